"""Price the rows that travel to experts: how long the workers of an expert group wait for them.

The parts of a layer's experts run in the order of `tensor_group.staggered`, as in training. Each
part follows its program (`training.expert_rows`) on the clocks of all workers of the group, and on
that of their links. An all-to-all begins when the last worker starts it, and takes as long as that
of the worker with the most bytes. So workers also wait for those with popular experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtrain_cli.config.cluster import Cluster, Constant
from mtrain_cli.model.tiling import expert_chunks, expert_parts
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.simulation.expert_cost import GROUPED, LayerExperts, moved
from mtrain_cli.simulation.router_loads import ExpertLoads
from mtrain_cli.training.expert_clock import GroupClocks, MessageCost
from mtrain_cli.training.expert_rows import (
    FORWARD_CHUNK,
    HOST_WAIT_US,
    backward_chunk,
    message_bytes,
    travelling,
)
from mtrain_cli.training.flops import own_tiles
from mtrain_cli.training.run_plan import RunPlan

_COUNT = 8  # bytes of a number of rows
WAIT_FOR_NUMBERS = Constant(
    HOST_WAIT_US, "measured",
    "us per layer and micro-batch without work for the GPU, as the host waits for numbers of rows, "
    "and all else that predictions lack; two H100s, 8 layers of Qwen3-30B-A3B, 8K and 32K",
    300, 9000,
)  # fmt: skip


@dataclass(frozen=True)
class RowWait:
    """The rows of one pass of a layer. Times are in microseconds, means over the layers.

    exposed: time for which the worker with the most work waits for rows.
    late: time for which a worker waits, in the mean, for the worker with the most work.
    hidden: time of messages that overlaps with computation.
    span: time of the pass through the experts, without the wait for numbers of rows.
    busy: time for which the messages occupy the link.
    size: number of bytes of rows that a worker receives, in the mean over the workers.
    """

    exposed: float
    late: float
    hidden: float
    span: float
    busy: float
    size: float


def layer_experts(plan: RunPlan, loads: ExpertLoads) -> LayerExperts:
    """Return the experts of a layer of a plan."""
    config, e = plan.config, plan.dtype_bytes
    own, _ = own_tiles(config, plan.layout, e)
    degree = dealt_over(plan)
    chunks = expert_chunks(
        own, config.model.hidden_size, config.model.moe, e, config.train.tile_mib << 20,
        degree=degree, chunks=config.topology.expert_chunks,
    )  # fmt: skip
    recompute = config.train.activation_checkpoint != "none"
    compiled = config.train.compile != False  # noqa: E712 - auto compiles on GPUs
    parts = 1
    if degree > 1:
        parts = expert_parts(own, config.model.moe.experts // degree, chunks)
    return LayerExperts(config.model, own, e, loads, degree, chunks, parts, recompute, compiled)


def dealt_over(plan: RunPlan) -> int:
    """Return the expert-parallel degree of a plan, in which it is a number (`plan_on`)."""
    given = plan.config.topology.expert_parallel
    return given if isinstance(given, int) and plan.config.model.moe.experts else 1


@dataclass(frozen=True)
class RowExchange:
    """The rows of a layer in an expert group, for one bound of the costs.

    slower: factor on the time of computation.
    """

    experts: LayerExperts
    costs: Costs
    per_node: int
    checkpoint: str
    slower: float = 1.0

    @staticmethod
    def of(
        plan: RunPlan, loads: ExpertLoads, cluster: Cluster, costs: Costs, slower: float
    ) -> RowExchange | None:
        """Return the exchange of a plan; None if no rows travel.

        cluster: the cluster of the plan. That of ``costs`` may have tensor groups for GPUs.
        """
        if dealt_over(plan) == 1:
            return None
        per_node = min(cluster.gpus_per_node, plan.dims.workers)
        kind = plan.config.train.activation_checkpoint
        return RowExchange(layer_experts(plan, loads), costs, per_node, kind, slower)

    @property
    def outer(self) -> bool:
        """Whether rows cross nodes."""
        return self.experts.degree > self.per_node

    def forward(self) -> RowWait:
        """Return the waits of a layer's forward pass.

        Before the rows, the workers exchange their numbers, and the host waits for them. Both
        overlap with nothing.
        """
        experts, degree = self.experts, self.experts.degree
        counted = _COUNT * experts.chunks * experts.model.moe.experts * (degree - 1)
        counts, _ = self._message(counted, to_all=False)
        forward, _ = self._computing()
        return self._pass(FORWARD_CHUNK, forward, counts + self.costs.burden(WAIT_FOR_NUMBERS))

    def backward(self) -> RowWait:
        """Return the waits of a layer's backward pass, with its recomputation."""
        _, backward = self._computing()
        return self._pass(backward_chunk(self.checkpoint), backward, 0.0)

    def _loads(self) -> np.ndarray:
        experts, moe = self.experts, self.experts.model.moe
        sizes = experts.tokens, moe.experts, moe.top_k, experts.degree
        return experts.loads.dealt(*sizes, self.costs.bound)

    def _computing(self) -> tuple[np.ndarray, np.ndarray]:
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
        between = [size / memory for size in experts.moved(rows_LPN.sum(-1))]
        again = into if experts.recompute else 0.0
        return (
            self.slower * (into + out + between[0]),
            self.slower * (2 * (into + out) + again + between[1]),
        )

    def _message(self, size: float, *, to_all: bool = True) -> tuple[float, float]:
        """Return the time of a message, and the time for which it occupies the link."""
        degree = self.experts.degree
        return self.costs.collective(to_all, degree, min(degree, self.per_node), int(size))

    def _pass(self, program: Sequence[str], computing_LP: np.ndarray, before: float) -> RowWait:
        """Return the mean of the layers. before: time that the pass waits at its beginning."""
        degree = self.experts.degree
        found = []
        for loads_PN, computing_P in zip(self._loads(), computing_LP, strict=True):
            of_all = np.tile(loads_PN.flatten(), (degree, 1))
            there, back = travelling(of_all)
            messages = self._messages(there, back)
            played = GroupClocks(program, self.experts.units, messages, computing_P)
            late, exposed = computing_P.max() - computing_P.mean(), played.exposed + before
            found.append((exposed, late, played.hidden, played.span, played.busy, played.size))
        return RowWait(*np.mean(found, axis=0).tolist())

    def _messages(self, there: np.ndarray, back: np.ndarray) -> dict[str, MessageCost]:
        """Return the cost of each kind of message of a part.

        Args:
            there, back: number of pairs that each worker receives for its experts, and for its own
                tokens.
        """
        experts = self.experts
        sizes = message_bytes(experts.model.hidden_size, experts.e)
        # What is received on one way is sent on the other.
        most = max(there.max(), back.max()) / experts.units
        mean = there.mean() / experts.units
        return {
            word: MessageCost(*self._message(most * size), mean * size)
            for word, size in sizes.items()
        }
