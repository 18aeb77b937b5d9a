"""Where the time of a training step with experts goes on a GPU. Used by `expert_speed.py`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import expert_steps
import torch
from expert_layers import guarded

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.training.trainer import Trainer

Event = dict[str, Any]
Spans = list[tuple[float, float]]

# Kinds of GPU work with words in the names of their kernels; the first match counts.
ROWS, WEIGHTS = "messages of rows", "messages of weights and others"
OWN_ROWS = "_leave", "_arrive", "_depart", "_sum_rows"  # kernels of triton/expert_rows.py
KINDS = (
    (ROWS, ("sendrecv", "alltoall", "all_to_all")),
    (WEIGHTS, ("nccl", "gloo")),
    ("attention", ("flash", "fmha", "attention")),
    ("grouped products", ("groupproblemshape", "grouped", "group_gemm")),
    ("dense products", ("gemm", "nvjet", "cutlass", "splitk", "::mm", "addmm", "cublas")),
    ("optimizer", ("adam", "multi_tensor_apply", "_foreach")),
    ("sorts", ("sort", "scan", "searchsorted", "bincount")),
    ("copies", ("memcpy", "memset", "copy_", "chunk_cat", "split_with_sizes", "catarray")),
    ("row passes", ("index", "gather", "scatter", "take", *OWN_ROWS)),
    ("compiled, other", ("triton", "_gate", "_order_pairs", "_order_rows")),
)
OTHER = "other element-wise"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
MOST = 12  # rows of the tables of kernels and of gaps


@dataclass(frozen=True)
class Trace:
    """A recorded step of the first worker. Times are in milliseconds.

    step: from the first to the last GPU operation (of a CPU: of operators).
    kinds: time and number of operations by kind.
    exposed: time in which rows travel and nothing else runs.
    idle: time in which the GPU runs nothing.
    compute_idle: time in which it runs nothing but messages.
    host: number of calls of each kind, and their host time.
    kernels: longest kernels: name, number, time.
    gaps: idle time by the operation that follows, number of gaps, and what the host did longest.
    unrecorded: median of the steps before it, which the profiler does not slow down.
    """

    step: float
    kinds: dict[str, tuple[float, int]]
    exposed: float
    idle: float
    compute_idle: float
    host: dict[str, tuple[int, float]]
    kernels: list[tuple[str, int, float]]
    gaps: list[tuple[str, int, float, str]]
    unrecorded: float = 0.0


def tables(bench: expert_steps.Bench, layers: int | None) -> Iterator[str]:
    """Yield tables of each length, attention and degree."""
    bench = expert_steps.with_layers(bench, layers)
    for seq in bench.lengths:
        bench.write(seq)
        for attention, words in bench.attentions.items():
            for degree in bench.degrees:
                name = f"## {format_size(seq)}, {attention}, EP {degree}"

                def table(
                    seq: int = seq, words: tuple[str, ...] = words, degree: int = degree
                ) -> str:
                    bench.require_time()
                    given = bench.words(seq, *words, f"topology.expert_parallel={degree}")
                    trace = bench.pool.call(record, given, bench.steps, splits=degree > 1)
                    return "\n".join(["", "", *_lines(trace)])

                yield guarded(name, table)
                yield ""


def record(_rank: int, _workers: int, words: tuple[str, ...], steps: int) -> Trace:
    """Train as a worker of a `Pool`, and record one more step."""
    began = time.perf_counter()
    config = compose(list(words))
    trainer = Trainer(config, replace(resolve_environment(config), launcher="mtrain"))
    gpu = trainer.device.type == "cuda"
    seconds = [expert_steps.step_seconds(trainer) for _ in range(steps)]
    print(f"built and warm in {time.perf_counter() - began:.1f} s; steps:", seconds, flush=True)
    expert_steps.synchronize(trainer)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        trainer.train_step(False)
        if gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        text = file.read_text(encoding="utf-8", errors="replace")
    trainer.close()
    trace = analyse(json.loads(text, strict=False)["traceEvents"], gpu=gpu)
    return replace(trace, unrecorded=1e3 * statistics.median(seconds[2:] or seconds))


def analyse(events: list[Event], *, gpu: bool) -> Trace:
    """Return the table of a recorded step."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    calls = [event for event in timed if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    if gpu:
        work = [(event, float(event["dur"])) for event in timed if event.get("cat") in ON_GPU]
    else:
        work = _own_times([event for event in timed if event.get("cat") == "cpu_op"])
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event, us in work:
        for found in (kinds[kind(str(event["name"]))], names[str(event["name"])]):
            found[0] += us
            found[1] += 1
    every = merged(_span(event) for event, _ in work)
    computing = merged(
        _span(event) for event, _ in work if kind(str(event["name"])) not in (ROWS, WEIGHTS)
    )
    rows = merged(_span(event) for event, _ in work if kind(str(event["name"])) == ROWS)
    step = every[-1][1] - every[0][0] if every else 0.0
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:MOST]
    return Trace(
        step / 1e3,
        {name: (us / 1e3, int(n)) for name, (us, n) in kinds.items()},
        (_length(merged([*rows, *computing])) - _length(computing)) / 1e3 if gpu else 0.0,
        (step - _length(every)) / 1e3,
        (step - _length(computing)) / 1e3,
        _host(calls, timed),
        [(name, int(n), us / 1e3) for name, (us, n) in longest],
        _gaps([event for event, _ in work], calls) if gpu else [],
    )


