"""Predict a training step: simulated attention, the rest of a layer, weights and the optimizer.

Order and overlap follow FSDP2: while one layer computes, it gathers the next layer's weights and,
in backward, reduce-scatters the gradients of the layer that has just ended. A layer takes the
larger of computation and communication; the first gather and the last reduce-scatter are exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.parallel.pipeline_schedule import TimedPipeline
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.simulation import non_attention_cost
from mtrain_cli.simulation.calibration import HIGH, LOSS, LOW, VALUE
from mtrain_cli.simulation.costs import BOUNDS, Costs
from mtrain_cli.simulation.expert_cost import ExpertLoads, RowExchange, TensorMessages, dealt_over
from mtrain_cli.simulation.host_time import host_ms
from mtrain_cli.simulation.non_attention_cost import Collective, ComputeCost, NonAttentionCost
from mtrain_cli.simulation.prediction import BoundedTime, Prediction
from mtrain_cli.simulation.timeline import NOT_SLOW
from mtrain_cli.simulation.work_counts import FLOP_PER_PAIR
from mtrain_cli.step.program import Message, MessageCost, PassTime, Post, weight_messages
from mtrain_cli.training.expert_traffic import summed_bytes
from mtrain_cli.training.flops import (
    causal_pairs,
    copied_elements,
    flops_per_token,
    layer_kinds,
    recomputed_pair_share,
)
from mtrain_cli.training.pipeline_plan import ModelPart, PipelinePlan, model_parts
from mtrain_cli.training.run_plan import RunPlan

# Share of the time of the loss that the forward pass takes if backward computes the logits again:
# one of four matrix products (`model.loss`).
_LOSS_IN_FORWARD = 0.25
TENSOR, PIPELINE, EXPERTS = "tensor", "pipeline", "experts"
# The parts of a step, in display order. Waits are late (for slower workers), links (for keys,
# values and their gradients), tensor (hidden states), experts (rows of tokens), weights (and
# gradients), pipeline (other stages) and offload (activations to or from the host).
PARTS = (
    *("attention", "index", "merge and copies", "late", "links", TENSOR, EXPERTS),
    *("matrices", "recomputed", "element-wise", "loss", "weights", PIPELINE),
    *("optimizer", "offload", "host"),
)
_WAITS = {
    "late": "slower workers",
    "links": "keys and values",
    TENSOR: "hidden states",
    EXPERTS: "rows of experts",
    "weights": "weights and gradients",
    PIPELINE: "other stages",
    "offload": "activations that move to or from the host",
}


def part_name(name: str) -> str:
    """Return a part of a step as the user reads it."""
    return f"waiting for {_WAITS[name]}" if name in _WAITS else name


@dataclass
class ExpertRows:
    """The rows that travel to experts and back in a step, in seconds and bytes.

    exposed: wait of the worker with the most popular experts. late: mean wait for it.
    size: bytes that a worker receives, in the mean.
    """

    exposed: float = 0.0
    hidden: float = 0.0
    late: float = 0.0
    size: float = 0.0


class PredictedStep:
    """The prediction of one optimizer step, for one bound until `predict_step` adds the bounds.

    parts: seconds of each of `PARTS`, which add up to the expected time; with a pipeline, those of
        its busiest stage. `TENSOR`, `EXPERTS` and `PIPELINE` only with these kinds of parallelism.
    hidden: seconds in which collectives of weights and gradients overlap with computation.
    mfu: model FLOP/s (with all pairs of dense attention) / peak FLOP/s.
    hfu: executed FLOP/s / peak FLOP/s.
    flop: number of FLOP that one worker executes.
    sent: bytes of weights and gradients that one worker receives.
    over_host: bytes that move between one worker and its host.
    hidden_states: bytes that one worker receives from its tensor group.
    pipeline: the schedule with the times of its passes in microseconds.
    passes: microseconds of each pass of a stage and of the loss, as in `StageTime`.
    for_host: microseconds for which the GPU waits because its host launches more slowly.
    """

    seconds: BoundedTime
    tokens_per_second_per_gpu: BoundedTime
    mfu: float
    hfu: float

    def __init__(
        self,
        cluster: Cluster,
        plan: RunPlan,
        attention: Prediction,
        costs: Costs,
        slowest: float,
        loads: ExpertLoads | None,
        part: ModelPart,
    ) -> None:
        self.cluster, self.plan, self.attention = cluster, plan, attention
        self.costs, self.slowest, self.part = costs, slowest, part
        self.layers = part.number_of_layers
        self.passes = {"forward": 0.0, "backward": 0.0, "loss": 0.0}
        self.non_attention = non_attention = NonAttentionCost.of(plan, part, loads)
        self.longer = non_attention_cost.longer_than_expected(non_attention, costs, plan.dtype)
        self.messages = TensorMessages.of(plan) if plan.dims.tp > 1 else None
        self.exchange = RowExchange.of(plan, loads or ExpertLoads(), cluster, costs, slowest)
        absent = {
            TENSOR: self.messages is None,
            EXPERTS: self.exchange is None,
            PIPELINE: plan.dims.pp == 1,
        }
        self.us = {name: 0.0 for name in PARTS if not absent.get(name)}
        kinds = layer_kinds(plan.config.model, part.every_layer)
        self.with_experts = kinds.get(True, 0) / self.layers
        self.row_waits: dict[str, PassTime] = {}
        self.experts = None if self.exchange is None else ExpertRows()
        self.hidden = self.flop = self.sent = self.over_host = self.hidden_states = 0.0
        self.backward = 0.0  # microseconds of one micro-batch's layers
        self.pipeline: TimedPipeline | None = None
        self.times = 1
        for group in weight_messages(plan.config.train.shard, plan.micro_batches):
            self.times = group.times
            self._micro_batch({op.message for op in group.body if isinstance(op, Post)})
        self.times = 1
        self._add(non_attention.optimizer, 1, "optimizer", "optimizer")
        self.us["optimizer"] += self._transfer(1.0).us + self._optimizer_on_host()
        if self.messages is not None:
            self.us[TENSOR] += self._summed_copies(kinds)
        self.us["host"] += costs.burden(cluster.gpu.step_ms) * 1e3
        self._wait_for_host()

    @property
    def order(self) -> tuple[float, float, float]:
        """Key that sorts steps by time, then by their GPUs' own time, then by memory."""
        seconds = self.seconds.value
        return round(seconds, 9), seconds - 1e-6 * self.for_host, self.gib

    @property
    def parts(self) -> dict[str, float]:
        return {name: us / 1e6 for name, us in self.us.items()}

    @property
    def total(self) -> float:
        return sum(self.us.values())

    @property
    def gib(self) -> float:
        return self.plan.memory.total / 2**30

    @property
    def fits(self) -> bool:
        return bool(self.plan.fits)

    def _micro_batch(self, messages: set[Message]) -> None:
        non_attention, layers, began = self.non_attention, self.layers, self.total
        in_forward = {Message.GATHER} & messages
        gathers, again, reduces = (
            self._transfers(message) if message in messages else []
            for message in (Message.GATHER, Message.GATHER_AGAIN, Message.REDUCE)
        )
        copied = copies(non_attention.of_layer, in_forward)
        forward = self._layers([FORWARD], non_attention.forward, layers, copied=copied)
        behind = forward / layers, self._carried(FORWARD)
        if FORWARD in self.row_waits:
            behind = self._behind_rows(self.row_waits[FORWARD])
        self._weights(*behind, gathers, layers - 1)
        forward_ended = self.total
        recomputes = self.plan.recompute is not Recompute.NOTHING
        passes = [RECOMPUTE, BACKWARD] if recomputes else [BACKWARD]
        copied = copies(non_attention.of_layer, messages - in_forward) + non_attention.added
        self.backward = backward = self._layers(
            passes, non_attention.backward, layers, non_attention.recomputed, copied=copied
        )
        carried = self._carried(*passes)
        # Backward starts with the last layer, which has no earlier gradients to scatter. The first
        # layer has no further weights to gather.
        if layers > 1:
            for transfers, times in ((again, 1), (again + reduces, layers - 2), (reduces, 1)):
                self._weights(backward / layers, carried, transfers, times)
        # The weights outside the layers, the first weights of each pass, and the last gradients
        # overlap with nothing.
        root = non_attention.of_root.items()
        alone = [self._transfer(found.received) for message, found in root if message in messages]
        alone += gathers + again + reduces
        self.us["weights"] += self.times * sum(transfer.us for transfer in alone)
        self.sent += self.times * sum(transfer.size for transfer in alone)
        backward_ended = self.total
        self._add(non_attention.loss, 1, "loss", "loss", LOSS)
        self._add(copies(non_attention.of_root, messages), 1, "loss", "loss")
        for name, us in (
            ("forward", forward_ended - began),
            ("backward", backward_ended - forward_ended),
            ("loss", self.total - backward_ended),
        ):
            self.passes[name] += us
        self._activations(forward / layers, backward / layers)

    def _wait_for_host(self) -> None:
        """Extend a step that the host takes longer to launch, and its passes in proportion."""
        own = self.plan.config, self.part.every_layer, self.plan.micro_batches
        self.for_host = max(0.0, 1e3 * host_ms(*own, self.costs.burden) - self.total)
        longer = 1 + self.for_host / sum(self.passes.values())
        self.passes = {name: longer * us for name, us in self.passes.items()}
        self.us["host"] += self.for_host

    def _activations(self, forward: float, backward: float) -> None:
        """Add waits for offloaded activations. forward, backward: us of a layer's computation."""
        host = self.non_attention.host
        us = host.kept / (self.costs.rate(self.cluster.gpu.host_link_gbps) * 1e3)
        waiting = max(0.0, us - forward) + max(0.0, us - backward)
        self.us["offload"] += self.times * host.layers * waiting
        self.over_host += self.times * 2 * host.layers * host.kept

    def _optimizer_on_host(self) -> float:
        """Return the optimizer's microseconds on the host; 0 if it runs on the GPU.

        Only the transfer of the first gradients and of the last weights overlaps with nothing.
        Gradients that leave during backward overlap with its last pass.
        """
        host, gpu, e = self.non_attention.host, self.cluster.gpu, self.plan.dtype_bytes
        self.over_host += (4 + e) * host.away
        memory = self.costs.rate(gpu.host_memory_gbps) * 1e3
        link = self.costs.rate(gpu.host_link_gbps) * 1e3
        stepped = (non_attention_cost.ADAMW + e) * host.away / memory
        down, up, unit = (size / link for size in (4 * host.away, e * host.away, host.unit))
        if self.plan.config.optim.offload_gradients:
            return max(0.0, down - self.backward) + max(stepped, up) + unit
        return max(stepped, down, up) + unit

    def _carried(self, *directions: str) -> tuple[float, float]:
        """Return the us for which a layer's messages occupy the (inner, outer) link."""
        found = [0.0, 0.0]
        for direction in directions:
            for link, ms in enumerate(self.attention.passes[direction].carried):
                found[link] += ms * 1e3
            if self.exchange is not None and direction in self.row_waits:
                rows = self.row_waits[direction].busy * self.with_experts
                found[self.exchange.outer] += rows
        return found[0], found[1]

    def _behind_rows(self, rows: PassTime) -> tuple[float, tuple[float, float]]:
        """Return the experts' time, and that of their rows on each link.

        The gather of the next layer starts only with the experts, for whose rows the host waits.
        """
        assert self.exchange is not None
        busy = rows.busy * self.with_experts
        carried = (0.0, busy) if self.exchange.outer else (busy, 0.0)
        return rows.span * self.with_experts, carried

    def _layers(
        self,
        passes: list[str],
        work: ComputeCost,
        layers: int,
        again: ComputeCost | None = None,
        *,
        copied: ComputeCost,
    ) -> float:
        """Add the computation of all layers. Return its microseconds per micro-batch."""
        before = self.total
        for name in passes:
            self._attention(name, layers)
        after_attention = self.total
        self._add(work, layers, "matrices", "element-wise", passes[-1])
        if again is not None:
            self._add(again, layers, "recomputed", "element-wise", passes[-1])
        if self.messages is not None:
            computing = (self.total - after_attention) / self.times / layers
            of_pass = self.messages.forward if again is None else self.messages.backward
            waits = of_pass(computing, self._tensor_message)
            self._wait(TENSOR, waits, self.times * layers, outer=False)
            self.hidden_states += self.times * layers * waits.size
        self._row_waits(passes[-1], layers)
        self._add(copied, layers, "matrices", "element-wise")
        return (self.total - before) / self.times

    def _row_waits(self, direction: str, layers: int) -> None:
        exchange, rows = self.exchange, self.experts
        if exchange is None or rows is None or not self.with_experts:
            return
        found = exchange.forward() if direction == FORWARD else exchange.backward()
        self.row_waits[direction] = found
        times = self.times * layers * self.with_experts
        rows.exposed += self._wait(EXPERTS, found, times, outer=exchange.outer) / 1e6
        rows.hidden += times * found.hidden / 1e6
        rows.late += times * found.late / 1e6
        rows.size += times * found.size

    def _wait(self, part: str, found: PassTime, times: float, *, outer: bool) -> float:
        """Add the waits of a pass. Hidden messages take a share of the GPU."""
        share = self.costs.burden(self.cluster.link(outer=outer).gpu_share)
        exposed = times * (found.exposed + share * found.hidden)
        self.us[part] += exposed
        self.us["late"] += times * found.late
        return exposed

    def _summed_copies(self, kinds: Mapping[bool, int]) -> float:
        """Return the us to add up gradients that all workers of a tensor group hold."""
        plan, dealt = self.plan, self.exchange is not None
        elements = sum(
            copied_elements(plan.config.model, experts=experts, dealt=dealt) * number
            for experts, number in kinds.items()
        )
        workers = plan.dims.workers // plan.dims.pp
        return self._tensor_message(summed_bytes(elements, plan.dims.tp, workers))

    def _tensor_message(self, size: float) -> float:
        degree = self.plan.dims.tp
        return self.costs.collective(False, degree, degree, int(size))[0]

    def _attention(self, direction: str, layers: int) -> None:
        found, plan = self.attention.passes[direction], self.plan
        again = direction == RECOMPUTE
        share = 1.0
        if again:
            rules = MaskRule.of(plan.config).by_layers(plan.config.model.num_layers)
            share = recomputed_pair_share(
                plan.config.train, plan.layout, plan.exchange.heads, rules
            )
        duration = getattr(found.duration, self.costs.bound)
        spent, exposed = found.spent, sum(found.exposed.values())
        of_all = {
            "attention": spent["attention"] + spent["columns"],
            "index": spent["index"],
            "merge and copies": spent["merge"] + spent["arrange"],
            "links": exposed,
            "host": spent["gap"],
        }
        # Workers that end a pass early wait for the others, at the latest when weights are
        # gathered.
        late = max(0.0, found.duration.value - sum(of_all.values()))
        # If less attention is recomputed, less communication overlaps with it.
        freed = (1.0 - share) * of_all["attention"]
        computing = sum(of_all.values()) - exposed - freed
        links = max(exposed, min(exposed + freed, max(found.carried) - computing))
        attention = share * of_all["attention"]
        parts = of_all | {"attention": attention, "links": links, "late": share * late}
        # Bounds exist only for the sum of the parts: scale all parts by one factor.
        scale = duration / found.duration.value if found.duration.value else 1.0
        for name, ms in parts.items():
            self.us[name] += self.times * ms * 1e3 * layers * scale
        model, environment = plan.config.of_worker.model, plan.environment
        pairs = self.attention.facts["density"] * causal_pairs(plan.config.seq)
        pairs = pairs * plan.config.train.micro_batch / environment.dims.cp
        products = FLOP_PER_PAIR[BACKWARD if direction == BACKWARD else FORWARD] * share
        self.flop += self.times * layers * products * model.num_heads * model.head_dim * pairs

    def _add(
        self, work: ComputeCost, times: int, matrices: str, elements: str, part: str | None = None
    ) -> None:
        """Add work to the parts ``matrices`` and ``elements``.

        times: how often a micro-batch does it. part: its name in the benchmark, None if unmeasured.
        """
        spent = non_attention_cost.priced(
            work, self.costs, None if part is None else self.longer.get(part)
        )
        times *= self.times
        self.flop += work.every_flop * times
        self.us[matrices] += spent.matrices * times * self.slowest
        self.us[elements] += spent.elements * times * self.slowest
        self.us["host"] += spent.host * times

    def _transfers(self, message: Message) -> list[MessageCost]:
        of_layer, degree = self.non_attention.of_layer[message], dealt_over(self.plan)
        found = [self._transfer(of_layer.received, self.plan.dims.tp)]
        if degree > 1 and of_layer.dealt:
            found.append(self._transfer(of_layer.dealt, degree))
        return found

    def _transfer(self, size: float, degree: int = 1) -> MessageCost:
        """Return a collective among the workers of a stage with the same weights.

        degree: number of consecutive workers that hold different weights.
        """
        workers = self.plan.dims.workers // self.plan.dims.pp // degree
        if workers == 1:
            return MessageCost(0.0, 0.0)
        members = min(workers, max(1, self.cluster.gpus_per_node // degree))
        us, busy = self.costs.collective(False, workers, members, int(size))
        return MessageCost(us, busy, size, members < workers)

    def _weights(
        self,
        computing: float,
        carried: tuple[float, float],
        transfers: Sequence[MessageCost],
        times: int,
    ) -> None:
        """Add the exposed time of collectives while ``times`` layers compute (`overlapped_us`)."""
        if not times or not transfers:
            return
        times *= self.times
        self.sent += times * sum(transfer.size for transfer in transfers)
        needed = overlapped_us(transfers, computing, carried, self.costs.bound)
        hidden, share, late, outer = min(needed, computing), 0.0, 0.0, transfers[0].outer
        if needed:
            share = self.costs.burden(self.cluster.link(outer=outer).gpu_share)
        if self.costs.bound == HIGH:
            late = min(needed, carried[outer])
        self.us["weights"] += times * (needed - hidden + share * hidden + late)
        self.hidden += times * hidden / 1e6


def predict_step(
    cluster: Cluster,
    plan: RunPlan,
    attention: Prediction,
    slow: Mapping[int, float] = NOT_SLOW,
    *,
    bounds: bool = True,
    loads: ExpertLoads | None = None,
) -> PredictedStep:
    """Predict a step of a plan from the attention of a layer, recomputed as the plan does.

    bounds: also predict the best and the worst case. loads: None if experts have equal loads.
    """
    slowest = max([1.0, *slow.values()])
    steps = {
        bound: _of_bound(cluster, plan, attention, attention.costs[bound], slowest, loads)
        for bound in (BOUNDS if bounds else (VALUE,))
    }
    likely, workers = steps[VALUE], plan.dims.workers
    low, high = (steps[b].total / 1e6 if b in steps else None for b in (LOW, HIGH))
    likely.seconds = BoundedTime.around(likely.total / 1e6, low, high)
    likely.tokens_per_second_per_gpu = likely.seconds.map(
        lambda seconds: plan.tokens_per_step / seconds / workers, falling=True
    )
    peak = cluster.gpu.peak_tflops.value * 1e12
    model = plan.flops.model
    # The plan's FLOP assume sequences of one document. Packed documents have fewer pairs.
    if attention.facts["pattern"] == "dense":
        pairs = attention.facts["density"] * causal_pairs(plan.config.seq)
        model = flops_per_token(plan.config.model, plan.config.seq, pairs=pairs).model
    likely.mfu = likely.tokens_per_second_per_gpu.value * model / peak
    likely.hfu = likely.flop / likely.seconds.value / peak
    return likely


def _of_bound(
    cluster: Cluster,
    plan: RunPlan,
    attention: Prediction,
    costs: Costs,
    slowest: float,
    loads: ExpertLoads | None,
) -> PredictedStep:
    """Predict a step for the bound of ``costs``; with a pipeline, its busiest stage."""

    def of(part: ModelPart) -> PredictedStep:
        own = attention.of_layers(part.every_layer)
        return PredictedStep(cluster, plan, own, costs, slowest, loads, part)

    if plan.pipeline is None:
        return of(ModelPart.whole(plan.config.model))
    parts = model_parts(plan.config, plan.micro_batches)
    stages = [of(part) for part in parts]
    alike = "layer_kinds" not in attention.facts and len(layer_kinds(plan.config.model)) == 1
    times = [
        StageTime.of(
            stage.passes,
            [dict.fromkeys(stage.passes, float(len(own))) for own in part.layers]
            if alike
            else [of(own).passes for own in part.virtual_stages],
        )
        for part, stage in zip(parts, stages, strict=True)
    ]
    pipeline = timed_step(plan, times, hop_us(cluster, costs, plan, plan.pipeline))
    played = pipeline.played
    busiest = max(range(plan.dims.pp), key=played.busy)
    step = stages[busiest]
    step.us[PIPELINE] = played.makespan - played.busy(busiest)
    step.flop = sum(stage.flop for stage in stages) / len(stages)
    step.pipeline = pipeline
    return step


def copies(collectives: Mapping[Message, Collective], messages: set[Message]) -> ComputeCost:
    sent = (found for message, found in collectives.items() if message in messages)
    return ComputeCost(moved=sum(found.copied for found in sent))


def overlapped_us(
    transfers: Sequence[MessageCost], computing: float, carried: tuple[float, float], bound: str
) -> float:
    """Return the microseconds of successive collectives that start with a computation.

    They get the bandwidth that attention's messages leave, which occupy the (inner, outer) link for
    ``carried``. The low bound assumes that they never meet.
    """
    alone, busy = sum(t.us for t in transfers), sum(t.busy for t in transfers)
    if not alone or not computing or bound == LOW:
        return alone
    left = max(0.0, 1.0 - carried[transfers[0].outer] / computing)
    speed = min(1.0, left * alone / busy) if busy else 1.0
    return alone / speed if alone <= speed * computing else computing + alone - speed * computing


@dataclass(frozen=True)
class StageTime:
    """Times of a stage in a step, over all micro-batches. The unit is any.

    forward, backward: passes through the layers of each virtual stage.
    loss: LM head and loss; 0 on all stages but the last.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    loss: float

    @staticmethod
    def of(whole: Mapping[str, float], parts: Sequence[Mapping[str, float]]) -> StageTime:
        """Deal the times of a stage out to its virtual stages, in proportion to their own times.

        whole: time of each pass and of the loss. parts: of each virtual stage as if it were alone.
        """

        def dealt(name: str) -> tuple[float, ...]:
            total = sum(part[name] for part in parts)
            return tuple(whole[name] * part[name] / total for part in parts)

        return StageTime(dealt("forward"), dealt("backward"), whole["loss"])


def timed_step(plan: RunPlan, stages: Sequence[StageTime], hop: float) -> TimedPipeline:
    """Return the pipeline of a plan with the times of its passes. hop: of a message."""
    planned = plan.pipeline
    assert planned is not None
    in_forward = 1.0 if plan.config.train.loss_gradients == "forward" else _LOSS_IN_FORWARD
    last = planned.pipeline.last

    def cost(number: int, *, forward: bool) -> float:
        virtual, stage = divmod(number, planned.pipeline.stages)
        own = stages[stage]
        passing = (own.forward if forward else own.backward)[virtual]
        loss = own.loss * (in_forward if forward else 1 - in_forward) * (number == last)
        return (passing + loss) / planned.pipeline.micro_batches

    forward, backward = (
        tuple(cost(number, forward=way) for number in range(last + 1)) for way in (True, False)
    )
    return TimedPipeline(planned.pipeline, forward, backward, hop)


def hop_us(cluster: Cluster, costs: Costs, plan: RunPlan, pipeline: PipelinePlan) -> float:
    """Return the microseconds of a message between stages; if some cross nodes, of those."""
    workers = plan.dims.workers // plan.dims.pp
    nodes = [stage * workers // cluster.gpus_per_node for stage in range(plan.dims.pp)]
    outer = len(set(nodes)) > 1
    link = cluster.link(outer=outer)
    per_us = costs.rate(link.bandwidth_gbps) * 1e3
    capacity = max(costs.rate(link.capacity_gbps) * 1e3, per_us)
    # All workers of a node send at once, and share its network cards.
    sharing = int(costs.burden(link.shared_by)) if outer else 1
    return costs.burden(link.latency_us) + pipeline.hidden * max(1 / per_us, sharing / capacity)
