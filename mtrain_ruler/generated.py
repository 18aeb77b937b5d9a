"""RULER, and samples of the user's own: the model generates an answer, which is graded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from mtrain_cli.data.tokenizers import documents_identity
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.results import PERCENT, Result, mean_and_error
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import MOST_TOGETHER
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec
from mtrain_ruler import ruler
from mtrain_ruler.ruler_files import Sources, read_samples
from mtrain_ruler.tables import PREFIX
from mtrain_ruler.word_lists import identity

FILE = "file:"


@dataclass
class Generated(Measurement):
    """Tasks of RULER at several lengths, and files of samples."""

    codec: TextCodec
    tasks: Sequence[str]
    lengths: Sequence[int]  # most tokens of a sample of RULER, those for the answer included
    samples: int  # number of samples of each task and length
    sources: Sources = field(default_factory=Sources)
    files: Sequence[Path] = ()
    max_new: int = 128  # most tokens to generate for a sample of a file
    together, generates = MOST_TOGETHER, True
    _hashes: dict[Path, str] = field(default_factory=dict, init=False, repr=False)

    def cells(self) -> list[Cell]:
        cells = [Cell(f"{PREFIX}{task}", n) for n in self.lengths for task in self.tasks]
        return cells + [Cell(f"{FILE}{path.stem}", 0) for path in self.files]

    def settings(self, cell: Cell) -> Mapping[str, Any]:
        """Return the tokenizer, and what the task reads. Files are read once."""
        common = {"tokenizer": documents_identity(self.codec.required)}
        if (file := self.file_of(cell)) is not None:
            return {**common, "file": self._content(file), "max_new": self.max_new}
        task = cell.task.removeprefix(PREFIX)
        contents = [self._content(path) for path in ruler.files_of(task, self.sources)]
        words = identity() if ruler.needs_words(task) else ""
        return {**common, "files": contents, "words": words, "seed": ruler.SEED}

    def labels(self, cell: Cell) -> tuple[str, ...]:
        if (file := self.file_of(cell)) is not None:
            return file.name, f"max-new {self.max_new}"
        task = cell.task.removeprefix(PREFIX)
        used = [] if "@" in task else ruler.files_of(task, self.sources)
        return tuple(path.name for path in used)

    def details(self, cell: Cell) -> tuple[str, ...]:
        if (file := self.file_of(cell)) is None:
            return ()
        return f"in {file.parent}", f"content {self._content(file)[:8]}"

    def items(self, cell: Cell) -> Iterator[Item]:
        if (file := self.file_of(cell)) is not None:
            samples = read_samples(file)
        else:
            task = cell.task.removeprefix(PREFIX)
            tokenizer, sources = self.codec.required, self.sources
            samples = ruler.generate(task, cell.length, self.samples, tokenizer, sources=sources)
        for sample in itertools.islice(samples, self.samples):
            yield {"ids": self.codec.encode(sample.prompt), "outputs": list(sample.outputs)}

    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        engine = cast(Engine, scorer)  # `mtrain eval` alone measures this, with an engine
        prompts, task = [item["ids"] for item in items], cell.task.removeprefix(PREFIX)
        most, stop = self.answer_tokens(cell), self.codec.stop
        rows = []
        for item, completion in zip(
            items, engine.generate(prompts, most, Sampling(), stop), strict=True
        ):
            text, outputs = self.codec.decode(completion.ids) or "", item["outputs"]
            if cell.length:
                grade = ruler.grade(task, text, outputs)
            else:
                grade = ruler.string_match_all(ruler.clean_prediction(text), outputs)
            rows.append(
                {"score": 100.0 * grade, "prediction": text, "outputs": outputs,
                 "finish": completion.finish, "prompt_tokens": completion.prompt_tokens}
            )  # fmt: skip
        return rows

    def count(self, cell: Cell, wanted: int) -> int:
        file = self.file_of(cell)
        return wanted if file is None else min(wanted, sum(1 for _ in read_samples(file)))

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        score, error = mean_and_error([row["score"] for row in rows])
        return replace(result, score=score, error=error, unit=PERCENT)

    def answer_tokens(self, cell: Cell) -> int:
        """Return the most tokens to generate for a sample of a cell."""
        if not cell.length:
            return self.max_new
        return ruler.find_task(cell.task.removeprefix(PREFIX)).template.tokens

    def file_of(self, cell: Cell) -> Path | None:
        """Return the file of samples of a cell; None for a task of RULER."""
        return next((path for path in self.files if f"{FILE}{path.stem}" == cell.task), None)

    def _content(self, path: Path) -> str:
        """Return the hash of a file."""
        if path not in self._hashes:
            self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._hashes[path]
