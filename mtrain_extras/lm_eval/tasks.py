"""The tasks of lm-eval, which is imported only when tasks are loaded: load, count, evaluate."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import did_you_mean
from mtrain_cli.inference.text import TextCodec
from mtrain_extras.lm_eval.requests import Answers, Plan

# The seeds of lm_eval.simple_evaluate.
_RANDOM_SEED, _OTHER_SEED = 0, 1234
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub")


@dataclass(frozen=True)
class HarnessOptions:
    """Tasks of lm-eval."""

    tasks: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None


@dataclass(frozen=True)
class HarnessTasks:
    """Loaded tasks of lm-eval."""

    loaded: Mapping[str, Any]  # what lm-eval's TaskManager returns: tasks and groups by their names
    samples: int | None  # most samples of each task; None for all

    @staticmethod
    def load(
        names: Sequence[str], folder: str | None, shots: int | None, samples: int | None
    ) -> HarnessTasks:
        """Load tasks by name, with their data and those of a folder of YAML files.

        shots: solved examples before each question; None for what each task prescribes. Raises
        ConfigError if lm-eval is missing, there is no such task, or its data cannot be read.
        """
        loaded = _load(names, folder)
        for name, task in loaded["tasks"].items():
            for is_so, why in (
                (getattr(task, "UNSAFE_CODE", False), "runs code that the model writes"),
                (getattr(task, "MULTIMODAL", False), "has images or sounds"),
            ):
                if is_so:
                    raise ConfigError(f"--tasks {name}: {why}, which mtrain does not support")
            # As in simple_evaluate: a task that prescribes 0 examples keeps them.
            own = task.get_config("num_fewshot")
            if own is None or (shots is not None and own != 0):
                task.set_config(key="num_fewshot", value=shots or 0)
        return HarnessTasks(loaded, samples)

    def plan(self, codec: TextCodec, plan: Plan) -> Plan:
        """Count the requests of all tasks in a plan; ConfigError if one cannot be served."""
        from mtrain_extras.lm_eval.model import HarnessModel

        model = HarnessModel(codec, plan.positions, plan)
        for plan.task, task in self.loaded["tasks"].items():
            self._build(plan.task, task)
            by_kind: dict[str, list[Any]] = {}
            for one in task.instances:
                by_kind.setdefault(one.request_type, []).extend([one] * one.repeats)
            for kind, requests in by_kind.items():
                getattr(model, kind)(requests)
        return plan

    def evaluate(self, codec: TextCodec, positions: int, answers: Answers) -> dict[str, Any]:
        """Evaluate all tasks, and return what `lm_eval.evaluator.evaluate` does, with samples."""
        from lm_eval.evaluator import evaluate

        from mtrain_extras.lm_eval.model import HarnessModel

        for name, task in self.loaded["tasks"].items():
            # evaluate() builds the requests, with a progress bar for each task.
            task.build_all_requests = lambda name=name, task=task, **_: self._build(name, task)
        random.seed(_RANDOM_SEED)
        np.random.seed(_OTHER_SEED)
        model: Any = HarnessModel(codec, positions, answers)
        with _quiet_logs():
            # Without bootstrap, whose processes would copy the model. `measured` computes errors.
            found: Any = evaluate(model, dict(self.loaded), self.samples, bootstrap_iters=0)
        return found

    def _build(self, name: str, task: Any) -> None:
        """Make the requests of a task, the same each time."""
        task.set_fewshot_seed(seed=_OTHER_SEED)
        with _in_one_line(f"--tasks {name}: no requests"):
            type(task).build_all_requests(task, limit=self.samples, rank=0, world_size=1)


def _load(names: Sequence[str], folder: str | None) -> Mapping[str, Any]:
    """Return what lm-eval's TaskManager loads."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            f"mtrain eval lm-eval: needs the package lm-eval: {install_command('lm-eval')}"
        ) from None
    if folder is not None:
        # Reading the files of all tasks of lm-eval takes seconds.
        with contextlib.suppress(Exception), _quiet():
            manager = TaskManager(include_path=folder, include_defaults=False)
            return manager.load(list(names))
    with _in_one_line(f"--include-path {folder}: cannot be read"):
        manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"--tasks {name}: no such task of lm-eval{did_you_mean(name, manager.all_tasks)}; "
                "`lm-eval ls tasks` lists them"
            )
        with _in_one_line(f"--tasks {name}: lm-eval cannot load this"):
            manager.load([name])
    with _quiet():
        return manager.load(list(names))


@contextlib.contextmanager
def _in_one_line(problem: str) -> Iterator[None]:
    """Raise ConfigError for any error: tasks are code of many authors and may read damaged data."""
    try:
        with _quiet():
            yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        text = "".join(one for one in (lines or [""])[0][:300] if one.isprintable())
        raise ConfigError(f"{problem} ({text or type(error).__name__})") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and log lines."""
    with contextlib.redirect_stderr(io.StringIO()), _quiet_logs():
        yield


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
