"""`mtrain profile step`: record training steps with `torch.profiler`, and sum their parts."""

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain_cli.launch.failures import RunError, not_written
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.printable import one_line
from mtrain_cli.profiling.measurement import Bench, BenchmarkPlan, MeasurementProgress, entry_point
from mtrain_cli.profiling.record_collector import expert_workers, own_loads
from mtrain_cli.records import record_files
from mtrain_cli.records.expert_loads import LOAD_PARTS, LOADS, expert_facts
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.training.dry_run import banner
from mtrain_cli.training.out_of_memory import explain_out_of_memory
from mtrain_cli.training.trainer import Trainer
from mtrain_extras.bench.step_breakdown import StepBreakdown, find_parts, messages, shortest

TARGET = "mtrain_extras.bench.step:run"
SHOWN = 10  # kernels or operators in the table
_COMPRESSION = 5  # of gzip; higher levels hardly make a trace of 100 MB smaller


@dataclass(frozen=True)
class StepProfilePlan(BenchmarkPlan):
    """Which steps to record. alike: first warm-up step, from 1, that is like the recorded ones."""

    warmup: int
    alike: int
    steps: int
    trace: bool


@dataclass(frozen=True)
class _RankSummary:
    """The results of one rank: seconds of unrecorded and recorded steps, and peak memory in GiB."""

    breakdown: StepBreakdown
    plain: list[float]
    recorded: list[float]
    peak_gib: float | None


@entry_point(StepProfilePlan)
def run(bench: Bench, plan: StepProfilePlan) -> bool:
    """Train and record the last steps on this worker. Return whether a stop was requested."""
    config, run_dir, environment = bench.config, bench.run_dir, bench.environment
    with (
        MeasurementProgress(bench, plan, plan.warmup + plan.steps) as progress,
        explain_out_of_memory(config, environment, run_dir) as about,
    ):
        progress.now("preparing")
        trainer = about.begin(Trainer(config, environment))
        progress.say(banner(trainer.plan, run_dir.path, trainer.dataset.describe()))
        loads: list[np.ndarray] = []
        before = _train(bench, trainer, progress, plan.warmup, "not recorded")
        if before is None:
            return True
        # Warm up: the first profiler of a process takes seconds to start and records slowly.
        with _profiler(bench):
            torch.zeros(1, device=bench.device).add_(1)
            _idle(bench)
        with _profiler(bench) as profiler:
            recorded = _train(bench, trainer, progress, plan.steps, "recorded", loads)
        if recorded is None:
            return True
        progress.now("reading the trace")
        trainer.close()
        plain = before[plan.alike - 1 :]
        breakdown = _read(profiler, run_dir.path, plan, bench)
        peak = max(filter(None, (m.peak_memory_gib for m in plain)), default=None)
        times = [m.seconds for m in plain], [m.seconds for m in recorded]
        # Without classes: workers do not unpickle those of other packages.
        sent = bench.gather((asdict(breakdown), *times, peak))
        everyone = [_RankSummary(StepBreakdown.of(values), *rest) for values, *rest in sent]
        gathered = np.concatenate([rows for of_rank in bench.gather(loads) for rows in of_rank])
    if bench.first:
        losses = [metrics.loss for metrics in (*before, *recorded)]
        document = _document(trainer, bench, plan, everyone, plain, losses)
        _write_results(run_dir.path, document, everyone, gathered)
        if not plan.quiet:
            _show(run_dir.path, document, plan)
    return False


