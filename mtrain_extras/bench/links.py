"""`mtrain profile links`: time messages between workers, alone and during a computation.

Rings inside a node (inner) and between nodes (outer) are measured separately; between nodes, one
ring alone and then all together, which shows whether GPUs share a network card. Messages use the
calls of `parallel.transport`. On a GPU, the stream stays busy until the host has queued everything.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.config.documents import replace_text
from mtrain_cli.launch.environment import ParallelDims, host_memory
from mtrain_cli.parallel import schedule
from mtrain_cli.parallel.collectives import (
    Together,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.profiling.measurement import Bench, BenchmarkPlan, MeasurementProgress, entry_point
from mtrain_cli.training.flops import peak_flops
from mtrain_extras.bench import link_fit
from mtrain_extras.bench.timing import device_name, measure, median_ms, result_document

TARGET = "mtrain_extras.bench.links:run"
FILE, CLUSTER = "links.json", "cluster.yaml"
_IN_A_ROW = 4  # messages per timed round, after one warm-up message
_AT_LEAST_US = 20_000.0  # messages during a computation last at least this long
_MOST_IN_A_ROW = 200
# Clock cycles for which the GPU sleeps while the host queues one message (about 170 microseconds)
# or one matrix product (about 20 microseconds).
_CYCLES_OF_A_MESSAGE, _CYCLES_OF_A_PRODUCT = 300_000, 40_000
_SMALLEST = 16  # bytes
Start = Callable[[], Sequence[dist.Work | Together]]


@dataclass(frozen=True)
class LinkBenchmarkPlan(BenchmarkPlan):
    """The messages to measure.

    sizes: bytes that a rank sends to one peer in a hop, or receives from all in a collective.
    """

    sizes: Sequence[int]
    repeats: int
    name: str

    @property
    def loaded_repeats(self) -> int:
        return max(1, self.repeats // 2)


@entry_point(LinkBenchmarkPlan)
def run(bench: Bench, plan: LinkBenchmarkPlan) -> bool:
    """Measure all operations on this worker. Return whether a stop was requested."""
    environment = bench.environment
    # A ring passes through all workers.
    group = make_context_group(
        environment.rank,
        ParallelDims(cp=environment.dims.workers),
        bench.device,
        timedelta(seconds=bench.config.topology.timeout_s),
        per_node=environment.workers_per_node,
        channels=(schedule.INNER, schedule.OUTER),
    )
    operations = list(_operations(group, bench.device))
    times: list[link_fit.LinkTime] = []
    stopped = False
    bench.synchronize()
    load = _Load(bench.device)
    rounds = plan.repeats + 1 + plan.loaded_repeats
    with MeasurementProgress(bench, plan, len(operations) * rounds) as progress:
        for number, operation in enumerate(operations, 1):
            progress.now(f"{operation.link} {operation.what}")
            what = f"measuring {operation.link} {operation.what},"
            progress.sampled(number, len(operations), what)
            measured = _measured(operation, plan, bench, load, progress)
            if stopped := measured is None:
                break
            times += measured
        progress.now("memory, launches")
        # The rank with the median copy bandwidth stands for all.
        # It travels as a dict: workers do not unpickle classes of other packages.
        machines = sorted(bench.gather(asdict(_machine(bench.device))), key=itemgetter("copy_gbps"))
        machine = link_fit.MeasuredMachine(**machines[len(machines) // 2])
    if bench.first:
        _write_results(bench, plan, times, machine, complete=not stopped)
    return stopped


@dataclass(frozen=True)
class _Operation:
    """A kind of message. start: prepares a size; returns what starts it, and bytes per rank."""

    link: str
    what: str
    ranks: int
    start: Callable[[int], tuple[Start, int]]
    takes_part: bool = True


def _operations(group: ContextGroup, device: torch.device) -> Iterator[_Operation]:
    per_node = group.per_node
    node = range(group.rank // per_node * per_node, (group.rank // per_node + 1) * per_node)
    counterparts = range(group.rank % per_node, group.size, per_node)
    for link, channel, members in (
        (link_fit.INNER, schedule.INNER, node),
        (link_fit.OUTER, schedule.OUTER, counterparts),
    ):
        ranks = len(members)
        if ranks < 2:
            continue
        at = members.index(group.rank)
        messages = _Messages(
            device, ranks,
            group.channel(channel, schedule.KV), group.channel(channel, schedule.DKV),
            to=members[(at + 1) % ranks], source=members[at - 1],
        )  # fmt: skip
        several = link == link_fit.OUTER and per_node > 1
        takes_part = not several or group.rank % per_node == 0
        yield _Operation(link, link_fit.HOP, ranks, messages.hop, takes_part)
        for what, start in (
            *([(link_fit.HOPS_AT_ONCE, messages.hop)] if several else []),
            (link_fit.TWO_HOPS, messages.two_hops),
            (link_fit.GATHER, messages.gather),
            (link_fit.SCATTER, messages.scatter),
            *([(link_fit.ALL_TO_ALL, messages.trade)] if device.type == "cpu" else []),
        ):
            yield _Operation(link, what, ranks, start)


def _ones(device: torch.device, size: int, *shape: int) -> torch.Tensor:
    """Return float32 ones [*shape, ...] of ``size`` bytes for each entry of ``shape``."""
    return torch.ones(*shape, max(_SMALLEST, size) // 4, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class _Messages:
    """Messages with the calls of training: KV in ``group``, gradients in ``other``."""

    device: torch.device
    ranks: int
    group: dist.ProcessGroup
    other: dist.ProcessGroup
    to: int = -1
    source: int = -1

    def hop(self, size: int) -> tuple[Start, int]:
        leaving, arriving = (_ones(self.device, size) for _ in range(2))
        return lambda: self._hop(leaving, arriving, self.group), leaving.nbytes

    def _hop(
        self, leaving: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        receives = dist.P2POp(dist.irecv, arriving, self.source, group)
        return dist.batch_isend_irecv([receives, dist.P2POp(dist.isend, leaving, self.to, group)])

    def two_hops(self, size: int) -> tuple[Start, int]:
        a, b, c, d = (_ones(self.device, size) for _ in range(4))
        return lambda: self._hop(a, b, self.group) + self._hop(c, d, self.other), a.nbytes

    def gather(self, size: int) -> tuple[Start, int]:
        others = self.ranks - 1
        own = _ones(self.device, size // others)
        return lambda: [start_all_gather(own, self.ranks, self.group)[1]], own.nbytes * others

    def scatter(self, size: int) -> tuple[Start, int]:
        others = self.ranks - 1
        shards = _ones(self.device, size // others, self.ranks)
        return lambda: [start_reduce_scatter(shards, self.group)[1]], shards[0].nbytes * others

    def trade(self, size: int) -> tuple[Start, int]:
        others = self.ranks - 1
        leaving = _ones(self.device, size // others, self.ranks)
        arriving = torch.empty_like(leaving)
        return (
            lambda: [start_all_to_all(arriving, leaving, (), (), self.group)],
            leaving[0].nbytes * others,
        )


def _measured(
    operation: _Operation,
    plan: LinkBenchmarkPlan,
    bench: Bench,
    load: _Load,
    progress: MeasurementProgress,
) -> list[link_fit.LinkTime] | None:
    """Time one operation at all sizes, on all ranks. Return None if a stop was requested."""
    prepared = [operation.start(size) for size in plan.sizes]
    clock = _on_gpu if bench.device.type == "cuda" else _on_cpu
    alone, loaded, slowdown = ([list[float]() for _ in prepared] for _ in range(3))
    for number in range(1 + plan.repeats + plan.loaded_repeats):
        if bench.stop_requested():
            return None
        for at, (start, _) in enumerate(prepared):
            bench.synchronize()
            count, running = _IN_A_ROW, None
            if number > plan.repeats:
                expected, running = statistics.median(alone[at]), load
                count = max(_IN_A_ROW, math.ceil(_AT_LEAST_US / expected))
                count = min(count, _MOST_IN_A_ROW)
                load.prepare(count * expected)
                bench.synchronize()
            own = clock(start, count, running) if operation.takes_part else (0.0, None)
            times, factors = zip(*bench.gather(own), strict=True)
            if running is not None:
                loaded[at].append(max(times))
                slowdown[at] += [factor for factor in factors if factor is not None]
            elif number:
                alone[at].append(max(times))
        progress.done()
    sizes = [size for _, size in prepared]
    del prepared, start
    bench.free_memory()
    of_load = [[float(np.median(v)) if v else None for v in of] for of in (loaded, slowdown)]
    return [
        link_fit.LinkTime(
            operation.link, operation.what, size, operation.ranks, *_percentiles(times), *both
        )
        for size, times, *both in zip(sizes, alone, *of_load, strict=True)
    ]


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 50th, 10th and 90th percentiles, in this order."""
    middle, low, high = np.percentile(values, (50, 10, 90))
    return float(middle), float(low), float(high)


