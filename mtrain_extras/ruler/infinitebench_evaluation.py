"""InfiniteBench in `mtrain eval`: what it reads, and how it cuts prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config import documents
from mtrain_cli.data.tokenizers import documents_identity
from mtrain_cli.evaluation.measurement import Cell, Item, Row
from mtrain_cli.evaluation.results import Result
from mtrain_extras.ruler.evaluation import GeneratedAnswers
from mtrain_extras.ruler.generation import Generation
from mtrain_extras.ruler.infinitebench import TASKS, Task, read_samples
from mtrain_extras.ruler.tables import INFINITEBENCH_PREFIX as PREFIX

if TYPE_CHECKING:
    from mtrain_cli.evaluation.request import EvaluationRequest
    from mtrain_cli.inference.model_source import ModelSource
    from mtrain_cli.inference.text import TextCodec
    from mtrain_cli.reporting.table import Table


@dataclass(frozen=True)
class InfiniteBenchOptions:
    """The folder of the released files, and the tasks to score."""

    data: str
    tasks: tuple[str, ...]


@dataclass
class InfiniteBenchSamples(Generation):
    """Tasks of InfiniteBench at several lengths."""

    data: Path
    tasks: Sequence[str]
    lengths: Sequence[int]  # most tokens of a sample, those for the answer included
    samples: int  # most samples of each task
    _counts: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def cells(self) -> list[Cell]:
        return [Cell(f"{PREFIX}{task}", n) for n in self.lengths for task in self.tasks]

    def settings(self, cell: Cell) -> Mapping[str, Any]:
        tokenizer = documents_identity(self.codec.required)
        return {"tokenizer": tokenizer, "file": self.content(self._file(cell))}

    def labels(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002 - no task has any
        return ()

    def details(self, cell: Cell) -> tuple[str, ...]:
        return f"in {self.data}", f"content {self.content(self._file(cell))[:8]}"

    def items(self, cell: Cell) -> Iterator[Item]:
        """Yield the samples, with the key ``cut``: the tokens that the middle of a prompt lost."""
        half = max(1, (cell.length - self.answer_tokens(cell)) // 2)
        for sample in itertools.islice(self._read(cell), self.samples):
            ids = self.codec.encode(sample.prompt)
            cut = len(ids) - 2 * half if len(ids) > cell.length - self.answer_tokens(cell) else 0
            kept = [*ids[:half], *ids[len(ids) - half :]] if cut else ids
            yield {"ids": kept, "outputs": list(sample.answers), "cut": cut}

    def grade(self, cell: Cell, text: str, outputs: Sequence[str]) -> float:
        return _task(cell.task).score(text, outputs)

    def count(self, cell: Cell, wanted: int) -> int:
        if cell.task not in self._counts:
            samples = itertools.islice(self._read(cell), self.samples)
            self._counts[cell.task] = sum(1 for _ in samples)
        return min(wanted, self._counts[cell.task])

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        """Return a result whose note says what was cut."""
        cut = sum(row["cut"] > 0 for row in rows)
        most, own = _task(result.task).tokens, self.answer_tokens(Cell(result.task, result.length))
        notes = [f"{cut} of {len(rows)} prompts"] if cut else []
        notes += [f"answers at {own:,} of {most:,} tokens"] if own < most else []
        return replace(super().result(rows, result), note=", ".join(notes))

    def answer_tokens(self, cell: Cell) -> int:
        """Return the benchmark's number, or half of the length if that is less."""
        return min(_task(cell.task).tokens, cell.length // 2)

    def _file(self, cell: Cell) -> Path:
        return self.data / f"{cell.task.removeprefix(PREFIX)}.jsonl"

    def _read(self, cell: Cell) -> Iterator[Any]:
        return read_samples(self._file(cell), cell.task.removeprefix(PREFIX))


def _task(name: str) -> Task:
    return TASKS[name.removeprefix(PREFIX)]


class InfiniteBench(GeneratedAnswers):
    """Tasks of InfiniteBench from the user's files."""

    def check(self, request: EvaluationRequest, source: ModelSource, *, beyond: bool) -> None:
        """Read the wanted samples. Raises ConfigError if a line of a file is damaged."""
        from mtrain_cli.evaluation.runner import tokenizer_text
        from mtrain_cli.inference.limits import require_known_ids, require_whole_cache
        from mtrain_cli.inference.text import open_codec

        del beyond  # `run_evaluation` compares the length, which includes special tokens
        codec = open_codec(source, request.tokenizer)
        samples = open_samples(request, source, codec)
        require_whole_cache(source.config.mask, max(request.lengths))
        vocabulary, tokenizer = source.config.model.vocab_size, tokenizer_text(request, source)
        for cell in samples.cells():
            if cell.length == min(request.lengths):
                samples.count(cell, request.samples)
                first = next(samples.items(cell))
                require_known_ids(first["ids"], vocabulary, str(cell), tokenizer)

    def tables(self, results: Sequence[Result]) -> Iterator[Table]:
        from mtrain_extras.ruler.tables import infinitebench_tables

        return infinitebench_tables(results)


def open_samples(
    request: EvaluationRequest, _: ModelSource, codec: TextCodec
) -> InfiniteBenchSamples:
    """Open the samples of a request. Raises ConfigError without a tokenizer."""
    options = documents.checked(InfiniteBenchOptions, request.options)
    assert codec.required  # raises if there is none
    return InfiniteBenchSamples(
        codec, Path(options.data), options.tasks, request.lengths, request.samples
    )


INFINITEBENCH = InfiniteBench(open_samples)
