"""`mtrain profile imbalance --attention-only`: one layer's attention on random Q, K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.profiling.measurement import (
    Bench,
    MeasurementCase,
    MeasurementPlan,
    MeasurementProgress,
    slowest,
)
from mtrain_cli.profiling.peers import torch_context_parallel
from mtrain_cli.profiling.profile_writer import ProfileWriter

PEER = "torch context_parallel, cuDNN"
HEADER = (
    f"{'case':48s} {'density':>7s} {'forward':>9s} {'backward':>9s} {'total ms':>9s} {'spread':>7s}"
)


def run(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:  # noqa: ARG001 - a measurement starts afresh
    """Measure every case of the plan on this worker. Returns whether it stopped early."""
    bench = Bench(environment, timedelta(seconds=config.topology.timeout_s))
    plan: MeasurementPlan = bench.gather(
        MeasurementPlan.load(run_dir) if environment.rank == 0 else None
    )[0]
    stop = StopFlag(run_dir, environment)
    stopped = False
    with MeasurementProgress(
        environment.rank == 0 and not plan.quiet, plan.samples * len(plan.cases)
    ) as progress:
        cases = [bench.case(number, label, case) for number, (label, case) in enumerate(plan.cases)]
        writer = ProfileWriter(run_dir, plan, bench, cases)
        progress.say(HEADER, "bold")
        for seq in dict.fromkeys(case.config.seq for case in cases):
            mine = [case for case in cases if case.config.seq == seq]
            stopped = stopped or _measure(
                mine,
                bench,
                writer,
                progress,
                stop,
                first_part=1 + plan.samples * cases.index(mine[0]),
            )
            if not stopped and plan.peer:
                peer = _measure_peer(mine[0].config, bench, plan.samples)
                writer.peer(peer)
                progress.say(_row(f"{PEER} {format_size(seq)}", 1.0, peer))
    writer.finish()
    if not plan.quiet:
        writer.show()
    return stopped


def _measure(
    cases: Sequence[MeasurementCase],
    bench: Bench,
    writer: ProfileWriter,
    progress: MeasurementProgress,
    stop: StopFlag,
    *,
    first_part: int,
) -> bool:
    """Record all samples of cases of one length, interleaved. Returns whether it stopped early."""
    inputs: dict[tuple[str, int], list[torch.Tensor]] = {}
    attentions = [_Attention.make(case, bench, inputs) for case in cases]
    for attention in attentions:
        progress.now(f"{attention.case.label}: warm-up")
        attention(True)
        bench.collector.recorder.read()
    for sample in range(writer.plan.samples):
        if any(bench.gather(stop.requested())):
            return True
        first = sample % len(cases)
        for attention in [*attentions[first:], *attentions[:first]]:
            progress.now(attention.case.label)
            seconds = {}
            # Rotate the order of cases, and of recorded and plain iterations: none is always first.
            for recorded in (False, True) if sample % 2 == 0 else (True, False):
                seconds[recorded] = attention(recorded)
                if recorded:
                    writer.recorded(
                        attention.case, sample + 1, [(attention.masks, attention.estimated)]
                    )
            attention.times.append(seconds[False])
            writer.timed(attention.case, sum(seconds[False]), sum(seconds[True]))
            progress.done()
        last = cases[-1] is writer.cases[-1]
        writer.sampled(first_part + sample, sample + 1 if last else 0)
    for attention in attentions:
        times = slowest(bench.gather(attention.times)) * 1e3
        forward, backward = (float(ms) for ms in np.median(times, 0))
        writer.measured(
            attention.case, forward_ms=forward, backward_ms=backward, spread=_spread(times)
        )
        if writer.first:
            facts = writer.facts(attention.case)
            progress.say(_row(attention.case.label, facts["density"], facts))
    del attentions, inputs
    bench.free_memory()
    return False


@dataclass
class _Attention:
    """One layer of a case on this worker.

    masks: one per sequence of the batch
    tensors: q, k, v and the gradient of the output
    times: seconds of the forward and backward pass, per iteration without recording
    estimated: the indices of the latest iteration, by layer
    """

    case: MeasurementCase
    bench: Bench
    masks: list[SequenceMask]
    attend: ContextAttention
    tensors: list[torch.Tensor]
    times: list[tuple[float, float]] = field(default_factory=list)
    estimated: dict[int, Index] | None = None

    @staticmethod
    def make(
        case: MeasurementCase, bench: Bench, inputs: dict[tuple[str, int], list[torch.Tensor]]
    ) -> _Attention:
        """Build the attention of a case; `inputs` shares tensors between cases of one layout."""
        layout = case.choices.layout
        masks = [
            SequenceMask.causal(case.config.seq, layout.padded_seq)
        ] * case.config.train.micro_batch
        attend = ContextAttention.make(
            case.exchange, case.choices.kernel, masks, bench.device, case.choices.pattern
        )
        key = layout.name, layout.padded_seq
        if key not in inputs:
            inputs[key] = _inputs(case, bench)
        return _Attention(case, bench, masks, attend, inputs[key])

    def __call__(self, recorded: bool) -> tuple[float, float]:
        """Run both passes, starting with all workers. Returns their seconds on this worker."""
        batch, recorder = (
            self.attend.for_next_batch().with_kept_indices(),
            self.bench.collector.recorder,
        )
        q, k, v, dout = self.tensors
        self.case.exchange.set_recorder(recorder if recorded else None)
        self.bench.synchronize()
        if recorded:
            self.bench.collector.start()
        with recorder.iteration():
            began = recorder.now()
            out = batch(q, k, v, 0)
            between = recorder.now()
            torch.autograd.grad(out, (q, k, v), dout)
            ended = recorder.now()
        self.case.exchange.set_recorder(None)
        self.estimated = batch.index.estimated if batch.index is not None else None
        return recorder.seconds(began, between), recorder.seconds(between, ended)


def _inputs(case: MeasurementCase, bench: Bench) -> list[torch.Tensor]:
    """Return this worker's tokens of random q, k, v and dout; layouts see the same sequences."""
    model, layout, config = case.config.model, case.choices.layout, case.config
    group = bench.environment.rank // bench.environment.cp
    held = torch.from_numpy(layout.positions(case.exchange.group.rank)).to(bench.device)
    generator = torch.Generator(bench.device).manual_seed(config.seed + group)
    tensors = []
    for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads):
        shape = (config.train.micro_batch, layout.tokens_per_worker, heads, model.head_dim)
        tensor = torch.empty(shape, device=bench.device, dtype=case.choices.dtype)
        # Draw one head at a time: no worker holds whole sequences of all heads.
        for sequence in tensor:
            for head in range(heads):
                whole = torch.randn(
                    config.seq,
                    model.head_dim,
                    device=bench.device,
                    dtype=case.choices.dtype,
                    generator=generator,
                )
                sequence[:, head] = whole[held.clamp(max=config.seq - 1)]
        tensors.append(tensor)
    for t in tensors[:3]:
        t.requires_grad_()
    return tensors


