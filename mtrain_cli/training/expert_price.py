"""Price expert-parallel degrees in seconds; `topology.expert_parallel=auto` takes the cheapest.

The price of a degree is the time of a step in one layer with experts: its computation, what waits
for rows or weights, copies of rows and weights, and the wait for numbers of rows. Loads are equal.
Only counts and constants enter, no measurements, so all ranks choose the same degree.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.traffic import Rates
from mtrain_cli.step.interpreters import MessageCost, time, traffic
from mtrain_cli.step.layer import EXPERTS_IN, EXPERTS_OUT, Layer
from mtrain_cli.step.program import Message, Post
from mtrain_cli.step.weights import weight_messages
from mtrain_cli.training.expert_traffic import (
    HOST_WAIT_US,
    ExpertTraffic,
    chunks_and_parts,
    copied_rows,
    degrees_in_a_node,
    expert_traffic,
    message_bytes,
    summed_gradients,
)
from mtrain_cli.training.flops import assumed_density, causal_pairs, own_tiles, training_flops
from mtrain_cli.training.state_memory import BYTES

# A larger degree must take less than this share of the time of a smaller one: prices are not exact.
_WORTH_IT = 0.97


@dataclass(frozen=True)
class ExpertPrice:
    """The price of an expert-parallel degree.

    seconds: time of a step in one layer.
    traffic: bytes that reach a worker.
    """

    seconds: float
    traffic: ExpertTraffic

    @property
    def degree(self) -> int:
        return self.traffic.degree


@dataclass(frozen=True)
class ExpertRun:
    """A run whose expert-parallel degree may be open.

    e: bytes of the compute dtype.
    per_node: number of workers of a node.
    """

    config: Config
    dims: ParallelDims
    layout: Layout
    e: int
    per_node: int

    @property
    def degree(self) -> int:
        """The expert-parallel degree (`require_experts_fit`).

        `auto` takes the cheapest degree, among those that stay in a node. A plan with
        `train.memory=auto` has chosen a number before (`memory_search`).
        """
        given = self.config.topology.expert_parallel
        if not self.config.model.moe.experts:
            return 1
        return given if isinstance(given, int) else self.cheapest().degree

    def cheapest(self) -> ExpertPrice:
        """Return the price of the cheapest degree, or of a smaller one that costs as much."""
        found = self.prices()
        least = min(each.seconds for each in found)
        return next(each for each in found if _WORTH_IT * each.seconds <= least)

    def prices(self) -> list[ExpertPrice]:
        """Return the prices of the degrees whose groups stay in a node, smallest degree first."""
        degrees = degrees_in_a_node(self.config, self.dims, self.per_node)
        return [self.price(degree) for degree in degrees]

    def price(self, degree: int) -> ExpertPrice:
        """Return the price of an expert-parallel degree."""
        computing = self.computing()
        rows, experts = self.rows(degree)
        # The host waits for numbers of rows, so weights of the next layer are gathered only behind
        # the experts of the forward pass.
        forward = computing / 4 if degree == 1 else experts
        beyond = rows + self.weights(degree, forward, computing * 3 / 4)
        traffic = expert_traffic(self.config, self.dims, self.layout, self.e, degree)
        return ExpertPrice(self.micro_batches * (computing + beyond), traffic)

    def row_seconds(self) -> float:
        """Return the seconds that rows cost a step in one layer; 0 if the degree is open."""
        degree = self.config.topology.expert_parallel
        if not self.config.model.moe.experts or not isinstance(degree, int):
            return 0.0
        return self.micro_batches * self.rows(degree)[0]

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a worker in an optimizer step."""
        train = self.config.train
        return train.global_batch // (train.micro_batch * self.dims.dp)

    @property
    def rates(self) -> Rates:
        name = self.config.topology.cluster
        cluster = None if name == "auto" else load_cluster(name, f"topology.cluster={name}")
        return Rates.on(cluster)

    def computing(self) -> float:
        """Return the seconds of computation of a layer in a micro-batch, in all passes."""
        config = self.config
        pairs = assumed_density(config) * causal_pairs(config.seq)
        flop = training_flops(config, self.layout, sharing=1, dtype_bytes=self.e, pairs=pairs)
        tokens = config.seq * config.train.micro_batch / (self.dims.cp * self.dims.tp)
        return flop.executed * tokens / config.model.num_layers / self.rates.flops

    def rows(self, degree: int) -> tuple[float, float]:
        """Return the seconds that rows cost a layer in a micro-batch, and those of a forward pass.

        The second number is that of the experts alone.
        """
        if degree == 1:
            return 0.0, 0.0
        config, model, rates = self.config, self.config.model, self.rates
        recomputes = config.train.activation_checkpoint != "none"
        tokens, _ = own_tiles(config, self.layout, self.e)
        pairs = tokens * model.moe.top_k
        chunks, parts = chunks_and_parts(config, tokens, self.e, degree)
        latency, bandwidth, share = rates.collective(outer=self.per_node % degree > 0)
        leave = pairs * (degree - 1) / degree
        sizes = message_bytes(model.hidden_size, self.e)

        def cost(post: Post) -> MessageCost | None:
            if post.message not in sizes:
                return None
            size = leave * post.rows * sizes[post.message]
            us = 1e6 * (latency + size / bandwidth)
            return MessageCost(us, us, size)

        layer = Layer(experts=True, checkpointed=recomputes, units=chunks * parts)
        product = 2e6 * pairs * model.hidden_size * model.moe.expert_size / rates.flops  # us
        products = {EXPERTS_IN: 2 * product, EXPERTS_OUT: product}
        found = [time(program, products, cost) for program in (layer.forward(), layer.backward())]
        copies = (
            sum(copied_rows(degree, recomputes=recomputes)) * pairs * model.hidden_size * self.e
        )
        copies += summed_gradients(self._elements(degree), self.e, chunks, parts)
        waits = HOST_WAIT_US + sum(each.exposed + share * each.hidden for each in found)
        return 1e-6 * waits + copies / rates.memory, 1e-6 * found[0].span

    def weights(self, degree: int, forward: float, backward: float) -> float:
        """Return the seconds that gathers and reductions of experts cost a layer in a micro-batch.

        Args:
            forward, backward: seconds of computation with which they overlap in each pass.
        """
        train, rates, e = self.config.train, self.rates, self.e
        elements, r = self._elements(degree), BYTES[train.reduce_dtype]
        workers = self.dims.dp * self.dims.cp * self.dims.tp  # of a stage
        messages = weight_messages(train.shard, self.micro_batches)
        gathers, again, reductions = (
            traffic(messages, {message: 1 / self.micro_batches})
            for message in (Message.GATHER, Message.GATHER_AGAIN, Message.REDUCE)
        )
        copies = elements * (2 * e * (gathers + again) + (e + r) * reductions) / rates.memory
        if workers == degree:
            return copies
        latency, bandwidth, share = rates.collective(outer=workers > self.per_node)
        others = elements * (1 - degree / workers)

        def waits(messages: float, size: float, overlapping: float) -> float:
            seconds = messages * latency + size / bandwidth
            return max(0.0, seconds - overlapping) + share * min(seconds, overlapping)

        return (
            copies
            + waits(gathers, gathers * e * others, forward)
            + waits(again + reductions, (again * e + reductions * r) * others, backward)
        )

    def _elements(self, degree: int) -> float:
        """Return the number of elements of the experts of a layer that a worker computes with."""
        moe = self.config.model.moe
        return 3 * moe.experts // degree * moe.expert_size * self.config.model.hidden_size
