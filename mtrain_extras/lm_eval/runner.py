"""Evaluate models with the tasks of lm-eval, and continue a stopped evaluation.

The first worker runs lm-eval, divides the requests into calls, such as a packed sequence or some
prompts, and sends each to all workers. The folder of the results keeps every answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from mtrain_cli.config.documents import checked, json_text
from mtrain_cli.config.schema import Config
from mtrain_cli.data.tokenizers import documents_identity
from mtrain_cli.evaluation.cost import EvaluationProgress, format_flop, forward_flop
from mtrain_cli.evaluation.request import EvaluationRequest
from mtrain_cli.evaluation.results import ResultsFolder, append_row, kept_rows, key_of
from mtrain_cli.evaluation.runner import Evaluation, Setting, StoppedError, score_text
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import MOST_TOGETHER
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.text import TextCodec
from mtrain_cli.inference.worker import warn
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.collectives import share
from mtrain_extras.lm_eval.packing import packs, score_together
from mtrain_extras.lm_eval.requests import (
    Continuing,
    Pair,
    Plan,
    Score,
    request_hash,
    request_names,
)
from mtrain_extras.lm_eval.results import measured
from mtrain_extras.lm_eval.tasks import HarnessOptions, HarnessTasks

ANSWERS = "answers.jsonl"
_MARGIN = 8  # tokens before an ending string that are decoded again


class EngineAnswers:
    """Answers requests with a model in this process. All workers make the same calls together.

    plan: checks requests first; None if they are checked.
    """

    def __init__(self, engine: Engine, codec: TextCodec, plan: Plan | None = None) -> None:
        self._engine, self._codec, self._plan = engine, codec, plan

    def scores(self, pairs: Sequence[Pair]) -> list[Score]:
        if self._plan is not None:
            self._plan.scores(pairs)
        scores: dict[int, Score] = {}
        for numbers in packs_of(pairs, self._engine.config, self._engine.device.type):
            together = score_together(self._engine, [pairs[number] for number in numbers])
            scores |= dict(zip(numbers, together, strict=True))
        return [scores[number] for number in range(len(pairs))]

    def texts(
        self, prompts: Sequence[list[int]], how: Continuing, names: Sequence[str] | None = None
    ) -> list[str]:
        """Return the text after each prompt. names: of the texts, which give the seeds."""
        if self._plan is not None:
            self._plan.texts(prompts, how)
        names = request_names(prompts, how) if names is None else names
        codec, longest = self._codec, max((len(one.encode()) for one in how.until), default=0)

        def ended(ids: Sequence[int]) -> bool:
            # A token has at least a byte, so the last tokens hold the whole string.
            tail = codec.decode_plain(ids[-(longest + _MARGIN) :])
            return any(one in tail for one in how.until)

        completions = self._engine.generate(
            prompts, how.max_new, how.sampling, codec.stop, ended=ended if how.until else None,
            seeds=[int(request_hash([name])[:12], 16) for name in names],
        )  # fmt: skip
        return [how.cut(codec.decode_plain(completion.ids)) for completion in completions]


def packs_of(pairs: Sequence[Pair], config: Config, device: str) -> list[list[int]]:
    """Return the numbers of the texts that share a sequence, for each sequence."""
    return packs(config, device, [len(context) + len(rest) for context, rest in pairs])


class HarnessRunner(Evaluation):
    """Evaluates on this worker. All workers call `run` together.

    tasks: loaded tasks; None to load them. Only the first worker needs them.
    calls: number of calls that computed something.
    """

    def __init__(
        self,
        request: EvaluationRequest,
        configs: Sequence[Config],
        environment: Environment,
        stop: Callable[[], bool] = lambda: False,
        tasks: HarnessTasks | None = None,
    ) -> None:
        super().__init__(request, configs, environment, stop)
        self._tasks, self._opened = tasks, 0
        self._answers: EngineAnswers | None = None
        self._generates = True  # whether a task asks for texts; the first worker finds out
        self.calls = 0
        self._waiting = True  # whether the other workers wait for a call

    def run(self) -> None:
        """Evaluate all settings.

        Raises StoppedError if the user asked to stop. Raises ConfigError if lm-eval or a task
        refuses to run, weights cannot be loaded, or the folder has results of another model.
        """
        if not self.first:
            while (call := share(None)[0]) is not None:
                if not call:
                    raise StoppedError
                self._compute(*call)
            return
        try:
            self._lead()
        finally:
            if self._waiting:
                self._send(None)

    def _lead(self) -> None:
        request, folder = self.request, self.open_folder()
        tasks = self._tasks or load_tasks(request)
        plan = tasks.plan(self.codec, Plan.of(self.source, beyond=True))
        self._generates = plan.generates
        flop = plan_flop(plan, self.source.config)
        progress = EvaluationProgress(flop * len(self.settings))
        many = f"{len(plan.lengths):,} requests of {len(tasks.loaded['tasks'])} tasks"
        progress.say(f"{many}, up to {format_flop(flop)} each time (dense attention)")
        if self.codec.starts:
            progress.say(self.codec.starts)
        for number, setting in enumerate(self.settings):
            started = time.perf_counter()
            answers = _KeptAnswers(self, folder, number, setting, progress)
            found = tasks.evaluate(self.codec, self.source.max_position, answers)
            self._keep(folder, setting, found, time.perf_counter() - started, progress)

    def origin(self, setting: Setting) -> dict[str, Any]:
        """Return what determines the answers of a model, for a key."""
        return {"model": setting.origin, "tokenizer": documents_identity(self.codec.required)}

    def _keep(
        self,
        folder: ResultsFolder,
        setting: Setting,
        found: dict[str, Any],
        seconds: float,
        progress: EvaluationProgress,
    ) -> None:
        """Write results and samples that the folder lacks, or of which it has others.

        A task that changed gives other samples under its name, even if it has as many.
        """
        known = self.known(setting, key="", task="", length=0, samples=0, seconds=seconds)
        names = {"length": 0, "attention": known.attention, "step": known.step}
        for result, rows in measured(found, known, self.origin(setting)):
            own = [{"key": result.key, "task": result.task, **names, **row} for row in rows]
            held = folder.samples.get(result.key, {})
            if any(json_text(row) != json_text(held.get(row["index"], row)) for row in own):
                folder.drop_samples(result.key)
                held = {}
            for row in own:
                if row["index"] not in held:
                    folder.add_sample(row)
            before = folder.results.get(result.key)
            if before is None or replace(result, seconds=before.seconds) != before:
                folder.add_result(result)
            progress.say(f"{result.task} {setting.label}: {score_text(result)}")

    def call(self, setting: int, kind: str, *arguments: Any) -> Any:
        """Compute a call on all workers. Only the first worker makes calls.

        Raises StoppedError if the user asked to stop.
        """
        self._waiting = False  # if this fails, it fails on all workers
        if self.stop():
            self._send([])
            raise StoppedError
        self._send([setting, kind, *arguments])
        result = self._compute(setting, kind, *arguments)
        self._waiting = True
        return result

    def _send(self, call: list[Any] | None) -> None:
        if self.environment.dims.workers > 1:
            share(call)

    def _compute(self, setting: int, kind: str, *arguments: Any) -> Any:
        self.calls += 1
        if self._answers is None or self._opened != setting:
            self._answers = None  # frees the memory
            engine = self.load(self.settings[setting], generates=self._generates)
            self._opened, self._answers = setting, EngineAnswers(engine, self.codec)
        if kind == "scores":
            return self._answers.scores(arguments[0])
        prompts, max_new, until, sampling, names = arguments
        how = Continuing(max_new, tuple(until), Sampling(**sampling))
        return self._answers.texts(prompts, how, names)


class _KeptAnswers:
    """Answers requests from the folder, and computes the others."""

    def __init__(
        self,
        runner: HarnessRunner,
        folder: ResultsFolder,
        number: int,
        setting: Setting,
        progress: EvaluationProgress,
    ) -> None:
        self._runner, self._number, self._setting = runner, number, setting
        self._progress = progress
        self._file, self._key = folder.path / ANSWERS, key_of(runner.origin(setting))
        rows, lost = kept_rows(self._file, _is_row)
        if lost:
            warn(lost)
        self._held = {row["request"]: row["answer"] for row in rows if row["key"] == self._key}

    def scores(self, pairs: Sequence[Pair]) -> list[Score]:
        names = [request_hash(["scores", *pair]) for pair in pairs]
        by_name = dict(zip(names, pairs, strict=True))
        missing = [name for name in by_name if name not in self._held]
        config, device = self._setting.config, self._runner.environment.device
        for numbers in packs_of([by_name[name] for name in missing], config, device):
            own = [missing[number] for number in numbers]
            scores = self._runner.call(self._number, "scores", [by_name[name] for name in own])
            for name, score in zip(own, scores, strict=True):
                self._add(name, list(score), sum(map(len, by_name[name])))
        return [(float(self._held[name][0]), bool(self._held[name][1])) for name in names]

    def texts(self, prompts: Sequence[list[int]], how: Continuing) -> list[str]:
        names = request_names(prompts, how)
        by_name = dict(zip(names, prompts, strict=True))
        missing = [name for name in by_name if name not in self._held]
        missing.sort(key=lambda name: (-len(by_name[name]), name))
        for first in range(0, len(missing), MOST_TOGETHER):
            own = missing[first : first + MOST_TOGETHER]
            about = how.max_new, list(how.until), asdict(how.sampling), own
            prompts = [by_name[name] for name in own]
            texts = self._runner.call(self._number, "texts", prompts, *about)
            for name, text in zip(own, texts, strict=True):
                self._add(name, text, len(by_name[name]) + how.max_new)
        return [self._held[name] for name in names]

    def _add(self, name: str, answer: Any, tokens: int) -> None:
        self._held[name] = answer
        # JSON has no infinite score. The next evaluation computes such an answer again.
        if isinstance(answer, str) or math.isfinite(answer[0]):
            append_row(self._file, {"key": self._key, "request": name, "answer": answer})
        work = forward_flop(self._setting.config, tokens)
        self._progress.advance(work, f"lm-eval {self._setting.label}")


def load_tasks(request: EvaluationRequest) -> HarnessTasks:
    """Load the tasks of a request. Raises ConfigError as in `HarnessTasks.load`."""
    options = checked(HarnessOptions, request.options)
    samples = request.samples or None
    return HarnessTasks.load(options.tasks, options.include_path, options.num_fewshot, samples)


def plan_flop(plan: Plan, config: Config) -> float:
    """Return the FLOP of all requests with dense attention, each computed alone."""
    counts = Counter(plan.lengths)
    return sum(count * forward_flop(config, length) for length, count in counts.items())


def _is_row(row: dict[str, Any]) -> bool:
    """Return whether a row from the disk holds a text, or a score as `Score` has it."""
    match row:
        case {"key": str(), "request": str(name), "answer": str()}:
            return "-" in name  # as in `request_names`
        case {"key": str(), "request": str(name), "answer": [int() | float(), bool()]}:
            return "-" not in name
    return False
