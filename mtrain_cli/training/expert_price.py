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
from mtrain_cli.model.tiling import expert_chunks, expert_parts
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.rates import Rates
from mtrain_cli.step.interpreters import MessageCost, time, traffic
from mtrain_cli.step.layer import EXPERTS_IN, EXPERTS_OUT, Layer
from mtrain_cli.step.program import Message, Post
from mtrain_cli.step.weights import weight_messages
from mtrain_cli.training.expert_rows import (
    HOST_WAIT_US,
    copied_rows,
    message_bytes,
    summed_gradients,
)
from mtrain_cli.training.expert_traffic import ExpertTraffic, degrees_in_a_node, expert_traffic
from mtrain_cli.training.flops import assumed_density, causal_pairs, training_flops
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
class _Run:
    """A run whose degree is not yet known.

    e: bytes of the compute dtype.
    per_node: number of workers of a node.
    """

    config: Config
    dims: ParallelDims
    layout: Layout
    e: int
    per_node: int

    @property
    def tokens(self) -> int:
        """Own tokens of a worker in a micro-batch."""
        return -(-self.layout.tokens_per_worker * self.config.train.micro_batch // self.dims.tp)

    @property
    def workers(self) -> int:
        """Number of workers of a stage."""
        return self.dims.dp * self.dims.cp * self.dims.tp

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

    def chunks_and_parts(self, degree: int) -> tuple[int, int]:
        """Return the number of chunks of tokens, and of parts of a worker's experts."""
        model, train = self.config.model, self.config.train
        chunks = expert_chunks(
            self.tokens, model.hidden_size, model.moe, self.e, train.tile_mib << 20,
            degree=degree, chunks=self.config.topology.expert_chunks,
        )  # fmt: skip
        return chunks, expert_parts(self.tokens, model.moe.experts // degree, chunks)

    def computing(self) -> float:
        """Return the seconds of computation of a layer in a micro-batch, in all passes."""
        config = self.config
        pairs = assumed_density(config) * causal_pairs(config.seq)
        flop = training_flops(config, self.layout, sharing=1, dtype_bytes=self.e, pairs=pairs)
        tokens = config.seq * config.train.micro_batch / (self.dims.cp * self.dims.tp)
        return flop.executed * tokens / config.model.num_layers / self.rates.flops


def price(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, per_node: int, degree: int
) -> ExpertPrice:
    """Return the price of an expert-parallel degree.

    Args:
        per_node: number of workers of a node.
    """
    run = _Run(config, dims, layout, dtype_bytes, per_node)
    computing = run.computing()
    rows, experts = _rows(run, degree)
    # The host waits for numbers of rows, so weights of the next layer are gathered only behind the
    # experts of the forward pass.
    forward = computing / 4 if degree == 1 else experts
    beyond = rows + _weights(run, degree, forward, computing * 3 / 4)
    traffic = expert_traffic(config, dims, layout, dtype_bytes, degree)
    return ExpertPrice(run.micro_batches * (computing + beyond), traffic)


def row_seconds(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, per_node: int
) -> float:
    """Return the seconds that rows cost a step in one layer, with the degree of ``config``."""
    degree, run = config.topology.expert_parallel, _Run(config, dims, layout, dtype_bytes, per_node)
    if not config.model.moe.experts or not isinstance(degree, int):
        return 0.0
    return run.micro_batches * _rows(run, degree)[0]


def _rows(run: _Run, degree: int) -> tuple[float, float]:
    """Return the seconds that rows cost a layer in a micro-batch, and those of a forward pass.

    The second number is that of the experts alone.
    """
    if degree == 1:
        return 0.0, 0.0
    model, rates = run.config.model, run.rates
    kind = run.config.train.activation_checkpoint
    pairs = run.tokens * model.moe.top_k
    chunks, parts = run.chunks_and_parts(degree)
    inside = run.per_node % degree == 0
    latency = rates.inner_latency if inside else rates.outer_latency
    bandwidth = rates.inner if inside else rates.outer
    share = rates.inner_share if inside else rates.outer_share
    leave = pairs * (degree - 1) / degree
    sizes = message_bytes(model.hidden_size, run.e)

    def cost(post: Post) -> MessageCost | None:
        if post.message not in sizes:
            return None
        size = leave * post.rows * sizes[post.message]
        us = 1e6 * (latency + size / bandwidth)
        return MessageCost(us, us, size)

    layer = Layer(experts=True, checkpointed=kind != "none", units=chunks * parts)
    product = 2e6 * pairs * model.hidden_size * model.moe.expert_size / rates.flops  # us
    products = {EXPERTS_IN: 2 * product, EXPERTS_OUT: product}
    found = [time(program, products, cost) for program in (layer.forward(), layer.backward())]
    copies = sum(copied_rows(degree, kind)) * pairs * model.hidden_size * run.e
    copies += summed_gradients(_weights_of(run, degree), run.e, chunks, parts)
    waits = HOST_WAIT_US + sum(each.exposed + share * each.hidden for each in found)
    return 1e-6 * waits + copies / rates.memory, 1e-6 * found[0].span


def _weights(run: _Run, degree: int, forward: float, backward: float) -> float:
    """Return the seconds that gathers and reductions of experts cost a layer in a micro-batch.

    Args:
        forward, backward: seconds of computation with which they overlap in each pass.
    """
    train, rates = run.config.train, run.rates
    weights, r = _weights_of(run, degree), BYTES[train.reduce_dtype]
    sharing = run.workers // degree
    micro_batches = run.micro_batches
    messages = weight_messages(train.shard, micro_batches)
    gathers, again, reductions = (
        traffic(messages, {message: 1 / micro_batches})
        for message in (Message.GATHER, Message.GATHER_AGAIN, Message.REDUCE)
    )
    copies = weights * (2 * run.e * (gathers + again) + (run.e + r) * reductions) / rates.memory
    if sharing == 1:
        return copies
    inside = run.workers <= run.per_node
    latency = rates.inner_latency if inside else rates.outer_latency
    bandwidth = rates.inner if inside else rates.outer
    share = rates.inner_share if inside else rates.outer_share
    others = weights * (1 - 1 / sharing)

    def waits(messages: float, size: float, overlapping: float) -> float:
        seconds = messages * latency + size / bandwidth
        return max(0.0, seconds - overlapping) + share * min(seconds, overlapping)

    return (
        copies
        + waits(gathers, gathers * run.e * others, forward)
        + waits(again + reductions, (again * run.e + reductions * r) * others, backward)
    )


def _weights_of(run: _Run, degree: int) -> float:
    """Return the number of elements of the experts of a layer that a worker computes with."""
    moe = run.config.model.moe
    return 3 * moe.experts // degree * moe.expert_size * run.config.model.hidden_size


def expert_degree(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, per_node: int
) -> int:
    """Return the expert-parallel degree of a run (`require_experts_fit`).

    `auto` takes the cheapest degree, among those that stay in a node. A plan with
    `train.memory=auto` has chosen a number before (`memory_search`).

    Args:
        per_node: number of workers of a node.
    """
    given = config.topology.expert_parallel
    if not config.model.moe.experts:
        return 1
    if isinstance(given, int):
        return given
    return cheapest(config, dims, layout, dtype_bytes, per_node).degree


def cheapest(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, per_node: int
) -> ExpertPrice:
    """Return the price of the cheapest degree in a node, or of a smaller one that costs as much."""
    found = prices(config, dims, layout, dtype_bytes, per_node)
    least = min(each.seconds for each in found)
    return next(each for each in found if _WORTH_IT * each.seconds <= least)


def prices(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, per_node: int
) -> list[ExpertPrice]:
    """Return the prices of the degrees whose groups stay in a node, the smallest degree first."""
    return [
        price(config, dims, layout, dtype_bytes, per_node, degree)
        for degree in degrees_in_a_node(config, dims, per_node)
    ]
