"""Count the work of a layer's experts: grouped products, the router and element-wise kernels.

Each expert's product is limited by FLOP/s or by memory bandwidth. An expert with few tokens still
reads its whole matrix, so uneven loads take longer, though the FLOP are the same.

Symbols: T own tokens of a worker, K experts of a token, S = T K pairs, E experts, C hidden size, I
width of an expert, e bytes of the compute dtype.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtrain_cli.config.cluster import Constant
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.simulation.router_loads import ExpertLoads
from mtrain_cli.training.expert_traffic import copied_rows, summed_gradients

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


@dataclass(frozen=True)
class GroupedProduct:
    """Equal matrix products, each limited by FLOP/s or by memory bandwidth.

    flop, moved: FLOP and bytes of one product.
    share: its rate, divided by that of large products.
    """

    flop: float
    moved: float
    share: Constant
    times: float


@dataclass(frozen=True)
class ComputeCost:
    """The work of one part of a step.

    flop: FLOP of matrix products.
    moved: number of bytes that element-wise kernels read and write.
    launches: number of kernels that the host launches.
    products: products of routers and experts, which are not in ``flop``.
    """

    flop: float = 0.0
    moved: float = 0.0
    launches: float = 0.0
    products: tuple[GroupedProduct, ...] = ()

    def __add__(self, other: ComputeCost) -> ComputeCost:
        return ComputeCost(
            self.flop + other.flop,
            self.moved + other.moved,
            self.launches + other.launches,
            self.products + other.products,
        )

    def scaled(self, share: float) -> ComputeCost:
        """Return a share of this work."""
        return ComputeCost(
            self.flop * share,
            self.moved * share,
            self.launches * share,
            tuple(replace(each, times=each.times * share) for each in self.products),
        )

    @property
    def every_flop(self) -> float:
        """FLOP of all products, those of experts, too."""
        return self.flop + sum(each.flop * each.times for each in self.products)


@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer, and how a worker computes them.

    tokens: own tokens of a worker.
    e: bytes of the compute dtype.
    degree: number of workers over which the experts are dealt.
    chunks: number of chunks of tokens. Each reads all weights of the worker's experts.
    parts: number of parts in which a worker computes its experts, one after another.
    recompute: whether the layer is checkpointed. Its backward pass then computes gate and up again.
    compile: whether the operations between the products are compiled (`model.expert_products`), so
        that they read and write each row once.
    """

    model: ModelConfig
    tokens: int
    e: int
    loads: ExpertLoads
    degree: int = 1
    chunks: int = 1
    parts: int = 1
    recompute: bool = True
    compile: bool = True

    @property
    def units(self) -> int:
        """The number of parts of all chunks."""
        return self.chunks * self.parts

    def work(self) -> tuple[ComputeCost, ComputeCost, ComputeCost]:
        """Return the work of router and experts: forward, recomputed and backward.

        With expert parallelism, the products are the mean over the workers. Recomputation repeats
        the router, gate and up, but not down. The bytes of element-wise kernels are counted in
        `model.expert_products`, `model.expert_parallel` and `model.routing`.
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
        kernels = EXPERT_LAUNCHES.value * self.units
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
        """Return the bytes of element-wise kernels between the products of a worker's experts.

        Returns: bytes of the forward and of the backward pass.

        Args:
            rows: number of pairs that the worker computes.
        """
        e, moe = self.e, self.model.moe
        forward, backward = (3.0 * e, 6.0 * e) if self.compile else (7.0 * e + 8, 24.0 * e + 32)
        forward, backward = forward * moe.expert_size, backward * moe.expert_size
        copied = copied_rows(self.degree, recomputes=self.recompute)
        forward += copied[0] * e * self.model.hidden_size
        backward += copied[1] * e * self.model.hidden_size
        weights = 3.0 * moe.experts / self.degree * moe.expert_size * self.model.hidden_size
        sums = summed_gradients(weights, e, self.chunks, self.parts)
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
