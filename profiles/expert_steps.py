"""Time training steps of a model with experts on two GPUs. Used by `expert_speed.py`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

import expert_peer
import torch
from expert_layers import guarded
from measured_runs import Pool, RunFailed, write_ids

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.collectives import share
from mtrain_cli.records.step_breakdown import LINKS, WAITS, find_parts, messages, shortest
from mtrain_cli.training.dry_run import fits
from mtrain_cli.training.expert_traffic import ExpertRun
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.trainer import Trainer

WORKERS = 2
LAYERS = (12, 10, 8, 6)
ATTENTIONS = {"dense": (), "vertical_slash": ("sparsity=vertical_slash",)}
MOST_DIFFERENCE = 0.01  # of the losses of two degrees: bfloat16 rounds sums in another order


@dataclass(frozen=True)
class Bench:
    """What to measure with.

    model: settings of the model.
    lengths: tokens of the sequences.
    degrees: expert-parallel degrees.
    attentions: settings of the attention, by name.
    began, limit: a row does not start later than ``limit`` seconds after ``began``.
    """

    model: tuple[str, ...]
    lengths: tuple[int, ...]
    degrees: tuple[int, ...]
    attentions: dict[str, tuple[str, ...]]
    steps: int
    device: str
    folder: Path
    pool: Pool
    began: float
    limit: float

    def shape(self, seq: int) -> ModelConfig:
        return compose([*self.model, f"seq={seq}"]).model

    def words(self, seq: int, *more: str) -> tuple[str, ...]:
        """Return the settings of a run on one document of random tokens."""
        return (
            *self.model, f"seq={seq}", "data=tokens", f"data.path={self.folder / str(seq)}/ids.npy",
            "data.shuffle=false", "data.document_mask=false", f"topology.device={self.device}",
            f"topology.workers={WORKERS}", f"train.steps={self.steps + 1}",
            f"run.dir={self.folder}/run", *more,
        )  # fmt: skip

    def write(self, seq: int) -> None:
        """Write the tokens of a sequence."""
        folder = self.folder / str(seq)
        folder.mkdir(exist_ok=True)
        write_ids(folder, self.shape(seq).vocab_size, seq, [0])

    def require_time(self) -> None:
        """Raise `RunFailed` if it is too late for another row."""
        if time.monotonic() - self.began > self.limit:
            raise RunFailed(f"left out: {self.limit:.0f} s are over")


@dataclass(frozen=True)
class Steps:
    """A run of mtrain's trainer.

    seconds: median of a step after the first two.
    mfu: share of the GPU's peak, in percent. It counts active parameters, and computed pairs if
        attention is sparse; None on a CPU.
    peak_gib, estimate_gib: most memory that tensors take on a GPU, and mtrain's estimate.
    exposed: share of a step in which an all-to-all of the experts moves rows and nothing computes,
        the largest of all workers.
    waits: the same for an all-to-all that waits for the other worker.
    of_messages: exposed time, as a share of the time of these messages.
    """

    losses: list[float | None]
    seconds: float
    mfu: float | None
    peak_gib: float | None
    estimate_gib: float
    exposed: float
    waits: float
    of_messages: float


def train_steps(_rank: int, _workers: int, words: tuple[str, ...], steps: int) -> Steps:
    """Train as a worker of a `Pool`, and record one more step with torch's profiler."""
    config = compose(list(words))
    environment = replace(resolve_environment(config), launcher="mtrain")
    trainer = Trainer(config, environment)
    metrics = []
    for _ in range(steps):
        synchronize(trainer)
        began = time.perf_counter()
        result = trainer.train_step(False)
        synchronize(trainer)
        metrics.append(trainer.metrics(result, time.perf_counter() - began))
    exposed = _exposed(trainer)
    trainer.close()
    steady = metrics[2:] or metrics
    mfu = steady[-1].mfu_model or steady[-1].mfu_executed
    return Steps(
        [step.loss for step in metrics],
        statistics.median(step.seconds for step in steady),
        None if mfu is None else 100 * mfu,
        max(filter(None, (step.peak_memory_gib for step in metrics)), default=None),
        trainer.plan.memory.allocated / GIB,
        *exposed,
    )


