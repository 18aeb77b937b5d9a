"""One layer's attention on the workers of a run, forward and backward, on random queries, keys and values: times and who waits."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config import compose
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import BACKWARD, FORWARD, Exchange, make_exchange
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.parallel.recording import ATTENTION, COLUMNS, INDEX, KINDS, WAIT, Recorder, Span
from mtrain_cli.profiling.imbalance import Imbalance, imbalance
from mtrain_cli.profiling.peers import torch_context_parallel
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.plan import Choices, compute_dtype, make_choices

RESULTS, RECORDS = "summary.json", "records.parquet"
PEER = "torch context_parallel, cuDNN"
TARGET = "mtrain_cli.profiling.layer:run"


@dataclass(frozen=True)
class Plan:
    """What to measure: labelled configurations, how often each, and whether what PyTorch offers is measured beside them."""

    cases: list[tuple[str, Config]]
    repeats: int
    peer: bool

    def save(self, run_dir: RunDir) -> None:
        folder = run_dir.path / "cases"
        folder.mkdir(exist_ok=True)
        for i, (_, config) in enumerate(self.cases):
            compose.save(config, folder / f"{i}.yaml")
        document = {"labels": [label for label, _ in self.cases], "repeats": self.repeats, "peer": self.peer}
        (folder / "plan.json").write_text(json.dumps(document, indent=1) + "\n")

    @staticmethod
    def load(run_dir: RunDir) -> Plan:
        folder = run_dir.path / "cases"
        document = json.loads((folder / "plan.json").read_text())
        cases = [(label, compose.load(folder / f"{i}.yaml")) for i, label in enumerate(document["labels"])]
        return Plan(cases, document["repeats"], document["peer"])


@dataclass(frozen=True)
class CaseResult:
    """Medians over iterations, of the slowest worker of each; times in ms.

    exchange: with its options. density: computed over causal pairs. forward, backward: the whole pass, index and communication included.
    by_kind: ms of a worker spent in each kind of span, mean over workers, forward and backward together; exposed communication is ``wait``.
    of_wait: the same of waits, by the channel waited for. time: imbalance of attention in ms, the mean of both passes. Columns that were
    gathered once are one step more in which workers are compared, and none of the steps that a worker's are compared with. computation:
    share of attention and columns in the time of both passes. overhead: recorded over not recorded. tables: ms of attention [workers,
    steps] of each pass; columns: ms of gathered columns [workers] of each pass.
    """

    label: str
    layout: str
    exchange: str
    pattern: str
    kernel: str
    seq: int
    workers: int
    density: float
    forward: float
    backward: float
    spread: float
    by_kind: dict[str, float]
    of_wait: dict[str, float]
    time: Imbalance | None
    computation: float
    overhead: float
    iterations: int
    tables: dict[str, list[list[float]]]
    columns: dict[str, list[float]]

    @property
    def total(self) -> float:
        return self.forward + self.backward


def run(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> None:  # noqa: ARG001 - a measurement starts afresh
    """Worker: measures every case that lies in the folder of the run; the first worker writes and prints what came out."""
    plan: list[Plan | None] = [Plan.load(run_dir) if environment.rank == 0 else None]
    dist.broadcast_object_list(plan, 0)
    assert plan[0] is not None
    cases = plan[0].cases
    bench = _Bench(environment, timedelta(seconds=config.topology.timeout_s), plan[0].repeats)
    results: list[CaseResult] = []
    records: list[dict[str, Any]] = []
    say = _printer(environment.rank)
    for label, case in cases:
        found, spans = bench.measure(label, case)
        results.append(found)
        records += spans
        say(found)
    for case in {case.seq: case for _, case in cases}.values() if plan[0].peer else ():
        peer = bench.measure_peer(case)
        if peer is not None:
            results.append(peer)
            say(peer)
    if environment.rank == 0:
        _write(run_dir, results, records)


class _Iteration:
    """One forward and backward pass under an index of its own; called again and again.

    pairs: those computed per head, of the last iteration, in the mean of sequences and heads; None for dense attention.
    """

    def __init__(self, attend: ContextAttention, tensors: list[torch.Tensor], bench: _Bench) -> None:
        self.attend, self.tensors, self.bench = attend, tensors, bench
        self.clock = Recorder(bench.device)
        self.pairs: torch.Tensor | None = None

    def __call__(self) -> tuple[float, float]:
        """-> seconds of both passes on this worker, which all begin together."""
        batch, clock = self.attend.again(), self.clock
        q, k, v, dout = self.tensors
        self.bench.together(self.attend.exchange)
        began = clock.now()
        out = batch(q, k, v, 0)
        between = clock.now()
        torch.autograd.grad(out, (q, k, v), dout)
        ended = clock.now()
        if batch.index is not None:
            (record,) = batch.index.records
            self.pairs = record.counts.pairs.double().mean() * record.workers
        return clock.seconds(began, between), clock.seconds(between, ended)


class _Bench:
    """Groups and buffers that the cases of a run share."""

    def __init__(self, environment: Environment, timeout: timedelta, repeats: int) -> None:
        self.environment, self.timeout, self.repeats = environment, timeout, repeats
        self.device = torch.device("cuda", torch.cuda.current_device()) if environment.device == "cuda" else torch.device("cpu")
        self.host_group = dist.new_group(backend="gloo", timeout=timeout)
        self._groups: dict[tuple[int, int, tuple[str, ...]], ContextGroup] = {}

    def exchange(self, choices: Choices) -> Exchange:
        how, e = choices.exchange, self.environment
        key = (how.per_node, how.heads, tuple(how.channels))
        if key not in self._groups:
            self._groups[key] = make_context_group(
                e.rank, e.workers, e.cp, self.device, self.timeout, per_node=how.per_node, heads=how.heads, channels=how.channels
            )
        return make_exchange(
            how.name, choices.layout, self._groups[key],
            chunks=how.chunks, prefetch=how.prefetch, circulates=how.circulates, shared_columns=how.shared_columns,
        )  # fmt: skip

    def measure(self, label: str, config: Config) -> tuple[CaseResult, list[dict[str, Any]]]:
        """-> the summary, and one row per span of every worker; the same on all workers."""
        choices = make_choices(config, self.environment)
        exchange = self.exchange(choices)
        masks = [SequenceMask.causal(config.seq, choices.layout.padded_seq)] * config.train.micro_batch
        iteration = _Iteration(
            ContextAttention.make(exchange, choices.kernel, masks, self.device, choices.pattern), self._inputs(config, choices), self
        )
        recorder = iteration.clock
        iteration()
        plain, recorded, spans = [], [], []
        exchange.record(recorder)
        iteration()
        for _ in range(self.repeats):
            exchange.record(None)
            plain.append(iteration())
            exchange.record(recorder)
            recorder.start()
            recorded.append(iteration())
            spans.append(recorder.read())
        exchange.record(None)
        pairs = causal_pairs(config.seq) if iteration.pairs is None else float(iteration.pairs)
        everyone: list[Any] = [None] * self.environment.workers
        dist.all_gather_object(everyone, (plain, recorded, spans, pairs), group=self.host_group)
        del iteration
        self.clean()
        steps = (len(exchange.schedule.forward[0]), len(exchange.schedule.backward[0]))
        how = {
            "label": label,
            "layout": config.topology.layout,
            "exchange": choices.exchange.label,
            "pattern": config.sparsity.pattern,
            "kernel": choices.kernel.name,
            "seq": config.seq,
            "workers": self.environment.workers,
        }
        rows = [
            {"case": label, "seq": config.seq, "rank": rank, "iteration": i, **asdict(span)}
            for rank, (_, _, mine, _) in enumerate(everyone)
            for i, found in enumerate(mine)
            for span in found
        ]
        return _summary(how, everyone, steps, causal_pairs(config.seq)), rows

    def measure_peer(self, config: Config) -> CaseResult | None:
        """What PyTorch itself offers, on the same shapes: dense, bfloat16, on GPUs, one context group of all workers; None elsewhere."""
        if self.device.type != "cuda":
            return None
        model, world = config.model, self.environment.cp
        if world != self.environment.workers or compute_dtype(config, "cuda") != torch.bfloat16:
            return None
        call = torch_context_parallel(world, model.num_heads // model.num_kv_heads)
        tokens = config.seq // world
        generator = torch.Generator(self.device).manual_seed(self.environment.rank)
        heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
        shapes = [(config.train.micro_batch, h, tokens, model.head_dim) for h in heads]
        q, k, v, dout = (torch.randn(s, device=self.device, dtype=torch.bfloat16, generator=generator) for s in shapes)
        for t in (q, k, v):
            t.requires_grad_()
        clock = Recorder(self.device)
        times = []
        for i in range(self.repeats + 1):
            self.together(None)
            a = clock.now()
            out = call(q, k, v)
            b = clock.now()
            torch.autograd.grad(out, (q, k, v), dout)
            c = clock.now()
            if i:
                times.append((clock.seconds(a, b), clock.seconds(b, c)))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, times, group=self.host_group)
        forward, backward, spread = _slowest(everyone)
        self.clean()
        nan = float("nan")
        return CaseResult(
            PEER, "torch", "all_gather", "dense", "cuDNN", config.seq, world, 1.0, forward, backward, spread,
            {}, {}, None, nan, nan, len(times), {}, {},
        )  # fmt: skip

    def _inputs(self, config: Config, choices: Choices) -> list[torch.Tensor]:
        model, tokens = config.model, choices.layout.tokens_per_worker
        generator = torch.Generator(self.device).manual_seed(config.seed + self.environment.rank)
        heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
        shapes = [(config.train.micro_batch, tokens, h, model.head_dim) for h in heads]
        made = [torch.randn(shape, device=self.device, dtype=choices.dtype, generator=generator) for shape in shapes]
        for t in made[:3]:
            t.requires_grad_()
        return made

    def together(self, exchange: Exchange | None) -> None:
        """All workers go on from here at once: on a GPU the last thing they wait for is a message on the device."""
        dist.barrier(self.host_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            group = exchange.group.whole if exchange is not None else None
            if self.environment.workers > 1:
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _slowest(everyone: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Times [workers][iterations] -> median ms of both passes of the slowest worker of each iteration, and their spread, (max - min) /
    median of the sum.
    """
    table = np.array(everyone) * 1e3
    passes = table.max(0)
    both = table.sum(2).max(0)
    return float(np.median(passes[:, 0])), float(np.median(passes[:, 1])), float((both.max() - both.min()) / np.median(both))


