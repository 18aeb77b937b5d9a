"""RULER, and samples of the user's own: the model generates an answer, which is graded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.data.tokenizers import documents_identity
from mtrain_cli.evaluation.measurement import Cell, Item
from mtrain_extras.ruler import ruler
from mtrain_extras.ruler.generation import Generation
from mtrain_extras.ruler.ruler_files import Sources, read_samples
from mtrain_extras.ruler.tables import PREFIX
from mtrain_extras.ruler.word_lists import identity

FILE = "file:"


@dataclass
class Generated(Generation):
    """Tasks of RULER at several lengths, and files of samples."""

    tasks: Sequence[str]
    lengths: Sequence[int]  # most tokens of a sample of RULER, those for the answer included
    samples: int  # number of samples of each task and length
    sources: Sources = field(default_factory=Sources)
    files: Sequence[Path] = ()
    max_new: int = 128  # most tokens to generate for a sample of a file

    def cells(self) -> list[Cell]:
        cells = [Cell(f"{PREFIX}{task}", n) for n in self.lengths for task in self.tasks]
        return cells + [Cell(f"{FILE}{path.stem}", 0) for path in self.files]

    def settings(self, cell: Cell) -> Mapping[str, Any]:
        """Return the tokenizer, and what the task reads. Files are read once."""
        common = {"tokenizer": documents_identity(self.codec.required)}
        if (file := self.file_of(cell)) is not None:
            return {**common, "file": self.content(file), "max_new": self.max_new}
        task = cell.task.removeprefix(PREFIX)
        contents = [self.content(path) for path in ruler.files_of(task, self.sources)]
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
        return f"in {file.parent}", f"content {self.content(file)[:8]}"

    def items(self, cell: Cell) -> Iterator[Item]:
        if (file := self.file_of(cell)) is not None:
            samples = read_samples(file)
        else:
            task = cell.task.removeprefix(PREFIX)
            tokenizer, sources = self.codec.required, self.sources
            samples = ruler.generate(task, cell.length, self.samples, tokenizer, sources=sources)
        for sample in itertools.islice(samples, self.samples):
            yield {"ids": self.codec.encode(sample.prompt), "outputs": list(sample.outputs)}

    def grade(self, cell: Cell, text: str, outputs: Sequence[str]) -> float:
        if cell.length:
            return ruler.grade(cell.task.removeprefix(PREFIX), text, outputs)
        return ruler.string_match_all(ruler.clean_prediction(text), outputs)

    def count(self, cell: Cell, wanted: int) -> int:
        file = self.file_of(cell)
        return wanted if file is None else min(wanted, sum(1 for _ in read_samples(file)))

    def answer_tokens(self, cell: Cell) -> int:
        if not cell.length:
            return self.max_new
        return ruler.find_task(cell.task.removeprefix(PREFIX)).template.tokens

    def file_of(self, cell: Cell) -> Path | None:
        """Return the file of samples of a cell; None for a task of RULER."""
        return next((path for path in self.files if f"{FILE}{path.stem}" == cell.task), None)
