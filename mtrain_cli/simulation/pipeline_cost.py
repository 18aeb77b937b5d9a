"""Time the step of a pipeline: play its schedule with the predicted times of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain_cli.config.cluster import Cluster
from mtrain_cli.parallel.pipeline_schedule import TimedPipeline
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.training.pipeline_plan import PipelinePlan
from mtrain_cli.training.run_plan import RunPlan

# Share of the time of the loss that the forward pass takes if backward computes the logits again:
# one of four matrix products (`model.loss`).
_LOSS_IN_FORWARD = 0.25


@dataclass(frozen=True)
class StageTime:
    """Times of a stage in a step, over all micro-batches. The unit is any.

    forward, backward: passes through the layers of each virtual stage.
    loss: LM head and loss; 0 on all stages but the last.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    loss: float

    @staticmethod
    def of(whole: Mapping[str, float], parts: Sequence[Mapping[str, float]]) -> StageTime:
        """Deal the times of a stage out to its virtual stages, in proportion to their own times.

        Args:
            whole: time of each pass of the stage, and of the loss.
            parts: times of each virtual stage as if it were alone, by pass.
        """

        def dealt(name: str) -> tuple[float, ...]:
            total = sum(part[name] for part in parts)
            return tuple(whole[name] * part[name] / total for part in parts)

        return StageTime(dealt("forward"), dealt("backward"), whole["loss"])


def timed_step(plan: RunPlan, stages: Sequence[StageTime], hop: float) -> TimedPipeline:
    """Return the pipeline of a plan with the times of its passes.

    Args:
        stages: times of each stage.
        hop: duration of a message between stages.
    """
    planned = plan.pipeline
    assert planned is not None
    in_forward = 1.0 if plan.config.train.loss_gradients == "forward" else _LOSS_IN_FORWARD
    last = planned.pipeline.last

    def cost(number: int, *, forward: bool) -> float:
        virtual, stage = divmod(number, planned.pipeline.stages)
        own = stages[stage]
        passing = (own.forward if forward else own.backward)[virtual]
        loss = own.loss * (in_forward if forward else 1 - in_forward) * (number == last)
        return (passing + loss) / planned.pipeline.micro_batches

    forward, backward = (
        tuple(cost(number, forward=way) for number in range(last + 1)) for way in (True, False)
    )
    return TimedPipeline(planned.pipeline, forward, backward, hop)


def hop_us(cluster: Cluster, costs: Costs, plan: RunPlan, pipeline: PipelinePlan) -> float:
    """Return the time of a message between stages, in microseconds.

    If some hops cross nodes, return their time.
    """
    workers = plan.dims.workers // plan.dims.pp
    nodes = [stage * workers // cluster.gpus_per_node for stage in range(plan.dims.pp)]
    outer = len(set(nodes)) > 1
    link = cluster.link(outer=outer)
    per_us = costs.rate(link.bandwidth_gbps) * 1e3
    capacity = max(costs.rate(link.capacity_gbps) * 1e3, per_us)
    # All workers of a node send at once, and share its network cards.
    sharing = int(costs.burden(link.shared_by)) if outer else 1
    return costs.burden(link.latency_us) + pipeline.hidden * max(1 / per_us, sharing / capacity)
