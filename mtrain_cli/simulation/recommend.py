"""Recommend the fastest configuration that fits: layout, exchange, groups, recomputation.

Groups are context groups, tensor groups and the stages of a pipeline. The search tries all degrees
of tensor parallelism that divide the heads, the MLP and a node, unless the user set
``topology.tensor_parallel``. It tries up to 16 stages, with and without virtual stages, unless the
user set ``topology.pipeline_parallel``. For a model with experts, it tries to deal them over as
many workers as ``topology.expert_parallel=auto`` does, and not to deal them, unless the user set
``topology.expert_parallel``. ``gpipe`` is never faster than ``1f1b`` and keeps more activations, so
the search leaves it out. If a step has several micro-batches, the search also tries
``train.shard=gradients``, which gathers the weights once per step.

For each configuration that fits, the search also tries ``train.keep_mlp`` with the largest number
of layers that memory allows. If no kind of recomputation fits, the search tries the memory settings
that ``train.memory=auto`` chooses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any

from mtrain_cli.config.cluster import Cluster, Constant
from mtrain_cli.config.exchanges import HEAD_SHARING, flat_name
from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.schema import CHECKPOINTS, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.simulation.expert_exchange import dealt_over
from mtrain_cli.simulation.predicted_step import EXPERTS, PIPELINE, TENSOR
from mtrain_cli.simulation.prediction import Prediction
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    check_enough_blocks,
    evaluate,
    plan_on,
    with_step,
)
from mtrain_cli.simulation.search_groups import Groups, groupings
from mtrain_cli.simulation.what_if import InvalidSetup
from mtrain_cli.training import memory_search
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.memory_search import CHOICES, KEPT, SHORTEST_SEQ, format_value, get_setting
from mtrain_cli.training.run_plan import USABLE, RunPlan

RECOMPUTATIONS = ("none", "selective", "full")
DOES_NOT_FIT = "does not fit"
CLOSE = 0.02  # predictions cannot resolve differences below this share of a step's time
_SHOWN = 3
_MOST_NODES = 512
_LARGEST_GPU = 512  # if nothing fits, try GPUs of up to this many GiB, or more if needed
# How explanations name the parts of a step.
_WORDS = {
    "attention": "attention",
    "index": "estimating indices",
    "merge and copies": "merging partial results and copying",
    "late": "waiting for slower workers",
    "links": "waiting for keys and values",
    TENSOR: "waiting for hidden states",
    EXPERTS: "waiting for rows of experts",
    PIPELINE: "waiting for other stages",
    "matrices": "matrix products",
    "recomputed": "recomputed products",
    "element-wise": "element-wise kernels",
    "weights": "waiting for weights and gradients",
    "optimizer": "the optimizer",
    "offload": "waiting for activations from the host",
    "host": "launches",
}


@dataclass(frozen=True)
class RejectedSetup:
    """A configuration that is impossible or does not fit in memory."""

    what: str
    why: str


@dataclass(frozen=True)
class Recommendation:
    """The result of a search.

    ranked: configurations that fit, fastest first. Only the first two have bounds.
    rejected: configurations that are impossible or do not fit.
    needed: changes to cluster or settings, each enough to fit; empty if something fits.
    least: the plan that needs the least memory with ``train.memory=auto``; None if something fits.
    """

    ranked: tuple[PredictedScenario, ...]
    rejected: tuple[RejectedSetup, ...]
    needed: tuple[str, ...] = ()
    least: RunPlan | None = None

    @property
    def best(self) -> PredictedScenario:
        return self.ranked[0]


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
    """Return the memory settings that differ from their defaults, except for recomputation."""
    keys = [key for key in CHOICES if key != "train.activation_checkpoint"]
    settings = {key: get_setting(config, key) for key in keys}
    if config.train.activation_checkpoint != "sequence_selective":
        del settings["train.checkpoint_keep"]
    changed = {k: value for k, value in settings.items() if value != CHOICES[k][0]}
    return {key: format_value(value) for key, value in changed.items()}


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

    progress: called with two counts: combinations of layout, exchange and context size predicted so
        far, and such combinations in total.

    Raises:
        InvalidSetup, ConfigError: no configuration is possible, even with unlimited memory.
    """
    space = _Space(cluster, scenario, workers, layouts, exchanges, recomputations)
    found = _Candidates()
    for groups in groupings(scenario, workers, space.per_node):
        found.add(space, groups)
    # The plan that needs the least memory comes first.
    unfit = sorted(found.unfit, key=lambda plan: plan.memory.total)
    rejected = (*found.rejected, *map(_too_large, unfit))
    if found.mistakes and not found.fitting and not unfit:
        raise found.mistakes[0]
    outcomes: list[PredictedScenario] = []
    for done, plans in enumerate(found.fitting):
        progress(done, len(found.fitting))
        outcomes.extend(_outcomes(cluster, scenario, plans))
    if not outcomes:
        needed = tuple(_needed(replace(space, recomputations=("full",))))
        return Recommendation((), rejected, needed, _least(found.tight))
    outcomes.sort(key=lambda outcome: outcome.step.seconds.value)
    best, *others = outcomes
    runner = next((o for o in others if place(o) != place(best)), next(iter(others), None))
    top = [evaluate(cluster, scenario, o.plan) for o in (best, runner) if o is not None]
    return Recommendation((*top, *(o for o in others if o is not runner)), rejected)