def synchronize(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    share(None, trainer.host_group)  # all workers begin together


def step_seconds(trainer: Trainer) -> float:
    """Train a step, and return its seconds on the slowest worker."""
    synchronize(trainer)
    began = time.perf_counter()
    trainer.train_step(False)
    synchronize(trainer)
    return time.perf_counter() - began


def _exposed(trainer: Trainer) -> tuple[float, float, float]:
    """Record a step. Return `Steps.exposed`, `Steps.waits` and `Steps.of_messages`."""
    gpu = trainer.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        synchronize(trainer)
        with profiler_labels.label(profiler_labels.STEP):
            trainer.train_step(False)
            with profiler_labels.label(profiler_labels.CLOSING):
                synchronize(trainer)
    own: list[dict[str, Any]] = []
    found, sent = None, {}
    with suppress(OSError, ValueError, KeyError), tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        own = [event for event in events if not _other_message(event)]
        sent = messages(own) if gpu else {}
    least = None
    if gpu:
        everyone = share(list(sent.items()), trainer.host_group)
        least = shortest([{tuple(message): ns for message, ns in one} for one in everyone])
    with suppress(ValueError):
        found = find_parts(own, gpu=gpu, least=least)
    shares = (nan,) * 3
    if found is not None:
        moving, waiting = found.parts[LINKS], found.parts.get(WAITS, 0)
        whole = moving + waiting + found.hidden
        part = (moving + waiting) / whole if whole else 0.0
        shares = moving / found.step, waiting / found.step, part
    return tuple(max(of_rank) for of_rank in zip(*share(shares, trainer.host_group), strict=True))


def _other_message(event: dict[str, Any]) -> bool:
    """Return whether an event is a message other than an all-to-all."""
    name, arguments = str(event.get("name", "")), event.get("args") or {}
    if name.lower().startswith("nccl") and event.get("cat") == "kernel":
        kind = str(arguments.get("Collective name", name)).lower()
        return not any(word in kind for word in ("all_to_all", "alltoall", "sendrecv"))
    return name.startswith("gloo:") and "all_to_all" not in name


def layers_that_fit(_rank: int, _workers: int, wordings: list[tuple[str, ...]]) -> int | None:
    """Return the most of `LAYERS` that fit in all of the runs, by mtrain's estimate."""
    for layers in LAYERS:
        plans = [make_plan(compose([*words, f"model.num_layers={layers}"])) for words in wordings]
        if all(fits(plan) for plan in plans):
            return layers
    return None


def chosen_degree(_rank: int, _workers: int, words: tuple[str, ...]) -> int:
    """Return the degree that `topology.expert_parallel=auto` takes."""
    plan = make_plan(compose([*words, "topology.expert_parallel=auto"]))
    per_node = plan.environment.workers_per_node
    return ExpertRun(plan.config, plan.dims, plan.layout, plan.dtype_bytes, per_node).degree


def with_layers(bench: Bench, layers: int | None) -> Bench:
    """Return the bench with these layers, or with the most that fit.

    Raises:
        SystemExit: none fit.
    """
    longest = max(bench.lengths)
    bench.write(longest)
    if layers is None:
        wordings = [
            bench.words(longest, *attention, f"topology.expert_parallel={degree}")
            for attention in bench.attentions.values()
            for degree in bench.degrees
        ]
        layers = bench.pool.call(layers_that_fit, wordings)
    if layers is None:
        raise SystemExit(f"not even {LAYERS[-1]} layers fit at {format_size(longest)}")
    return replace(bench, model=(*bench.model, f"model.num_layers={layers}"))


def model(bench: Bench, layers: int | None, *, peer: bool) -> Iterator[str]:
    """Yield the rows of mtrain by length, attention and degree, and those of transformers."""
    bench = with_layers(bench, layers)
    yield f"layers: {bench.shape(max(bench.lengths)).num_layers}"
    yield ""
    columns = ["seq", "attention", "experts", "s / step", "tokens/s", "MFU %", "peak GiB"]
    columns += ["estimate GiB", "peak / estimate", "all-to-all exposed", "waits", "of its time"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for seq in bench.lengths:
        bench.write(seq)
        for attention, words in bench.attentions.items():
            yield from _runs(bench, seq, attention, words)
        if peer and seq == bench.lengths[0]:
            yield from _peer_rows(bench, seq)


def _runs(bench: Bench, seq: int, attention: str, words: tuple[str, ...]) -> Iterator[str]:
    seconds: dict[int, float] = {}
    losses: dict[int, list[float | None]] = {}
    for degree in bench.degrees:

        def row(degree: int = degree) -> str:
            bench.require_time()
            given = bench.words(seq, *words, f"topology.expert_parallel={degree}")
            run: Steps = bench.pool.call(train_steps, given, bench.steps, splits=degree > 1)
            seconds[degree], losses[degree] = run.seconds, run.losses
            return _cells(seq, run)

        yield guarded(f"| {format_size(seq)} | {attention} | EP {degree} |", row)

    def auto() -> str:
        chosen = bench.pool.call(chosen_degree, bench.words(seq, *words))
        if chosen not in seconds:
            return f"EP {chosen}: not measured | | | | | | | | |"
        ratio = seconds[chosen] / min(seconds.values())
        return f"EP {chosen}: {ratio:.3f}x the time of the faster | | | | | | | | |"

    yield guarded(f"| {format_size(seq)} | {attention} | auto |", auto)
    yield f"| {format_size(seq)} | {attention} | check | {check(losses)} | | | | | | | | |"


def check(losses: dict[int, list[float | None]]) -> str:
    """Return the losses of each degree, and WRONG if those of a step do not agree.

    losses: of each step, by degree. A worker without the loss of a step has None.
    """
    shown = [
        f"EP {degree} loss {' '.join('?' if loss is None else f'{loss:.4f}' for loss in steps)}"
        for degree, steps in losses.items()
    ]
    if len(losses) < 2:
        return "; ".join([*shown, "no other degree to compare with"])
    columns = [
        [nan if loss is None else loss for loss in step]
        for step in zip(*losses.values(), strict=True)
    ]
    gaps = [(max(step) - min(step)) / abs(step[0]) for step in columns]
    gap = max(gaps) if all(isfinite(loss) for step in columns for loss in step) else nan
    verdict = "" if gap <= MOST_DIFFERENCE else " WRONG"
    return "; ".join([*shown, f"at most {gap:.2%} apart{verdict}"])


def _cells(seq: int, run: Steps) -> str:
    mfu = "" if run.mfu is None else f"{run.mfu:.1f}"
    peak = ratio = ""
    if run.peak_gib is not None:
        peak, ratio = f"{run.peak_gib:.2f}", f"{run.peak_gib / run.estimate_gib:.3f}"
    return (
        f"{run.seconds:.3f} | {seq / run.seconds:,.0f} | {mfu} | {peak} | {run.estimate_gib:.2f} "
        f"| {ratio} | {run.exposed:.1%} | {run.waits:.1%} | {run.of_messages:.0%} |"
    )


def _peer_rows(bench: Bench, seq: int) -> Iterator[str]:
    """Yield a row of transformers. After a failure, try shorter sequences."""
    for tokens in (seq, seq // 2, seq // 4):
        name = f"| {WORKERS} x {format_size(tokens)} | dense, sdpa | transformers, FSDP2 |"
        yield (line := guarded(name, partial(_peer_cells, bench, tokens)))
        if "failed" not in line:
            return


def _peer_cells(bench: Bench, tokens: int) -> str:
    bench.require_time()
    peer = expert_peer.ExpertPeer(bench.shape(tokens), tokens, bench.device, bench.steps)
    run: expert_peer.ExpertPeerTimes = bench.pool.call(expert_peer.train, peer)
    rate = WORKERS * tokens / run.seconds
    return f"{run.seconds:.3f} | {rate:,.0f} | | {run.peak_gib:.2f} | | | | | |"
