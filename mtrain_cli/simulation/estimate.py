"""Estimate the step of a plan, for `mtrain train --dry-run` and the banner and status of a run."""

from __future__ import annotations

from mtrain_cli.config.cluster import Cluster, load_cluster, shipped
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.families import FAMILIES
from mtrain_cli.simulation.scenario import PairSource, Scenario, evaluate
from mtrain_cli.simulation.what_if import InvalidSetup
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.step_estimate import StepEstimate

MOST_CONTEXT = 64  # workers of a context group; predicting a larger one can take minutes


def estimate_step(plan: RunPlan) -> StepEstimate:
    """Estimate a step as `mtrain simulate` predicts it with the settings of the plan.

    Without a prediction, as on a CPU, the result has no time. It has no density either if the
    pattern has no synthetic index.
    """
    config, on_cpu = plan.config, plan.environment.device == "cpu"
    try:
        pairs = PairSource.of(config)
        workload = pairs.problem(config)
        density = workload.density
    except ConfigError:
        known = config.sparsity.known_density(config.seq)
        why = f"sparsity={config.sparsity.pattern} has no synthetic index; `mtrain simulate "
        return StepEstimate(known, problem="" if on_cpu else f"{why}--index` takes a recorded one")
    drawn = pairs.describe(config) if pairs.name in FAMILIES else ""
    if on_cpu:
        return StepEstimate(density, drawn)
    cluster = _cluster_of(plan)
    problem = ""
    if cluster is None:
        nodes = "several nodes of " * (plan.environment.nodes > 1)
        problem = f"no cluster of mtrain has {nodes}{plan.hardware.gpu}; give topology.cluster=FILE"
    elif plan.dtype != "bfloat16":
        problem = f"kernels were measured in bfloat16, not in {plan.dtype}"
    elif plan.dims.cp > MOST_CONTEXT:
        problem = f"{plan.dims.cp} workers share a sequence; `mtrain simulate` takes minutes"
    else:
        try:
            step = evaluate(cluster, Scenario(config, workload), plan.dealt).step.seconds
            seconds = step.value, step.low, step.high
            return StepEstimate(density, drawn, cluster.name, seconds)
        except (ConfigError, InvalidSetup) as error:
            problem = str(error)
    return StepEstimate(density, drawn, problem=problem)


def _cluster_of(plan: RunPlan) -> Cluster | None:
    """Return the cluster that the settings name, or else a shipped one with the plan's GPUs."""
    given, nodes = plan.config.topology.cluster, plan.environment.nodes
    for name in ([] if given == "auto" else [given]) + list(shipped()):
        cluster = load_cluster(name)
        if cluster.gpu.name == plan.hardware.gpu and (nodes == 1 or cluster.outer is not None):
            return cluster
    return None
