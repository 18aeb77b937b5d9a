"""Evaluate models with the tasks of lm-eval, and continue a stopped evaluation.

The first worker runs lm-eval. It divides the requests into calls, such as a packed sequence or some
prompts, and sends each call to the other workers. All workers compute it together. The folder of
the results keeps every answer, so that no request is computed twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.tokenizers import documents_identity
from mtrain_cli.evaluation.continuations import pack_size, packs, score_together
from mtrain_cli.evaluation.cost import format_flop, forward_flop
from mtrain_cli.evaluation.evaluation_progress import EvaluationProgress
from mtrain_cli.evaluation.request import EvaluationRequest
from mtrain_cli.evaluation.results import Result, ResultsFolder, append_row, kept_rows, key_of
from mtrain_cli.evaluation.runner import (
    OTHERS_DONE,
    Setting,
    StoppedError,
    pattern_text,
    score_text,
    settings_of,
)
from mtrain_cli.inference.answers import describe, report
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import MOST_TOGETHER
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.text import TextCodec, open_codec
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.collectives import share
from mtrain_cli.printable import one_line
from mtrain_lm_eval.requests import (
    Continuing,
    Pair,
    Plan,
    Score,
    request_hash,
    request_names,
    request_seed,
)
from mtrain_lm_eval.results import measured
from mtrain_lm_eval.tasks import HarnessTasks

ANSWERS = "answers.jsonl"
_MARGIN = 8  # tokens before an ending string that are decoded again


class _UnreadableError(Exception):
    """A model cannot be loaded. All workers raise this together.

    problems: lines for the user.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(*problems)
        self.problems = problems


class EngineAnswers:
    """Answers requests with a model in this process. All workers make the same calls together.

    plan: checks requests first; None if they are checked.
    """

    def __init__(self, engine: Engine, codec: TextCodec, plan: Plan | None = None) -> None:
        self._engine, self._codec, self._plan = engine, codec, plan

    def scores(self, pairs: Sequence[Pair]) -> list[Score]:
        if self._plan is not None:
            self._plan.scores(pairs)
        found: dict[int, Score] = {}
        for numbers in packs_of(pairs, self._engine.config, self._engine.device.type):
            together = score_together(self._engine, [pairs[number] for number in numbers])
            found |= dict(zip(numbers, together, strict=True))
        return [found[number] for number in range(len(pairs))]

    def texts(self, prompts: Sequence[list[int]], how: Continuing) -> list[str]:
        return self.named_texts(prompts, how, request_names(prompts, how))

    def named_texts(
        self, prompts: Sequence[list[int]], how: Continuing, names: Sequence[str]
    ) -> list[str]:
        """Do as `texts`. names: of the texts, which give the seeds."""
        if self._plan is not None:
            self._plan.texts(prompts, how)
        codec, longest = self._codec, max((len(one.encode()) for one in how.until), default=0)

        def ended(ids: Sequence[int]) -> bool:
            # A token has at least a byte, so the last tokens hold the whole string.
            tail = codec.decode_plain(ids[-(longest + _MARGIN) :])
            return any(one in tail for one in how.until)

        completions = self._engine.generate(
            prompts,
            how.max_new,
            how.sampling,
            codec.stop,
            ended=ended if how.until else None,
            seeds=list(map(request_seed, names)),
        )
        return [how.cut(codec.decode_plain(completion.ids)) for completion in completions]


def packs_of(pairs: Sequence[Pair], config: Config, device: str) -> list[list[int]]:
    """Return the numbers of the texts that share a sequence, for each sequence."""
    lengths = [len(context) + len(rest) for context, rest in pairs]
    return packs(lengths, pack_size(config, device))


