"""Checks of `mtrain eval` before any work: lengths, texts, samples and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.problem import ConfigError, Names
from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.other_kinds import find

if TYPE_CHECKING:
    from mtrain_cli.evaluation.generated import Generated
    from mtrain_cli.evaluation.measurement import Cell
    from mtrain_cli.evaluation.request import EvaluationRequest
    from mtrain_cli.evaluation.sources import Sources
    from mtrain_cli.inference.model_source import ModelSource

# The options of `mtrain data needles` that have another name or none in `mtrain eval niah`.
_NEEDLES = Names(other={"pairs": "needles"}, lacks=("questions",))


def require_positions(
    source: ModelSource, option: str, lengths: Sequence[int], *, beyond: bool
) -> None:
    """Raise ConfigError if a length exceeds the positions of the model."""
    most = source.max_position
    if not beyond and max(lengths) > most:
        raise ConfigError(
            f"--length {option}: the model has {most:,} positions; give at most "
            f"{format_size(most)}, or add --beyond to go on anyway"
        )


def require_short(short: int, option: str) -> None:
    """Raise ConfigError if a length has no token with more context than ``short``."""
    from mtrain_cli.commands.data_ruler import token_lengths

    least = min(token_lengths(option))
    if short > least - 2:
        raise ConfigError(
            f"--short {format_size(short)}: no token of a sequence of {format_size(least)} tokens "
            "has more context than that; give a smaller --short or a larger --length"
        )


@dataclass(frozen=True)
class CheckedWork:
    """What an evaluation can measure.

    request: without the tasks and files that are damaged.
    tasks: what an evaluation of another package found; None for those of mtrain.
    warnings: lines for the user.
    failed: lines on what is damaged.
    """

    request: EvaluationRequest
    tasks: Any = None
    warnings: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def check_work(request: EvaluationRequest, source: ModelSource, *, beyond: bool) -> CheckedWork:
    """Check what to measure before any work.

    Raises:
        ConfigError: a sample or a task cannot be made, or all are damaged.
    """
    if (other := find(request.kind)) is not None:
        tasks = other.check(request, source, beyond=beyond)
        return CheckedWork(request, tasks, failed=tasks.failed)
    return _check_samples(request, source, beyond=beyond)


def _check_samples(request: EvaluationRequest, source: ModelSource, *, beyond: bool) -> CheckedWork:
    """Make the first samples, so that mistakes are reported before any work."""
    from mtrain_cli.evaluation.generated import Generated
    from mtrain_cli.evaluation.perplexity import Perplexity
    from mtrain_cli.evaluation.request import open_measurement
    from mtrain_cli.evaluation.runner import name_of, tokenizer_text
    from mtrain_cli.evaluation.sources import DamagedFileError
    from mtrain_cli.inference.limits import require_hidden_labels, require_known_ids
    from mtrain_cli.inference.text import open_codec

    codec = open_codec(source, None if request.tokenizer is None else Path(request.tokenizer))
    measurement = open_measurement(request, source, codec)
    if not isinstance(measurement, Generated):
        require_hidden_labels(source.config, "this evaluation")
    vocabulary, tokenizer = source.config.model.vocab_size, tokenizer_text(request, source)
    damaged: dict[str, tuple[str, ...]] = {}
    for cell in measurement.cells():
        prompts = []
        try:
            with _NEEDLES.in_errors():
                if not cell.length:
                    prompts = [item["ids"] for item in measurement.items(cell)]
                elif cell.length == min(request.lengths):
                    prompts = [next(measurement.items(cell))["ids"]]
        except DamagedFileError as error:
            damaged[cell.task] = error.problems
            continue
        if isinstance(measurement, Perplexity):
            prompts += [sequence.ids for sequence in measurement.sequences[cell.length]]
        for ids in prompts:
            require_known_ids(ids, vocabulary, name_of(cell), tokenizer)
        if isinstance(measurement, Generated):
            _require_prompts(measurement, cell, source, prompts, beyond=beyond)
    if isinstance(measurement, Perplexity):
        remarks = (f"perplexity: {line}" for line in measurement.remarks.values())
        return CheckedWork(request, warnings=tuple(remarks))
    return _without(request, damaged)


def _without(request: EvaluationRequest, damaged: Mapping[str, Sequence[str]]) -> CheckedWork:
    """Return a request without damaged tasks and files, which ``damaged`` names with a reason."""
    from mtrain_cli.evaluation.generated import FILE, PREFIX

    options = request.ruler
    tasks = tuple(task for task in options.tasks if f"{PREFIX}{task}" not in damaged)
    files = tuple(file for file in options.files if f"{FILE}{Path(file).stem}" not in damaged)
    failed = tuple(
        line if line.startswith("--file") else f"{name}: {line}"
        for name, lines in damaged.items()
        for line in lines
    )
    if failed and not tasks and not files:
        raise ConfigError(*failed)
    left = replace(request, ruler=replace(options, tasks=tasks, files=files))
    return CheckedWork(left, failed=failed)


def _require_prompts(
    measurement: Generated,
    cell: Cell,
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    *,
    beyond: bool,
) -> None:
    """Check the prompts of a file, or the positions of the samples of a task."""
    from mtrain_cli.inference.limits import require_prompts

    if cell.length:
        require_prompts(source, [[0]], cell.length - 1, beyond=True)
        if not beyond:
            require_room(source, cell.length, measurement.special_tokens)
        return
    file = measurement.file_of(cell)
    names = [f"--file {file}: sample {n}" for n in range(1, len(prompts) + 1)]
    most = measurement.answer_tokens(cell)
    require_prompts(source, prompts, most, beyond=beyond, names=names)


def require_room(source: ModelSource, length: int, special: int) -> None:
    """Raise ConfigError if a sample of RULER with special tokens exceeds the model's positions.

    The last token of an answer takes no position, so one special token always has room.
    """
    used, most = length + special - 1, source.max_position
    if special and used > most:
        raise ConfigError(
            f"--length {length}: the tokenizer adds {special} tokens to a prompt, so a sample "
            f"needs {used:,} positions; the model has {most:,}. Give at most {most + 1 - special}, "
            "or add --beyond to go on anyway"
        )


def unused_files(tasks: Sequence[str], sources: Sources) -> list[str]:
    """Return a line for each file that no task of RULER reads."""
    from mtrain_cli.evaluation.ruler import find_task

    used = {find_task(name).source for name in tasks if "@" not in name}
    used |= {"words"} if "cwe" in tasks else set()
    shown = ",".join(tasks) or "''"
    return [
        f"--{name} {file}: has no effect, no task of --tasks {shown} reads it"
        for name, file in vars(sources).items()
        if file is not None and name not in used
    ]
