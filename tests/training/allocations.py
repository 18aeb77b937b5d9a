"""Live bytes of training steps on real processes, to check the closed form of memory.py against."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
from parallel.free_buffers import free_tensors
from parallel.ways import make_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.model import decoder as decoder_module
from mtrain_cli.model import feed_forward as feed_forward_module
from mtrain_cli.model import mlp_products
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.fp8_rows import Fp8, Fp8Matrix
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.parallelize import parallelize, set_execution
from mtrain_cli.model.routing import Routing
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange, make_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.fsdp import begin_micro_batch
from mtrain_cli.parallel.layer_groups import make_expert_group, make_expert_mesh, make_tensor_group
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group, make_parameter_mesh
from mtrain_cli.sparsity.pattern import Pattern, make_pattern
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.batch import MixedAttention
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.memory import MemoryEstimate, estimate_memory
from mtrain_cli.training.optimizer import make_optimizer
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.pipeline import make_stage
from mtrain_cli.training.router_batches import RouterBatches
from mtrain_cli.training.state_memory import StateMemory

# Stand-ins of the kernels of layers without and with an index.
DENSE_KERNEL, SPARSE_KERNEL = "flash4", "sdpa"
_PATIENCE = 10  # how often a sum above the peak is counted again, 2 ms later each time


class LiveBytes(TorchDispatchMode):
    """Track the bytes of live storages after every operator.

    Storages that other threads free within 20 ms do not count.

    peak: the largest sum.
    elsewhere: tensors that do not count.
    hasty_below: sums below this are not counted again, so a peak below it may be too large.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        elsewhere: list[torch.Tensor] | None = None,
        hasty_below: float = 0.0,
    ) -> None:
        super().__init__()
        self.peak, self._hasty_below = 0, hasty_below
        self._storages: dict[int, Any] = {}
        self._elsewhere = {tensor.untyped_storage()._cdata for tensor in elsewhere or ()}
        for tensor in tensors:
            self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self._elsewhere and storage.device.type != "meta":
            self._storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        # A thread of gloo holds the buffers of a finished collective until it gets Python's lock.
        for _ in range(_PATIENCE):
            found = self.now()
            if found <= self.peak:
                return result
            if found < self._hasty_below:
                break
            time.sleep(0.002)  # without the lock
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the current sum."""
        total, gone = 0, []
        for key, ref in self._storages.items():
            storage = ref()
            if storage is None:
                gone.append(key)
            else:
                total += storage.nbytes()
        for key in gone:
            del self._storages[key]
        return total


class StandIn:
    """A kernel that allocates what a GPU kernel allocates, and computes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, q, k, v, tiles, scale):  # noqa: ARG002
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, dout, saved, tiles, scale):  # noqa: ARG002
        q, k, v, out, lse, _ = saved
        buffers = [
            torch.empty(q.shape, dtype=torch.float32),
            torch.empty_like(lse),
            torch.empty_like(lse),
        ]
        if out is None and self.name == "sdpa":
            buffers.append(torch.empty_like(q))
        if self.name == "flash4":
            buffers += [torch.empty(k.shape, dtype=torch.float32) for _ in range(2)]
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        assert self.name == "sdpa"
        dk, dv = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
        buffers += [torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)]
        buffers += [k.new_empty(*k.shape[:2], *q.shape[2:]) for _ in range(2)]
        return torch.zeros_like(q), dk, dv


class FusedNorm(torch.autograd.Function):
    """Norm that saves what CUDA's saves: its input and a float32 per row. The CPU's saves more."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _, weight, _ = ctx.saved_tensors
        return grad.clone(), torch.zeros_like(weight)


FUNCTIONAL = SimpleNamespace(
    rms_norm=lambda x, _, weight, __: FusedNorm.apply(x, weight),
    silu=torch.nn.functional.silu,
    linear=torch.nn.functional.linear,
)


def fp8_rows(values: torch.Tensor, width: int = 0) -> Fp8:
    """Allocate what the kernels of a GPU return for rows of ``width``, by default the values'."""
    rows = len(values)
    like = values.new_zeros(rows, width or values.shape[1], dtype=torch.float8_e4m3fn)
    return Fp8(like, values.new_zeros(rows, 1, dtype=torch.float32))


def fp8_matrix(matrices: list[torch.Tensor], largest: torch.Tensor, transposed: bool) -> Fp8Matrix:
    sizes = sum(map(len, matrices)), matrices[0].shape[1]
    values = torch.zeros(sizes[::-1] if transposed else sizes, dtype=torch.float8_e4m3fn)
    return Fp8Matrix(values, largest.new_zeros(1, len(values)))