def _train(
    bench: Bench,
    trainer: Trainer,
    progress: MeasurementProgress,
    count: int,
    kind: str,
    loads: list[np.ndarray] | None = None,
) -> list[StepMetrics] | None:
    """Run training steps, with idle GPUs before and after each step."""
    metrics = []
    for number in range(trainer.step + 1, trainer.step + 1 + count):
        progress.now(f"step {number}, {kind}")
        bench.synchronize()
        _idle(bench)
        began = time.perf_counter()
        with profiler_labels.label(profiler_labels.STEP):
            result = trainer.train_step(bench.stop.requested())
            with profiler_labels.label(profiler_labels.CLOSING):
                _idle(bench)
        seconds = time.perf_counter() - began
        progress.done()
        progress.say(f"step {number}, {kind}: {seconds:.3g} s")
        if result.stop:
            return None
        metrics.append(trainer.metrics(result, seconds))
        if loads is not None:
            own = None if result.routing is None else result.routing.own
            loads.append(own_loads(own, 0, number, bench.environment.rank))
    return metrics


def _idle(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()


def _profiler(bench: Bench) -> torch.profiler.profile:
    """Return a profiler that omits shapes, stacks and memory, because these slow the host."""
    # At its default level, Kineto reports start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Without acc_events, torch warns that events between cycles are lost. There is only one cycle.
    return torch.profiler.profile(activities=activities, acc_events=True)


def _read(
    profiler: torch.profiler.profile, folder: Path, plan: StepProfilePlan, bench: Bench
) -> StepBreakdown:
    """Write the trace of this rank, and break its recorded steps down into parts."""
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
            one_line(f"{folder}: rank {rank} cannot write its trace ({error.strerror or error})")
        ) from error
    gpu = bench.device.type == "cuda"
    # A rank compares the durations of its messages with those on the other ranks.
    least = shortest(bench.gather(messages(events))) if gpu else None
    breakdown = find_parts(events, gpu=gpu, least=least)
    if gpu and not breakdown.launches:
        raise RunError(
            f"rank {rank}: torch.profiler recorded no kernel. Another profiler may hold the GPU, "
            "or CUPTI may be forbidden here; set KINETO_LOG_LEVEL=0 for details"
        )
    return breakdown


