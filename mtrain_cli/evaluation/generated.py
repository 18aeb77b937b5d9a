"""RULER, and samples of the user's own: the model generates an answer, which is graded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import documents_identity
from mtrain_cli.evaluation import ruler
from mtrain_cli.evaluation.matching import clean_prediction, string_match_all
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.results import PERCENT, Result, mean_and_error
from mtrain_cli.evaluation.samples import read_samples
from mtrain_cli.evaluation.sources import Sources
from mtrain_cli.evaluation.word_lists import identity
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec

PREFIX = "ruler:"
FILE = "file:"
TOGETHER = 8  # prompts that generate together


@dataclass
class Generated(Measurement):
    """Tasks of RULER at several lengths, and files of samples.

    tasks: names of tasks of RULER.
    lengths: most tokens of a sample of RULER, those for the answer included.
    samples: number of samples of each task and length.
    files: files of samples.
    max_new: most tokens to generate for a sample of a file.
    """

    codec: TextCodec
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    sources: Sources = field(default_factory=Sources)
    files: Sequence[Path] = ()
    max_new: int = 128
    together = TOGETHER
    _hashes: dict[Path, str] = field(default_factory=dict, init=False, repr=False)

    def cells(self) -> list[Cell]:
        cells = [Cell(f"{PREFIX}{task}", n) for n in self.lengths for task in self.tasks]
        return cells + [Cell(f"{FILE}{path.stem}", 0) for path in self.files]

    def settings(self, cell: Cell) -> Mapping[str, Any]:
        """Return the tokenizer, and what the task reads. Files are read once."""
        assert self.codec.tokenizer is not None
        common = {"tokenizer": documents_identity(self.codec.tokenizer)}
        if cell.task.startswith(FILE):
            content = self._content(self.file_of(cell))
            return {**common, "file": content, "max_new": self.max_new}
        task = cell.task.removeprefix(PREFIX)
        source = ruler.find_task(task).source
        files = [task.partition("@")[2] or (getattr(self.sources, source) if source else "")]
        if self.sources.words is not None and task == "cwe":
            files.append(self.sources.words)
        contents = [self._content(Path(file).expanduser()) for file in files if file]
        words = identity() if ruler.needs_words(task) else ""
        return {**common, "files": contents, "words": words, "seed": ruler.SEED}

    def labels(self, cell: Cell) -> tuple[str, ...]:
        if cell.task.startswith(FILE):
            return (self.file_of(cell).name, f"max-new {self.max_new}")
        task = cell.task.removeprefix(PREFIX)
        source = ruler.find_task(task).source
        used = [getattr(self.sources, source)] if source and "@" not in task else []
        used += [self.sources.words] if task == "cwe" else []
        return tuple(path.name for path in used if path is not None)

    def details(self, cell: Cell) -> tuple[str, ...]:
        if not cell.task.startswith(FILE):
            return ()
        file = self.file_of(cell)
        return f"in {file.parent}", f"content {self._content(file)[:8]}"

    def items(self, cell: Cell) -> Iterator[Item]:
        if cell.task.startswith(FILE):
            made = read_samples(self.file_of(cell))
        else:
            assert self.codec.tokenizer is not None
            made = ruler.generate(
                cell.task.removeprefix(PREFIX), cell.length, self.samples, self.codec.tokenizer,
                sources=self.sources,
            )  # fmt: skip
        for sample in itertools.islice(made, self.samples):
            ids = self.codec.encode(sample.prompt)
            yield {"ids": ids, "outputs": list(sample.outputs)}

    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        engine = cast(Engine, scorer)  # `mtrain eval` alone measures this, with an engine
        prompts = [item["ids"] for item in items]
        most, stop = self.answer_tokens(cell), self.codec.stop
        completions = engine.generate(prompts, most, Sampling(), stop)
        rows = []
        for item, completion in zip(items, completions, strict=True):
            text = self.codec.decode(completion.ids)
            assert text is not None
            grade = self._grade(cell, text, item["outputs"])
            rows.append(
                {"score": 100.0 * grade, "prediction": text, "outputs": item["outputs"],
                 "finish": completion.finish, "prompt_tokens": completion.prompt_tokens}
            )  # fmt: skip
        return rows

    def count(self, cell: Cell, wanted: int) -> int:
        if cell.task.startswith(FILE):
            return min(wanted, sum(1 for _ in read_samples(self.file_of(cell))))
        return wanted

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        score, error = mean_and_error([row["score"] for row in rows])
        return replace(result, score=score, error=error, unit=PERCENT)

    def answer_tokens(self, cell: Cell) -> int:
        """Return the most tokens to generate for a sample of a cell."""
        if cell.task.startswith(FILE):
            return self.max_new
        return ruler.find_task(cell.task.removeprefix(PREFIX)).template.tokens

    def _grade(self, cell: Cell, text: str, outputs: Sequence[str]) -> float:
        if cell.task.startswith(FILE):
            return string_match_all(clean_prediction(text), outputs)
        return ruler.grades(cell.task.removeprefix(PREFIX), [text], [outputs])[0]

    @property
    def special_tokens(self) -> int:
        """Number of tokens that the tokenizer adds to a prompt, which RULER does not count."""
        return len(self.codec.begin)

    def _content(self, path: Path) -> str:
        """Return the hash of a file."""
        if path not in self._hashes:
            self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._hashes[path]

    def file_of(self, cell: Cell) -> Path:
        """Return the file of samples of a cell."""
        return next(path for path in self.files if f"{FILE}{path.stem}" == cell.task)


def require_distinct(files: Sequence[Path]) -> None:
    """Raise ConfigError if two files would have one name in the results."""
    names = [path.stem for path in files]
    for path in files:
        if names.count(path.stem) > 1:
            raise ConfigError(f"--file {path}: another file has this name; rename one")
