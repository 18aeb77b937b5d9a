"""`mtrain profile imbalance`: record every case, in steps of training or on random Q, K and V."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.profiling.measurement import (
    Bench,
    MeasurementCase,
    MeasurementPlan,
    MeasurementProgress,
    entry_point,
    rotated,
)
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.profiling.record_collector import Estimated, estimated, expert_workers
from mtrain_cli.training.batch import (
    Batches,
    Layouts,
    MixedAttention,
    PackedSample,
    attention_setups,
)
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.flops import attention_kept, causal_pairs
from mtrain_cli.training.router_batches import OwnLoads, RouterBatches
from mtrain_cli.training.trainer import Trainer

PEER = "torch context_parallel, cuDNN, dense"
MicroBatches = Sequence[Sequence[PackedSample]]


@entry_point(MeasurementPlan)
def train_and_record(bench: Bench, plan: MeasurementPlan) -> bool:
    """Train with the first case and sample all cases. Return whether samples are missing.

    Before the optimizer step, every case computes both passes of the batch with the same weights.
    """
    with MeasurementProgress(bench, plan, plan.samples * len(plan.cases)) as progress:
        progress.now("preparing")
        trainer = Trainer(plan.cases[0][1], bench.environment)
        bench.groups = trainer.worker.groups  # cases use the run's communicators
        dealt = expert_workers(trainer)
        cases = [replace(case, expert_parallel=dealt) for case in bench.cases(plan)]
        writer = ProfileWriter(plan, bench, cases)
        rehearsal = _Rehearsal(bench, trainer, writer, progress)
        trainer.callbacks.append(rehearsal)
        while writer.samples < plan.samples:
            progress.now(f"training step {trainer.step + 1}")
            after = trainer.step - plan.warmup
            rehearsal.due = after >= 0 and after % plan.every == 0
            if trainer.train_step(bench.stop.requested()).stop:
                break
    writer.finish()
    if not plan.quiet:
        writer.show()
    return writer.samples < plan.samples


class _Rehearsal(Callback):
    """Runs every case on the sequences of a training step, without and with recording."""

    needs_samples = True

    def __init__(
        self, bench: Bench, trainer: Trainer, writer: ProfileWriter, progress: MeasurementProgress
    ) -> None:
        self.bench, self.trainer, self.writer, self.progress = bench, trainer, writer, progress
        self._make = [
            Batches(
                Layouts(case.exchange, case.choices.balancer),
                attention_setups(
                    case.config,
                    case.choices,
                    mask=MaskRule.of(trainer.config),
                    keep=attention_kept(trainer.config.train),
                ),
                bench.device,
                layers=trainer.config.model.num_layers,
                offload=trainer.offload,
                tensor=trainer.tensor,
                router=RouterBatches.make(trainer.config, case.exchange.group, trainer.tensor),
            )
            for case in writer.cases
        ]
        self._warm = False
        self.due = False

    def on_samples(self, samples: MicroBatches) -> None:
        if self.due:
            self._sample(samples)

    def _sample(self, micro_batches: MicroBatches) -> None:
        writer, progress = self.writer, self.progress
        if not self._warm:
            # Compile kernels; create connections and events.
            for case in writer.cases:
                progress.now(f"{case.label}: warm-up")
                self._compute(case, micro_batches, recorded=True)
                self.bench.collector.recorder.read()
            self._warm = True
        sample = writer.samples
        for case in rotated(writer.cases, sample):
            progress.now(case.label)
            seconds = {}
            for recorded in rotated((False, True), sample):
                passed = self._compute(case, micro_batches, recorded=recorded)
                computed, loads, seconds[recorded] = passed
                if recorded:
                    writer.recorded(case, self.trainer.step + 1, computed, loads)
            writer.timed(case, seconds[False], seconds[True])
            progress.done()
        writer.sampled(self.trainer.step + 1, sample + 1)
        progress.sampled(sample + 1, writer.plan.samples)
        if sample == 0:
            # Save the indices now, so that `simulate` can replay them even if the run is killed.
            writer.save_indices()

    def _compute(
        self, case: MeasurementCase, micro_batches: MicroBatches, *, recorded: bool
    ) -> tuple[list[Estimated], OwnLoads | None, float]:
        """Run both passes of a case. Return masks and indices, loads of experts, and seconds."""
        trainer, bench = self.trainer, self.bench
        recorder = bench.collector.recorder
        trainer.record(recorder if recorded else None, case.exchange)
        batches = [self._make[case.number](samples) for samples in micro_batches]
        attends = [batch.attention.with_kept_indices() for batch in batches]
        valid, _ = trainer.run_step.totals(batches)
        bench.synchronize()
        if recorded:
            bench.collector.start()
        began = recorder.now()
        trainer.run_step.forward_backward(batches, attends, valid)
        seconds = recorder.seconds(began, recorder.now())
        trainer.states.drop_gradients()
        trainer.record(None, case.exchange)
        computed = [estimated(attend) for attend in attends]
        loads = OwnLoads.of([b.routing for b in batches if b.routing is not None])
        return computed, loads, seconds


@entry_point(MeasurementPlan)
def record_attention(bench: Bench, plan: MeasurementPlan) -> bool:
    """Measure every case of the plan on this worker. Return whether a stop was requested."""
    stopped = False
    with MeasurementProgress(bench, plan, plan.samples * len(plan.cases)) as progress:
        cases = bench.cases(plan)
        writer = ProfileWriter(plan, bench, cases)
        for seq in dict.fromkeys(case.config.seq for case in cases):
            mine = [case for case in cases if case.config.seq == seq]
            first_part = 1 + plan.samples * cases.index(mine[0])
            stopped = stopped or _measure(mine, bench, writer, progress, first_part)
            if plan.peer and not stopped:
                writer.peer(_measure_peer(mine[0].config, bench, plan.samples))
    writer.finish()
    if not plan.quiet:
        writer.show()
    return stopped


def _measure(
    cases: Sequence[MeasurementCase],
    bench: Bench,
    writer: ProfileWriter,
    progress: MeasurementProgress,
    first_part: int,
) -> bool:
    """Record all samples of cases of equal length. Return whether a stop was requested."""
    inputs: dict[tuple[str, int], _Inputs] = {}
    attentions = [_Attention.make(case, bench, inputs) for case in cases]
    for attention in attentions:
        progress.now(f"{attention.case.label}: warm-up")
        attention(True)
        bench.collector.recorder.read()
    for sample in range(writer.plan.samples):
        if bench.stop_requested():
            return True
        for attention in rotated(attentions, sample):
            progress.now(attention.case.label)
            seconds = {}
            for recorded in rotated((False, True), sample):
                seconds[recorded] = attention(recorded)
                if recorded:
                    assert attention.estimated is not None
                    kept = [attention.estimated]
                    writer.recorded(attention.case, sample + 1, kept)
            attention.times.append(seconds[False])
            writer.timed(attention.case, *(sum(map(sum, seconds[way])) for way in (False, True)))
            progress.done()
        last = cases[-1] is writer.cases[-1]
        writer.sampled(first_part + sample, sample + 1 if last else 0)
    for attention in attentions:
        facts = writer.facts(attention.case)
        by_kind = [_medians(bench, times) for times in zip(*attention.times, strict=True)]
        facts.update({name: float(np.mean([of[name] for of in by_kind])) for name in by_kind[0]})
        attend = attention.attend
        if isinstance(attend, MixedAttention):
            for times, layer in zip(by_kind, (attend.window.plan, attend.full.plan), strict=True):
                times["density"] = layer.allowed_pairs / (
                    len(layer.masks) * causal_pairs(facts["seq"])
                )
            sparse, dense = by_kind
            if attention.case.choices.pattern is not None and facts["density"] is not None:
                # The density of the case is the mean of the two layers. Rank 0 knows it.
                sparse["density"] = 2 * facts["density"] - dense["density"]
            facts["kinds"] = dict(zip(attention.case.config.layer_kinds, by_kind, strict=True))
    del attentions, inputs
    bench.free_memory()
    return False


# (forward, backward) times in seconds of each measured layer.
_Times = list[tuple[float, float]]


@dataclass(frozen=True)
class _Inputs:
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dout: torch.Tensor

    def time_passes(
        self, attend: Callable[..., torch.Tensor], recorder: Recorder
    ) -> tuple[float, float]:
        """Return this worker's times of the (forward, backward) pass in seconds."""
        began = recorder.now()
        out = attend(*self.qkv)
        between = recorder.now()
        torch.autograd.grad(out, self.qkv, self.dout)
        ended = recorder.now()
        return recorder.seconds(began, between), recorder.seconds(between, ended)