def kind(name: str) -> str:
    """Return the kind of a GPU operation."""
    low = name.lower()
    return next((kind for kind, words in KINDS if any(word in low for word in words)), OTHER)


def _span(event: Event) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def merged(spans: Any) -> Spans:
    """Return the union of spans, in their order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def _own_times(events: list[Event]) -> list[tuple[Event, float]]:
    """Return each operator with its time without that of operators inside it."""
    found: list[tuple[Event, float]] = []
    for thread in {event.get("tid") for event in events}:
        inside: list[list[Any]] = []  # event, own time, end
        own = [event for event in events if event.get("tid") == thread]
        for event in sorted(own, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
            begin, end = _span(event)
            while inside and inside[-1][2] <= begin:
                found.append(tuple(inside.pop()[:2]))
            if inside:
                inside[-1][1] -= end - begin
            inside.append([event, end - begin, end])
        found += [(event, us) for event, us, _ in inside]
    return [(event, max(0.0, us)) for event, us in found]


def _host(calls: list[Event], timed: list[Event]) -> dict[str, tuple[int, float]]:
    """Return number and host time in ms of calls that launch, wait or allocate."""
    copies = {
        event.get("args", {}).get("correlation")
        for event in timed
        if event.get("cat") == "gpu_memcpy" and "DtoH" in str(event["name"])
    }

    def label(event: Event) -> str | None:
        name = str(event["name"])
        if "Launch" in name:
            return "kernel launches"
        if name.startswith("cudaMemcpy"):
            down = event.get("args", {}).get("correlation") in copies
            return "cudaMemcpyAsync to the host" if down else "other cudaMemcpyAsync"
        return name if "Synchronize" in name or "Malloc" in name or "Free" in name else None

    number: Counter[str] = Counter()
    host: Counter[str] = Counter()
    for event in calls:
        if (found := label(event)) is not None:
            number[found] += 1
            host[found] += float(event["dur"])  # type: ignore[assignment]
    return {name: (number[name], host[name] / 1e3) for name in sorted(number)}


def _gaps(work: list[Event], calls: list[Event]) -> list[tuple[str, int, float, str]]:
    """Return idle time by the operation that ends a gap, and the longest call of the host in it."""
    found: dict[str, list[Any]] = defaultdict(lambda: [0, 0.0, Counter()])
    ordered = sorted(work, key=lambda event: float(event["ts"]))
    spans = sorted((*_span(call), str(call["name"])) for call in calls)
    end, first = float(ordered[0]["ts"]), 0
    for event in ordered:
        begin, finish = _span(event)
        if begin > end:
            entry = found[str(event["name"])]
            entry[0] += 1
            entry[1] += begin - end
            while first < len(spans) and spans[first][1] < end:
                first += 1
            for started, ended, name in spans[first:]:
                if started > begin:
                    break
                entry[2][name] += max(0.0, min(ended, begin) - max(started, end))
        end = max(end, finish)
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:MOST]
    return [
        (name, n, us / 1e3, next((call for call, _ in during.most_common(1)), ""))
        for name, (n, us, during) in longest
    ]


def _lines(trace: Trace) -> Iterator[str]:
    idle = f"idle {trace.idle:.1f} ms, idle or only messages {trace.compute_idle:.1f} ms"
    yield f"step {trace.step:.1f} ms ({trace.unrecorded:.1f} without the profiler), {idle}, "
    yield f"only rows travel {trace.exposed:.1f} ms"
    yield ""
    yield "| kind | ms | share | operations |"
    yield "|---|---|---|---|"
    for name, (ms, n) in sorted(trace.kinds.items(), key=lambda item: -item[1][0]):
        yield f"| {name} | {ms:.1f} | {ms / max(trace.step, 1e-9):.1%} | {n} |"
    yield ""
    yield "| host | calls | ms |"
    yield "|---|---|---|"
    for name, (n, ms) in trace.host.items():
        yield f"| {name} | {n} | {ms:.1f} |"
    yield ""
    yield "| longest | calls | ms |"
    yield "|---|---|---|"
    for name, n, ms in trace.kernels:
        yield f"| {_cell(name)} | {n} | {ms:.1f} |"
    if trace.gaps:
        yield ""
        yield "| idle before | gaps | ms | longest call of the host |"
        yield "|---|---|---|---|"
        for name, n, ms, call in trace.gaps:
            yield f"| {_cell(name)} | {n} | {ms:.1f} | {call} |"


def _cell(name: str) -> str:
    return name.replace("|", "/")[:90]
