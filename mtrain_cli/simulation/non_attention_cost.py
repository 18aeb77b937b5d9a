"""Count a rank's work except attention: FLOP of matrix products, and bytes of other kernels.

The bytes are counted line by line in `model.decoder`, `model.loss` and FSDP2's copies; norms,
rotary embedding and gates count as fused kernels, as with ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mtrain_cli.config.cluster import Constant, Gpu
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.simulation.calibration import HIGH, LOSS, LOW, VALUE
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.simulation.expert_cost import (
    ComputeCost,
    ExpertLoads,
    LayerExperts,
    dealt_over,
    layer_experts,
)
from mtrain_cli.step.program import Message, Repeat, layers, work
from mtrain_cli.training.flops import by_hand, layer_kinds, layer_shapes, own_tiles, spared_by_fp8
from mtrain_cli.training.memory import MIB
from mtrain_cli.training.pipeline_plan import ModelPart
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.state_memory import StateMemory

_EAGER_SOURCE = "a step of 32K on one H200 takes 10 to 15 % longer uncompiled (profiles/notes.md)"
EAGER = Constant(2.8, "measured", _EAGER_SOURCE, 2.0, 3.5)
_LAUNCHES_SOURCE = (
    "number of kernels that a compiled layer and FSDP2 launch in forward; twice as many in backward"
)
LAUNCHES = Constant(16, "guess", _LAUNCHES_SOURCE, 8, 40)
# Bytes per float32 logit (`model.loss`): 4 each to write it, to read it for the maximum, to read it
# for the sum, and to read and write its gradient. A copy of the gradient in the compute dtype is
# counted separately.
_LOGITS = 20
_LOGITS_AGAIN = 12  # bytes per logit of a pass that computes the loss and no gradient
_TILE_LAUNCHES = 6, 18  # kernels per tile of the MLP, forward and backward (`model.feed_forward`)
DEVICE_ROWS = 4096  # with fewer rows, a layer on an H200 is launch-bound
# Bounds of a time in a run, as factors on the time measured on a GPU of this model. GPUs of one
# model differ, and clocks drop under load.
MEASURED = {LOW: 0.97, VALUE: 1.0, HIGH: 1.1}
# The same bounds if the measured layer had another size.
BEYOND = {LOW: 0.85, VALUE: 1.0, HIGH: 1.3}
# Float32 bytes that AdamW moves per number of a shard: it reads and writes the parameter and two
# states, and reads the gradient.
ADAMW = 28


class HostTraffic(NamedTuple):
    """The traffic between one rank and its host.

    layers, kept: number of layers that offload activations, and the bytes that each sends.
    away: numbers of a rank's shard that AdamW updates on the host; 0 if it runs on the GPU.
    unit: bytes of the first gradients and the last weights, whose transfer overlaps with nothing.
    """

    layers: int
    kept: float
    away: int
    unit: float

    @staticmethod
    def of(plan: RunPlan, states: StateMemory) -> HostTraffic:
        optim, e = plan.config.optim, plan.dtype_bytes
        layers = layers_on_host(plan.config.train.offload_activations, plan.config.model.num_layers)
        largest = max(states.layer_shard, states.root_shard)
        return HostTraffic(
            layers=layers,
            kept=(plan.memory.host - states.host) / layers if layers else 0.0,
            away=states.shard if optim.offload else 0,
            unit=(e if optim.offload_gradients else 4 + e) * largest * float(optim.offload),
        )


def _loss_cost(plan: RunPlan, tokens: int) -> ComputeCost:
    model, train, e = plan.config.model, plan.config.train, plan.dtype_bytes
    logits_again = train.loss_gradients == "recompute"
    logits, head = tokens * model.vocab_size, model.vocab_size * model.hidden_size
    chunks = -(-4 * logits // (train.loss_chunk_mib * MIB))
    return ComputeCost(
        (8.0 if logits_again else 6.0) * head * tokens,
        # - The logits.
        # - The LM head's float32 gradient: every chunk reads and writes it.
        # - One cast of this gradient.
        # - The embedding in both directions, and the last norm. If the embedding is tied, its
        #   gradient is added to that of the LM head.
        (_LOGITS + e + (_LOGITS_AGAIN if logits_again else 0)) * logits
        + 8 * head * chunks
        + (4 + e) * head
        + e * (3 * head + 6 * tokens * model.hidden_size),
        (15.0 if logits_again else 10.0) * chunks,
    )


class Collective(NamedTuple):
    """A gather of weights or a reduction of gradients, in bytes.

    copied: what copies before and after it read and write.
    received, dealt: what a rank receives, and of dealt experts.
    """

    copied: float
    received: float
    dealt: float = 0.0


@dataclass(frozen=True)
class NonAttentionCost:
    """The work of one rank, by part of a step.

    forward, recomputed, backward: of a layer per micro-batch.
    loss: of LM head, loss, embedding and last norm per micro-batch, in both directions.
    added: accumulation of a layer's unsharded gradients.
    optimizer: gradient norm, clipping and AdamW per step.
    of_layer, of_root: collectives of a layer, and of the weights outside the layers.
    tokens: tokens of a micro-batch with which the worker's layers compute, with padding.
    rows: number of these tokens in a tile of the MLP.
    """

    forward: ComputeCost
    recomputed: ComputeCost
    backward: ComputeCost
    loss: ComputeCost
    added: ComputeCost
    optimizer: ComputeCost
    host: HostTraffic
    of_layer: dict[Message, Collective]
    of_root: dict[Message, Collective]
    tokens: int
    rows: int

    def size(self, part: str) -> int:
        """Return the tokens at which to look up the measured time of a part.

        A small tile is launch-bound only if it is measured alone.
        """
        if part == LOSS or self.rows == self.tokens:
            return self.tokens
        return max(self.rows, min(self.tokens, DEVICE_ROWS))

    @staticmethod
    def of(
        plan: RunPlan, part: ModelPart | None = None, loads: ExpertLoads | None = None
    ) -> NonAttentionCost:
        """Count the work of a worker, that of a layer in the mean over its layers.

        part: its part of the model; None for all. loads: of experts; None if they are equal.
        """
        config, model, train = plan.config, plan.config.of_worker.model, plan.config.train
        optim, e = config.optim, plan.dtype_bytes
        workers = plan.dims.workers // plan.dims.pp
        layer_workers = workers // plan.dims.tp
        tokens = plan.layout.tokens_per_worker * train.micro_batch
        own, own_rows = own_tiles(config, plan.layout, e)
        states = StateMemory(config, plan.dims.workers, plan.micro_batches, e, part)
        number_of_layers = len(states.numbers)
        layer, root = states.weights_of(states.numbers) / number_of_layers, states.root_weights
        # The shards of dealt experts, and what this worker computes with.
        dealt = sum(states.dealt[model.has_experts(n)] for n in states.numbers) / number_of_layers
        sharing = workers // dealt_over(plan)
        experts = dealt * sharing
        layer_shard = (layer - experts) / layer_workers + dealt
        shard, r = states.shard, states.r
        forward, recomputed, backward = ComputeCost(), ComputeCost(), ComputeCost()
        for kind, number in layer_kinds(model, states.numbers).items():
            found = _layer_work(plan, layer_experts(plan, loads or ExpertLoads()) if kind else None)
            forward, recomputed, backward = (
                total + each.scaled(number / number_of_layers)
                for total, each in zip((forward, recomputed, backward), found, strict=True)
            )
        # Weights are cast, gathered and copied out; gradients are copied in and added to the shard.
        out, out_of_shard = 2 * e, e + (e if optim.offload else 4)
        back, to_shard = r + e, 8 + r
        added = (8 + e) * layer if train.shard == "optimizer" and plan.micro_batches > 1 else 0
        clipped = shard * (4 + (8 if optim.clip_norm else 0))
        stepped = 0 if optim.offload else ADAMW * shard
        share, layer_share, dealt_share = ((n - 1) / n for n in (workers, layer_workers, sharing))
        gather = Collective(
            out * layer + out_of_shard * layer_shard,
            e * (layer - experts) * layer_share,
            e * experts * dealt_share,
        )
        return NonAttentionCost(
            forward=forward,
            recomputed=recomputed,
            backward=backward,
            loss=_loss_cost(plan, own) if part is None or part.last else ComputeCost(),
            added=ComputeCost(moved=added),
            optimizer=ComputeCost(moved=float(clipped + stepped), launches=50.0),
            host=HostTraffic.of(plan, states),
            of_layer={
                Message.GATHER: gather,
                Message.GATHER_AGAIN: gather,
                Message.REDUCE: Collective(
                    back * layer + to_shard * layer_shard,
                    r * (layer - experts) * layer_share,
                    r * experts * dealt_share,
                ),
            },
            of_root={
                Message.GATHER: Collective(
                    out * root + out_of_shard * root / workers, e * root * share
                ),
                Message.REDUCE: Collective(
                    back * root + to_shard * root / workers, r * root * share
                ),
            },
            tokens=tokens,
            rows=min(tokens, own_rows * plan.dims.tp),
        )


def _layer_work(plan: RunPlan, experts: LayerExperts | None) -> Iterator[ComputeCost]:
    """Yield the forward, the recomputed and the backward work of a layer.

    With tensor parallelism, attention and MLP have the tokens of the tensor group; residual stream,
    router, experts and shared MLP have the worker's own.
    """
    config, model, train = plan.config, plan.config.of_worker.model, plan.config.train
    e, tokens = plan.dtype_bytes, plan.layout.tokens_per_worker * train.micro_batch
    own, own_rows = own_tiles(config, plan.layout, e)
    tiles, again = -(-own // own_rows), train.activation_checkpoint != "none"
    kinds = layers(
        model, checkpointed=again, tiled=by_hand(config, tiles > 1), keep_mlp=train.keep_mlp
    )
    alike = [(n, layer) for n, layer in kinds if layer.experts == (experts is not None)]
    shapes = layer_shapes(model, experts=experts is not None)
    rows = {name: own if name.startswith("shared ") else tokens for name in shapes}
    # `LayerExperts.work` has the products of router and experts.
    program = [Repeat(n, [*layer.forward(), *layer.backward()]) for n, layer in alike]
    of_rows = {n: 2.0 * prod(s) * rows[n] for n, s in shapes.items() if len(s) == 2}
    flop = work(program, {n: of for n, of in of_rows.items() if n != "router"})
    spared = spared_by_fp8(program, of_rows, train.fp8)
    stream, wide = own * model.hidden_size, tokens * model.intermediate_size
    rotated = tokens * 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    eager = e * (1.0 if train.compile != False else EAGER.value)  # noqa: E712 - auto compiles
    if experts is None:
        # With several tiles the weight gradients accumulate in float32.
        of_tiles = model.hidden_size * (
            3 * model.intermediate_size + model.num_heads * model.head_dim
        )
        sums = (8 * tiles + 4 + e) * of_tiles if tiles > 1 else 0
        without = 1 - layers_with_products(train.keep_mlp, model.num_layers) / model.num_layers
        of_forward, of_backward = ((tiles - 1) * number for number in _TILE_LAUNCHES)
        casts = _moved_by_casts(model, train.fp8, tokens, without)
        inside = [
            ComputeCost(moved=eager * 3 * wide + e * casts[0], launches=of_forward),
            ComputeCost(moved=eager * 3 * wide * without + e * casts[1]),
            ComputeCost(moved=eager * 5 * wide + e * casts[2] + sums, launches=of_backward),
        ]
    else:
        inside = list(experts.work())
    for direction, narrow, launches, of_mlp in (
        (FORWARD, 9 * stream + rotated, 1, inside[0]),
        (RECOMPUTE, 6 * stream + rotated if again else 4 * stream, again, inside[1]),
        (BACKWARD, 15 * stream + rotated, 2, inside[2]),
    ):
        number = sum(n for n, _ in alike)
        of_layer, less = flop[direction] / number, spared.get(direction, 0.0) / number
        around = ComputeCost(of_layer, eager * narrow, launches * LAUNCHES.value, spared=less)
        yield around + of_mlp if of_layer else ComputeCost()


def _moved_by_casts(
    model: ModelConfig, fp8: str, tokens: int, without: float
) -> tuple[float, float, float]:
    """Return what fp8 adds to a layer's forward, recomputed and backward traffic, in elements.

    A cast apart reads an element and writes half of one, the cast of a weight reads it twice. The
    kernels of norms and of the gate's forward pass write half an element instead of one, that of
    the gate's backward pass writes both. without: share of layers that keep no products.
    """
    if fp8 == "none":
        return 0.0, 0.0, 0.0
    hidden, wide = tokens * model.hidden_size, tokens * model.intermediate_size
    mlp, kept = 2.5 * model.hidden_size * model.intermediate_size, 1 - without
    forward = (kept - 0.5) * wide - 0.5 * hidden + 3 * mlp
    recomputed = without * (0.5 * hidden + 2 * mlp)
    backward = (1 - kept) * wide + 1.5 * hidden + 3 * mlp
    if fp8 == "all":
        heads, keys = (n * model.head_dim for n in (model.num_heads, 2 * model.num_kv_heads))
        output, qkv = (2.5 * model.hidden_size * width for width in (heads, heads + keys))
        forward += 1.5 * tokens * heads - 0.5 * hidden + output + qkv
        recomputed += without * (1.5 * tokens * heads + output) - 0.5 * hidden + qkv
        backward += 1.5 * (hidden + tokens * (heads + keys)) + 2 * hidden + output + qkv
    return forward, recomputed, backward


class ExpectedTime(NamedTuple):
    """The expected microseconds of one part's work. host: launches that do not overlap."""

    matrices: float
    elements: float
    host: float


