"""What tensor and pipeline parallelism do and cost, as rows of a plan and of the banner."""

from __future__ import annotations

from mtrain_cli.training.expert_price import ExpertPrice, cheapest, expert_degree, price, prices
from mtrain_cli.training.run_plan import RunPlan, size


def tensor_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return rows on tensor parallelism: what a worker computes, and what its messages cost."""
    whole, part, degree = plan.config.model, plan.config.of_worker.model, plan.dims.tp
    if degree == 1:
        return []
    heads = f"{part.num_heads} of {whole.num_heads} heads"
    width = f"{part.intermediate_size:,} of {whole.intermediate_size:,} columns of the MLP"
    # A gathered token has its keys and values instead of four hidden states.
    more = 2 * whole.hidden_size / (whole.num_kv_heads * whole.head_dim)
    cost = (
        f"moves {more:.3g} times the bytes of context parallelism of the same degree (all_gather)"
    )
    return [("tensor", f"a worker computes {heads} and {width}"), ("", f"forward {cost}")]


def pipeline_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return rows on pipeline parallelism: the stages, and what their messages cost."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    message, step = size(pipeline.hidden), size(pipeline.received)
    moved = f"a message has {message} of hidden states; a stage between others receives {step}"
    rows = [("pipeline", pipeline.describe()), ("", f"{moved} per step")]
    if plan.config.train.shard == "full" and plan.micro_batches > 1 and plan.received.weights:
        again = "train.shard=full gathers weights again for every micro-batch"
        rows.append(("", f"{again}; train.shard=gradients gathers them once a step"))
    return rows


def expert_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return a row on the experts of a layer: who holds them, and the bytes that they move."""
    config, dims = plan.config, plan.dims
    if not config.model.moe.experts:
        return []
    shape = config, dims, plan.layout, plan.dtype_bytes
    per_node = plan.environment.workers_per_node
    degree = expert_degree(*shape, per_node)
    held = f"a worker computes {config.model.moe.experts // degree} of {config.model.moe.experts}"
    if dims.dp * dims.cp * dims.tp == 1:
        return [("experts", held)]
    best = cheapest(*shape, per_node)
    own = price(*shape, per_node, degree)
    others = [each for each in prices(*shape, per_node) if (each.degree == 1) != (degree == 1)]
    other = min(others, key=lambda each: each.seconds, default=None)
    costs = ", ".join(_cost(each) for each in (own, other) if each is not None)
    reason = ""
    requested = plan.requested or config
    if requested.topology.expert_parallel == "auto":
        reason = "; chosen by auto, the shortest predicted time"
        if plan.search is not None:
            reason = "; chosen by auto together with the memory setting"
    elif best.degree != degree:
        reason = f"; topology.expert_parallel={best.degree} takes the shortest predicted time"
    return [("experts", f"{held}, {costs}{reason}")]


def _cost(price: ExpertPrice) -> str:
    """Return the time and the bytes of an expert-parallel degree."""
    ms = 1e3 * price.seconds
    received = size(price.traffic.total)
    return f"degree {price.degree} takes {ms:.3g} ms and receives {received} per layer and step"