def _finish(works: Sequence[dist.Work | Together]) -> None:
    for work in works:
        work.wait()


def _on_gpu(start: Start, count: int, load: _Load | None) -> tuple[float, float | None]:
    """Return microseconds per message, and the slowdown of the load; None without a load."""
    computing, side = torch.cuda.current_stream(), torch.cuda.Stream()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Let the device sleep while the host queues everything, so that the host's time does not count.
    products = 2 * load.times if load is not None else 0
    with torch.cuda.stream(side):
        side.wait_stream(computing)
        torch.cuda._sleep(_CYCLES_OF_A_MESSAGE * (count + 2) + _CYCLES_OF_A_PRODUCT * products)
        _finish(start())
        started.record()
        for _ in range(count):
            _finish(start())
        ended.record()
    factor = None
    if load is not None:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(load.times + 1)]
        computing.wait_event(started)
        marks[0].record()
        for mark in marks[1:]:
            load.once()
            mark.record()
        torch.cuda.synchronize()
        at = [started.elapsed_time(mark) for mark in marks]
        until = started.elapsed_time(ended)
        factor = load.factor([b - a for a, b in itertools.pairwise(at) if a >= 0 and b <= until])
    torch.cuda.synchronize()
    return started.elapsed_time(ended) * 1e3 / count, factor