@dataclass
class _Attention:
    """One layer's attention in one case, on this worker; a layer of each kind if masks differ."""

    case: MeasurementCase
    bench: Bench
    attend: ContextAttention | MixedAttention
    inputs: _Inputs
    times: list[_Times] = field(default_factory=list)
    estimated: Estimated | None = None

    @staticmethod
    def make(
        case: MeasurementCase, bench: Bench, inputs: dict[tuple[str, int], _Inputs]
    ) -> _Attention:
        """Build the attention of a case. inputs: by (layout, padded length), shared by cases."""
        layout, choices = case.choices.layout, case.choices
        make = Batches(
            Layouts(case.exchange, choices.balancer),
            attention_setups(case.config, choices),
            bench.device,
            layers=case.config.model.num_layers,
        )
        attend = make(_samples(case.config, bench)).attention
        key = layout.name, layout.padded_seq
        if key not in inputs:
            q, k, v, dout = _draw(case, bench)
            inputs[key] = _Inputs(
                (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout
            )
        return _Attention(case, bench, attend, inputs[key])

    def __call__(self, recorded: bool) -> _Times:
        """Wait for all workers, run both passes, and return this worker's times by layer."""
        batch = self.attend.for_next_batch().with_kept_indices()
        recorder = self.bench.collector.recorder
        self.case.exchange.set_recorder(recorder if recorded else None)
        self.bench.synchronize()
        if recorded:
            self.bench.collector.start()
        with recorder.iteration():
            seconds = [
                self.inputs.time_passes(partial(batch, layer=layer), recorder)
                for layer in self.case.single_layers
            ]
        self.case.exchange.set_recorder(None)
        self.estimated = estimated(batch)
        return seconds


def _samples(config: Config, bench: Bench) -> list[Sample]:
    """Return this context group's first sequences, of which only the masks count."""
    count, seq = config.train.micro_batch, config.seq
    if config.data.mask_key is None:
        return [Sample(*np.zeros((3, seq), np.int32))] * count
    dataset = open_dataset(config)
    first = count * bench.environment.dims.coordinate("dp", bench.environment.rank)
    return [dataset[number % len(dataset)] for number in range(first, first + count)]


def _draw(case: MeasurementCase, bench: Bench) -> Iterator[torch.Tensor]:
    """Yield this worker's random q, k, v and dout, each [batch, tokens, heads, head_dim]."""
    # Workers draw the same sequences and keep their tokens, whatever the layout.
    layout, config = case.choices.layout, case.config
    model, head_dim = config.model, config.model.head_dim
    options: dict[str, Any] = {"device": bench.device, "dtype": case.choices.dtype}
    group = bench.environment.dims.coordinate("dp", bench.environment.rank)
    held = torch.from_numpy(layout.positions(case.exchange.group.rank)).to(bench.device)
    generator = torch.Generator(bench.device).manual_seed(config.seed + group)
    for heads in (model.num_heads, *[model.num_kv_heads] * 2, model.num_heads):
        shape = config.train.micro_batch, layout.tokens_per_worker, heads, head_dim
        tensor = torch.empty(shape, **options)
        # Draw one head at a time: whole sequences of all heads would not fit into memory.
        for sequence in tensor:
            for head in range(heads):
                whole = torch.randn(config.seq, head_dim, generator=generator, **options)
                sequence[:, head] = whole[held.clamp(max=config.seq - 1)]
        yield tensor


def _measure_peer(config: Config, bench: Bench, repeats: int) -> dict[str, Any]:
    """Time PyTorch's context parallelism on the same shapes, with dense attention in bfloat16."""
    model, world = config.model, bench.environment.dims.cp
    call = torch_context_parallel(world, model.num_heads // model.num_kv_heads)
    options: dict[str, Any] = {"device": bench.device, "dtype": torch.bfloat16}
    shape = config.seq // world, model.head_dim
    q, k, v, dout = (
        torch.randn(config.train.micro_batch, heads, *shape, **options)
        for heads in (model.num_heads, *[model.num_kv_heads] * 2, model.num_heads)
    )
    inputs = _Inputs((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout)
    times = []
    for _ in range(repeats + 1):
        bench.synchronize()
        times.append(inputs.time_passes(call, bench.collector.recorder))
    measured = _medians(bench, times[1:])  # the first is a warm-up
    bench.free_memory()
    return {"label": PEER, "seq": config.seq, "workers": world, **measured}


def torch_context_parallel(world: int, group: int) -> Callable[..., torch.Tensor]:
    """Return a call of PyTorch's context parallelism: all-gather of KV, cuDNN, its own balancing.

    The call takes this rank's q [1, heads, tokens, head_dim], and k and v [1, kv_heads, tokens,
    head_dim].

    Args:
        group: query heads per KV head. The call repeats each KV head this many times, because
            PyTorch's context parallelism needs as many KV heads as query heads.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    set_rotate_method("allgather")
    buffer = torch.zeros(2 * world, device="cuda")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
        ):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def _medians(bench: Bench, times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the medians in ms of the slowest worker's times, and (max - min) / median."""
    ms = bench.slowest(times) * 1e3
    forward, backward = (float(median) for median in np.median(ms, 0))
    both = ms.sum(1)
    spread = float((both.max() - both.min()) / np.median(both))
    return {"forward_ms": forward, "backward_ms": backward, "spread": spread}