def expected_us(flop: float, moved: float, gpu: Gpu) -> float:
    return flop / (gpu.gemm_tflops.value * 1e6) + moved / (gpu.hbm_gbps.value * 1e3)


def longer_than_expected(
    non_attention: NonAttentionCost, costs: Costs, dtype: str
) -> dict[str, float]:
    """Return measured / expected time (`expected_us`) of each part that was measured.

    The ratios are for the bound of ``costs``. Layers with experts have none.
    """
    gpu, measured = costs.cluster.gpu, costs.kernels.non_attention
    if measured is None or measured.dtype != dtype:
        return {}
    found = {}
    for part, cost in (
        (FORWARD, non_attention.forward),
        (BACKWARD, non_attention.backward + non_attention.recomputed),
        (LOSS, non_attention.loss),
    ):
        # Layers with experts were not measured.
        if part in measured.parts and cost != ComputeCost() and not cost.products:
            us = expected_us(cost.timed_flop, cost.moved, gpu)
            us = us * non_attention.size(part) / non_attention.tokens
            share, inside = measured.share(
                part, us, lambda point: expected_us(point.flop, point.moved, gpu)
            )
            found[part] = share * (MEASURED if inside else BEYOND)[costs.bound]
    return found


def priced(work: ComputeCost, costs: Costs, longer: float | None = None) -> ExpectedTime:
    """Return the predicted time of the work. longer: see `longer_than_expected`."""
    gpu = costs.cluster.gpu
    if longer is None:
        matrices = work.timed_flop / (costs.rate(gpu.gemm_tflops) * 1e6)
        elements = costs.copied(work.moved)
    else:
        matrices = longer * expected_us(work.timed_flop, 0.0, gpu)
        elements = longer * expected_us(0.0, work.moved, gpu)
    for each in work.products:
        rate = costs.rate(gpu.gemm_tflops) * costs.rate(each.share) * 1e6
        memory = each.moved / (costs.rate(gpu.hbm_gbps) * 1e3)
        matrices += each.times * max(each.flop / rate, memory)
    share = costs.burden(LAUNCHES) / LAUNCHES.value
    host = work.launches * share * costs.burden(gpu.launch_us)
    return ExpectedTime(matrices, elements, max(0.0, host - matrices - elements))
