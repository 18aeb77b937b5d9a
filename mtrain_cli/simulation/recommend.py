"""Recommend the fastest configuration that fits: layout, exchange, groups, recomputation.

The search tries every size of context groups, every degree of tensor parallelism within a node,
up to 16 stages with one or two virtual stages, and experts dealt as ``auto`` does or not. Of the
memory settings, it tries kinds of recomputation, ``train.keep_mlp`` with the most layers that fit,
``train.shard=gradients`` for several micro-batches, and, if nothing fits, those of
``train.memory=auto``. Keys that the user set stay fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from mtrain_cli.config import parallel_checks
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.exchanges import HEAD_SHARING, flat_name
from mtrain_cli.config.keys import show
from mtrain_cli.config.parallel_checks import NEED_ALL_EXPERTS, NEED_WHOLE_MODEL
from mtrain_cli.config.schema import CHECKPOINTS, Config, ConfigError
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.simulation.expert_cost import dealt_over
from mtrain_cli.simulation.predicted_step import PARTS, part_name
from mtrain_cli.simulation.prediction import Prediction
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    check_enough_blocks,
    evaluate,
    plan_on,
    with_step,
)
from mtrain_cli.simulation.what_if import InvalidSetup
from mtrain_cli.training import planning
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.planning import CHOICES, KEPT, get_setting
from mtrain_cli.training.run_plan import USABLE, RunPlan

RECOMPUTATIONS = ("none", "selective", "full")
DOES_NOT_FIT = "does not fit"
CLOSE = 0.02  # predictions cannot resolve differences below this share of a step's time
_SHOWN = 3
_MOST_STAGES = 16
_ANY_SCHEDULE = ("auto", 1, "auto")  # defaults of schedule, virtual_stages and stage_layers


@dataclass(frozen=True)
class Recommendation:
    """The result of a search.

    ranked: configurations that fit, fastest first. Only the first two have bounds.
    rejected: (configuration, why) of the others.
    least: the plan that needs the least memory with ``train.memory=auto``; None if something fits.
    """

    ranked: tuple[PredictedScenario, ...]
    rejected: tuple[tuple[str, str], ...]
    least: RunPlan | None = None


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

    def __str__(self) -> str:
        degrees = {name: value for name, value in vars(self).items() if value != 1}
        return " ".join(f"{name}={value}" for name, value in degrees.items()) or "one worker"


def label(plan: RunPlan) -> str:
    """Describe a configuration in a few words."""
    dims, train = plan.dims, plan.config.train
    groups = f", {dims.dp} x {dims.cp} workers" if dims.dp > 1 else ""
    groups = f", {dims}" if dims.tp > 1 or dims.pp > 1 else groups
    if (virtual := plan.config.topology.virtual_stages) > 1:
        groups += f" of {virtual} virtual stages"
    if (dealt := dealt_over(plan)) > 1:
        groups += f", experts over {dealt} workers"
    kind = "no" if train.activation_checkpoint == "none" else train.activation_checkpoint
    other = " ".join(f"{key}={value}" for key, value in memory_settings(plan.config).items())
    return (
        f"{plan.layout.name} {plan.exchange.label}{groups}, {kind} "
        f"recomputation{', ' if other else ''}{other}"
    )


def memory_settings(config: Config) -> dict[str, str]:
    """Return the memory settings that differ from their defaults, except recomputation."""
    keys = [key for key in CHOICES if key != "train.activation_checkpoint"]
    settings = {key: get_setting(config, key) for key in keys}
    if config.train.activation_checkpoint != "sequence_selective":
        del settings["train.checkpoint_keep"]
    changed = {k: value for k, value in settings.items() if value != CHOICES[k][0]}
    return {key: show(value) for key, value in changed.items()}


def recommend(
    cluster: Cluster,
    scenario: Scenario,
    workers: int,
    layouts: Sequence[str],
    exchanges: Sequence[str],
    recomputations: Sequence[str] = RECOMPUTATIONS,
    progress: Callable[[int, int], None] = lambda done, of: None,  # noqa: ARG005
) -> Recommendation:
    """Search all configurations for the fastest one that fits.

    progress: called with the number of combinations predicted so far, and in total.

    Raises:
        ConfigError: no configuration is possible, even with unlimited memory.
    """
    search = _Search(cluster, scenario, workers, layouts, exchanges, recomputations)
    for groups in groupings(scenario, workers, search.per_node):
        search.add(groups)
    # The plan that needs the least memory comes first.
    unfit = sorted(search.unfit, key=lambda plan: plan.memory.total)
    sizes = (f"{p.memory.total / GIB:.1f} of {usable(p):.1f} GiB" for p in unfit)
    large = (f"{label(plan)} ({size})" for plan, size in zip(unfit, sizes, strict=True))
    rejected = (*search.rejected, *((what, DOES_NOT_FIT) for what in large))
    if search.mistakes and not search.fitting and not unfit:
        raise search.mistakes[0]
    outcomes: list[PredictedScenario] = []
    for done, plans in enumerate(search.fitting):
        progress(done, len(search.fitting))
        outcomes.extend(_outcomes(cluster, scenario, plans))
    if not outcomes:
        return Recommendation((), rejected, _least(search.tight))
    outcomes.sort(key=lambda outcome: outcome.step.order)
    best, *others = outcomes
    runner = next((o for o in others if place(o) != place(best)), next(iter(others), None))
    top = [evaluate(cluster, scenario, o.plan) for o in (best, runner) if o is not None]
    return Recommendation((*top, *(o for o in others if o is not runner)), rejected)


@dataclass(frozen=True)
class _Search:
    """The space of a search, and its plans so far.

    fitting: the plans that fit, by place: layout, exchange, groups of workers and ``train.shard``.
    tight: the plan that recomputes the most, of each place where none fits.
    seen: places; ``auto`` may choose an exchange that is also compared by its name.
    """

    cluster: Cluster
    scenario: Scenario
    workers: int
    layouts: Sequence[str]
    exchanges: Sequence[str]
    recomputations: Sequence[str]
    fitting: list[list[RunPlan]] = field(default_factory=list)
    unfit: list[RunPlan] = field(default_factory=list)
    tight: list[RunPlan] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)
    seen: set[tuple[str, str, Groups, str]] = field(default_factory=set)

    @property
    def per_node(self) -> int:
        return min(self.cluster.gpus_per_node, self.workers)

    def add(self, groups: Groups) -> None:
        train = self.scenario.config.train
        each = self.workers // groups.sharing * train.micro_batch
        if train.global_batch % each:
            why = f"train.global_batch={train.global_batch}: must be a multiple of {each}"
            self.rejected.append((f"groups of {groups}", why))
            self.mistakes.append(ConfigError(why))
            return
        per_node = self.per_node // groups.tensor
        for layout, exchange in _distinct(self.layouts, self.exchanges, groups.context, per_node):
            try:
                for shard in self._shards(groups, train.global_batch > each):
                    plans = list(self.plans(groups, layout, exchange, shard))
                    if self._keep(plans, groups) and groups.stages > 1:
                        break
            except ConfigError as error:
                why = error.reason if isinstance(error, InvalidSetup) else error.problems[0]
                self.rejected.append((f"{layout} {exchange} over groups of {groups}", why))
                self.mistakes.append(error)

    def _keep(self, plans: Sequence[RunPlan], groups: Groups) -> bool:
        """Keep plans of other memory settings. Return whether one fits."""
        first, good = plans[0], [plan for plan in plans if plan.fits]
        groups = replace(groups, experts=dealt_over(first))
        where = first.exchange.label, first.layout.name, groups, first.config.train.shard
        if where not in self.seen:
            self.seen.add(where)
            self.unfit.extend(plan for plan in plans if not plan.fits)
            if good:
                self.fitting.append(good)
            else:
                self.tight.append(plans[-1])
        return bool(good)

    def _shards(self, groups: Groups, several: bool) -> list[str]:
        """Return the values of ``train.shard`` to try. several: several micro-batches."""
        shard = self.scenario.config.train.shard
        if shard != "full" or self.scenario.sets("train.shard") or not several:
            return [shard]
        # With stages, `full` gathers the weights once per micro-batch, and holds fewer of them.
        return ["full", "gradients"] if groups.stages == 1 else ["gradients", "full"]

    def plans(self, groups: Groups, layout: str, exchange: str, shard: str) -> Iterator[RunPlan]:
        """Yield plans of other memory settings. If none fits, the last recomputes the most."""
        scenario, anything = self.scenario, self.recomputations is RECOMPUTATIONS
        check_enough_blocks(scenario.config, layout, self.workers, groups.context)

        def plan_with(**changes: Any) -> RunPlan:
            return plan_on(
                self.cluster,
                scenario.config.changed(train={"memory": "manual", "shard": shard, **changes}),
                workers=self.workers,
                layout=layout,
                exchange=exchange,
                context_parallel=groups.context,
                tensor_parallel=groups.tensor,
                pipeline_parallel=groups.stages,
                virtual_stages=groups.virtual,
                expert_parallel=groups.experts,
            )

        # Only what a recomputed layer keeps can be offloaded, so offloading needs recomputation.
        away = scenario.config.train.offload_activations
        kinds = [kind for kind in self.recomputations if kind != "none" or not away]
        plans = [plan_with(activation_checkpoint=kind) for kind in kinds]
        yield from plans
        good = [plan for plan in plans if plan.fits]
        if good:
            # Do not change train.keep_mlp if the user set it.
            if not scenario.sets("train.keep_mlp"):
                for plan in good:
                    if (setting := planning.with_products(plan)) is not None:
                        yield replace(plan, config=setting.config)
            return
        allowed = CHECKPOINTS if anything else self.recomputations
        for setting in planning.search(plan_with() if anything else plans[0]).settings:
            if setting.fits and setting.config.train.activation_checkpoint in allowed:
                yield replace(plan_with(), config=setting.config)
                return


def _outcomes(
    cluster: Cluster, scenario: Scenario, plans: Sequence[RunPlan]
) -> Iterator[PredictedScenario]:
    """Predict plans that differ only in their memory settings, without bounds."""
    parts = [plan.recompute for plan in plans]
    first = next((part for part in parts if part is not Recompute.NOTHING), Recompute.NOTHING)
    attention: dict[Recompute, Prediction] = {}
    for plan, part in zip(plans, parts, strict=True):
        key = first if part is Recompute.NOTHING else part
        if key in attention:
            yield with_step(cluster, scenario, plan, attention[key], bounds=False)
        else:
            outcome = evaluate(cluster, scenario, plan, bounds=False, recompute=key)
            attention[key] = outcome.attention
            yield outcome


def _distinct(
    layouts: Sequence[str], exchanges: Sequence[str], context: int, per_node: int
) -> list[tuple[str, str]]:
    """Return the pairs, the first of equivalent ones: with ulysses alone, all layouts are."""
    if context == 1:
        return [(layouts[0], exchanges[0])]
    crosses = context > per_node
    flat = [e for e in exchanges if crosses or flat_name(e) == e or flat_name(e) not in exchanges]
    return [
        (layout, e)
        for layout in layouts
        for e in flat
        if e not in HEAD_SHARING or layout == layouts[0]
    ]


def place(outcome: PredictedScenario) -> tuple[str, str, Groups]:
    dims, virtual = outcome.plan.dims, outcome.plan.config.topology.virtual_stages
    groups = Groups(dims.cp, dims.tp, dims.pp, virtual, dealt_over(outcome.plan))
    return outcome.layout, outcome.plan.exchange.label, groups


def usable(plan: RunPlan) -> float:
    """Return how much of a GPU's memory a plan may use, in GiB."""
    return USABLE * plan.hardware.memory / GIB


