"""Compare methods of parallelism: what one worker holds, receives and waits for, each used alone.

Rows of methods that mtrain has come from its plans. DP and TP without sequence parallelism
(arXiv:1909.08053, section 3) are formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.exchanges import ULYSSES, exchange_name
from mtrain_cli.config.parallel_checks import splits_layers
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.validate import problems
from mtrain_cli.parallel.layout import Joined
from mtrain_cli.training.run_plan import RunPlan, message_bytes, tensor_messages
from mtrain_cli.training.state_memory import BYTES, largest_states

Planner = Callable[[Config], RunPlan]
_RING = exchange_name(gathers=False, hierarchical=False)
_TENSOR, _PIPELINE, _CONTEXT = "tensor_parallel", "pipeline_parallel", "context_parallel"


@dataclass(frozen=True)
class Method:
    """A method of parallelism.

    degree: key in ``topology`` that takes the degree; empty for data parallelism.
    formula_of: the method from whose plan a formula starts; empty if mtrain has the method.
    """

    name: str
    degree: str = ""
    topology: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    formula_of: str = ""


ZERO_3, TENSOR_SEQUENCE = "ZeRO-3", "TP + SP"
METHODS = (
    Method("DP", formula_of=ZERO_3),
    Method("ZeRO-1", train={"shard": "optimizer"}),
    Method("ZeRO-2", train={"shard": "gradients"}),
    Method(ZERO_3, train={"shard": "full"}),
    Method("TP", _TENSOR, formula_of=TENSOR_SEQUENCE),
    Method(TENSOR_SEQUENCE, _TENSOR, train={"shard": "full"}),
    Method("PP", _PIPELINE, train={"shard": "gradients"}),
    Method("Ulysses", _CONTEXT, {"exchange": ULYSSES}, {"shard": "full"}),
    Method(_RING, _CONTEXT, {"exchange": _RING, "layout": "contiguous"}, {"shard": "full"}),
    Method("zigzag ring", _CONTEXT, {"exchange": _RING, "layout": "zigzag"}, {"shard": "full"}),
)


@dataclass(frozen=True)
class MethodCost:
    """What a method costs one worker, in bytes (`table.LEGEND`).

    workers: the degrees of all dimensions, such as ``2 data x 4 context``.
    limit: what limits the degree.
    """

    name: str
    workers: str
    limit: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    received: float
    idle: float
    imbalance: float
    formula: bool = False


@dataclass(frozen=True)
class ImpossibleMethod:
    name: str
    why: str


def compare(
    config: Config, workers: int, per_node: int, plan: Planner
) -> list[MethodCost | ImpossibleMethod]:
    """Return the costs of all methods, each with the largest degree that it allows.

    Data parallelism uses the other workers. All train on the same sequences per step.
    """
    costs: list[MethodCost | ImpossibleMethod] = []
    by_name = {method.name: method for method in METHODS}
    for method in METHODS:
        base = by_name[method.formula_of or method.name]
        try:
            chosen = configured(config, base, workers, per_node)
            if wrong := problems(chosen):
                raise ConfigError(*wrong)
            planned = plan(chosen)
        except ConfigError as error:
            costs.append(ImpossibleMethod(method.name, error.problems[0]))
            continue
        limit, _ = _limit(method, config, per_node)
        formula = _replicated if method.name == "DP" else _tensor_alone
        cost = cost_of(planned, method.name, limit)
        costs.append(formula(planned, cost) if method.formula_of else cost)
    return costs


def configured(config: Config, method: Method, workers: int, per_node: int) -> Config:
    """Return the configuration of a method with the largest degree that it allows.

    Raises:
        ConfigError: the method allows no degree above 1.
    """
    limit, allows = _limit(method, config, per_node)
    degree = next(n for n in range(workers, 0, -1) if workers % n == 0 and (n == 1 or allows(n)))
    if method.degree and degree == 1 < workers:
        raise ConfigError(f"no degree above 1 fits {limit} with these settings")
    degrees = {_CONTEXT: 1, _TENSOR: 1, _PIPELINE: 1}
    if method.degree:
        degrees[method.degree] = degree
    return config.changed(
        topology={"workers": workers, **degrees, **method.topology},
        train={"global_batch": sequences_of(config, workers), "memory": "manual", **method.train},
    )


def sequences_of(config: Config, workers: int) -> int:
    """Return the sequences per step: several micro-batches, so that ZeRO-1 and ZeRO-2 differ."""
    each = workers * config.train.micro_batch
    return max(2, -(-config.train.global_batch // each)) * each


def _limit(method: Method, config: Config, per_node: int) -> tuple[str, Callable[[int], bool]]:
    """Return what limits the degree of a method, and whether it allows a degree."""
    model = config.model
    heads = f"{model.num_heads} heads, {model.num_kv_heads} KV heads"
    blocks = config.seq // config.topology.block_size // (2 if "zigzag" in method.name else 1)
    if not method.degree:
        return "sequences per step", lambda degree: degree == 1
    if method.degree == _TENSOR:
        mlp = f"MLP of {model.intermediate_size:,}, {per_node} GPUs of a node"
        return f"{heads}, {mlp}", partial(splits_layers, config, per_node=per_node)
    if method.degree == _PIPELINE:
        return f"{model.num_layers} layers", lambda degree: degree <= model.num_layers
    if method.name == "Ulysses":
        common = gcd(model.num_heads, model.num_kv_heads)
        return heads, lambda degree: common % degree == 0
    return f"{blocks:,} blocks of the sequence", lambda degree: degree <= blocks


def cost_of(plan: RunPlan, name: str = "", limit: str = "") -> MethodCost:
    """Return what a plan costs the worker with the largest shards."""
    config, e = plan.config, plan.dtype_bytes
    states = largest_states(config, plan.dims.workers, plan.micro_batches, e)
    pipeline, layers = plan.pipeline, len(states.numbers)
    hops = 0 if pipeline is None else pipeline.received
    return MethodCost(
        name=name,
        workers=str(plan.dims),
        limit=limit,
        weights=states.parameters + states.weights(layers, 2) + e * states.root_weights,
        gradients=states.gradients(layers),
        optimizer=states.optimizer,
        activations=max(moment.activations for moment in plan.memory.moments),
        received=sum(plan.received.in_step(plan.micro_batches * layers)) + hops,
        idle=0.0 if pipeline is None else pipeline.played.bubble,
        imbalance=_imbalance(plan),
    )


def _imbalance(plan: RunPlan) -> float:
    joined, seq = Joined.of(plan.layout, plan.exchange.heads), plan.layout.seq
    rules = MaskRule.of(plan.config).by_layers(plan.config.model.num_layers)
    pairs = np.zeros(joined.workers)
    for rule, count in rules:
        mask = rule.undivided(seq, seq)
        of_query = (mask.high - mask.low).sum(0)
        for place in range(joined.workers):
            positions = joined.positions(place)
            pairs[place] += count * of_query[positions[positions < seq]].sum()
    return float(pairs.max() / pairs.mean())


def _replicated(plan: RunPlan, cost: MethodCost) -> MethodCost:
    """Return the cost of DP from that of ZeRO-3: a worker holds all, a ring sums the gradients."""
    weights, workers = plan.parameters.total, plan.dims.workers
    r = BYTES[plan.config.train.reduce_dtype]
    return replace(
        cost,
        weights=(4 + plan.dtype_bytes) * weights,
        gradients=4 * weights,
        optimizer=8 * weights,
        received=2 * (workers - 1) / workers * r * weights,
        formula=True,
    )


def _tensor_alone(plan: RunPlan, cost: MethodCost) -> MethodCost:
    """Return the cost of tensor parallelism alone from that with sequence parallelism."""
    config = plan.config
    message = message_bytes(config, plan.layout, plan.dtype_bytes)
    layers, recomputes = config.model.num_layers, config.train.activation_checkpoint != "none"
    # A worker also keeps the other workers' rows of the layer's input, and without checkpointing
    # those of the MLP's. Checkpointing repeats an all-reduce.
    more = layers * message * (1 if recomputes else 2)
    messages = 2 * tensor_messages(config)[0] + 2 * recomputes * layers
    return replace(
        cost,
        activations=cost.activations + more,
        received=plan.micro_batches * messages * message + plan.received.weights,
        formula=True,
    )