def _measure_peer(config: Config, bench: Bench, repeats: int) -> dict[str, Any]:
    """Time PyTorch's context parallelism: same shapes, dense, bfloat16, one group of GPUs."""
    model, world = config.model, bench.environment.cp
    call = torch_context_parallel(world, model.num_heads // model.num_kv_heads)
    tokens = config.seq // world
    generator = torch.Generator(bench.device).manual_seed(bench.environment.rank)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    shapes = [(config.train.micro_batch, h, tokens, model.head_dim) for h in heads]
    q, k, v, dout = (
        torch.randn(s, device=bench.device, dtype=torch.bfloat16, generator=generator)
        for s in shapes
    )
    for t in (q, k, v):
        t.requires_grad_()
    clock = bench.collector.recorder
    times = []
    for i in range(repeats + 1):
        bench.synchronize()
        a = clock.now()
        out = call(q, k, v)
        b = clock.now()
        torch.autograd.grad(out, (q, k, v), dout)
        c = clock.now()
        if i:
            times.append((clock.seconds(a, b), clock.seconds(b, c)))
    slowest_ms = slowest(bench.gather(times)) * 1e3
    bench.free_memory()
    forward, backward = (float(ms) for ms in np.median(slowest_ms, 0))
    return {
        "label": PEER,
        "seq": config.seq,
        "workers": world,
        "forward_ms": forward,
        "backward_ms": backward,
        "spread": _spread(slowest_ms),
    }


def _spread(times: np.ndarray) -> float:
    """Return (max - min) / median of forward plus backward; times is [iterations, 2]."""
    both = times.sum(1)
    return float((both.max() - both.min()) / np.median(both))


def _row(label: str, density: float, times: dict[str, Any]) -> str:
    """Format one case under `HEADER`."""
    forward, backward = times["forward_ms"], times["backward_ms"]
    return (
        f"{label:48s} {density:7.2%} {forward:9.2f} {backward:9.2f} "
        f"{forward + backward:9.2f} {times['spread']:7.1%}"
    )