def _document(
    trainer: Trainer,
    bench: Bench,
    plan: StepProfilePlan,
    everyone: Sequence[_RankSummary],
    metrics: Sequence[StepMetrics],
    losses: list[float | None],
) -> dict[str, Any]:
    """Return the content of summary.json. Times are in milliseconds per step."""
    config, choices, e = trainer.config, trainer.choices, trainer.environment
    gpu, facts = trainer.device.type == "cuda", bench.facts()
    parallel = {dim: size for dim in ("tp", "pp") if (size := e.dims.sizes[dim]) > 1}
    return {
        "kind": record_files.STEP,
        "complete": True,
        "command": facts.get("command", []),
        "environment": facts,
        "versions": facts.get("versions", {}),
        "device": torch.cuda.get_device_name(trainer.device) if gpu else "CPU",
        "gpu": gpu,
        "workers": e.dims.workers,
        "warmup": plan.warmup,
        "steps": plan.steps,
        "settings": {
            **{"model": config.model.name, "layers": config.model.num_layers, "seq": config.seq},
            **{"global_batch": config.train.global_batch, "cp": e.dims.cp, **parallel},
            **{"layout": choices.layout.name, "exchange": choices.exchange.label},
            **{"pattern": config.sparsity.pattern, "kernel": choices.kernel.name},
            **{"dtype": str(choices.dtype).removeprefix("torch."), "compile": choices.compile},
            "activation_checkpoint": config.train.activation_checkpoint,
            "shard": config.train.shard,
            **expert_facts(config.model, expert_workers(trainer)),
        },
        "losses": losses,
        # Medians of rank 0; for memory, the highest peak of all ranks.
        "plain": {
            "first": plan.alike,
            "steps": len(metrics),
            **{
                name: _median([getattr(m, name) for m in metrics])
                for name in ("tokens_per_second_per_gpu", "density", "mfu_model", "mfu_executed")
            },
            "peak_memory_gib": max(filter(None, (s.peak_gib for s in everyone)), default=None),
        },
        "ranks": [_of_rank(rank, summary) for rank, summary in enumerate(everyone)],
        "top": _top([summary.breakdown for summary in everyone]),
        "messages": _sent([summary.breakdown for summary in everyone]),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _of_rank(rank: int, summary: _RankSummary) -> dict[str, Any]:
    breakdown, steps = summary.breakdown, summary.breakdown.steps

    def ms(ns: float) -> float:
        return ns / 1e6 / steps

    return {
        "rank": rank,
        "step_ms": ms(breakdown.step),
        "plain_ms": statistics.median(summary.plain) * 1e3,
        "recorded_ms": statistics.fmean(summary.recorded) * 1e3,
        "parts": {name: ms(ns) for name, ns in breakdown.parts.items()},
        "links_hidden_ms": ms(breakdown.hidden),
        "unmatched": breakdown.unmatched / steps,
        "launches": breakdown.launches / steps,
        "launching_ms": ms(breakdown.launching),
        "syncs": breakdown.syncs / steps,
        "syncing_ms": ms(breakdown.syncing),
        "ahead_us": None if breakdown.ahead is None else breakdown.ahead / 1e3,
    }


def _top(everyone: Sequence[StepBreakdown]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for breakdown in everyone:
        scale = breakdown.steps * len(everyone)
        for kind in breakdown.kinds:
            totals = sums[kind.name, kind.part]
            totals[0] += kind.calls / scale
            totals[1] += kind.ns / 1e6 / scale
    most = sorted(sums.items(), key=lambda item: -item[1][1])[:SHOWN]
    return [
        {"name": name, "part": part, "calls": calls, "ms": ms} for (name, part), (calls, ms) in most
    ]


def _sent(everyone: Sequence[StepBreakdown]) -> list[dict[str, Any]]:
    """Return the kinds of messages, means over steps and ranks, the longest first."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for breakdown in everyone:
        scale = breakdown.steps * len(everyone)
        for t in breakdown.messages:
            for i, value in enumerate((t.calls, t.ns / 1e6, t.waits / 1e6, t.exposed / 1e6)):
                sums[t.name, t.part][i] += value / scale
    names = "calls", "ms", "waits_ms", "exposed_ms"
    return [
        {"name": name, "part": part, **dict(zip(names, values, strict=True))}
        for (name, part), values in sorted(sums.items(), key=lambda item: -item[1][1])
    ]


def _write_results(
    folder: Path, document: dict[str, Any], everyone: Sequence[_RankSummary], loads: np.ndarray
) -> None:
    """Write kernels.csv, the loads of experts and summary.json."""
    try:
        with (folder / record_files.KERNELS).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("rank", "name", "part", "calls", "ms"))
            for rank, summary in enumerate(everyone):
                steps = summary.breakdown.steps
                rows.writerows(
                    (rank, k.name, k.part, k.calls / steps, k.ns / 1e6 / steps)
                    for k in summary.breakdown.kinds
                )
        if len(loads):
            by_step = np.argsort(loads["step"], kind="stable")
            record_files.write_part(loads[by_step], folder, 0, LOAD_PARTS)
        record_files.join_parts(folder, LOAD_PARTS, LOADS)
        record_files.write_summary(folder, document)
    except OSError as error:
        raise RunError(one_line(not_written(error, folder))) from error


def _show(folder: Path, document: dict[str, Any], plan: StepProfilePlan) -> None:
    from mtrain_cli.reporting.step_tables import step_section
    from mtrain_cli.reporting.terminal import make_console, print_section

    console = make_console()
    print_section(console, step_section(document))
    console.print(f"files  {folder}", soft_wrap=True)
    if plan.trace:
        viewers = "https://ui.perfetto.dev or chrome://tracing"
        console.print(f"trace  trace-rank-N.json.gz, for {viewers}", soft_wrap=True)
    console.print(f"again  mtrain report {shlex.quote(str(folder))}", soft_wrap=True)