def _summary(how: dict[str, Any], everyone: Sequence[Any], steps: tuple[int, int], causal: int) -> CaseResult:
    plain, recorded, spans, pairs = zip(*everyone, strict=True)
    forward, backward, spread = _slowest(plain)
    with_records = sum(_slowest(recorded)[:2])
    iterations, workers = len(plain[0]), len(everyone)
    by_kind = dict.fromkeys(KINDS, 0.0)
    of_wait: dict[str, float] = {}
    for mine in spans:
        for found in mine:
            for span in found:
                share = span.seconds * 1e3 / (iterations * workers)
                by_kind[span.kind] += share
                if span.kind == WAIT:
                    of_wait[span.link] = of_wait.get(span.link, 0.0) + share
    passes = {FORWARD: steps[0], BACKWARD: steps[1]}
    tables = {name: _table(spans, ATTENTION, name, count, iterations) for name, count in passes.items()}
    columns = {name: _table(spans, COLUMNS, name, 1, iterations)[:, 0] for name in passes}
    across = [imbalance(np.column_stack([table, columns[name]])) for name, table in tables.items()]
    time = Imbalance(
        worker=statistics.fmean(d.worker for d in across),
        step=statistics.fmean(imbalance(table).step for table in tables.values()),
        total=statistics.fmean(d.total for d in across),
        critical=statistics.fmean(d.critical for d in across),
    )
    wall = statistics.fmean(sum(t) for mine in recorded for t in mine) * 1e3
    return CaseResult(
        **how,
        density=statistics.fmean(pairs) / causal,
        forward=forward,
        backward=backward,
        spread=spread,
        by_kind=by_kind,
        of_wait=of_wait,
        time=time,
        computation=(by_kind[ATTENTION] + by_kind[COLUMNS]) / wall,
        overhead=with_records / (forward + backward) - 1,
        iterations=iterations,
        tables={name: table.round(4).tolist() for name, table in tables.items()},
        columns={name: part.round(4).tolist() for name, part in columns.items()},
    )