def _least(plans: Sequence[RunPlan]) -> RunPlan | None:
    """Return the plan that needs the least memory with ``train.memory=auto``."""
    saving = []
    for plan in plans:
        settings = planning.search(plan).settings
        least = planning.nearest_to_fitting(plan, settings)
        saving.append(replace(plan, config=least.config))
    return min(saving, key=lambda plan: plan.memory.total, default=None)


def reasons(
    best: PredictedScenario, other: PredictedScenario, words: Sequence[str] = ()
) -> list[str]:
    """Explain with numbers why ``best`` is faster than ``other``, the largest difference first."""
    seconds, step = best.step.seconds.value, other.step.seconds.value
    gap, here, there = step - seconds, best.step.parts, other.step.parts
    explanation = [f"{gap:.3g} s ({gap / step:.1%}) less per step"]
    if gap <= CLOSE * step:
        faster = f"{step / seconds - 1:.1%} faster"
        explanation = [f"{faster}, less than the prediction can resolve: measure both"]
    # A step without tensor parallelism or a pipeline has no time for it.
    differences = sorted(((there.get(n, 0.0) - here.get(n, 0.0), n) for n in PARTS), reverse=True)
    listed = [pair for pair in differences[:_SHOWN] if pair[0] > 0] + [differences[-1]]
    for difference, name in listed:
        if abs(difference) > 0.002 * step:
            times = f"{here.get(name, 0.0):.3g} s instead of {there.get(name, 0.0):.3g} s"
            explanation.append(f"{'but ' * (difference < 0)}{part_name(name)} {times}")
    own, others = (
        fmean(p.work.worker for p in scenario.attention.passes.values())
        for scenario in (best, other)
    )
    if abs(own - others) > 0.005:
        explanation.append(f"worker imbalance of work {own:.2f} instead of {others:.2f}")
    explanation.append(
        f"memory {best.step.gib:.1f} GiB instead of {other.step.gib:.1f} GiB, of "
        f"{usable(best.plan):.1f} GiB usable ({USABLE:.0%})"
    )
    typed = any(word.startswith("train.keep_mlp=") for word in words)
    if "train.keep_mlp" in memory_settings(best.plan.config) and not typed:
        explanation.append(KEPT)
    return explanation


