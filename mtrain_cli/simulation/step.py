"""A whole training step: attention as it was played, the rest of every layer, weights and gradients on their way, and the optimizer.

Order and overlap are FSDP2's: the weights of the next layer are gathered while one is computed, and in backward the gradients of the layer
before are scattered at the same time, one collective after the other. All layers are alike, so that the time of a layer is a closed form:
computation, or what links have to carry where that is longer. The first gather and the last scatter have nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.cluster import Cluster
from mtrain_cli.simulation.costs import BOUNDS, Costs
from mtrain_cli.simulation.rest import Rest, Spent, priced
from mtrain_cli.simulation.simulate import Prediction, Range
from mtrain_cli.simulation.timeline import Conditions
from mtrain_cli.training.dry_run import Plan
from mtrain_cli.training.flops import causal_pairs, flops_per_token

DAY, HOUR = 86400.0, 3600.0
# In this order they are shown. late: for slower workers, in attention; links: for keys, values and their gradients.
PARTS = (
    "attention", "index", "merge and copies", "late", "links", "matrices", "recomputed", "element-wise", "loss", "weights",
    "optimizer", "host",
)  # fmt: skip


@dataclass(frozen=True)
class PredictedStep:
    """One optimizer step. seconds: with bounds. parts: seconds by `PARTS`, which add up to the likely time; ``weights`` is what gathering
    weights and scattering gradients adds to it. hidden: seconds of these that computation hides. exposed: share of the step in which
    workers wait for links, those of weights included. mfu, hfu: shares of the peak by what the model asks for and by what is executed.
    """

    plan: Plan
    seconds: Range
    parts: dict[str, float]
    hidden: float
    tokens_per_second_per_gpu: Range
    mfu: float
    hfu: float

    @property
    def exposed(self) -> float:
        return (self.parts["links"] + self.parts["weights"]) / self.seconds.value

    @property
    def gib(self) -> float:
        return self.plan.memory.total / 2**30

    @property
    def fits(self) -> bool:
        return bool(self.plan.fits)

    def days(self, tokens: float) -> Range:
        """Of a training on so many tokens."""
        rate = self.tokens_per_second_per_gpu
        return Range(*(tokens / (getattr(rate, name) * self.plan.environment.workers) / DAY for name in (HIGH, VALUE, LOW)))

    def dollars(self, tokens: float, price: float) -> Range:
        """price: of a GPU and hour."""
        days = self.days(tokens)
        return Range(*(getattr(days, name) * DAY / HOUR * self.plan.environment.workers * price for name in (LOW, VALUE, HIGH)))


@dataclass(frozen=True)
class Transfer:
    """A collective. us: alone. busy: for how long of it the link is full. outer: it crosses nodes."""

    us: float
    busy: float
    outer: bool


def beside(transfers: Sequence[Transfer], computing: float, carried: tuple[float, float], bound: str) -> float:
    """us that collectives take, one after the other, beside so many us of computation in which attention's messages fill the links for
    ``carried`` us: they get what is left of them, and all of it after the computation. At best they never meet attention's messages.
    """
    alone, busy = sum(t.us for t in transfers), sum(t.busy for t in transfers)
    if not alone or not computing or bound == LOW:
        return alone
    left = max(0.0, 1.0 - carried[transfers[0].outer] / computing)
    speed = min(1.0, left * alone / busy) if busy else 1.0
    return alone / speed if alone <= speed * computing else computing + alone - speed * computing


def predict_step(
    cluster: Cluster, plan: Plan, attention: Prediction, conditions: Conditions | None = None, *, bounds: bool = True
) -> PredictedStep:
    """attention: of a layer of the same plan, with recomputation if that is full."""
    slowest = max([1.0, *(conditions or Conditions()).slow.values()])
    found = {bound: _Step(cluster, plan, attention, attention.costs[bound], slowest) for bound in (BOUNDS if bounds else (VALUE,))}
    likely = found[VALUE]
    times = sorted(step.seconds for step in found.values())
    seconds = Range(times[0], likely.seconds, times[-1])
    model, train, workers = plan.config.model, plan.config.train, plan.environment.workers
    rate = Range(*(plan.tokens_per_step / getattr(seconds, name) / workers for name in (HIGH, VALUE, LOW)))
    seq = plan.config.seq
    executed = flops_per_token(
        model, seq, activation_checkpoint=train.activation_checkpoint, pairs=attention.facts["density"] * causal_pairs(seq),
        padded_seq=plan.layout.padded_seq,
    )  # fmt: skip
    peak = cluster.gpu.peak_tflops.value * 1e12
    return PredictedStep(
        plan, seconds, likely.parts, likely.hidden, rate,
        rate.value * plan.flops.model / peak, rate.value * executed.executed / peak,
    )  # fmt: skip


class _Step:
    """The sum of a step under one bound."""

    def __init__(self, cluster: Cluster, plan: Plan, attention: Prediction, costs: Costs, slowest: float) -> None:
        self.cluster, self.plan, self.attention, self.costs, self.slowest = cluster, plan, attention, costs, slowest
        self.rest = rest = Rest.of(plan)
        layers, full = plan.config.model.num_layers, plan.config.train.activation_checkpoint == "full"
        self.us = dict.fromkeys(PARTS, 0.0)
        self.hidden = 0.0
        gather, reduce = self._transfer(rest.gather), self._transfer(rest.reduce)
        forward = self._layers([FORWARD], [priced(rest.forward, costs)], layers)
        self._weights(forward / layers, self._carried(FORWARD), [gather], layers - 1)
        passes = [RECOMPUTE, BACKWARD] if full else [BACKWARD]
        again = priced(rest.recomputed, costs)
        backward = self._layers(passes, [priced(rest.backward, costs)], layers, again)
        carried = tuple(sum(self._carried(name)[i] for name in passes) for i in (0, 1))
        # Beside the last layer nothing is to be scattered yet, beside the first nothing to be gathered.
        for transfers, times in (([gather], 1), ([gather, reduce], layers - 2), ([reduce], 1)):
            self._weights(backward / layers, (carried[0], carried[1]), transfers, times if layers > 1 else 0)
        # Weights outside of the layers and of the first layer; of the last one at the start of backward; gradients that come last.
        alone = [self._transfer(rest.root_gather), gather, gather, reduce, self._transfer(rest.root_reduce)]
        self.us["weights"] += sum(transfer.us for transfer in alone)
        self._add(priced(rest.loss, costs), 1, "loss", "loss")
        for name in PARTS:
            self.us[name] *= plan.micro_batches
        self.hidden *= plan.micro_batches
        self._add(priced(rest.optimizer, costs), 1, "optimizer", "optimizer")
        self.us["optimizer"] += self._transfer(1.0).us
        self.us["host"] += costs.burden(cluster.gpu.step_ms) * 1e3

    @property
    def parts(self) -> dict[str, float]:
        return {name: us / 1e6 for name, us in self.us.items()}

    @property
    def seconds(self) -> float:
        return sum(self.us.values()) / 1e6

    def _carried(self, direction: str) -> tuple[float, float]:
        inner, outer = self.attention.passes[direction].carried
        return inner * 1e3, outer * 1e3

    def _layers(self, passes: list[str], work: list[Spent], layers: int, again: Spent | None = None) -> float:
        """Adds what all layers compute -> us."""
        before = sum(self.us.values())
        for name in passes:
            self._attention(name, layers)
        for spent in work:
            self._add(spent, layers, "matrices", "element-wise")
        if again is not None:
            self._add(again, layers, "recomputed", "element-wise")
        return sum(self.us.values()) - before

    def _attention(self, direction: str, layers: int) -> None:
        found = self.attention.passes[direction]
        duration = getattr(found.duration, self.costs.bound)
        spent = found.spent
        parts: Mapping[str, float] = {
            "attention": spent["attention"] + spent["columns"], "index": spent["index"],
            "merge and copies": spent["merge"] + spent["arrange"],
            "links": sum(found.exposed.values()), "host": spent["gap"],
        }  # fmt: skip
        # Under a bound the parts are not known, only their sum.
        scale = duration / found.duration.value if found.duration.value else 1.0
        for name, ms in parts.items():
            self.us[name] += ms * 1e3 * layers * scale
        # Who ends a pass early waits for the others, at the latest where weights are gathered.
        self.us["late"] += max(0.0, found.duration.value - sum(parts.values())) * 1e3 * layers * scale

    def _add(self, spent: Spent, times: float, matrices: str, elements: str) -> None:
        self.us[matrices] += spent.matrices * times * self.slowest
        self.us[elements] += spent.elements * times * self.slowest
        self.us["host"] += spent.host * times

    def _transfer(self, size: float) -> Transfer:
        workers = self.plan.environment.workers
        if workers == 1:
            return Transfer(0.0, 0.0, False)
        members = min(workers, self.cluster.gpus_per_node)
        us, busy = self.costs.collective(False, workers, members, int(size))
        return Transfer(us, busy, members < workers)

    def _weights(self, computing: float, carried: tuple[float, float], transfers: Sequence[Transfer], times: int) -> None:
        """Adds what the weights of so many layers cost beside the computation of one."""
        if not times:
            return
        needed = beside(transfers, computing, carried, self.costs.bound)
        hidden = min(needed, computing)
        share = self.costs.burden(self.cluster.link(outer=transfers[0].outer).gpu_share) if needed else 0.0
        late = 0.0
        if self.costs.bound == HIGH and needed:
            late = min(needed, carried[transfers[0].outer])
        self.us["weights"] += times * (needed - hidden + share * hidden + late)
        self.hidden += times * hidden / 1e6