def _on_cpu(start: Start, count: int, load: _Load | None) -> tuple[float, float | None]:
    ends: list[float] = []

    def messages() -> None:
        _finish(start())
        ends.append(time.perf_counter())
        for _ in range(count):
            _finish(start())
        ends.append(time.perf_counter())

    if load is None:
        messages()
        return (ends[1] - ends[0]) * 1e6 / count, None
    thread = threading.Thread(target=messages)
    marks = []
    thread.start()
    while thread.is_alive():
        before = time.perf_counter()
        load.once()
        marks.append((before, time.perf_counter()))
    thread.join()
    inside = [(b - a) * 1e3 for a, b in marks if a >= ends[0] and b <= ends[1]]
    return (ends[1] - ends[0]) * 1e6 / count, load.factor(inside)


class _Load:
    """Matrix products with attention's shapes, so short that many run during one message."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        heads, tokens, dtype = (16, 2048, torch.bfloat16) if gpu else (2, 256, torch.float32)
        self.q, self.k = (
            torch.randn(heads, tokens, 128 if gpu else 64, device=device, dtype=dtype)
            for _ in range(2)
        )
        self.gpu, self.times = gpu, 1
        self.alone = self._alone()

    def once(self) -> None:
        torch.bmm(torch.bmm(self.q, self.k.transpose(1, 2)), self.k)

    def prepare(self, us: float) -> None:
        """Choose the number of products: together they outlast messages of ``us`` microseconds."""
        # Device clocks and host load change, so measure a product anew.
        self.alone = self._alone()
        self.times = int(min(1000, 1.5 * us / 1e3 / self.alone + 4))

    def factor(self, ms: Sequence[float]) -> float | None:
        return float(np.mean(ms)) / self.alone if len(ms) > 1 else None

    def _alone(self) -> float:
        def many() -> None:
            for _ in range(20):
                self.once()

        return median_ms(many, "cuda" if self.gpu else "cpu", 3) / 20


def _machine(device: torch.device) -> link_fit.MeasuredMachine:
    kind, gpu = device.type, device.type == "cuda"
    numbers = (256 if gpu else 16) << 20
    a, b, c = (torch.ones(numbers // 4, device=device) for _ in range(3))
    side, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    square = torch.randn(side, side, device=device, dtype=dtype)
    product = 2 * side**3 / median_ms(lambda: square @ square, kind, 5) * 1e3
    name = device_name(kind)
    known = peak_flops(name)
    memory = torch.cuda.get_device_properties(device).total_memory if gpu else host_memory()
    return link_fit.MeasuredMachine(
        gpu=name,
        peak_tflops=(known or product) / 1e12,
        peak_source="datasheet" if known else "measured",
        matmul_tflops=product / 1e12,
        memory_gib=memory / 2**30,
        copy_gbps=2 * numbers / median_ms(lambda: b.copy_(a), kind, 5) / 1e6,
        added_gbps=3 * numbers / median_ms(lambda: torch.add(a, b, out=c), kind, 5) / 1e6,
        launch_us=_launch_us(device),
        device=kind,
    )


def _launch_us(device: torch.device) -> tuple[float, float, float]:
    """Return percentiles 10, 50 and 90 of a small launch, in microseconds."""
    x = torch.ones(64, device=device)
    idle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    many = measure(lambda: [torch.add(x, x, out=x) for _ in range(200)], "cpu", 10, before=idle)
    middle, low, high = _percentiles([ms * 1e3 / 200 for ms in many])
    return low, middle, high


def _write_results(
    bench: Bench,
    plan: LinkBenchmarkPlan,
    times: Sequence[link_fit.LinkTime],
    machine: link_fit.MeasuredMachine,
    *,
    complete: bool,
) -> None:
    environment, facts = bench.environment, bench.facts()
    virtual = environment.nodes > 1 and environment.workers_per_node < environment.local_workers
    gpu = environment.device == "cuda"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpu else None
    document = result_document(
        "links", environment.device, times, facts.get("command", []), complete=complete,
        backend="nccl" if gpu else "gloo", workers=environment.dims.workers,
        per_node=environment.workers_per_node, nodes=environment.nodes, virtual_nodes=virtual,
        environment=facts, machine=asdict(machine), fits={},
    )  # fmt: skip
    document["versions"]["nccl"] = nccl
    if complete:
        document["fits"] = {
            link: {what: asdict(fit) for what, fit in by_operation.items()}
            for link, by_operation in link_fit.fit_links(times).items()
        }
        document["cluster"] = link_fit.cluster_document(
            plan.name,
            environment.nodes,
            environment.workers_per_node,
            machine,
            times,
            measured_ranks=environment.dims.workers,
            virtual=virtual,
        )
        replace_text(bench.run_dir.path / CLUSTER, cluster_text(document))
    replace_text(bench.run_dir.path / FILE, json.dumps(document, indent=1) + "\n")


def cluster_text(document: dict[str, Any]) -> str:
    """Return the text of the cluster file of a links.json, after a line on hardware and command."""
    import yaml

    # Drop the path of the program: it means nothing elsewhere.
    command = " ".join(["mtrain", *document["command"][1:]])
    machines = f"{document['workers']} x {document['device']} by {document['backend']}"
    return f"# Measured on {machines}: {command}\n" + yaml.safe_dump(
        document["cluster"], sort_keys=False, default_flow_style=None, width=160, allow_unicode=True
    )
