"""What tensor and pipeline parallelism do and cost, as rows of a plan and of the banner."""

from __future__ import annotations

from dataclasses import replace

from mtrain_cli.config import validate
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.training.expert_price import ExpertPrice, ExpertRun
from mtrain_cli.training.flops import ASSUMED_DENSITY
from mtrain_cli.training.memory import size
from mtrain_cli.training.resolution import resolve_run
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.stage_choice import named_on


def tensor_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return rows on tensor parallelism: what a worker computes, and what its messages cost."""
    whole, part, degree = plan.config.model, plan.config.of_worker.model, plan.dims.tp
    if degree == 1:
        return []
    heads = f"{part.num_heads} of {whole.num_heads} heads"
    width = f"{part.intermediate_size:,} of {whole.intermediate_size:,} columns of the MLP"
    rows = [("tensor", f"a worker computes {heads} and {width}")]
    if (alone := _context_alone(plan)) is not None:
        rows.append(("", _compared(plan, alone)))
    return rows


def _in_step(plan: RunPlan) -> tuple[int, int, int]:
    """Return `ReceivedBytes.in_step` for a worker of the stage with the most layers."""
    layers, stages = plan.config.model.num_layers, plan.dims.pp
    if plan.pipeline is not None:
        layers = max(sum(plan.pipeline.layers[stage::stages]) for stage in range(stages))
    return plan.received.in_step(layers * plan.micro_batches)


def _compared(plan: RunPlan, alone: RunPlan) -> str:
    """Compare the bytes of a run with those of context parallelism alone on the same workers."""
    own, other = _in_step(plan), _in_step(alone)
    keys, hidden, weights = map(size, own)
    return (
        f"a worker receives {size(sum(own))} per step, {sum(own) / sum(other):.3g} times the "
        f"bytes of context parallelism alone ({size(sum(other))}): hidden states {hidden}, keys "
        f"and values {keys} instead of {size(other[0])}, weights and gradients {weights} instead "
        f"of {size(other[2])}"
    )


def _context_alone(plan: RunPlan) -> RunPlan | None:
    """Return the plan of the same workers without tensor parallelism; None if it is not allowed."""
    dims = plan.dims
    context = dims.cp * dims.tp
    config = plan.config.changed(
        topology={"tensor_parallel": 1, "context_parallel": context, "tensor_chunks": "auto"}
    )
    if any(validate.problems(config)):
        return None
    dims = ParallelDims.of(dims.workers, pp=dims.pp, cp=context, tp=1)
    environment = replace(plan.environment, dims=dims)
    try:
        choices = resolve_run(config, environment, plan.hardware)
    except ConfigError:
        return None
    return RunPlan.of(config, environment, plan.hardware, choices)


def pipeline_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return rows on pipeline parallelism: the stages, and what their messages cost."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    message, step = size(pipeline.hidden), size(pipeline.received)
    moved = f"a message has {message} of hidden states; a stage between others receives {step}"
    rows = [("pipeline", pipeline.describe()), ("", f"{moved} per step")]
    sparsity = plan.config.sparsity
    if sparsity.dense_layers and sparsity.known_density(plan.config.seq) is None:
        cut = plan.config.topology.stage_layers == "auto"
        what = "layers of stages and idle time assume" if cut else "the idle time assumes"
        text = f"{what} that a sparse layer computes {ASSUMED_DENSITY:.0%} of the pairs"
        rows.append(("", text + "; topology.stage_layers sets other layers" * cut))
    if plan.config.train.shard == "full" and plan.micro_batches > 1 and plan.received.weights:
        again = "train.shard=full gathers weights again for every micro-batch"
        rows.append(("", f"{again}; train.shard=gradients gathers them once a step"))
    return rows


def expert_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return rows on the experts of a layer: who holds them, what they move, and other degrees."""
    config, dims = plan.config, plan.dims
    if not config.model.moe.experts:
        return []
    per_node = plan.environment.workers_per_node
    run = ExpertRun(config, dims, plan.layout, plan.dtype_bytes, per_node)
    degree = run.degree
    held = f"a worker computes {config.model.moe.experts // degree} of {config.model.moe.experts}"
    if dims.dp * dims.cp * dims.tp == 1:
        return [("experts", held)]
    best, own, considered = run.cheapest(), run.price(degree), run.prices()
    others = [each for each in considered if (each.degree == 1) != (degree == 1)]
    other = min(others, key=lambda each: each.seconds, default=None)
    costs = ", ".join(_cost(each) for each in (own, other) if each is not None)
    reason, rows = "", []
    requested = plan.requested or config
    if requested.topology.expert_parallel == "auto":
        reason = "; chosen by auto, the shortest predicted time"
        if plan.search is not None:
            reason = "; chosen by auto together with the memory setting"
        times = ", ".join(f"{each.degree}: {1e3 * each.seconds:.3g}" for each in considered)
        rows = [("", f"predicted ms of a layer and step by degree: {times}")]
    elif best.degree != degree:
        reason = f"; topology.expert_parallel={best.degree} takes the shortest predicted time"
    return [("experts", f"{held}; predicted for {_hardware(plan)}: {costs}{reason}"), *rows]


def _hardware(plan: RunPlan) -> str:
    """Return for which hardware the times of degrees are predicted."""
    cluster = plan.config.topology.cluster
    name = "H200s (topology.cluster=auto)" if cluster == "auto" else cluster
    return named_on(plan.environment.device, name)


def _cost(price: ExpertPrice) -> str:
    """Return the time and the bytes of an expert-parallel degree."""
    ms = 1e3 * price.seconds
    received = size(price.traffic.total)
    return f"degree {price.degree} takes {ms:.3g} ms and receives {received} per layer and step"
