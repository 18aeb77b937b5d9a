"""The groups of workers that `mtrain simulate recommend` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtrain_cli.config.parallel_checks import (
    NEED_ALL_EXPERTS,
    NEED_WHOLE_MODEL,
    tensor_problems,
    unsupported,
)
from mtrain_cli.config.schema import Config
from mtrain_cli.simulation.scenario import Scenario

_MOST_STAGES = 16
_ANY_SCHEDULE = ("auto", 1, "auto")  # defaults of schedule, virtual_stages and stage_layers


@dataclass(frozen=True)
class Groups:
    """How workers share the work of a sequence.

    context: number of workers of a context group, or of its tensor groups.
    stages, virtual: number of stages, and of virtual stages on each.
    experts: value of ``topology.expert_parallel``.
    """

    context: int
    tensor: int = 1
    stages: int = 1
    virtual: int = 1
    experts: int | str = 1

    @property
    def sharing(self) -> int:
        return self.context * self.tensor * self.stages

    def describe(self) -> str:
        """Return the degrees besides ``context``, or ""."""
        degrees: dict[str, int | str] = {"tensor_parallel": self.tensor}
        degrees["pipeline_parallel"] = self.stages
        degrees["virtual_stages"] = self.virtual
        degrees |= {"expert_parallel": self.experts}
        shown = " ".join(f"{name}={value}" for name, value in degrees.items() if value != 1)
        return f" of {shown}" if shown else ""


def groupings(scenario: Scenario, workers: int, per_node: int) -> Iterator[Groups]:
    """Yield the groups to try, those without a pipeline first.

    per_node: number of workers of a node.
    """
    config, degrees = scenario.config, expert_degrees(scenario)
    for stages in _stage_counts(scenario, workers):
        for tensor in tensor_degrees(scenario, per_node):
            groups = workers // (tensor * stages)
            if not groups or workers % (tensor * stages):
                continue
            for context in contexts(config, groups, per_node // tensor):
                one = Groups(context, tensor, stages)
                if one.sharing == context or groups % context == 0:
                    for each in _with_virtual_stages(scenario, workers, one):
                        yield from (replace(each, experts=degree) for degree in degrees)


def _stage_counts(scenario: Scenario, workers: int) -> list[int]:
    config, given = scenario.config, scenario.config.topology.pipeline_parallel
    if (
        given > 1
        or scenario.sets("topology.pipeline_parallel")
        or any(unsupported(config, "topology.pipeline_parallel", NEED_WHOLE_MODEL))
    ):
        return [given]
    most = min(_MOST_STAGES, config.model.num_layers, config.train.global_batch)
    return [n for n in range(1, most + 1) if workers % n == 0]


def _with_virtual_stages(scenario: Scenario, workers: int, one: Groups) -> Iterator[Groups]:
    """Yield the groups with each number of virtual stages to try.

    Leave out pipelines with fewer micro-batches than stages, which mostly idle, unless the user set
    the number of stages.
    """
    topology, train = scenario.config.topology, scenario.config.train
    fixed = (topology.schedule, topology.virtual_stages, topology.stage_layers) != _ANY_SCHEDULE
    if one.stages == 1 or fixed or scenario.sets("topology.virtual_stages"):
        yield replace(one, virtual=topology.virtual_stages)
        return
    count = train.global_batch // (workers // one.sharing * train.micro_batch)
    if count < one.stages and topology.pipeline_parallel == 1:
        return
    yield one
    if count and count % one.stages == 0 and 2 * one.stages <= scenario.config.model.num_layers:
        yield replace(one, virtual=2)


def contexts(config: Config, workers: int, per_node: int) -> list[int]:
    """Return the sizes of context groups to try, the largest first.

    Each size divides ``workers``, and is a multiple or a divisor of ``per_node``. If the user set
    ``topology.context_parallel``, return only this size.
    """
    if config.topology.context_parallel != "auto":
        assert isinstance(config.topology.context_parallel, int)
        return [config.topology.context_parallel]
    divisors = (c for c in range(workers, 0, -1) if workers % c == 0)
    return [c for c in divisors if c % per_node == 0 or per_node % c == 0]


def expert_degrees(scenario: Scenario) -> list[int | str]:
    """Return the values of ``topology.expert_parallel`` to try.

    These are 1 and the degree with the shortest predicted time (``auto``). If the user set the key,
    or a setting that needs all experts on each worker, return only one value.
    """
    config = scenario.config
    given = config.topology.expert_parallel
    fixed = given != 1 or scenario.sets("topology.expert_parallel")
    if fixed or not config.model.moe.experts or any(unsupported(config, "", NEED_ALL_EXPERTS)):
        return [given]
    return [1, "auto"]


def tensor_degrees(scenario: Scenario, per_node: int) -> list[int]:
    """Return the tensor-parallel degrees to try, the smallest first.

    Each degree divides the heads, the key-value heads, the MLP's width and the workers of a node.
    If the user set ``topology.tensor_parallel``, return only this degree.
    """
    config, given = scenario.config, scenario.config.topology.tensor_parallel
    if given > 1 or scenario.sets("topology.tensor_parallel"):
        return [given]
    return [
        degree
        for degree in range(1, per_node + 1)
        if per_node % degree == 0
        and not any(tensor_problems(config.changed(topology={"tensor_parallel": degree})))
    ]
