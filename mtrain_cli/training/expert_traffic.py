"""What experts move, and what that costs: rows of tokens, or weights; and which degrees fit.

With expert parallelism, a token's row travels once to each other worker that has some of its
experts, and one row returns from there: this module says how many. Without it, FSDP gathers the
weights of all experts and reduces their gradients. `topology.expert_parallel=auto` takes the degree
with the cheapest step in one layer with experts: its computation, what waits for rows or weights,
copies, and the wait for numbers of rows. Loads are equal. Only counts and constants enter, no
measurements, so that all ranks choose the same degree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.config.cluster import cluster_of
from mtrain_cli.config.schema import Config, ConfigError, ModelConfig, MoeConfig
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.model.tiling import ONE_ADDITION, expert_chunks, scored_row
from mtrain_cli.parallel.fsdp import sharded_dimension
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.traffic import Rates
from mtrain_cli.step.program import (
    EXPERTS_IN,
    EXPERTS_OUT,
    Layer,
    Message,
    MessageCost,
    Post,
    time,
    traffic,
    weight_messages,
)
from mtrain_cli.training.flops import assumed_density, causal_pairs, own_tiles, training_flops
from mtrain_cli.training.state_memory import BYTES

_ROW = 16  # bytes: grouped products on a GPU need widths that are a multiple of this
# Time per layer and micro-batch that a degree above 1 takes beyond products, rows, copies and
# messages, in microseconds. In the forward pass of each layer the host waits for the numbers of
# rows, so it cannot queue work ahead. Two H200s of one host, 8 layers of Qwen3-30B-A3B, degree 2
# against 1 (docs/benchmarks.md): 2.1 ms at 16K, 1.5 at 32K and 3.8 at 128K. This is their mean.
HOST_WAIT_US = 2500.0
# A larger degree must take less than this share of the time of a smaller one: prices are not exact.
_WORTH_IT = 0.97


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes that reach one worker in an optimizer step, for the experts of one layer.

    rows, weights: with their gradients; rows if tokens choose their experts at random.
    """

    rows: int
    weights: int

    @property
    def total(self) -> int:
        return self.rows + self.weights


def expert_traffic(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, degree: int
) -> ExpertTraffic:
    """Return the bytes of an expert-parallel degree (see `step.program`)."""
    model, train, moe = config.model, config.train, config.model.moe
    workers = _workers(dims)
    micro_batches = train.global_batch // (train.micro_batch * dims.dp)
    tokens = train.micro_batch * layout.tokens_per_worker / dims.tp
    layer = Layer(experts=True, checkpointed=train.activation_checkpoint != "none")
    sizes_of_rows = message_bytes(model, dtype_bytes)
    row = traffic(layer.forward(), sizes_of_rows) + traffic(layer.backward(), sizes_of_rows)
    rows = micro_batches * tokens * rows_per_token(moe, degree) * row
    whole = 3 * moe.experts * moe.expert_size * model.hidden_size / degree
    # With degree 1, the workers of a tensor group have the same shard and add up its gradients.
    copies = dims.tp if degree == 1 else 1
    others = 1 - degree * copies / workers
    e, r = dtype_bytes, BYTES[train.reduce_dtype]
    sizes = {Message.GATHER: e, Message.GATHER_AGAIN: e, Message.REDUCE: r}
    bytes_each = traffic(weight_messages(train.shard, micro_batches), sizes)
    summed = summed_bytes(whole, copies, workers)
    return ExpertTraffic(round(rows), round(whole * others * bytes_each + summed))


def summed_bytes(elements: float, copies: int, workers: int) -> float:
    """Return the bytes that reach a worker in the all-reduce of copied gradients, in float32.

    It adds up the shard of ``elements`` weights of ``copies`` of all ``workers`` of a stage.
    """
    return 2 * (1 - 1 / copies) * 4 * elements * copies / workers


def require_experts_fit(config: Config, dims: ParallelDims, dtype_bytes: int, device: str) -> None:
    """Raise ConfigError if the experts do not fit the workers, or a GPU their sizes."""
    given = config.topology.expert_parallel
    if not config.model.moe.experts:
        return
    if isinstance(given, int) and (problem := degree_problem(config, dims, given)) is not None:
        allowed = ", ".join(map(str, allowed_degrees(config, dims)))
        raise ConfigError(f"topology.expert_parallel={given}: {problem}; allowed: auto, {allowed}")
    if device == "cuda" and (problem := grouped_problem(config, dtype_bytes)) is not None:
        raise ConfigError(problem)


def degrees_in_a_node(config: Config, dims: ParallelDims, per_node: int) -> list[int]:
    """Return the allowed degrees whose groups stay in a node, from which `auto` chooses."""
    return [n for n in allowed_degrees(config, dims) if per_node % n == 0]


