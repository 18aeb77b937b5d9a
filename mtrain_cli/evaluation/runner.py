"""Evaluate models under several attentions, sample by sample, and continue a stopped evaluation.

The first worker makes the samples, keeps the results and decides what comes next. All workers
compute each sample together.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, plugins
from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config
from mtrain_cli.evaluation.cost import EvaluationProgress, format_flop, forward_flop
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.request import EvaluationRequest, Weights, open_measurement
from mtrain_cli.evaluation.results import IN_TRAINING, Result, ResultsFolder, format_score, key_of
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import require_known_ids
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec, open_codec
from mtrain_cli.inference.worker import describe, report, warn
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import not_written, reporting_out_of_memory
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.collectives import share
from mtrain_cli.sparsity.pattern import make_pattern
from mtrain_cli.training.resolution import compute_dtype

TARGET = "mtrain_cli.evaluation.runner:run"
STOPPED = "stopped; finished samples are kept, and the same command continues"


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
        """The hash of weights and attention."""
        return key_of(
            {"weights": self.weights.identity, "sparsity": asdict(self.config.sparsity),
             "dtype": self.config.train.dtype}
        )  # fmt: skip

    @property
    def label(self) -> str:
        """The name for the user."""
        step = "" if self.weights.step is None else f"step {self.weights.step}, "
        return f"{step}{self.attention}"

    def source(self) -> ModelSource:
        return ModelSource(Path(self.weights.path), self.weights.is_folder, self.config)


@dataclass(frozen=True)
class InTraining:
    """A model in training. say: shows a line to the user."""

    scorer: Scorer
    codec: TextCodec
    say: Callable[[str], None]


class Evaluation:
    """What evaluates on this worker: each of the request's weights with each of its attentions.

    configs: configuration of each attention.
    stop: returns whether the user asked to stop. Only the first worker's counts.
    """

    def __init__(
        self,
        request: EvaluationRequest,
        configs: Sequence[Config],
        environment: Environment,
        stop: Callable[[], bool] = lambda: False,
        codec: TextCodec | None = None,
    ) -> None:
        self.request, self.environment, self.stop = request, environment, stop
        self.first = environment.rank == 0
        # `auto` means the dtype of the device, so that samples of two devices do not mix.
        dtypes = (str(compute_dtype(one, environment.device)).split(".")[1] for one in configs)
        typed = [one.changed(train={"dtype": d}) for one, d in zip(configs, dtypes, strict=True)]
        pairs = list(zip(request.attentions, typed, strict=True))
        self.settings = [Setting(weights, *pair) for weights in request.weights for pair in pairs]
        self.source = self.settings[0].source()
        self.codec = open_codec(self.source, request.tokenizer) if codec is None else codec

    def open_folder(self) -> ResultsFolder:
        folder = ResultsFolder.open(Path(self.request.out), self.request.model)
        for line in folder.damage:
            warn(line)
        return folder

    def load(self, setting: Setting, *, generates: bool) -> Engine:
        """Load a model, and show it."""
        engine = Engine(setting.source(), self.environment, warn if self.first else None)
        if self.first:
            lines = describe(engine, generates=generates)
            report(lines[: 1 + (setting.attention != "dense")])
        return engine

    def known(self, setting: Setting, **values: Any) -> Result:
        """Return a result without a score. values: further fields of it."""
        pattern = asdict(setting.config.sparsity).items()
        tokenizer = self.request.tokenizer
        return Result(
            attention=setting.attention, pattern=pattern_text(setting.config),
            step=setting.weights.step, score=None, error=None, unit="",
            settings=(
                *values.pop("settings", ()),
                *([] if tokenizer is None else [f"tokenizer {Path(tokenizer).name}"]),
                *(
                    f"{key} {show(value) if isinstance(value, tuple) else value}"
                    for key, value in pattern if value is not None
                ),
                f"dtype {setting.config.train.dtype}",
            ),
            details=(
                *values.pop("details", ()), f"weights {setting.weights.identity}",
                *filter(None, [self.codec.starts]),
            ),
            **values,
        )  # fmt: skip


class Runner(Evaluation):
    """Evaluates on this worker. All workers call `run` together.

    training: the model in training to evaluate instead of weights on disk.
    measure: opens the texts.
    problem: a line on results in training that could not be written; "" if they were.
    """

    def __init__(
        self,
        request: EvaluationRequest,
        configs: Sequence[Config],
        environment: Environment,
        stop: Callable[[], bool] = lambda: False,
        training: InTraining | None = None,
        measure: Callable[[EvaluationRequest, ModelSource, TextCodec], Measurement] = (
            open_measurement
        ),
    ) -> None:
        codec = None if training is None else training.codec
        super().__init__(request, configs, environment, stop, codec)
        self._training, self.problem = training, ""
        # Only the first worker reads texts. The others measure what it sends.
        read = request if self.first else replace(request, samples=0)
        self._measurement = measure(read, self.source, self.codec)

    def run(self) -> None:
        """Measure all results that the folder does not hold.

        Raises StoppedError if the user asked to stop. Raises ConfigError if a sample does not fit
        or cannot be made, weights cannot be loaded, or the folder holds results of another model.
        """
        self.run_in(self.open_folder() if self.first else None)

    def run_at(self, step: int, folder: ResultsFolder | None) -> None:
        """Measure the model in training after ``step`` steps. folder: as in `run_in`."""
        self.settings = [
            replace(one, weights=Weights.in_training(Path(one.weights.path), step))
            for one in self.settings
        ]
        self.problem = ""
        self.run_in(folder)

    def run_in(self, folder: ResultsFolder | None) -> None:
        """Do as `run`, with an open folder. Workers other than the first have none."""
        self._folder = folder
        shown = self.first and self._training is None
        work = self._work() if self.first else 0.0
        self._progress = EvaluationProgress(work, enabled=shown)
        for line in filter(None, (self._outlook(work), self.codec.starts)) if self.first else ():
            self._progress.say(line)
        for setting in self.settings:
            rows = self._measure_setting(setting)
            if folder is not None:
                self._measurement.learn(setting.origin, setting.label, rows)

    def _measure_setting(self, setting: Setting) -> list[Row]:
        """Measure all cells. Return the first worker's rows."""
        scorer: Scorer | None = None if self._training is None else self._training.scorer
        rows: list[Row] = []
        for cell in self._measurement.cells():
            key = self._key(setting, cell)
            started, measured = time.perf_counter(), list[Row]()
            for group in self._shared(self._missing(key, cell)):
                scorer = scorer or self.load(setting, generates=self._measurement.generates)
                measured = self._measure(scorer, cell, [item for _, item in group])
                if self._folder is not None:
                    self._keep(key, setting, cell, [index for index, _ in group], measured)
                    work = self._cost(setting, cell) * len(group)
                    self._progress.advance(work, f"{cell} {setting.label}")
            if self._folder is not None:
                whole = list(self._whole_rows(key, cell).values())
                rows += whole
                seconds = time.perf_counter() - started if measured else 0.0
                self._finish(key, setting, cell, whole, seconds)
        return rows

    def _outlook(self, flop: float) -> str:
        """Return a line on what is left to compute. The cost of files is not known."""
        if not flop:
            return f"{self.request.out} holds all samples; nothing to compute"
        lengths = [cell.length for cell in self._measurement.cells()]
        texts = [f"up to {format_flop(flop)} to compute (dense attention)"] if any(lengths) else []
        return " and ".join([*texts, *(["the samples of --file"] if 0 in lengths else [])])

    def _measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        """Return the rows of samples on all workers. Context groups divide the samples."""
        dims = self.environment.dims
        if dims.dp == 1:
            return self._measurement.measure(scorer, cell, items)
        # Weights are gathered by all workers, so a group without a sample computes another's.
        own = dims.coordinate("dp", self.environment.rank)
        (row,) = self._measurement.measure(scorer, cell, [items[own if own < len(items) else 0]])
        by_group = {dims.coordinate("dp", n): row for n, row in enumerate(share(row))}
        return [by_group[number] for number in range(len(items))]

    def _missing(self, key: str, cell: Cell) -> Iterator[list[tuple[int, Item]]]:
        """Yield groups of samples that the folder lacks; none but on the first worker."""
        if self._folder is None:
            return
        rows = self._whole_rows(key, cell)
        wanted = range(self._measurement.count(cell, self.request.samples))
        if all(index in rows for index in wanted) and not any("text" in r for r in rows.values()):
            return  # all are there; making them again could take minutes
        missing = (
            (index, item)
            for index, item in zip(wanted, self._measurement.items(cell), strict=False)
            if index not in rows or rows[index].get("text") != item.get("text")
        )
        vocabulary = self.source.config.model.vocab_size
        tokenizer = tokenizer_text(self.request, self.source)
        together = self._measurement.together * self.environment.dims.dp
        while group := list(itertools.islice(missing, together)):
            for _, item in group:
                require_known_ids(item["ids"], vocabulary, str(cell), tokenizer)
            yield group

    def _whole_rows(self, key: str, cell: Cell) -> dict[int, Row]:
        """Return the rows of the wanted samples, without those that lack what a result needs."""
        assert self._folder is not None
        rows = self._folder.samples.get(key, {})
        known = Result("", cell.task, cell.length, "", "", None, 1, None, None, "")
        whole = {}
        for index in range(self._measurement.count(cell, self.request.samples)):
            try:
                result = self._measurement.result([rows[index]], known)
                documents.checked(Result, asdict(result))
                whole[index] = rows[index]
            except (LookupError, TypeError, ValueError, ArithmeticError):
                continue
        return whole

    def _shared(self, groups: Iterator[list[tuple[int, Item]]]) -> Iterator[list[tuple[int, Item]]]:
        """Yield the first worker's groups of samples on all workers."""
        while True:
            own = next(groups, None)
            if own is not None and self.stop():
                own = []
            if self.environment.dims.workers > 1:
                own = share(own)[0]
            if own is None:
                return
            if not own:
                raise StoppedError
            yield own

    def _keep(
        self, key: str, setting: Setting, cell: Cell, numbers: list[int], rows: list[Row]
    ) -> None:
        assert self._folder is not None
        names = {"key": key, "task": cell.task, "length": cell.length}
        names |= {"attention": setting.attention, "step": setting.weights.step}
        names |= {} if self._training is None else {IN_TRAINING: True}
        for index, row in zip(numbers, rows, strict=True):
            self._write(partial(self._folder.add_sample, {**names, "index": index, **row}))

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the folder. A full disk must not end a training run."""
        try:
            write()
        except OSError as error:
            if self._training is None:
                raise
            self.problem = not_written(error, Path(self.request.out))

    def _finish(
        self, key: str, setting: Setting, cell: Cell, rows: list[Row], seconds: float
    ) -> None:
        """Write a result that has samples and is new. seconds: of the samples measured now."""
        assert self._folder is not None
        if not rows:
            return
        before = self._folder.results.get(key)
        known = self.known(
            setting, key=key, task=cell.task, length=cell.length, samples=len(rows),
            seconds=seconds + (before.seconds if before is not None else 0.0),
            settings=self._measurement.labels(cell), details=self._measurement.details(cell),
        )  # fmt: skip
        result = self._measurement.result(rows, known)
        if result == before:
            return
        self._write(partial(self._folder.add_result, result))
        say = self._progress.say if self._training is None else self._training.say
        say(f"{cell} {setting.label}: {score_text(result)}")

    def _key(self, setting: Setting, cell: Cell) -> str:
        """Return the key of a result: that from training if the run measured it then."""
        if self._folder is None:
            return ""
        own = {"task": cell.task, "length": cell.length, **self._measurement.settings(cell)}
        step = setting.weights.step
        if step is not None and self.request.model == "..":
            weights = Weights.in_training(Path(setting.weights.path), step)
            trained = key_of({**own, "model": replace(setting, weights=weights).origin})
            if trained in self._folder.samples:
                return trained
        return key_of({**own, "model": setting.origin})

    def _cost(self, setting: Setting, cell: Cell) -> float:
        """Return the FLOP of a sample. That of a file is not known."""
        return forward_flop(setting.config, cell.length) if cell.length else 1.0

    def _work(self) -> float:
        """Return the FLOP of the samples that the folder lacks, without short contexts."""
        work, measurement = 0.0, self._measurement
        self._measurement = copy.copy(measurement)  # learns whose key tokens others use
        for setting in self.settings:
            for cell in self._measurement.cells():
                missing = self._measurement.count(cell, self.request.samples)
                missing -= len(self._whole_rows(self._key(setting, cell), cell))
                work += self._cost(setting, cell) * missing
            self._measurement.learn(setting.origin, setting.label, [])
        self._measurement = measurement
        return work


def tokenizer_text(request: EvaluationRequest, source: ModelSource) -> str:
    """Return how a message names the tokenizer of an evaluation."""
    if request.tokenizer is not None:
        return f"--tokenizer {request.tokenizer}: this tokenizer"
    return f"{source.path}: its tokenizer"


def score_text(result: Result) -> str:
    """Return ``97.5 ± 1.2 %`` or ``2.3456 ± 0.0012 nats``."""
    if result.score is None:
        return "not finite"
    return f"{format_score(result.score, result.error, result.unit)} {result.unit}".rstrip()


def pattern_text(config: Config) -> str:
    """Return the settings of a pattern for the user; "" for dense attention."""
    pattern: Any = make_pattern(config.sparsity, config.seed)
    if pattern is None:
        return ""
    dense = config.sparsity.dense_text
    return f"{pattern.describe()}{f'; {dense} dense' if dense else ''}"


def run(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> bool:
    """Evaluate on one worker of `mtrain eval`. Return whether a stop request ended it early."""
    request, configs = EvaluationRequest.load(run_dir.path)
    flag = StopFlag(run_dir)
    try:
        evaluate(make_runner(request, configs, environment, stop=flag.requested), environment)
    except StoppedError:
        if environment.rank == 0 and environment.launcher != "mtrain":
            report([STOPPED])  # no command goes on after a rank of a job
        return True
    return False


@cache
def find(kind: str) -> Any | None:
    """Return the entry point of the group `mtrain.evaluations` with this name, or None.

    Before any work, ``check(request, source, beyond=)`` checks what an `EvaluationRequest` asks of
    a `ModelSource`, and returns what ``runner`` gets as ``tasks``. ``runner`` takes the arguments
    of `Runner` and ``tasks``, and returns an object whose ``run`` all workers call together. If it
    has ``tables``, this makes the tables of the results whose task begins with the name and ":".
    """
    return plugins.load_by_name("mtrain.evaluations").get(kind)


def make_runner(
    request: EvaluationRequest,
    configs: Sequence[Config],
    environment: Environment,
    *,
    stop: Callable[[], bool] = lambda: False,
    tasks: Any = None,
) -> Any:
    """Return what evaluates a request. tasks: see `find`."""
    if (other := find(request.kind)) is not None:
        return other.runner(request, configs, environment, stop, tasks=tasks)
    return Runner(request, configs, environment, stop)


def evaluate(runner: Any, environment: Environment) -> None:
    """Run an evaluation. Raises RunError if the memory is full."""
    advice = "Give a smaller --length or more topology.workers. The samples so far are kept."
    with reporting_out_of_memory(lambda _: f"rank {environment.rank} ran out of memory. {advice}"):
        runner.run()
