"""Price the messages of tensor parallelism: how long a layer waits for them.

The tiles of the MLP run in the order of `tensor_group.staggered`, as in training. Each tile follows
its program (`training.tensor_traffic`) on two clocks: one of the worker, one of its link. The
messages before attention overlap with nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from mtrain_cli.config.cluster import Cluster, Link
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.tensor_group import staggered
from mtrain_cli.training.flops import layer_shapes, own_tiles
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.tensor_traffic import (
    BACKWARD_TILE,
    BEFORE_ATTENTION,
    EXPERT_FORWARD_MESSAGES,
    FORWARD_TILE,
    KEPT_BACKWARD_TILE,
    NEXT,
    SEND,
    WAIT,
    expert_backward_messages,
    messages_before_attention,
    row_bytes,
)

MessageTime = Callable[[float], float]


@dataclass(frozen=True)
class TensorWait:
    """The messages of one pass of a layer. Times are in microseconds.

    exposed: time for which the worker waits for messages.
    hidden: time of messages that overlaps with computation.
    size: number of bytes that the worker receives.
    """

    exposed: float = 0.0
    hidden: float = 0.0
    size: float = 0.0

    def __add__(self, other: TensorWait) -> TensorWait:
        return TensorWait(
            self.exposed + other.exposed, self.hidden + other.hidden, self.size + other.size
        )

    def scaled(self, share: float) -> TensorWait:
        return TensorWait(self.exposed * share, self.hidden * share, self.size * share)


@dataclass(frozen=True)
class TensorMessages:
    """The messages of one worker in a layer and micro-batch.

    tiles: own rows of each tile of the MLP.
    row: number of bytes that the worker receives for each own row, in one message.
    before: number of messages of the backward pass outside the tiles.
    kept: share of the layers that keep their MLP products.
    weights: elements of each matrix of the worker's part of the MLP, for the shares of products.
    before_weights: elements of its matrices before attention.
    experts: share of the layers that have experts. All their messages overlap with nothing.
    experts_backward: number of messages in the backward pass of such a layer.
    """

    tiles: tuple[int, ...]
    row: int
    before: int
    kept: float
    weights: dict[str, int]
    before_weights: int
    experts: float = 0.0
    experts_backward: int = 0

    @staticmethod
    def of(plan: RunPlan) -> TensorMessages:
        config, model = plan.config, plan.config.model
        own, rows = own_tiles(config, plan.layout, plan.dtype_bytes)
        full, rest = divmod(own, rows)
        shapes = layer_shapes(config.of_worker.model, experts=False)
        names = ("o", "gate", "up", "down")
        return TensorMessages(
            tiles=(rows,) * full + ((rest,) if rest else ()),
            row=row_bytes(config, plan.dtype_bytes),
            before=messages_before_attention(config.train),
            kept=layers_with_products(config.train.keep_mlp, model.num_layers) / model.num_layers,
            weights={name: prod(shapes[name]) for name in names},
            before_weights=sum(prod(shapes[name]) for name in ("q", "k", "v")),
            experts=model.expert_layers / model.num_layers,
            experts_backward=expert_backward_messages(config.train),
        )

    def forward(self, computing: float, message: MessageTime) -> TensorWait:
        """Return the waits of a layer's forward pass.

        Args:
            computing: time of the layer's forward pass except attention, in microseconds.
            message: function that returns the time of a message from its bytes.
        """
        mlp = sum(self.weights.values())
        of_tiles = computing * mlp / (mlp + self.before_weights)
        dense = self._alone(BEFORE_ATTENTION, message)
        if self.experts < 1:
            dense += self._tiles(FORWARD_TILE, of_tiles, message)
        return self._mean(dense, EXPERT_FORWARD_MESSAGES, message)

    def backward(self, computing: float, message: MessageTime) -> TensorWait:
        """Return the waits of a layer's backward pass, with its recomputation.

        computing, message: as in `forward`, for this pass.
        """
        dense = self._alone(self.before, message)
        for program, share in ((KEPT_BACKWARD_TILE, self.kept), (BACKWARD_TILE, 1 - self.kept)):
            if share and self.experts < 1:
                tiles = self._tiles(program, self._of_tiles(program, computing), message)
                dense += tiles.scaled(share)
        return self._mean(dense, self.experts_backward, message)

    def _mean(self, dense: TensorWait, of_experts: int, message: MessageTime) -> TensorWait:
        """Return the mean over layers without and with experts."""
        experts = self._alone(of_experts, message)
        return dense.scaled(1 - self.experts) + experts.scaled(self.experts)

    def _of_tiles(self, program: Sequence[str], computing: float) -> float:
        mlp = sum(self.weights.get(word, 0) for word in program)
        # Before attention, each weight has two products, and another one if they are recomputed.
        return computing * mlp / (mlp + (1 + self.before) * self.before_weights)

    def _alone(self, count: int, message: MessageTime) -> TensorWait:
        size = self.row * sum(self.tiles)
        return TensorWait(count * message(size), 0.0, count * size)

    def _tiles(self, program: Sequence[str], computing: float, message: MessageTime) -> TensorWait:
        """Run all tiles of a pass on the two clocks."""
        clocks = _Clocks(message)
        elements = sum(self.weights.get(word, 0) for word in program)
        per_element = computing / (elements * sum(self.tiles))
        staggered(self._tile(program, rows, rows * per_element, clocks) for rows in self.tiles)
        exposed = clocks.worker - computing
        return TensorWait(exposed, max(0.0, clocks.busy - exposed), clocks.size)

    def _tile(
        self, program: Sequence[str], rows: int, per_element: float, clocks: _Clocks
    ) -> Iterator[None]:
        arrivals: deque[float] = deque()
        for word in program:
            if word == SEND:
                arrivals.append(clocks.send(rows * self.row))
            elif word == NEXT:
                yield
            elif word == WAIT:
                clocks.worker = max(clocks.worker, arrivals.popleft())
            else:
                clocks.worker += self.weights[word] * per_element


class _Clocks:
    """The times of a worker and of its link, in microseconds from the start of a pass."""

    def __init__(self, message: MessageTime) -> None:
        self.message = message
        self.worker = self.link = self.busy = self.size = 0.0

    def send(self, size: int) -> float:
        """Start a message. Return the time when it arrives. Messages of a link keep their order."""
        us = self.message(size)
        self.link = max(self.worker, self.link) + us
        self.busy += us
        self.size += size
        return self.link


def cluster_of_groups(cluster: Cluster, degree: int) -> Cluster:
    """Return a cluster in which one GPU stands for a tensor group of ``degree`` GPUs.

    Context groups of several tensor coordinates run at once. GPUs that share a network card divide
    its bandwidth.
    """
    if degree == 1:
        return cluster
    outer = cluster.outer
    each = cluster.gpus_per_node // degree
    return replace(
        cluster, gpus_per_node=each, outer=None if outer is None else _divided(outer, degree)
    )


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