def gate_backward_rows(gate_up, dinner):
    """Allocate what the kernel does, which overwrites gate and up if they are not e4m3."""
    both = fp8_rows(dinner, 2 * dinner.shape[1])
    if isinstance(gate_up, Fp8):
        gate_up = dinner.new_zeros(len(dinner), 2 * dinner.shape[1]).chunk(2, 1)
    return dinner, *gate_up, both


FP8_KERNELS = SimpleNamespace(
    cast_rows=fp8_rows,
    normed_rows=lambda x, _, __, added, needs_norm: (
        x if added is None else x + added, x.clone() if needs_norm else None, fp8_rows(x)
    ),
    gated_rows=lambda gate, _, keep: (
        fp8_rows(gate), fp8_rows(gate, 2 * gate.shape[1]) if keep else None
    ),
    gate_backward_rows=gate_backward_rows,
    cast_matrix=fp8_matrix,
    largest_of=lambda matrices: matrices[0].new_zeros(1, dtype=torch.float32),
)  # fmt: skip


def fp8_product(left, right, dtype, out, **_):
    result = (len(left.values_SK), len(right.values_NK))
    return out if out is not None else torch.zeros(result, dtype=dtype)


def use_gpu_allocations(patch: pytest.MonkeyPatch) -> None:
    """Make norms and fp8 products allocate what they do on a GPU."""
    for module in (decoder_module, feed_forward_module):
        patch.setattr(module, "functional", FUNCTIONAL)
    patch.setattr(mlp_products, "kernels_of", lambda _: FP8_KERNELS)
    patch.setattr(mlp_products, "product", fp8_product)


def step_peak(
    rank: int, world: int, overrides: list[str], exchange: str, kernel: str, dtype: torch.dtype
) -> tuple[int, int]:
    """Return (peak bytes of the second step, closed form) of one worker of a context group.

    With an offloaded optimizer, both leave out its step on the host, since host and device are one
    here.
    """
    config = compose(overrides)
    tp, pp = config.topology.tensor_parallel, config.topology.pipeline_parallel
    cp = world // (tp * pp)
    dims = ParallelDims.of(world, pp=pp, cp=cp, tp=tp)
    layout = make_layout(config.layout, dims.cp, config.seq, config.topology.block_size)
    group = make_context_group(rank, dims, torch.device("cpu"))
    tensor = make_tensor_group(rank, dims, torch.device("cpu"))
    environment = gloo.environment(rank, world, cp, None, tp, pp)
    stage = make_stage(config, environment, torch.device("cpu"), dtype, None)
    train, states_away = config.train, config.optim.offload
    circulates = "queries" if config.topology.circulates == "queries" else "kv"
    offload = (
        ActivationOffload(config.model.num_layers, torch.device("cpu"), train.offload_activations)
        if train.offload_activations
        else None
    )

    def empty() -> Decoder:
        with torch.device("meta"):
            return Decoder(config.model, stages=() if stage is None else stage.stages)

    mesh = make_parameter_mesh(dims, "cpu")
    degree = config.topology.expert_parallel
    assert isinstance(degree, int)
    dealt = make_expert_group(rank, dims, degree, torch.device("cpu"))
    decoder = parallelize(
        empty(), config, mesh, dtype, compile=False, offload=offload, tensor=tensor,
        experts=dealt,
        expert_mesh=None if dealt is None else make_expert_mesh(dims, degree, "cpu"),
    )  # fmt: skip
    decoder.to_empty(device="cpu")
    for parameter in decoder.parameters():
        torch.nn.init.zeros_(parameter)
    host = OffloadedOptimizer(decoder, empty(), config.optim) if states_away else None
    optimizer = host.optimizer if host else make_optimizer(decoder, config.optim)
    batch, tokens = config.train.micro_batch, layout.tokens_per_worker
    masks = [SequenceMask.causal(config.seq, layout.padded_seq)] * batch
    shared = make_exchange(exchange, layout, group, circulates=circulates)
    attend = attention_of(config, shared, kernel, masks, offload)
    inputs = [torch.zeros(batch, tokens, dtype=torch.long) for _ in range(3)]
    if tensor is not None:
        inputs[0], inputs[2] = tensor.own(inputs[0], 0), tensor.own(inputs[2], 0)

    routings = RouterBatches.make(config, group, tensor)

    def routing() -> Routing | None:
        if routings is None:
            return None
        return routings.of(layout, [config.seq] * batch, torch.device("cpu"))

    def gradients() -> None:
        if stage is not None:
            attends = [attend.for_next_batch() for _ in range(train.global_batch)]
            batches: Any = [
                SimpleNamespace(
                    attend=each,
                    routing=routing(),
                    **{
                        name: tensor.clone()
                        for name, tensor in zip(
                            ("tokens", "positions", "labels"), inputs, strict=True
                        )
                    },
                )
                for each in attends
            ]
            stage.forward_backward(decoder, batches, attends, 1)
            return
        last = train.global_batch // batch - 1
        for number in range(last + 1):
            begin_micro_batch(decoder, train.shard, last=number == last)
            decoder(*inputs, attend, 1.0, routing()).backward()

    def step() -> None:
        (host or optimizer).step()
        optimizer.zero_grad(set_to_none=True)

    choice = ExchangeChoice(exchange, "", per_node=dims.cp, circulates=circulates)
    estimate = estimate_memory(
        config,
        workers=world,
        layout=layout,
        exchange=choice,
        kernel=kernel,
        dtype_bytes=dtype.itemsize,
        cuda=False,
        attention=AttentionMemory(
            config.of_worker, layout, choice, kernel, dtype.itemsize, DENSE_KERNEL
        ),
    )
    states_on_host = StateMemory(config, world, train.global_batch, dtype.itemsize).host
    expected = estimate.allocated + estimate.host - states_on_host
    with pytest.MonkeyPatch.context() as patch:
        use_gpu_allocations(patch)
        patch.setattr(torch.nn.functional, "rms_norm", FUNCTIONAL.rms_norm)
        gradients()
        step()
        # Host buffers of offloaded activations, which persist from step to step.
        waiting = [] if offload is None else [t for free in offload._free.values() for t in free]
        states = (
            []
            if states_away
            else [state for states in optimizer.state.values() for state in states.values()]
        )
        left = [gradient for unit in (host and host._gradients) or () for gradient in unit]
        with LiveBytes(
            [*decoder.parameters(), *states, *free_tensors(shared.buffers), *waiting],
            left,
            hasty_below=0.9 * expected,
        ) as live:
            gradients()
            if not states_away:
                step()
    return live.peak, expected