def allowed_degrees(config: Config, dims: ParallelDims) -> list[int]:
    most = min(_workers(dims), config.model.moe.experts)
    return [n for n in range(1, most + 1) if degree_problem(config, dims, n) is None]


def degree_problem(config: Config, dims: ParallelDims, degree: int) -> str | None:
    """Return why a degree does not fit, or None if it fits."""
    workers, moe = _workers(dims), config.model.moe
    if workers % degree:
        of_stage = f" of a stage (topology.pipeline_parallel={dims.pp})" if dims.pp > 1 else ""
        return f"does not divide the {with_count(workers, 'worker')}{of_stage}"
    if moe.experts % degree:
        return f"does not divide model.moe.experts={moe.experts}"
    sizes = (moe.experts, 2 * moe.expert_size, config.model.hidden_size)
    shards = workers // degree
    if degree > 1:
        for shape in (sizes, (sizes[0], sizes[2], moe.expert_size)):
            if sharded_dimension(shape, shards) is None:
                return (
                    f"leaves {with_count(shards, 'worker')} to share an expert's weight of "
                    f"{shape[1]} x {shape[2]}, and neither size is a multiple of {shards}"
                )
    return None


def _workers(dims: ParallelDims) -> int:
    return dims.dp * dims.cp * dims.tp


def grouped_problem(config: Config, dtype_bytes: int) -> str | None:
    sizes = {
        "model.moe.expert_size": config.model.moe.expert_size,
        "model.hidden_size": config.model.hidden_size,
    }
    for key, size in sizes.items():
        if size * dtype_bytes % _ROW:
            return f"{key}={size}: grouped products need a multiple of {_ROW // dtype_bytes}"
    return None


def reached(loads_PN: np.ndarray, moe: MoeConfig) -> np.ndarray:
    """Return the share of tokens that choose an expert of each worker, ``[P]``.

    Exact for equal loads of experts, and for one expert per token; else an estimate, between the
    largest load of an expert and the sum of loads.

    loads_PN: share of tokens that choose each expert of each worker.
    """
    # Without replacement: each choice falls on one of the experts that are left.
    share_P, none_P = loads_PN.sum(-1) / moe.top_k, np.ones(len(loads_PN))
    for chosen in range(moe.top_k):
        none_P *= np.maximum(0.0, 1.0 - share_P * moe.experts / (moe.experts - chosen))
    return np.clip(1.0 - none_P, loads_PN.max(-1), np.minimum(1.0, loads_PN.sum(-1)))


