"""Price the messages of tensor parallelism: how long a layer waits for them (`step.program`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from mtrain_cli.config.cluster import Cluster, Link
from mtrain_cli.step.program import (
    Layer,
    Message,
    MessageCost,
    PassTime,
    Post,
    Program,
    layers,
    time,
)
from mtrain_cli.training.flops import layer_shapes, own_tiles
from mtrain_cli.training.run_plan import RunPlan, message_bytes


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
            message_bytes(config, plan.layout, plan.dtype_bytes) // own,
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