def attention_of(
    config: Config,
    exchange: Exchange,
    kernel: str,
    masks: list[SequenceMask],
    offload: ActivationOffload | None,
) -> ContextAttention | MixedAttention:
    """Return attention with stand-ins of kernels. kernel: that of layers with an index, if any."""
    pattern, layers = make_pattern(config.sparsity, config.seed), config.model.num_layers

    def of(name: str, pattern: Pattern | None) -> ContextAttention:
        keep = attention_kept(config.train)
        return make_attention(
            exchange, StandIn(name), masks, "cpu", pattern, keep=keep, offload=offload
        )

    dense = config.sparsity.dense_of(layers)
    if not dense:
        return of(kernel, pattern)
    return MixedAttention(of(kernel, pattern), of(DENSE_KERNEL, None), dense, layers)


def kept(layers: int, overrides: list[str], dtype: torch.dtype) -> tuple[int, MemoryEstimate]:
    """Return (bytes that a forward pass leaves beyond parameters and inputs, closed form)."""
    config = compose([*overrides, f"model.num_layers={layers}"])
    layout = make_layout(config.layout, 1, config.seq, config.topology.block_size)
    offloaded = config.train.offload_activations
    offload = ActivationOffload(layers, torch.device("cpu"), offloaded) if offloaded else None
    decoder = Decoder(config.model).to(dtype)
    set_execution(decoder, config, compile=False, offload=offload)
    decoder.loss = LossOptions()
    masks = [SequenceMask.causal(config.seq, config.seq)]
    exchange = make_exchange("all_gather", layout, ContextGroup())
    kernel = DENSE_KERNEL if config.sparsity.pattern == "dense" else SPARSE_KERNEL
    attend = attention_of(config, exchange, kernel, masks, offload)
    inputs = [torch.zeros(1, config.seq, dtype=torch.long) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        use_gpu_allocations(patch)
        with LiveBytes([*decoder.parameters(), *inputs]) as live:
            before = live.now()
            loss = decoder(*inputs, attend, 1.0)
            left = live.now() - before
    assert loss.requires_grad
    exchange_choice = ExchangeChoice("all_gather", "", per_node=1)
    estimate = estimate_memory(
        config,
        workers=1,
        layout=layout,
        exchange=exchange_choice,
        kernel=kernel,
        dtype_bytes=dtype.itemsize,
        cuda=False,
        attention=AttentionMemory(
            config, layout, exchange_choice, kernel, dtype.itemsize, DENSE_KERNEL
        ),
    )
    return left, estimate


def step_peaks(
    rank: int, world: int, cases: list[tuple[list[str], str, str, torch.dtype]]
) -> list[tuple[int, int]]:
    """Return `step_peak` of several cases in one process group."""
    return [step_peak(rank, world, *case) for case in cases]
