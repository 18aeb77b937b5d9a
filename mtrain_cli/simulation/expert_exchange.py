"""Price the rows that travel to experts: how long the workers of an expert group wait for them.

An all-to-all begins when the last worker starts it, and takes as long as that of the worker with
the most bytes. So workers also wait for those with popular experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.config.cluster import Cluster, Constant
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.simulation.expert_cost import GROUPED, LayerExperts, moved
from mtrain_cli.simulation.router_loads import ExpertLoads
from mtrain_cli.step.interpreters import MessageCost, PassTime, time, work
from mtrain_cli.step.layer import EXPERTS_IN, EXPERTS_OUT, Layer
from mtrain_cli.step.program import Program
from mtrain_cli.training.expert_traffic import HOST_WAIT_US, chunks_and_parts, message_bytes
from mtrain_cli.training.flops import own_tiles
from mtrain_cli.training.run_plan import RunPlan

_COUNT = 8  # bytes of a number of rows
_PRODUCTS = {EXPERTS_IN: 2, EXPERTS_OUT: 1}  # relative size of the products
WAIT_FOR_NUMBERS = Constant(
    HOST_WAIT_US, "measured",
    "us per layer and micro-batch without work for the GPU, as the host waits for numbers of rows, "
    "and all else that predictions lack; two H100s, 8 layers of Qwen3-30B-A3B, 8K and 32K",
    300, 9000,
)  # fmt: skip


def layer_experts(plan: RunPlan, loads: ExpertLoads) -> LayerExperts:
    """Return the experts of a layer of a plan."""
    config, e = plan.config, plan.dtype_bytes
    own, _ = own_tiles(config, plan.layout, e)
    degree = dealt_over(plan)
    chunks, parts = chunks_and_parts(config, own, e, degree)
    recompute = config.train.activation_checkpoint != "none"
    compiled = config.train.compile != False  # noqa: E712 - auto compiles on GPUs
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
        return RowExchange(layer_experts(plan, loads), costs, per_node, slower)

    @property
    def outer(self) -> bool:
        """Whether rows cross nodes."""
        return self.experts.degree > self.per_node

    def forward(self) -> PassTime:
        """Return the time of the experts in a forward pass, in the mean over the layers.

        Before the rows, the workers exchange their numbers, and the host waits for them. Both
        overlap with nothing, and are only in `PassTime.exposed`.
        """
        experts, degree = self.experts, self.experts.degree
        counted = _COUNT * experts.chunks * experts.model.moe.experts * (degree - 1)
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
        return Layer(experts=True, checkpointed=experts.recompute, units=experts.units)

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
        """Return the time of a message, and the time for which it occupies the link."""
        degree = self.experts.degree
        return self.costs.collective(to_all, degree, min(degree, self.per_node), int(size))

    def _pass(self, program: Program, elements: int) -> PassTime:
        """Return the mean of the layers. elements: as in `_computing`."""
        layers = zip(self._loads(), self._computing(program, elements), strict=True)
        return PassTime.mean([self._time(program, *layer) for layer in layers])

    def _time(self, program: Program, loads_PN: np.ndarray, computing_P: np.ndarray) -> PassTime:
        experts = self.experts
        there, back = travelling(np.tile(loads_PN.flatten(), (experts.degree, 1)))
        # What is received on one way is sent on the other.
        most, mean = max(there.max(), back.max()) / experts.units, there.mean() / experts.units
        costs = {
            message: MessageCost(*self._message(most * size), mean * size)
            for message, size in message_bytes(experts.model.hidden_size, experts.e).items()
        }
        return time(program, _PRODUCTS, lambda post: costs.get(post.message), computing_P)


def travelling(pairs_PE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rows each worker of a group receives from others: as experts, and back.

    Args:
        pairs_PE: pairs of each worker's tokens by expert, [workers, experts]. Each worker holds an
            equal, consecutive part of the experts.
    """
    workers = len(pairs_PE)
    from_to = pairs_PE.reshape(workers, workers, -1).sum(-1)
    own = from_to.diagonal()
    return from_to.sum(0) - own, from_to.sum(1) - own
