"""Predict a layer's experts: their loads, products, router, element-wise kernels and messages.

An expert with few tokens still reads its whole matrix, so uneven loads take longer, though the FLOP
are the same. A Zipf distribution does not say which expert is popular: the expected case is the
random deal with the median load of the busiest worker; the best case deals the experts evenly, and
the worst case gives the most popular ones to one worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.config.cluster import Cluster, Constant, Link
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.records.expert_loads import LOAD_PARTS, LOADS, analyse_experts
from mtrain_cli.records.record_files import open_records
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.step.program import (
    EXPERTS_IN,
    EXPERTS_OUT,
    Layer,
    Message,
    MessageCost,
    PassTime,
    Post,
    Program,
    layers,
    time,
    work,
)
from mtrain_cli.training.expert_traffic import (
    HOST_WAIT_US,
    chunks_of_tokens,
    copied_rows,
    message_bytes,
    reached,
    summed_gradients,
)
from mtrain_cli.training.flops import layer_shapes, own_tiles
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.run_plan import message_bytes as context_message_bytes

_BFLOAT16 = 2  # bytes
_GUESS = "; not measured"
GROUPED = Constant(
    0.85, "measured",
    "rate of grouped products, of that of large products; an H200, 128 experts of 2048 x 768",
    0.68, 0.98,
)  # fmt: skip
ROUTER = Constant(
    0.5, "guess", f"rate of the router's bfloat16 products, of the same rate{_GUESS}", 0.2, 0.8
)
FLOAT32 = Constant(
    0.07, "guess", f"rate of the router's float32 products, of the same rate{_GUESS}", 0.05, 0.4
)
EXPERT_LAUNCHES = Constant(
    60, "guess", f"number of kernels of router and experts in forward, twice in backward{_GUESS}",
    30, 150,
)  # fmt: skip


_COUNT = 8  # bytes of a number of rows
_PRODUCTS = {EXPERTS_IN: 2, EXPERTS_OUT: 1}  # relative size of the products
WAIT_FOR_NUMBERS = Constant(
    HOST_WAIT_US, "measured",
    "us per layer and micro-batch without work for the GPU, as the host waits for numbers of rows, "
    "and all else that predictions lack; two H200s, 8 layers of Qwen3-30B-A3B, 16K to 128K",
    300, 6000,
)  # fmt: skip
EXAMPLE = "zipf:X with X from 0 (equal loads) to 3, or a profile of experts"
_MOST = 3.0
_DRAWS = 101  # of the experts of a worker
_TOKENS = 1_000_000  # for ratios of loads


@dataclass(frozen=True)
class ExpertLoads:
    """How many tokens choose each expert. All workers' tokens have the same loads.

    exponent: the expert of rank r gets a share ~ 1 / r^exponent.
    shares: recorded share of each expert in its layer's tokens, by layer; empty for Zipf.
    """

    exponent: float = 0.0
    source: str = "zipf:0, equal loads (the default of --expert-loads)"
    shares: tuple[tuple[float, ...], ...] = ()

    def pairs(self, tokens: int, experts: int, top_k: int) -> np.ndarray:
        """Return the number of pairs of each expert, [layers, experts].

        A Zipf distribution has one layer, whose loads descend; no expert has more pairs than
        tokens.
        """
        if self.shares:
            return np.array(self.shares) * (tokens * top_k)
        shares = 1.0 / np.arange(1, experts + 1) ** self.exponent
        left, found = float(tokens * top_k), np.zeros(experts)
        for rank in range(experts):  # from the most loaded; what it cannot take goes to the others
            found[rank] = min(tokens, left * shares[rank] / shares[rank:].sum())
            left -= found[rank]
        return found[None]

    def dealt(
        self, tokens: int, experts: int, top_k: int, workers: int, bound: str = VALUE
    ) -> np.ndarray:
        """Return the pairs of the experts of each worker, [layers, workers, experts / workers]."""
        pairs = self.pairs(tokens, experts, top_k)
        if not self.shares and workers > 1 and self.exponent:
            pairs = pairs[:, _order(self.exponent, experts, top_k, workers, bound)]
        return pairs.reshape(len(pairs), workers, -1)

    def busiest(self, experts: int, top_k: int, workers: int) -> float:
        """Return the largest load of a worker, divided by the mean; mean over layers."""
        loads = self.dealt(_TOKENS, experts, top_k, workers).sum(-1)
        return float((loads.max(1) / loads.mean(1)).mean())


@lru_cache(maxsize=64)
def _order(exponent: float, experts: int, top_k: int, workers: int, bound: str) -> np.ndarray:
    """Return the ranks of the experts in the order in which consecutive workers hold them."""
    ranks = np.arange(experts)
    if bound == HIGH:
        return ranks
    pairs = ExpertLoads(exponent).pairs(_TOKENS, experts, top_k)[0]
    if bound == LOW:
        held: list[list[int]] = [[] for _ in range(workers)]
        for rank in ranks.tolist():  # to the worker with the fewest pairs that still has room
            open_ones = (each for each in held if len(each) < experts // workers)
            min(open_ones, key=lambda each: float(pairs[each].sum())).append(rank)
        return np.array(held).flatten()
    generator = np.random.default_rng(0)
    draws = [generator.permutation(experts) for _ in range(_DRAWS)]
    draws.sort(key=lambda draw: float(pairs[draw].reshape(workers, -1).sum(1).max()))
    return draws[_DRAWS // 2]


def parse_loads(text: str | None, model: ModelConfig) -> ExpertLoads:
    """Return the loads that ``expert_loads`` names: zipf:X, or a profile with loads of experts.

    Raises:
        ConfigError: the value is wrong, or the model has no experts.
    """
    if text is None:
        return ExpertLoads()

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"expert_loads={text}: {why}")

    wanted = model.moe.experts
    if not wanted:
        raise refuse(f"{model.name} has no experts; choose another, such as model=qwen3_30b_a3b")
    kind, colon, value = text.partition(":")
    if kind == "zipf" and colon:
        with suppress(ValueError):
            if 0 <= (exponent := float(value)) <= _MOST:
                return ExpertLoads(exponent, f"zipf:{exponent:g}")
        raise refuse(f"give {EXAMPLE}")
    folders = [Path(parent, text, inside) for parent in ("", "runs") for inside in ("", "profile")]
    folder = next((f for f in folders if (f / LOADS).is_file() or (f / LOAD_PARTS).is_dir()), None)
    loads = [] if folder is None else analyse_experts(open_records(folder))
    recorded = next(iter(loads), None)
    if not text or recorded is None:
        raise refuse(f"holds no loads of experts; give {EXAMPLE}")
    shares = recorded.shares.mean(0, dtype=np.float64)
    if shares.shape[1] != wanted:
        raise refuse(f"has loads of {shares.shape[1]} experts, but model.moe.experts={wanted}")
    shares /= shares.sum(1, keepdims=True)
    largest = float((shares.max(1) * wanted).mean())
    source = (
        f"of {folder} (largest {largest:.2f} times the mean, over {len(shares)} layers and "
        f"{len(recorded.steps)} steps)"
    )
    return ExpertLoads(0.0, source, tuple(map(tuple, shares.tolist())))


@dataclass(frozen=True)
class GroupedProduct:
    """Equal matrix products, each limited by FLOP/s or by memory bandwidth.

    flop, moved: FLOP and bytes of one. share: its rate, divided by that of large products.
    """

    flop: float
    moved: float
    share: Constant
    times: float


@dataclass(frozen=True)
class ComputeCost:
    """The work of one part of a step.

    flop: of matrix products, without those in ``products``.
    moved: bytes that element-wise kernels read and write.
    launches: number of kernels.
    products: of routers and experts.
    spared: those of ``flop`` that take no time, because fp8 is faster.
    """

    flop: float = 0.0
    moved: float = 0.0
    launches: float = 0.0
    products: tuple[GroupedProduct, ...] = ()
    spared: float = 0.0

    def __add__(self, other: ComputeCost) -> ComputeCost:
        return ComputeCost(
            self.flop + other.flop,
            self.moved + other.moved,
            self.launches + other.launches,
            self.products + other.products,
            self.spared + other.spared,
        )

    def scaled(self, share: float) -> ComputeCost:
        return ComputeCost(
            self.flop * share,
            self.moved * share,
            self.launches * share,
            tuple(replace(each, times=each.times * share) for each in self.products),
            self.spared * share,
        )

    @property
    def timed_flop(self) -> float:
        return self.flop - self.spared

    @property
    def every_flop(self) -> float:
        return self.flop + sum(each.flop * each.times for each in self.products)


@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer, and how a worker computes them.

    tokens: own tokens of a worker.
    e: bytes of the compute dtype.
    degree: number of workers over which the experts are dealt.
    chunks: number of chunks of tokens, each of which reads all weights of the worker's experts.
    recompute: whether backward computes gate and up again.
    compile: whether kernels between the products read and write each row once.
    """

    model: ModelConfig
    tokens: int
    e: int
    loads: ExpertLoads
    degree: int = 1
    chunks: int = 1
    recompute: bool = True
    compile: bool = True

    def work(self) -> tuple[ComputeCost, ComputeCost, ComputeCost]:
        """Return the work of router and experts: forward, recomputed and backward.

        With expert parallelism, the products are the mean over the workers. Recomputation repeats
        the router, gate and up, but not down.
        """
        model, moe, e, tokens = self.model, self.model.moe, self.e, self.tokens
        hidden, width = model.hidden_size, moe.expert_size
        # Equal numbers of rows are one product, many times.
        pairs = self.loads.pairs(tokens, moe.experts, moe.top_k)
        numbers = pairs * (self.degree / self.chunks)
        rows = Counter(numbers.round().astype(int).flatten().tolist())
        share = self.chunks / (self.degree * len(pairs))
        into = _products(rows, hidden, 2 * width, e, share)
        out = _products(rows, width, hidden, e, share)
        low = e == _BFLOAT16
        router = GroupedProduct(
            2.0 * tokens * hidden * moe.experts,
            tokens * (e * hidden + 4.0 * moe.experts),
            ROUTER if low else FLOAT32,
            1,
        )
        # In bfloat16, a gradient of logits has two terms (`model.router_logits`).
        back = replace(router, flop=router.flop * 2) if low else router
        chosen, scores = tokens * moe.top_k, 40.0 * tokens * moe.experts
        order = 16.0 * 8 * chosen  # sorting and placing the pairs
        shared = moe.shared_size * tokens * e
        read = 2.0 * e * chosen * hidden  # dispatch
        combined = 3.0 * e * chosen * hidden
        combined += (4.0 + 2 * e) * tokens * hidden
        if self.compile:
            combined = float(e) * (chosen + tokens) * hidden
        inside = [float(size) for size in self.moved(np.array(chosen))]
        kernels = EXPERT_LAUNCHES.value * self.chunks
        forward = ComputeCost(
            moved=read + scores + order + combined + inside[0] + 3.0 * shared,
            launches=kernels,
            products=(router, *into, *out),
        )
        again = ComputeCost(
            moved=read + scores + 3.0 * shared, launches=kernels, products=(router, *into)
        )
        backward = ComputeCost(
            moved=2 * read + scores + combined + inside[1] + 5.0 * shared,
            launches=2 * kernels,
            products=(back, back, *into, *into, *out, *out),
        )
        return forward, again, backward

    def moved(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of kernels between the products, in forward and in backward.

        rows: number of pairs that the worker computes.
        """
        e, moe = self.e, self.model.moe
        forward, backward = (3.0 * e, 6.0 * e) if self.compile else (7.0 * e + 8, 24.0 * e + 32)
        forward, backward = forward * moe.expert_size, backward * moe.expert_size
        copied = copied_rows(moe, self.degree, recomputes=self.recompute)
        forward += copied[0] * e * self.model.hidden_size
        backward += copied[1] * e * self.model.hidden_size
        weights = 3.0 * moe.experts / self.degree * moe.expert_size * self.model.hidden_size
        sums = summed_gradients(weights, e, self.chunks)
        return forward * rows, backward * rows + sums


def _products(
    rows: Counter[int], width: int, out: int, e: int, share: float
) -> tuple[GroupedProduct, ...]:
    return tuple(
        GroupedProduct(2.0 * number * width * out, moved(number, width, out, e), GROUPED, share * n)
        for number, n in sorted(rows.items())
        if number
    )


def moved(rows: Any, width: int, out: int, e: int) -> Any:
    """Return the bytes of a product of ``rows`` rows with a matrix of width x out."""
    return float(e) * (width * out + rows * (width + out))


def layer_experts(plan: RunPlan, loads: ExpertLoads) -> LayerExperts:
    """Return the experts of a layer of a plan."""
    config, e = plan.config, plan.dtype_bytes
    own, _ = own_tiles(config, plan.layout, e)
    degree = dealt_over(plan)
    chunks = chunks_of_tokens(config, own, e, degree)
    recompute = config.train.activation_checkpoint != "none"
    compiled = config.train.compile != False  # noqa: E712 - auto compiles on GPUs
    return LayerExperts(config.model, own, e, loads, degree, chunks, recompute, compiled)


def dealt_over(plan: RunPlan) -> int:
    """Return the expert-parallel degree of a plan, in which it is a number (`plan_on`)."""
    given = plan.config.topology.expert_parallel
    return given if isinstance(given, int) and plan.config.model.moe.experts else 1


@dataclass(frozen=True)
class RowExchange:
    """The rows of a layer in an expert group, for one bound. slower: factor on computation."""

    experts: LayerExperts
    costs: Costs
    per_node: int
    slower: float = 1.0

    @staticmethod
    def of(
        plan: RunPlan, loads: ExpertLoads, cluster: Cluster, costs: Costs, slower: float
    ) -> RowExchange | None:
        """Return the exchange of a plan; None if no rows travel.

        cluster: that of the plan; that of ``costs`` may have tensor groups for GPUs.
        """
        if dealt_over(plan) == 1:
            return None
        per_node = min(cluster.gpus_per_node, plan.dims.workers)
        return RowExchange(layer_experts(plan, loads), costs, per_node, slower)

    @property
    def outer(self) -> bool:
        return self.experts.degree > self.per_node

    def forward(self) -> PassTime:
        """Return the time of the experts in a forward pass, in the mean over the layers.

        The workers first exchange the numbers of rows, for which the host waits. Both overlap with
        nothing, and are only in `PassTime.exposed`.
        """
        experts, degree = self.experts, self.experts.degree
        counted = _COUNT * experts.chunks * (experts.model.moe.experts + degree) * (degree - 1)
        counts, _ = self._message(counted, to_all=False)
        waits = counts + self.costs.burden(WAIT_FOR_NUMBERS)
        found = self._pass(self._layer.forward(), 0)
        return found._replace(exposed=found.exposed + waits)

    def backward(self) -> PassTime:
        """Return the time of a backward pass with its recomputation, as in `forward`."""
        return self._pass(self._layer.backward(), 1)

    @property
    def _layer(self) -> Layer:
        experts = self.experts
        return Layer(experts=True, checkpointed=experts.recompute, units=experts.chunks)

    def _loads(self) -> np.ndarray:
        experts, moe = self.experts, self.experts.model.moe
        sizes = experts.tokens, moe.experts, moe.top_k, experts.degree
        return experts.loads.dealt(*sizes, self.costs.bound)

    def _computing(self, program: Program, elements: int) -> np.ndarray:
        """Return the time of each worker's experts, [layers, ranks].

        elements: which of `LayerExperts.moved` lies between the products.
        """
        experts, costs, gpu = self.experts, self.costs, self.costs.cluster.gpu
        rows_LPN = self._loads() * experts.degree
        hidden, width = experts.model.hidden_size, experts.model.moe.expert_size
        rate = costs.rate(gpu.gemm_tflops) * costs.rate(GROUPED) * 1e6
        memory = costs.rate(gpu.hbm_gbps) * 1e3
        each = rows_LPN / experts.chunks

        def products_us(inner: int, outer: int) -> np.ndarray:
            size = np.where(each > 0, moved(each, inner, outer, experts.e), 0.0)
            us = np.maximum(2.0 * each * inner * outer / rate, size / memory)
            return experts.chunks * us.sum(-1)

        into, out = products_us(hidden, 2 * width), products_us(width, hidden)
        products = work(program, {EXPERTS_IN: into, EXPERTS_OUT: out})
        between = experts.moved(rows_LPN.sum(-1))[elements] / memory
        return self.slower * (sum(products.values()) + between)

    def _message(self, size: float, *, to_all: bool = True) -> tuple[float, float]:
        degree = self.experts.degree
        return self.costs.collective(to_all, degree, min(degree, self.per_node), int(size))

    def _pass(self, program: Program, elements: int) -> PassTime:
        layers = zip(self._loads(), self._computing(program, elements), strict=True)
        return PassTime.mean([self._time(program, *layer) for layer in layers])

    def _time(self, program: Program, loads_PN: np.ndarray, computing_P: np.ndarray) -> PassTime:
        experts = self.experts
        rows_P = experts.tokens * reached(loads_PN / experts.tokens, experts.model.moe)
        there, back = travelling(np.tile(rows_P, (experts.degree, 1)))
        # What is received on one way is sent on the other.
        most, mean = max(there.max(), back.max()) / experts.chunks, there.mean() / experts.chunks
        costs = {
            message: MessageCost(*self._message(most * size), mean * size)
            for message, size in message_bytes(experts.model, experts.e).items()
        }
        return time(program, _PRODUCTS, lambda post: costs.get(post.message), computing_P)


def travelling(tokens_PP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rows each worker of a group receives from others: as experts, and back.

    tokens_PP: number of tokens of each worker that choose an expert of each worker.
    """
    own = tokens_PP.diagonal()
    return tokens_PP.sum(0) - own, tokens_PP.sum(1) - own


@dataclass(frozen=True)
class TensorMessages:
    """The messages of one worker in a layer and micro-batch.

    kinds: kinds of layers, each with the number of such layers.
    row: bytes that the worker receives for each own row, in one message.
    weights: elements of each matrix, for the shares of products.
    """

    kinds: Sequence[tuple[int, Layer]]
    row: int
    weights: dict[str, int]

    @staticmethod
    def of(plan: RunPlan) -> TensorMessages:
        config, train = plan.config, plan.config.train
        own, rows = own_tiles(config, plan.layout, plan.dtype_bytes)
        full, rest = divmod(own, rows)
        tiles = (rows,) * full + ((rest,) if rest else ())
        checkpointed = train.activation_checkpoint != "none"
        kinds = layers(config.model, checkpointed=checkpointed, tiled=True, keep_mlp=train.keep_mlp)
        shapes = layer_shapes(config.of_worker.model, experts=False)
        return TensorMessages(
            [(number, replace(layer, tiles=tiles)) for number, layer in kinds],
            context_message_bytes(config, plan.layout, plan.dtype_bytes) // own,
            {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1},
        )

    def forward(self, computing: float, message: Callable[[float], float]) -> PassTime:
        """Return the time of a forward pass, in the mean over the layers.

        computing: microseconds except attention. message: returns those of a message from its size.
        """
        return self._mean([layer.forward() for _, layer in self.kinds], computing, message)

    def backward(self, computing: float, message: Callable[[float], float]) -> PassTime:
        """Return the time of a backward pass with its recomputation, as in `forward`."""
        return self._mean([layer.backward() for _, layer in self.kinds], computing, message)

    def _mean(
        self, programs: list[Program], computing: float, message: Callable[[float], float]
    ) -> PassTime:
        def cost(post: Post) -> MessageCost | None:
            if post.message is not Message.HIDDEN:
                return None
            us = message(post.rows * self.row)
            return MessageCost(us, us, post.rows * self.row)

        times = [time(program, self.weights, cost, computing) for program in programs]
        return PassTime.mean(times, [number for number, _ in self.kinds])


def cluster_of_groups(cluster: Cluster, degree: int) -> Cluster:
    """Return a cluster in which one GPU stands for a tensor group of ``degree`` GPUs.

    Context groups of several tensor coordinates run at once, and divide shared network cards.
    """
    if degree == 1:
        return cluster
    outer = None if cluster.outer is None else _divided(cluster.outer, degree)
    return replace(cluster, gpus_per_node=cluster.gpus_per_node // degree, outer=outer)


def _divided(link: Link, degree: int) -> Link:
    shared = max(1, round(link.shared_by.value))
    by = min(degree, shared)
    rates = ("bandwidth_gbps", "capacity_gbps", "collective_bandwidth_gbps")
    return replace(
        link,
        **{name: getattr(link, name).scaled(1 / by) for name in rates},
        shared_by=replace(
            link.shared_by,
            **{k: max(1.0, getattr(link.shared_by, k) // degree) for k in ("low", "value", "high")},
        ),
    )