def groupings(scenario: Scenario, workers: int, per_node: int) -> Iterator[Groups]:
    """Yield the groups to try, those without a pipeline first. per_node: workers of a node."""
    for stages in _stage_counts(scenario, workers):
        for tensor in tensor_degrees(scenario, per_node):
            count, rest = divmod(workers, tensor * stages)
            if not count or rest:
                continue
            for context in contexts(scenario.config, count, per_node // tensor):
                groups = Groups(context, tensor, stages)
                if groups.sharing == context or count % context == 0:
                    for virtual in _virtual_stages(scenario, workers, groups):
                        for experts in expert_degrees(scenario):
                            yield replace(groups, virtual=virtual, experts=experts)


def _stage_counts(scenario: Scenario, workers: int) -> list[int]:
    config, key = scenario.config, "topology.pipeline_parallel"
    given = config.topology.pipeline_parallel
    needs_all = any(parallel_checks.unsupported(config, key, NEED_WHOLE_MODEL))
    if given > 1 or scenario.sets(key) or needs_all:
        return [given]
    most = min(_MOST_STAGES, config.model.num_layers, config.train.global_batch)
    return [n for n in range(1, most + 1) if workers % n == 0]


def _virtual_stages(scenario: Scenario, workers: int, groups: Groups) -> Iterator[int]:
    """Yield each number of virtual stages to try: none if a stage would mostly idle."""
    topology, train = scenario.config.topology, scenario.config.train
    fixed = (topology.schedule, topology.virtual_stages, topology.stage_layers) != _ANY_SCHEDULE
    if groups.stages == 1 or fixed or scenario.sets("topology.virtual_stages"):
        yield topology.virtual_stages
        return
    count = train.global_batch // (workers // groups.sharing * train.micro_batch)
    if count < groups.stages and topology.pipeline_parallel == 1:
        return
    yield 1
    layers = scenario.config.model.num_layers
    if count and count % groups.stages == 0 and 2 * groups.stages <= layers:
        yield 2


def contexts(config: Config, workers: int, per_node: int) -> list[int]:
    """Return the sizes of context groups to try, the largest first.

    Each size divides ``workers``, and is a multiple or a divisor of ``per_node``.
    """
    if isinstance(given := config.topology.context_parallel, int):
        return [given]
    divisors = (c for c in range(workers, 0, -1) if workers % c == 0)
    return [c for c in divisors if c % per_node == 0 or per_node % c == 0]


def expert_degrees(scenario: Scenario) -> list[int | str]:
    """Return the values of ``topology.expert_parallel`` to try: 1 and ``auto``, or what is set."""
    config = scenario.config
    given = config.topology.expert_parallel
    fixed = given != 1 or scenario.sets("topology.expert_parallel")
    needs_all = any(parallel_checks.unsupported(config, "", NEED_ALL_EXPERTS))
    return [given] if fixed or not config.model.moe.experts or needs_all else [1, "auto"]


def tensor_degrees(scenario: Scenario, per_node: int) -> list[int]:
    """Return the tensor-parallel degrees to try, the smallest first."""
    config, given = scenario.config, scenario.config.topology.tensor_parallel
    if given > 1 or scenario.sets("topology.tensor_parallel"):
        return [given]
    degrees = range(1, per_node + 1)
    return [n for n in degrees if parallel_checks.splits_layers(config, n, per_node)]