def _table(spans: Sequence[Sequence[Sequence[Span]]], kind: str, direction: str, steps: int, iterations: int) -> np.ndarray:
    """ms of one kind of span, [workers, steps], median over iterations."""
    table = np.zeros((iterations, len(spans), steps))
    for rank, mine in enumerate(spans):
        for i, found in enumerate(mine):
            for span in found:
                if span.kind == kind and span.direction == direction:
                    table[i, rank, min(span.step, steps - 1)] += span.seconds * 1e3
    return np.median(table, 0)


def _printer(rank: int) -> Callable[[CaseResult], None]:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)

    def say(found: CaseResult) -> None:
        if rank == 0:
            console.print(line(found))

    if rank == 0:
        console.print(HEADER, style="bold")
    return say


HEADER = (
    f"{'case':44s} {'density':>7s} {'forward':>9s} {'backward':>9s} {'total ms':>9s} {'wait':>7s} {'index':>6s} "
    f"{'worker ID':>9s} {'step ID':>7s} {'compute':>7s}"
)


def line(found: CaseResult) -> str:
    """One case under `HEADER`."""
    label = f"{found.seq // 1024}K {found.label}" if found.seq % 1024 == 0 else f"{found.seq} {found.label}"
    start = f"{label:44s} {found.density:7.2%} {found.forward:9.2f} {found.backward:9.2f} {found.total:9.2f}"
    if found.time is None:
        return start
    kinds = found.by_kind
    return f"{start} {kinds[WAIT]:7.2f} {kinds[INDEX]:6.2f} {found.time.worker:9.3f} {found.time.step:7.3f} {found.computation:7.1%}"


def _write(run_dir: RunDir, results: list[CaseResult], records: list[dict[str, Any]]) -> None:
    document = {"schema": 1, "kind": "layer", "cases": [asdict(r) for r in results]}
    (run_dir.path / RESULTS).write_text(json.dumps(document, indent=1) + "\n")
    try:
        import pandas

        pandas.DataFrame(records).to_parquet(run_dir.path / RECORDS)
    except ImportError:
        (run_dir.path / RECORDS).with_suffix(".jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