def rows_per_token(moe: MoeConfig, degree: int) -> float:
    """Return to how many other workers a token is sent, in the mean of random choices."""
    loads = np.full((1, moe.experts // degree), moe.top_k / moe.experts)
    return (degree - 1) * float(reached(loads, moe)[0])


def message_bytes(model: ModelConfig, dtype_bytes: int) -> dict[Message, int]:
    """Return the bytes of a token's row in each kind of message."""
    # There with a score and a place of each choice, back with the gradient of its score.
    numbers = {Message.ROWS: 0, Message.ROWS_BACK: 0, Message.SCORED: 2, Message.SCORED_BACK: 1}
    return {
        message: dtype_bytes * scored_row(model.hidden_size, dtype_bytes, each * model.moe.top_k)
        for message, each in numbers.items()
    }


def copied_rows(moe: MoeConfig, degree: int, *, recomputes: bool) -> tuple[float, float]:
    """Return how often rows are read or written because they travel, per pair: forward, backward.

    A token is read, and written to each message; its sums are written, and read when they return.
    If layers are checkpointed, rows travel twice in backward.
    """
    if degree == 1:
        return 0.0, 0.0
    rows = (1 + rows_per_token(moe, degree)) / moe.top_k
    return 3 * rows, (3 + recomputes) * rows


def summed_gradients(weights: float, e: int, chunks: int) -> float:
    """Return the bytes that adding up gradients of ``weights`` expert weights reads and writes.

    More than two chunks are added up in float32.
    """
    if chunks > ONE_ADDITION:
        return weights * ((8 + 2 * e) * chunks + 4 + e)
    return weights * e * 3 * (chunks > 1)


def chunks_of_tokens(config: Config, tokens: int, e: int, degree: int) -> int:
    """Return the number of chunks in which the experts compute own tokens."""
    model, topology = config.model, config.topology
    return expert_chunks(
        tokens, model.hidden_size, model.moe, e, config.train.tile_mib << 20,
        degree=degree, chunks=topology.expert_chunks,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpertPrice:
    """Seconds of a step in one layer, and bytes, of an expert-parallel degree."""

    degree: int
    seconds: float
    traffic: ExpertTraffic


@dataclass(frozen=True)
class ExpertRun:
    """A run whose expert-parallel degree may be open. e: bytes of the compute dtype."""

    config: Config
    dims: ParallelDims
    layout: Layout
    e: int
    per_node: int

    @property
    def degree(self) -> int:
        """The given degree, or the cheapest one in a node for `auto`; 1 for a dense model."""
        given = self.config.topology.expert_parallel
        if not self.config.model.moe.experts:
            return 1
        return given if isinstance(given, int) else self.cheapest().degree

    def cheapest(self) -> ExpertPrice:
        """Return the price of the cheapest degree, or of a smaller one that costs as much."""
        prices = self.prices()
        least = min(price.seconds for price in prices)
        return next(price for price in prices if _WORTH_IT * price.seconds <= least)

    def prices(self) -> list[ExpertPrice]:
        return [self.price(n) for n in degrees_in_a_node(self.config, self.dims, self.per_node)]

    def price(self, degree: int) -> ExpertPrice:
        computing = self.computing()
        rows, experts = self.rows(degree)
        # The host waits for numbers of rows, so weights of the next layer are gathered only behind
        # the experts of the forward pass.
        forward = computing / 4 if degree == 1 else experts
        beyond = rows + self.weights(degree, forward, computing * 3 / 4)
        received = expert_traffic(self.config, self.dims, self.layout, self.e, degree)
        return ExpertPrice(degree, self.micro_batches * (computing + beyond), received)

    def row_seconds(self) -> float:
        """Return the seconds that rows cost a step in one layer; 0 if the degree is open."""
        degree = self.config.topology.expert_parallel
        if not self.config.model.moe.experts or not isinstance(degree, int):
            return 0.0
        return self.micro_batches * self.rows(degree)[0]

    @property
    def micro_batches(self) -> int:
        train = self.config.train
        return train.global_batch // (train.micro_batch * self.dims.dp)

    @property
    def rates(self) -> Rates:
        return Rates.on(cluster_of(self.config.topology.cluster))

    def computing(self) -> float:
        """Return the seconds of computation of a layer in a micro-batch, in all passes."""
        config = self.config
        pairs = assumed_density(config) * causal_pairs(config.seq)
        flop = training_flops(config, self.layout, sharing=1, dtype_bytes=self.e, pairs=pairs)
        tokens = config.seq * config.train.micro_batch / (self.dims.cp * self.dims.tp)
        return flop.executed * tokens / config.model.num_layers / self.rates.flops

    def rows(self, degree: int) -> tuple[float, float]:
        """Return the seconds of rows in a micro-batch, and of the experts in a forward pass."""
        if degree == 1:
            return 0.0, 0.0
        config, model, rates = self.config, self.config.model, self.rates
        recomputes = config.train.activation_checkpoint != "none"
        tokens, _ = own_tiles(config, self.layout, self.e)
        pairs = tokens * model.moe.top_k
        chunks = chunks_of_tokens(config, tokens, self.e, degree)
        latency, bandwidth, share = rates.collective(outer=self.per_node % degree > 0)
        leave = tokens * rows_per_token(model.moe, degree)
        sizes = message_bytes(model, self.e)

        def cost(post: Post) -> MessageCost | None:
            if post.message not in sizes:
                return None
            size = leave * post.rows * sizes[post.message]
            us = 1e6 * (latency + size / bandwidth)
            return MessageCost(us, us, size)

        layer = Layer(experts=True, checkpointed=recomputes, units=chunks)
        product = 2e6 * pairs * model.hidden_size * model.moe.expert_size / rates.flops  # us
        products = {EXPERTS_IN: 2 * product, EXPERTS_OUT: product}
        passes = [time(program, products, cost) for program in (layer.forward(), layer.backward())]
        copied = sum(copied_rows(model.moe, degree, recomputes=recomputes))
        copies = copied * pairs * model.hidden_size * self.e
        copies += summed_gradients(self._elements(degree), self.e, chunks)
        waits = HOST_WAIT_US + sum(taken.exposed + share * taken.hidden for taken in passes)
        return 1e-6 * waits + copies / rates.memory, 1e-6 * passes[0].span

    def weights(self, degree: int, forward: float, backward: float) -> float:
        """Return the seconds that gathers and reductions cost a layer in a micro-batch.

        forward, backward: seconds of computation that hide them.
        """
        train, rates, e = self.config.train, self.rates, self.e
        elements, r = self._elements(degree), BYTES[train.reduce_dtype]
        workers = _workers(self.dims)
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
        moe = self.config.model.moe
        return 3 * moe.experts // degree * moe.expert_size * self.config.model.hidden_size
