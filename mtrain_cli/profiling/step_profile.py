"""`mtrain profile step`: a training whose last steps are recorded by `torch.profiler`, and what becomes of the records."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shlex
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import PLAN, RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.profiling import records
from mtrain_cli.profiling.measurement import Bench, MeasurementProgress
from mtrain_cli.profiling.step_breakdown import StepBreakdown, find_parts, messages, shortest
from mtrain_cli.training.banner import banner
from mtrain_cli.training.metrics import StepMetrics
from mtrain_cli.training.out_of_memory import explained_where_memory_is_full
from mtrain_cli.training.trainer import StepResult, Trainer

TARGET = "mtrain_cli.profiling.step_profile:run"
SHOWN = 10  # kernels or operators
_COMPRESSION = 5  # a trace of a large step is 100 MB, of which level 9 makes hardly less


@dataclass(frozen=True)
class StepProfilePlan:
    """warmup: training steps before the recorded ones. alike: number of the first of them, from 1, that compares with those: it is not
    dense before sparse ones, nor, if there is another, the first of its kind, which compiles. trace: whether the trace of every rank is
    left. quiet: nothing is shown.
    """

    warmup: int
    alike: int
    steps: int
    trace: bool
    quiet: bool

    def save(self, run_dir: RunDir) -> None:
        (run_dir.path / PLAN).write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def load(run_dir: RunDir) -> StepProfilePlan:
        return StepProfilePlan(**json.loads((run_dir.path / PLAN).read_text()))


@dataclass(frozen=True)
class _RankSummary:
    """What one rank has to say. plain: seconds of the steps from `StepProfilePlan.alike` on that were not recorded; recorded: of those
    that were.
    peak_gib: the most memory of the former.
    """

    found: StepBreakdown
    plain: list[float]
    recorded: list[float]
    peak_gib: float | None


def run(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:  # noqa: ARG001 - a measurement starts afresh
    """Worker: trains, and records the last steps. Returns whether it was stopped before."""
    bench = Bench(environment, timedelta(seconds=config.topology.timeout_s))
    first = environment.rank == 0
    plan: StepProfilePlan = bench.everyone(StepProfilePlan.load(run_dir) if first else None)[0]
    stop = StopFlag(run_dir, environment)
    results: list[StepResult] = []
    with (
        MeasurementProgress(first and not plan.quiet, plan.warmup + plan.steps) as progress,
        explained_where_memory_is_full(config, environment, run_dir) as about,
    ):
        progress.now("prepares")
        trainer = about.begin(Trainer(config, environment))
        progress.say(banner(trainer.plan, run_dir.path, trainer.dataset.describe()))

        def step(kind: str) -> float:
            """One training step, from one moment at which all devices are idle to the next -> its seconds."""
            number = trainer.step + 1
            progress.now(f"step {number}, {kind}")
            bench.together()
            _idle(bench)
            began = time.perf_counter()
            with profiler_labels.label(profiler_labels.STEP):
                results.append(trainer.train_step(stop.requested()))
                with profiler_labels.label(profiler_labels.CLOSING):
                    _idle(bench)
            seconds = time.perf_counter() - began
            progress.done()
            progress.say(f"step {number}, {kind}: {seconds:.3g} s")
            return seconds

        plain: list[float] = []
        metrics: list[StepMetrics] = []
        for number in range(1, plan.warmup + 1):
            seconds = step("not recorded")
            if results[-1].stop:
                return True
            if number >= plan.alike:
                plain.append(seconds)
                metrics.append(trainer.metrics(results[-1], seconds))
        # The first profiler of a process takes seconds to begin, and its first records are slower than those that follow.
        with _profiler(bench):
            torch.zeros(1, device=bench.device).add_(1)
            _idle(bench)
        recorded = []
        with _profiler(bench) as profiler:
            for _ in range(plan.steps):
                recorded.append(step("recorded"))
                if results[-1].stop:
                    return True
        progress.now("reads the records")
        trainer.close()
        peaks = [m.peak_memory_gib for m in metrics if m.peak_memory_gib is not None]
        mine = _RankSummary(
            _read(profiler, run_dir.path, plan, bench), plain, recorded, max(peaks, default=None)
        )
        everyone: list[_RankSummary] = bench.everyone(mine)
    if first:
        document = _document(
            trainer, run_dir, plan, everyone, metrics, [result.loss for result in results]
        )
        _leave(run_dir.path, document, everyone)
        if not plan.quiet:
            _show(run_dir.path, document, plan)
    return False


def _idle(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()


def _profiler(bench: Bench) -> torch.profiler.profile:
    """Neither shapes nor stacks nor memory: these would slow the host down."""
    # Of its own it tells on stderr that it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, acc_events=True
    )  # one cycle: without it, a warning of what is lost between two


def _read(
    profiler: torch.profiler.profile, folder: Path, plan: StepProfilePlan, bench: Bench
) -> StepBreakdown:
    """Writes the trace of this rank, and finds the parts in it.

    Raises:
        RunError: it cannot be written, or the profiler saw nothing of the GPU.
    """
    rank = bench.environment.rank
    trace = folder / f"trace-rank-{rank}.json.gz"
    draft = folder / f".trace-rank-{rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            profiler.export_chrome_trace(str(draft))
            events = json.loads(draft.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
            if plan.trace:
                with (
                    draft.open("rb") as source,
                    gzip.open(trace, "wb", compresslevel=_COMPRESSION) as packed,
                ):
                    shutil.copyfileobj(source, packed)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder}: rank {rank} cannot write its trace ({error.strerror or error})"
        ) from error
    gpu = bench.device.type == "cuda"
    # Every rank needs to know how long the others took for the same messages.
    least = shortest(bench.everyone(messages(events))) if gpu else None
    found = find_parts(events, gpu=gpu, least=least)
    if gpu and not found.launches:
        raise RunError(
            f"rank {rank}: torch.profiler recorded no kernel; another profiler may hold the GPU, or CUPTI is not allowed here; "
            "KINETO_LOG_LEVEL=0 says more"
        )
    return found


def _document(
    trainer: Trainer,
    run_dir: RunDir,
    plan: StepProfilePlan,
    everyone: Sequence[_RankSummary],
    metrics: Sequence[StepMetrics],
    losses: list[float | None],
) -> dict[str, Any]:
    """The summary. Times are ms of one step. metrics: of the steps without records, from `StepProfilePlan.alike` on. losses: of all
    steps."""
    config, choices, e = trainer.config, trainer.choices, trainer.environment
    gpu = trainer.device.type == "cuda"
    facts = json.loads(run_dir.environment.read_text()) if run_dir.environment.exists() else {}
    return {
        "kind": records.STEP,
        "complete": True,
        "command": facts.get("command", []),
        "environment": facts,
        "versions": facts.get("versions", {}),
        "device": torch.cuda.get_device_name(trainer.device) if gpu else "CPU",
        "gpu": gpu,
        "workers": e.workers,
        "warmup": plan.warmup,
        "steps": plan.steps,
        "settings": {
            "model": config.model.name,
            "layers": config.model.num_layers,
            "seq": config.seq,
            "global_batch": config.train.global_batch,
            "cp": e.cp,
            "layout": config.layout,
            "exchange": choices.exchange.label,
            "pattern": config.sparsity.pattern,
            "kernel": choices.kernel.name,
            "dtype": str(choices.dtype).removeprefix("torch."),
            "compile": choices.compile,
            "activation_checkpoint": config.train.activation_checkpoint,
            "shard": config.train.shard,
        },
        "losses": losses,
        # Medians of rank 0, but for memory, of which it is the most of any rank.
        "plain": {
            "first": plan.alike,
            "steps": len(metrics),
            "tokens_per_second_per_gpu": statistics.median(
                m.tokens_per_second_per_gpu for m in metrics
            ),
            "density": statistics.median(m.density for m in metrics),
            **{
                name: _median([getattr(m, name) for m in metrics])
                for name in ("mfu_model", "mfu_executed")
            },
            "peak_memory_gib": max(
                (said.peak_gib for said in everyone if said.peak_gib is not None), default=None
            ),
        },
        "ranks": [_of_rank(rank, said) for rank, said in enumerate(everyone)],
        "top": _top([said.found for said in everyone]),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _of_rank(rank: int, said: _RankSummary) -> dict[str, Any]:
    found = said.found

    def ms(ns: float) -> float:
        return ns / 1e6 / found.steps

    return {
        "rank": rank,
        "step_ms": ms(found.step),
        "plain_ms": statistics.median(said.plain) * 1e3,
        "recorded_ms": statistics.fmean(said.recorded) * 1e3,
        "parts": {name: ms(ns) for name, ns in found.parts.items()},
        "links_hidden_ms": ms(found.hidden),
        "unmatched": found.unmatched / found.steps,
        "launches": found.launches / found.steps,
        "launching_ms": ms(found.launching),
        "syncs": found.syncs / found.steps,
        "syncing_ms": ms(found.syncing),
        "ahead_us": None if found.ahead is None else found.ahead / 1e3,
    }


def _top(everyone: Sequence[StepBreakdown]) -> list[dict[str, Any]]:
    """Kernels or operators that take most time, of a step and the mean of ranks."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in everyone:
        for kind in found.kinds:
            of = sums[kind.name, kind.part]
            of[0] += kind.calls / found.steps / len(everyone)
            of[1] += kind.ns / 1e6 / found.steps / len(everyone)
    most = sorted(sums.items(), key=lambda item: -item[1][1])[:SHOWN]
    return [
        {"name": name, "part": part, "calls": calls, "ms": ms} for (name, part), (calls, ms) in most
    ]


def _leave(folder: Path, document: dict[str, Any], everyone: Sequence[_RankSummary]) -> None:
    """
    Raises:
        RunError: the folder cannot be written.
    """
    try:
        with (folder / records.KERNELS).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("rank", "name", "part", "calls", "ms"))
            for rank, said in enumerate(everyone):
                steps = said.found.steps
                rows.writerows(
                    (rank, k.name, k.part, k.calls / steps, k.ns / 1e6 / steps)
                    for k in said.found.kinds
                )
        records.write_summary(folder, document)
    except OSError as error:
        raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error


def _show(folder: Path, document: dict[str, Any], plan: StepProfilePlan) -> None:
    from mtrain_cli.reporting.step_tables import show_step
    from mtrain_cli.reporting.terminal import make_console

    console = make_console()
    show_step(console, document)
    console.print(f"files  {folder}", soft_wrap=True)
    if plan.trace:
        console.print(
            "trace  trace-rank-N.json.gz, for https://ui.perfetto.dev or chrome://tracing",
            soft_wrap=True,
        )
    console.print(f"again  mtrain report {shlex.quote(str(folder))}", soft_wrap=True)