class HarnessRunner:
    """Evaluates on this worker. All workers call `run` together.

    tasks: loaded tasks; None to load them. Only the first worker needs them.
    stop: returns whether the user asked to stop. Only the first worker's counts.
    """

    def __init__(
        self,
        request: EvaluationRequest,
        configs: Sequence[Config],
        environment: Environment,
        stop: Callable[[], bool] = lambda: False,
        tasks: HarnessTasks | None = None,
    ) -> None:
        self._request, self._environment, self._stop = request, environment, stop
        self._tasks, self._first = tasks, environment.rank == 0
        self._settings = settings_of(request, configs, environment.device)
        folder = None if request.tokenizer is None else Path(request.tokenizer)
        self._codec = open_codec(self._settings[0].source(), folder)
        self._opened: tuple[int, EngineAnswers] | None = None
        self.device = environment.device
        self._generates = True  # whether a task asks for texts; the first worker finds out
        self.calls = 0  # that computed something
        self._together = True  # whether the other workers wait for a call

    def run(self) -> None:
        """Evaluate all settings.

        Raises:
            StoppedError: the user asked to stop.
            ConfigError: lm-eval or a task refuses to run, or the folder has results of another
                model. If weights are damaged, all others are evaluated before.
        """
        if not self._first:
            self._follow()
            return
        try:
            self._lead()
        finally:
            if self._together:
                self._send(None)

    def _lead(self) -> None:
        request, source = self._request, self._settings[0].source()
        folder = ResultsFolder.open(Path(request.out), request.model)
        for line in folder.damage:
            _warn(line, first=self._first)
        tasks = self._tasks or load_tasks(request)
        plan = tasks.plan(self._codec, Plan.of(source, beyond=True))
        self._generates = plan.generates
        flop = plan_flop(plan, source.config)
        progress = EvaluationProgress(flop * len(self._settings))
        many = f"{len(plan.lengths):,} requests of {len(tasks.loaded['tasks'])} tasks"
        progress.say(f"{many}, up to {format_flop(flop)} each time (dense attention)")
        if self._codec.starts:
            progress.say(self._codec.starts)
        failed: list[str] = []
        lost = 0
        try:
            for number, setting in enumerate(self._settings):
                started = time.perf_counter()
                answers = _KeptAnswers(self, folder, number, setting, progress)
                try:
                    found = tasks.evaluate(self._codec, source.max_position, answers)
                except _UnreadableError as error:
                    failed += error.problems
                    lost += 1
                    progress.say(f"{setting.label}: cannot be loaded")
                    continue
                seconds = time.perf_counter() - started
                self._keep(folder, setting, found, seconds, progress)
        finally:
            progress.close()
        if failed:
            others = [OTHERS_DONE] if lost < len(self._settings) else []
            raise ConfigError(*dict.fromkeys(failed), *others)

    def origin(self, setting: Setting) -> dict[str, Any]:
        """Return what determines the answers of a model, for a key."""
        assert self._codec.tokenizer is not None
        return {"model": setting.origin, "tokenizer": documents_identity(self._codec.tokenizer)}

    def _keep(
        self,
        folder: ResultsFolder,
        setting: Setting,
        found: dict[str, Any],
        seconds: float,
        progress: EvaluationProgress,
    ) -> None:
        """Write results and samples that the folder lacks, or of which it has others.

        A task that changed gives other samples under its name, even if it has as many. Otherwise a
        result of fewer samples replaces none of more.
        """
        names: dict[str, Any] = {
            "length": 0,
            "attention": setting.attention,
            "step": setting.weights.step,
        }
        known = Result(
            key="", task="", pattern=pattern_text(setting.config), samples=0, score=None,
            error=None, unit="", seconds=seconds, **names,
            settings=setting.labels_with(self._request.tokenizer),
            details=(setting.weights_label, *filter(None, [self._codec.starts])),
        )  # fmt: skip
        changed = False
        # Groups, which have no samples of their own, come after their tasks.
        for one in sorted(
            measured(found, known, self.origin(setting)), key=lambda one: not one.rows
        ):
            key = one.result.key
            own = [{"key": key, "task": one.result.task, **names, **row} for row in one.rows]
            held = folder.samples.get(key, {})
            if any(row["index"] in held and not _equal(row, held[row["index"]]) for row in own):
                folder.drop_samples(key)
                held, changed = {}, True
            for row in own:
                if row["index"] not in held:
                    folder.add_sample(row)
            before = folder.results.get(key)
            line = f"{one.result.task} {setting.label}: {score_text(one.result)}"
            if (
                before is not None
                and before.samples > one.result.samples
                and not (changed and not own)
            ):
                line += (
                    f" on {with_count(one.result.samples, 'sample')}; the result on "
                    f"{before.samples:,} stays: {score_text(before)}"
                )
            elif before is None or replace(one.result, seconds=before.seconds) != before:
                folder.add_result(one.result)
            progress.say(line)

    def call(self, setting: int, kind: str, *arguments: Any) -> Any:
        """Compute a call on all workers. Only the first worker makes calls.

        Raises:
            StoppedError: the user asked to stop.
        """
        self._together = False  # if this fails, it fails on all workers
        if self._stop():
            self._send([])
            raise StoppedError
        self._send([setting, kind, *arguments])
        try:
            result = self._compute(setting, kind, *arguments)
        except _UnreadableError:
            self._together = True
            raise
        self._together = True
        return result

    def _follow(self) -> None:
        """Compute the calls of the first worker."""
        while (call := share(None)[0]) is not None:
            if not call:
                raise StoppedError
            with contextlib.suppress(_UnreadableError):
                self._compute(*call)

    def _send(self, call: list[Any] | None) -> None:
        if self._environment.dims.workers > 1:
            share(call)

    def _compute(self, setting: int, kind: str, *arguments: Any) -> Any:
        self.calls += 1
        if self._opened is None or self._opened[0] != setting:
            self._opened = None  # frees the memory
            self._opened = setting, self._open_together(self._settings[setting])
        answers = self._opened[1]
        if kind == "scores":
            return answers.scores(arguments[0])
        prompts, max_new, until, sampling, names = arguments
        how = Continuing(max_new, tuple(until), Sampling(**sampling))
        return answers.named_texts(prompts, how, names)

    def _open_together(self, setting: Setting) -> EngineAnswers:
        answers: EngineAnswers | None = None
        problems: list[str] = []
        try:
            answers = self._open(setting)
        except ConfigError as error:
            problems = list(error.problems)
        if self._environment.dims.workers > 1:
            problems = next((found for found in share(problems) if found), [])
        if answers is None or problems:
            raise _UnreadableError(problems)
        return answers

    def _open(self, setting: Setting) -> EngineAnswers:
        warn = partial(_warn, first=self._first)
        engine = Engine(setting.source(), self._environment, warn)
        if self._first:
            lines = describe(engine, generates=self._generates)
            report(lines[: 1 + (setting.attention != "dense")])
        return EngineAnswers(engine, self._codec)


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
        self._progress, self._device = progress, runner.device
        self._file, self._key = folder.path / ANSWERS, key_of(runner.origin(setting))
        self._held: dict[str, Any] = {}
        rows, lost = kept_rows(self._file, _is_row)
        if lost:
            progress.say(f"warning: {lost}")
        for row in rows:
            if row["key"] == self._key:
                self._held[row["request"]] = row["answer"]

    def scores(self, pairs: Sequence[Pair]) -> list[Score]:
        names = [request_hash(["scores", *pair]) for pair in pairs]
        missing = list({name: pair for name, pair in zip(names, pairs, strict=True)
                        if name not in self._held}.values())  # fmt: skip
        config = self._setting.config
        for numbers in packs_of(missing, config, self._device):
            own = [missing[number] for number in numbers]
            found = self._runner.call(self._number, "scores", own)
            for pair, score in zip(own, found, strict=True):
                self._add(request_hash(["scores", *pair]), list(score), len(pair[0]) + len(pair[1]))
        return [(float(self._held[name][0]), bool(self._held[name][1])) for name in names]

    def texts(self, prompts: Sequence[list[int]], how: Continuing) -> list[str]:
        names = request_names(prompts, how)
        by_name = dict(zip(names, prompts, strict=True))
        missing = [name for name in by_name if name not in self._held]
        missing.sort(key=lambda name: (-len(by_name[name]), name))
        for group in _groups(missing):
            own = [by_name[name] for name in group]
            about = how.max_new, list(how.until), asdict(how.sampling), list(group)
            found = self._runner.call(self._number, "texts", own, *about)
            for name, text in zip(group, found, strict=True):
                self._add(name, text, len(by_name[name]) + how.max_new)
        return [self._held[name] for name in names]

    def _add(self, name: str, answer: Any, tokens: int) -> None:
        self._held[name] = answer
        # JSON has no infinite score. The next evaluation computes such an answer again.
        if isinstance(answer, str) or math.isfinite(answer[0]):
            append_row(self._file, {"key": self._key, "request": name, "answer": answer})
        self._progress.advance(
            forward_flop(self._setting.config, tokens), f"lm-eval {self._setting.label}"
        )