@dataclass(frozen=True)
class _Space:
    cluster: Cluster
    scenario: Scenario
    workers: int
    layouts: Sequence[str]
    exchanges: Sequence[str]
    recomputations: Sequence[str] = RECOMPUTATIONS

    @property
    def per_node(self) -> int:
        """Number of workers of a node."""
        return min(self.cluster.gpus_per_node, self.workers)

    def places(self, groups: Groups) -> list[tuple[str, str]]:
        """Return the (layout, exchange) pairs to try with these groups."""
        per_node = self.per_node // groups.tensor
        return _distinct(self.layouts, self.exchanges, groups.context, per_node)

    def shards(self, groups: Groups) -> list[str]:
        """Return the values of ``train.shard`` to try."""
        train = self.scenario.config.train
        replicas = self.workers // groups.sharing
        several = train.global_batch > replicas * train.micro_batch
        if train.shard != "full" or self.scenario.sets("train.shard") or not several:
            return [train.shard]
        # With stages, `full` gathers the weights once per micro-batch, and holds fewer of them.
        return ["full", "gradients"] if groups.stages == 1 else ["gradients", "full"]

    def plans(self, groups: Groups, layout: str, exchange: str, shard: str) -> Iterator[RunPlan]:
        """Yield plans with these groups, layout and exchange, but other memory settings.

        If no plan fits, the last plan recomputes the most.
        """
        scenario, anything = self.scenario, self.recomputations is RECOMPUTATIONS
        check_enough_blocks(scenario.config, layout, self.workers, groups.context)

        def plan_with(**changes: Any) -> RunPlan:
            return plan_on(
                self.cluster,
                scenario.config.changed(train={"memory": "manual", "shard": shard, **changes}),
                workers=self.workers,
                kernel=scenario.kernel,
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
                    if (setting := memory_search.with_products(plan)) is not None:
                        yield replace(plan, config=setting.config)
            return
        allowed = CHECKPOINTS if anything else self.recomputations
        for setting in memory_search.search(plan_with() if anything else plans[0]).settings:
            if setting.fits and setting.config.train.activation_checkpoint in allowed:
                yield replace(plan_with(), config=setting.config)
                return


def _outcomes(
    cluster: Cluster, scenario: Scenario, plans: Sequence[RunPlan]
) -> Iterator[PredictedScenario]:
    """Predict plans that differ only in their memory settings. The predictions have no bounds.

    Plans that recompute the same part of attention share one prediction of attention. A plan
    without recomputation uses any of these predictions, because forward and backward are the same
    in each.
    """
    parts = [plan.recompute for plan in plans]
    first = next((part for part in parts if part is not Recompute.NOTHING), Recompute.NOTHING)
    attention: dict[Recompute, Prediction] = {}
    for plan, part in zip(plans, parts, strict=True):
        key = first if part is Recompute.NOTHING else part
        if key in attention:
            yield with_step(cluster, scenario, plan, attention[key], bounds=False)
        else:
            found = evaluate(cluster, scenario, plan, bounds=False, recompute=key)
            attention[key] = found.attention
            yield found


@dataclass(frozen=True)
class _Candidates:
    """The plans of a search, by layout, exchange, groups of workers and ``train.shard``.

    fitting: the plans that fit in memory, one list for each group with such a plan.
    unfit: all plans that do not fit.
    tight: the plan that recomputes the most, for each group without a plan that fits.
    seen: exchange, layout, groups of workers and ``train.shard`` of each group.
    """

    fitting: list[list[RunPlan]] = field(default_factory=list)
    unfit: list[RunPlan] = field(default_factory=list)
    tight: list[RunPlan] = field(default_factory=list)
    rejected: list[RejectedSetup] = field(default_factory=list)
    mistakes: list[Exception] = field(default_factory=list)
    seen: set[tuple[str, str, Groups, str]] = field(default_factory=set)

    def add(self, space: _Space, groups: Groups) -> None:
        """Add the plans with these groups of workers."""
        train, context = space.scenario.config.train, groups.context
        replicas, shared = space.workers // groups.sharing, groups.describe()
        if train.global_batch % (replicas * train.micro_batch):
            why = (
                f"train.global_batch={train.global_batch} cannot be divided among {replicas} groups"
            )
            if train.micro_batch > 1:
                why += f" with train.micro_batch={train.micro_batch} each"
            what = f"{replicas} groups of {context} worker{'s' * (context > 1)}{shared}"
            allowed = f"allowed: multiples of {replicas * train.micro_batch}"
            self._reject(what, why, ConfigError(f"{why}; {allowed}"))
            return
        for layout, exchange in space.places(groups):
            try:
                for shard in space.shards(groups):
                    fits = self._add(list(space.plans(groups, layout, exchange, shard)), groups)
                    if fits and groups.stages > 1:
                        break
            except (InvalidSetup, ConfigError) as error:
                what = f"{layout} {exchange} over {context} workers{shared}"
                self._reject(what, _why(error, exchange), error)

    def _add(self, plans: Sequence[RunPlan], groups: Groups) -> bool:
        first = plans[0]
        groups = replace(groups, experts=dealt_over(first))
        where = first.exchange.label, first.layout.name, groups, first.config.train.shard
        good = [plan for plan in plans if plan.fits]
        if where in self.seen:
            return bool(good)  # `auto` chose an exchange that is also compared by its name
        self.seen.add(where)
        if good:
            self.fitting.append(good)
        else:
            self.tight.append(plans[-1])
        self.unfit.extend(plan for plan in plans if not plan.fits)
        return bool(good)

    def _reject(self, what: str, why: str, mistake: Exception) -> None:
        self.rejected.append(RejectedSetup(what, why))
        self.mistakes.append(mistake)


def _too_large(plan: RunPlan) -> RejectedSetup:
    need = f"{plan.memory.total / GIB:.1f} of {usable(plan):.1f} GiB"
    return RejectedSetup(f"{label(plan)} ({need})", DOES_NOT_FIT)


def _distinct(
    layouts: Sequence[str], exchanges: Sequence[str], context: int, per_node: int
) -> list[tuple[str, str]]:
    """Return (layout, exchange) pairs. If several pairs are equivalent, return only the first.

    - One worker exchanges nothing, so all pairs are equivalent.
    - Inside one node, a hierarchical exchange is equivalent to its flat counterpart.
    - With ulysses alone, every worker computes whole sequences, so all layouts are equivalent.
    """
    if context == 1:
        return [(layouts[0], exchanges[0])]
    plain = {e: flat_name(e) for e in exchanges}
    flat = [
        e for e in exchanges if context > per_node or plain[e] == e or plain[e] not in exchanges
    ]
    return [
        (layout, e)
        for layout in layouts
        for e in flat
        if e not in HEAD_SHARING or layout == layouts[0]
    ]


def place(outcome: PredictedScenario) -> tuple[str, str, Groups]:
    """Return a configuration's layout, exchange and groups of workers."""
    dims, virtual = outcome.plan.dims, outcome.plan.config.topology.virtual_stages
    groups = Groups(dims.cp, dims.tp, dims.pp, virtual, dealt_over(outcome.plan))
    return outcome.layout, outcome.plan.exchange.label, groups


def _why(error: Exception, exchange: str) -> str:
    line = str(error).splitlines()[0].partition("; allowed")[0]
    return line.removeprefix(f"topology.exchange={exchange}: ")


def usable(plan: RunPlan) -> float:
    """Return how much of a GPU's memory a plan may use, in GiB."""
    return USABLE * plan.hardware.memory / GIB


def _least(plans: Sequence[RunPlan]) -> RunPlan | None:
    """Return the plan that needs the least memory with ``train.memory=auto``.

    plans: the plan that recomputes the most, for each layout, exchange and context size.
    """
    saving = []
    for plan in plans:
        settings = memory_search.search(plan).settings
        least = memory_search.nearest_to_fitting(plan, settings)
        saving.append(replace(plan, config=least.config))
    return min(saving, key=lambda plan: plan.memory.total, default=None)


def _needed(space: _Space) -> Iterator[str]:
    """Yield changes to cluster or settings. Each change alone makes the training run fit."""
    cluster, config = space.cluster, space.scenario.config

    def smallest(changed: _Space) -> RunPlan | None:
        plans: list[RunPlan] = []
        topology = config.topology
        degree, stages = topology.tensor_parallel, topology.pipeline_parallel
        context = changed.workers // (degree * stages)
        experts = topology.expert_parallel
        groups = Groups(context, degree, stages, topology.virtual_stages, experts)
        for layout, exchange in changed.places(groups):
            with suppress(InvalidSetup, ConfigError):
                plans += list(changed.plans(groups, layout, exchange, config.train.shard))
        return min(plans, key=lambda plan: (not plan.fits, plan.memory.total), default=None)

    def fitting(**changes: Any) -> RunPlan | None:
        plan = smallest(replace(space, **changes))
        return plan if plan is not None and plan.fits else None

    now = smallest(space)
    if now is None:
        return

    def on_larger(gib: int) -> RunPlan | None:
        """Return a plan that would fit on GPUs with ``gib`` GiB of memory, or None."""
        gpu = replace(cluster.gpu, hbm_gib=Constant(gib, "guess", "", gib, gib))
        return fitting(cluster=replace(cluster, gpu=gpu))

    # The memory settings depend on the GPU's memory, so each size needs a search of its own.
    possible = range(
        floor(cluster.gpu.hbm_gib.value) + 1,
        max(_LARGEST_GPU, ceil(now.memory.total / GIB / USABLE)) + 1,
    )
    gib = possible.start + bisect_left(possible, True, key=lambda gib: on_larger(gib) is not None)
    large = on_larger(gib)
    if large is not None:
        yield f"GPUs with {gib} GiB instead of {cluster.gpu.hbm_gib.value:.0f}: {label(large)}"
    nodes = 2 * cluster.nodes
    if cluster.outer is None and nodes <= _MOST_NODES:
        yield (
            f"more nodes than {cluster.nodes}: {cluster.name} does not describe links between "
            "nodes (links.outer)"
        )
    while cluster.outer is not None and nodes <= _MOST_NODES:
        more = replace(cluster, nodes=nodes)
        if (plan := fitting(cluster=more, workers=more.gpus)) is not None:
            yield f"--nodes {nodes} instead of {cluster.nodes}: {_with_memory(plan)}"
            break
        nodes *= 2
    asked = config.seq
    seq = asked // 2
    while seq >= SHORTEST_SEQ:
        shorter = replace(space.scenario, config=replace(config, seq=seq))
        allowed = not any(mask_problems(config.mask, seq, config.sparsity.pattern))
        if allowed and (plan := fitting(scenario=shorter)) is not None:
            yield f"seq={format_size(seq)} instead of {format_size(asked)}: {_with_memory(plan)}"
            break
        seq //= 2


def _with_memory(plan: RunPlan) -> str:
    return f"{label(plan)}, {plan.memory.total / GIB:.1f} GiB"


def reasons(
    best: PredictedScenario, other: PredictedScenario, words: Sequence[str] = ()
) -> list[str]:
    """Explain with numbers why ``best`` is faster than ``other``, the largest difference first.

    words: settings as the user typed them.
    """
    mine, its = best.step, other.step
    step = its.seconds.value
    gap = step - mine.seconds.value

    # A step without tensor parallelism or a pipeline has no time for it.
    of_mine, of_its = (dict.fromkeys(_WORDS, 0.0) | dict(step.parts) for step in (mine, its))

    def part(name: str) -> str:
        return f"{_WORDS[name]} takes {of_mine[name]:.3g} s instead of {of_its[name]:.3g} s"

    if gap > CLOSE * step:
        explanation = [f"{gap:.3g} s ({gap / step:.1%}) less per step"]
    else:
        faster = f"{step / mine.seconds.value - 1:.1%} faster"
        explanation = [f"{faster}, less than the prediction can resolve: measure both"]
    differences = sorted(((of_its[n] - of_mine[n], n) for n in _WORDS), reverse=True)
    for difference, name in differences[:_SHOWN]:
        if difference > 0.002 * step:
            explanation.append(f"{part(name)}{_degree(best, other, name)}")
    difference, name = differences[-1]
    if difference < -0.002 * step:
        explanation.append(f"but {part(name)}")
    explanation.append(
        f"memory {mine.gib:.1f} GiB instead of {its.gib:.1f} GiB, of {usable(best.plan):.1f} GiB "
        f"usable ({USABLE:.0%})"
    )
    typed = any(word.startswith("train.keep_mlp=") for word in words)
    if "train.keep_mlp" in memory_settings(best.plan.config) and not typed:
        explanation.append(KEPT)
    return explanation


def _degree(best: PredictedScenario, other: PredictedScenario, name: str) -> str:
    if name not in ("late", "attention"):
        return ""
    mine, its = (
        sum(p.work.worker for p in o.attention.passes.values()) / len(o.attention.passes)
        for o in (best, other)
    )
    return f" (worker imbalance of work {mine:.2f}, not {its:.2f})" if its > mine + 0.005 else ""
