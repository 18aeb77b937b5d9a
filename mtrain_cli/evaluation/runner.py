"""Evaluate models under several attentions, sample by sample, and continue a stopped evaluation.

The first worker makes the samples, keeps the results and decides what comes next. All workers
compute each sample together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.dense_layers import last_layers
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.cost import format_flop, forward_flop
from mtrain_cli.evaluation.evaluation_progress import EvaluationProgress
from mtrain_cli.evaluation.generated import Generated
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.request import EvaluationRequest, Weights, open_measurement
from mtrain_cli.evaluation.results import (
    IN_TRAINING,
    Result,
    ResultsFolder,
    format_score,
    key_of,
)
from mtrain_cli.inference.answers import describe, report
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import require_known_ids
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec, open_codec
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import not_written
from mtrain_cli.parallel.collectives import share
from mtrain_cli.printable import one_line
from mtrain_cli.training.resolution import compute_dtype

STOPPED = "stopped; finished samples are kept, and the same command continues"
OTHERS_DONE = "all other results are complete"  # the last line after those on what failed


class StoppedError(Exception):
    """The user asked to stop. The folder holds the samples so far."""


@dataclass(frozen=True)
class Setting:
    """Weights with one attention. ``config`` names the compute dtype, not ``auto``."""

    weights: Weights
    attention: str
    config: Config

    @property
    def origin(self) -> str:
        """Return the hash of weights and attention."""
        own = {
            "weights": self.weights.identity,
            "sparsity": asdict(self.config.sparsity),
            "dtype": self.config.train.dtype,
        }
        return key_of(own)

    @property
    def label(self) -> str:
        """Return the name for the user."""
        step = "" if self.weights.step is None else f"step {self.weights.step}, "
        return f"{step}{self.attention}"

    @property
    def weights_label(self) -> str:
        """Return what tells apart weights of one step, for `Result.details`."""
        return f"weights {self.weights.identity}"

    def labels_with(self, tokenizer: str | None) -> tuple[str, ...]:
        """Return settings for `Result.settings`. tokenizer: as in `EvaluationRequest`."""
        own = () if tokenizer is None else (f"tokenizer {Path(tokenizer).name}",)
        pattern = asdict(self.config.sparsity).items()
        keys = (f"{key} {value}" for key, value in pattern if value is not None)
        return (*own, *keys, f"dtype {self.config.train.dtype}")

    def source(self) -> ModelSource:
        return ModelSource(Path(self.weights.path), self.weights.is_folder, self.config)


def settings_of(
    request: EvaluationRequest, configs: Sequence[Config], device: str
) -> list[Setting]:
    """Return each of the request's weights with each of its attentions, in this order.

    Args:
        configs: configuration of each attention.
        device: ``cuda`` or ``cpu``. It determines the dtype that ``auto`` means, so that samples
            of the two devices do not mix.
    """
    resolved = [
        config.changed(train={"dtype": str(compute_dtype(config, device)).removeprefix("torch.")})
        for config in configs
    ]
    pairs = list(zip(request.attentions, resolved, strict=True))
    return [Setting(weights, *pair) for weights in request.weights for pair in pairs]


@dataclass(frozen=True)
class InTraining:
    """A model in training.

    say: shows a line to the user.
    """

    scorer: Scorer
    codec: TextCodec
    say: Callable[[str], None]


class Runner:
    """Evaluates on this worker. All workers call `run` together.

    stop: returns whether the user asked to stop. Only the first worker's counts.
    training: the model in training to evaluate instead of weights on disk.
    problem: a line on results in training that could not be written; "" if they were.
    failed: lines on samples that cannot be made, and on weights that cannot be loaded.
    """

    def __init__(
        self,
        request: EvaluationRequest,
        configs: Sequence[Config],
        environment: Environment,
        stop: Callable[[], bool] = lambda: False,
        training: InTraining | None = None,
    ) -> None:
        self._request, self._environment, self._stop = request, environment, stop
        self._training, self.problem = training, ""
        self.failed: list[str] = []
        self._complete = 0  # results
        self._first = environment.rank == 0
        self._settings = settings_of(request, configs, environment.device)
        source = self._settings[0].source()
        self._vocabulary = source.config.model.vocab_size
        self._tokenizer = tokenizer_text(request, source)
        given = None if request.tokenizer is None else Path(request.tokenizer)
        codec = open_codec(source, given) if training is None else training.codec
        self._starts = codec.starts
        self._measurement: Measurement = open_measurement(
            # Only the first worker reads texts. The others measure what it sends.
            request if self._first else replace(request, samples=0),
            source,
            codec,
        )

    def run(self) -> None:
        """Measure all results that the folder does not hold.

        Raises:
            StoppedError: the user asked to stop.
            ConfigError: a sample does not fit, or the folder holds results of another model. If
                weights or samples are damaged, the first worker measures all else before.
        """
        request = self._request
        folder = ResultsFolder.open(Path(request.out), request.model) if self._first else None
        for line in folder.damage if folder is not None else ():
            self._warn(line)
        self.run_in(folder)

    def run_at(self, step: int, folder: ResultsFolder | None) -> None:
        """Measure the model in training after ``step`` steps. folder: as in `run_in`."""
        self._settings = [
            replace(one, weights=Weights.in_training(Path(one.weights.path), step))
            for one in self._settings
        ]
        self.problem = ""
        self.run_in(folder)

    def run_in(self, folder: ResultsFolder | None) -> None:
        """Do as `run`, with an open folder. Workers other than the first have none."""
        self._folder = folder
        shown = self._first and self._training is None
        self._progress = progress = EvaluationProgress(*self._work(), enabled=shown)
        try:
            if self._first:
                progress.say(self._outlook(progress.remaining))
                if self._starts:
                    progress.say(self._starts)
            for setting in self._settings:
                rows = self._measure_setting(setting)
                if folder is not None and rows is not None:
                    self._measurement.learn(setting.origin, setting.label, rows)
        finally:
            progress.close()
        if self._first and self.failed:
            others = [OTHERS_DONE] if self._complete else []
            raise ConfigError(*dict.fromkeys(self.failed), *others)

    def _measure_setting(self, setting: Setting) -> list[Row] | None:
        """Measure all cells. Return the first worker's rows; None if the weights are damaged."""
        engine: Scorer | None = None
        rows: list[Row] = []
        for cell in self._measurement.cells():
            key = self._key(setting, cell, self._measurement)
            failures, measured, started = len(self.failed), False, time.perf_counter()
            for items in self._shared(self._possible(self._steps(key, cell), cell)):
                engine = engine or self._opened(setting)
                if engine is None:
                    return None
                found = self._measure(engine, cell, [item["item"] for item in items])
                measured = True
                if self._folder is not None:
                    self._keep(key, setting, cell, items, found)
                    work = self._cost(setting, cell, self._measurement) * len(items)
                    self._progress.advance(work, f"{name_of(cell)} {setting.label}")
            if self._folder is not None and len(self.failed) == failures:
                rows += self._folder.samples.get(key, {}).values()
                self._finish(key, setting, cell, time.perf_counter() - started if measured else 0.0)
        return rows

    def _possible(self, steps: Iterator[list[Item]], cell: Cell) -> Iterator[list[Item]]:
        """Yield groups of samples up to the first that cannot be made."""
        try:
            yield from steps
        except ConfigError as error:
            name = name_of(cell)
            self.failed += [p if name in p else f"{name}: {p}" for p in error.problems]

    def _outlook(self, flop: float) -> str:
        """Return a line on what is left to compute. The cost of files is not known."""
        if not flop:
            return f"{self._request.out} holds all samples; nothing to compute"
        lengths = [cell.length for cell in self._measurement.cells()]
        texts = [f"up to {format_flop(flop)} to compute (dense attention)"] if any(lengths) else []
        return " and ".join([*texts, *(["the samples of --file"] if 0 in lengths else [])])

    def _opened(self, setting: Setting) -> Scorer | None:
        """Return the model; None on all workers if one of them cannot load it."""
        if self._training is not None:
            return self._training.scorer
        engine: Engine | None = None
        problems: list[str] = []
        try:
            engine = Engine(setting.source(), self._environment, self._warn)
        except ConfigError as error:
            problems = list(error.problems)
        else:
            lines = describe(engine, generates=isinstance(self._measurement, Generated))
            for line in lines[: 1 + (setting.attention != "dense")]:
                self._progress.say(line)
        if self._environment.dims.workers > 1:
            problems = next((found for found in share(problems) if found), [])
        if not problems:
            return engine
        self.failed += problems
        self._progress.say(f"{setting.label}: cannot be loaded")
        return None

    def _measure(self, engine: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        """Return the rows of samples on all workers. Context groups divide the samples."""
        dims, rank = self._environment.dims, self._environment.rank
        if dims.dp == 1:
            return self._measurement.measure(engine, cell, items)
        # Weights are gathered by all workers, so a group without a sample computes another's.
        own = dims.coordinate("dp", rank)
        (row,) = self._measurement.measure(engine, cell, [items[own if own < len(items) else 0]])
        by_group = {dims.coordinate("dp", n): row for n, row in enumerate(share(row))}
        return [by_group[number] for number in range(len(items))]

    def _steps(self, key: str, cell: Cell) -> Iterator[list[Item]]:
        """Yield groups of {index, item} that the folder lacks; none but on the first worker."""
        if self._folder is None:
            return
        rows = self._whole_rows(key, cell)
        wanted = self._request.samples
        if all(index in rows for index in range(wanted)) and not any(
            "text" in row for row in rows.values()
        ):
            return  # all are there; making them again could take minutes
        missing: Iterator[Item] = (
            {"index": index, "item": item}
            for index, item in enumerate(itertools.islice(self._measurement.items(cell), wanted))
            if index not in rows or rows[index].get("text") != item.get("text")
        )
        together = self._measurement.together * self._environment.dims.dp
        while group := list(itertools.islice(missing, together)):
            for one in group:
                require_known_ids(
                    one["item"]["ids"], self._vocabulary, name_of(cell), self._tokenizer
                )
            yield group

    def _whole_rows(self, key: str, cell: Cell) -> dict[int, Row]:
        """Return the rows of a result. Forget those that are damaged, or of another text."""
        assert self._folder is not None
        rows = self._folder.samples.get(key, {})
        for index in [index for index, row in rows.items() if not self._is_whole(row, cell)]:
            del rows[index]
        for index in self._measurement.stale(cell, rows):
            del rows[index]
        return rows

    def _is_whole(self, row: Row, cell: Cell) -> bool:
        """Return whether a row from the disk has what a result needs."""
        known = Result("", cell.task, cell.length, "", "", None, 1, None, None, "")
        try:
            documents.checked(Result, asdict(self._measurement.result([row], known)))
        except (KeyError, IndexError, TypeError, ValueError, ArithmeticError):
            return False
        return True

    def _shared(self, steps: Iterator[list[Item]]) -> Iterator[list[Item]]:
        """Yield the first worker's groups of samples on all workers."""
        while True:
            own = next(steps, None)
            if own is not None and self._stop():
                own = []
            if self._environment.dims.workers > 1:
                own = share(own)[0]
            if own is None:
                return
            if not own:
                raise StoppedError
            yield own

    def _keep(
        self, key: str, setting: Setting, cell: Cell, items: Sequence[Item], rows: Sequence[Row]
    ) -> None:
        assert self._folder is not None
        names = {"key": key, "task": cell.task, "length": cell.length}
        names |= {"attention": setting.attention, "step": setting.weights.step}
        names |= {} if self._training is None else {IN_TRAINING: True}
        for item, row in zip(items, rows, strict=True):
            self._write(partial(self._folder.add_sample, {**names, "index": item["index"], **row}))

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the folder. A full disk must not end a training run."""
        try:
            write()
        except OSError as error:
            if self._training is None:
                raise
            self.problem = not_written(error, Path(self._request.out))

    def _finish(self, key: str, setting: Setting, cell: Cell, seconds: float) -> None:
        """Write a result that has samples and is new. seconds: of the samples measured now."""
        assert self._folder is not None
        rows, before = self._folder.samples.get(key), self._folder.results.get(key)
        if not rows:
            return
        self._complete += 1
        measurement = self._measurement
        known = Result(
            key=key,
            task=cell.task,
            length=cell.length,
            attention=setting.attention,
            pattern=pattern_text(setting.config),
            step=setting.weights.step,
            samples=len(rows),
            score=None,
            error=None,
            unit="",
            seconds=seconds + (before.seconds if before is not None else 0.0),
            settings=measurement.labels(cell) + setting.labels_with(self._request.tokenizer),
            details=(
                *measurement.details(cell),
                setting.weights_label,
                *filter(None, [self._starts]),
            ),
        )
        result = measurement.result([rows[index] for index in sorted(rows)], known)
        if result == before:
            return
        self._write(partial(self._folder.add_result, result))
        say = self._progress.say if self._training is None else self._training.say
        say(f"{name_of(cell)} {setting.label}: {score_text(result)}")

    def _key(self, setting: Setting, cell: Cell, measurement: Measurement) -> str:
        """Return the key of a result: that from training if the run measured it then."""
        if self._folder is None:
            return ""
        own = {"task": cell.task, "length": cell.length, **measurement.settings(cell)}
        step = setting.weights.step
        if step is not None and self._request.model == "..":
            weights = Weights.in_training(Path(setting.weights.path), step)
            trained = key_of({**own, "model": replace(setting, weights=weights).origin})
            if trained in self._folder.samples:
                return trained
        return key_of({**own, "model": setting.origin})

    def _cost(self, setting: Setting, cell: Cell, measurement: Measurement) -> float:
        if not cell.length:
            return 1.0
        share_of = measurement.tokens(cell) / cell.length
        return forward_flop(setting.config, cell.length) * share_of

    def _work(self) -> tuple[float, float]:
        """Return the FLOP of all samples, and of those that the folder holds."""
        total = done = 0.0
        measurement = self._measurement
        for setting in self._settings if self._folder is not None else ():
            for cell in measurement.cells():
                cost = self._cost(setting, cell, measurement)
                held = self._whole_rows(self._key(setting, cell, measurement), cell).keys()
                wanted = range(self._measurement.count(cell, self._request.samples))
                total += cost * len(held | set(wanted))
                done += cost * len(held)
            measurement = measurement.after(setting.origin)
        return total, done

    def _warn(self, line: str) -> None:
        if self._first:
            report([f"mtrain: warning: {one_line(line)}"])


def tokenizer_text(request: EvaluationRequest, source: ModelSource) -> str:
    """Return how a message names the tokenizer of an evaluation."""
    if request.tokenizer is not None:
        return f"--tokenizer {request.tokenizer}: this tokenizer"
    return f"{source.path}: its tokenizer"


def name_of(cell: Cell | Result) -> str:
    """Return ``niah 64k``."""
    return f"{cell.task} {format_size(cell.length)}" if cell.length else cell.task


def score_text(result: Result) -> str:
    """Return ``97.5 ± 1.2 %`` or ``2.3456 ± 0.0012 nats``."""
    if result.score is None:
        return "not finite"
    return f"{format_score(result.score, result.error, result.unit)} {result.unit}".rstrip()


def pattern_text(config: Config) -> str:
    """Return the settings of a pattern for the user; "" for dense attention."""
    from mtrain_cli.sparsity.pattern import make_pattern

    pattern: Any = make_pattern(config.sparsity, config.seed)
    if pattern is None:
        return ""
    last = last_layers(config)
    return f"{pattern.describe()}{f'; {last} dense' if last else ''}"