def load_tasks(request: EvaluationRequest) -> HarnessTasks:
    """Load the tasks of a request.

    Raises:
        ConfigError: as in `HarnessTasks.load`.
    """
    options = request.lm_eval
    return HarnessTasks.load(
        options.tasks, options.include_path, options.num_fewshot, request.samples or None
    )


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two rows are equal on the disk, where a NaN is null."""
    return json.loads(json_text(one)) == json.loads(json_text(other))


def plan_flop(plan: Plan, config: Config) -> float:
    """Return the FLOP of all requests with dense attention, each computed alone."""
    counts: dict[int, int] = {}
    for length in plan.lengths:
        counts[length] = counts.get(length, 0) + 1
    return sum(count * forward_flop(config, length) for length, count in counts.items())


def _is_row(row: dict[str, Any]) -> bool:
    """Return whether a row from the disk holds the answer to a request of a model."""
    name = row.get("request")
    is_named = isinstance(row.get("key"), str) and isinstance(name, str)
    return is_named and _is_answer(str(name), row.get("answer"))


def _is_answer(name: str, answer: Any) -> bool:
    """Return whether a row from the disk holds a text, or a score as `Score` has it."""
    if "-" in name:  # as in `request_names`
        return isinstance(answer, str)
    return (
        isinstance(answer, list)
        and len(answer) == 2
        and isinstance(answer[0], int | float)
        and isinstance(answer[1], bool)
    )


def _groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), MOST_TOGETHER):
        yield names[first : first + MOST_TOGETHER]


def _warn(line: str, *, first: bool) -> None:
    if first:
        report([f"mtrain: warning: {one_line(line)}"])
