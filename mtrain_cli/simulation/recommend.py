"""Recommend the fastest configuration that fits, of all layouts, exchanges, groups, recomputation.

What fits is also tried with the MLP products of as many layers kept as memory allows
(``train.keep_mlp``): the same attention in another step. If no recomputation fits, the memory
settings that ``train.memory=auto`` chooses are tried instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from mtrain_cli.config.schema import CHECKPOINTS, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.simulation.cluster import Cluster, Constant
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    check_enough_blocks,
    evaluate,
    plan_on,
    with_step,
)
from mtrain_cli.simulation.what_if import InvalidSetup
from mtrain_cli.training.flops import recomputes_attention
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.memory_search import (
    CHOICES,
    format_value,
    get_setting,
    nearest_to_fitting,
    search,
    with_products,
)
from mtrain_cli.training.run_plan import KEPT, SHORTEST_SEQ, USABLE, RunPlan, with_setting

RECOMPUTATIONS = ("none", "selective", "full")
DOES_NOT_FIT = "does not fit"
CLOSE = 0.02  # of a step: a smaller difference is below the accuracy of a prediction
_SHOWN = 3
_MOST_NODES = 512
_LARGEST_GPU = 512  # GiB; sizes up to this are always tried
# Names of the parts of a step in explanations.
_WORDS = {
    "attention": "attention",
    "index": "estimating indices",
    "merge and copies": "merging partial results and copying",
    "late": "waiting for slower workers",
    "links": "waiting for keys and values",
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
    """A configuration that is impossible or does not fit. why: the same for the same reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Recommendation:
    """The result of a search.

    ranked: configurations that fit, fastest first; the first two have bounds.
    rejected: configurations that are impossible or do not fit.
    needed: if nothing fits, changes that would help.
    least: if nothing fits, the plan that needs the least memory, with ``train.memory=auto``.
    """

    ranked: tuple[PredictedScenario, ...]
    rejected: tuple[RejectedSetup, ...]
    needed: tuple[str, ...] = ()
    least: RunPlan | None = None

    @property
    def best(self) -> PredictedScenario:
        return self.ranked[0]


def label(plan: RunPlan) -> str:
    """Return a configuration in a few words."""
    environment, train = plan.environment, plan.config.train
    groups = f", {environment.dp} x {environment.cp} workers" if environment.dp > 1 else ""
    kind = "no" if train.activation_checkpoint == "none" else train.activation_checkpoint
    other = " ".join(f"{key}={value}" for key, value in memory_settings(plan.config).items())
    return (
        f"{plan.layout.name} {plan.exchange.label}{groups}, {kind} "
        f"recomputation{', ' if other else ''}{other}"
    )


def memory_settings(config: Config) -> dict[str, str]:
    """Return memory settings, except the kind of recomputation, that differ from the default."""
    settings = {
        key: get_setting(config, key) for key in CHOICES if key != "train.activation_checkpoint"
    }
    if config.train.activation_checkpoint != "sequence_selective":
        del settings["train.checkpoint_keep"]
    return {key: format_value(value) for key, value in settings.items() if value != CHOICES[key][0]}


def contexts(config: Config, workers: int, per_node: int) -> list[int]:
    """Return the sizes of context groups that fill nodes or divide them, the largest first."""
    if config.topology.context_parallel != "auto":
        assert isinstance(config.topology.context_parallel, int)
        return [config.topology.context_parallel]
    return [
        c
        for c in range(workers, 0, -1)
        if workers % c == 0 and (c % per_node == 0 or per_node % c == 0)
    ]


def recommend(
    cluster: Cluster,
    scenario: Scenario,
    workers: int,
    layouts: Sequence[str],
    exchanges: Sequence[str],
    recomputations: Sequence[str] = RECOMPUTATIONS,
    progress: Callable[[int, int], None] = lambda done, of: None,  # noqa: ARG005
) -> Recommendation:
    """Search all configurations for the fastest that fits.

    progress: called with the number of attention passes predicted so far and in total.

    Raises:
        InvalidSetup, ConfigError: no configuration is possible, whatever the memory.
    """
    per_node = min(cluster.gpus_per_node, workers)
    rejected: list[RejectedSetup] = []
    fitting: list[list[RunPlan]] = []
    unfit: list[RunPlan] = []
    tight: list[RunPlan] = []
    mistakes: list[Exception] = []
    for context in contexts(scenario.config, workers, per_node):
        replicas, train = workers // context, scenario.config.train
        if train.global_batch % (replicas * train.micro_batch):
            short = (
                f"train.global_batch={train.global_batch} cannot be divided among so many groups"
            )
            if train.micro_batch > 1:
                short += f" with train.micro_batch={train.micro_batch} each"
            rejected.append(
                RejectedSetup(f"{replicas} groups of {context} worker{'s' * (context > 1)}", short)
            )
            mistakes.append(
                ConfigError(f"{short}; allowed: multiples of {replicas * train.micro_batch}")
            )
            continue
        for layout, exchange in _distinct(layouts, exchanges, context, per_node):
            try:
                plans = list(
                    _plans(cluster, scenario, workers, context, layout, exchange, recomputations)
                )
            except (InvalidSetup, ConfigError) as error:
                mistakes.append(error)
                rejected.append(
                    RejectedSetup(
                        f"{layout} {exchange} over {context} workers", _why(error, exchange)
                    )
                )
                continue
            good = [plan for plan in plans if plan.fits]
            if good:
                fitting.append(good)
            else:
                tight.append(plans[-1])
            unfit += [plan for plan in plans if not plan.fits]
    # Those that miss by the least come first.
    unfit.sort(key=lambda plan: plan.memory.total)
    rejected += [
        RejectedSetup(
            f"{label(plan)} ({plan.memory.total / GIB:.1f} of {usable(plan):.1f} GiB)", DOES_NOT_FIT
        )
        for plan in unfit
    ]
    if mistakes and not fitting and not unfit:
        raise mistakes[0]
    outcomes: list[PredictedScenario] = []
    for done, plans in enumerate(fitting):
        progress(done, len(fitting))
        full = any(recomputes_attention(plan.config.train) for plan in plans)
        first = evaluate(cluster, scenario, plans[0], bounds=False, recompute=full)
        outcomes += [
            first,
            *(
                with_step(cluster, scenario, plan, first.attention, bounds=False)
                for plan in plans[1:]
            ),
        ]
    if not outcomes:
        return Recommendation(
            (),
            tuple(rejected),
            tuple(_needed(cluster, scenario, workers, layouts, exchanges)),
            _least(tight),
        )
    outcomes.sort(key=lambda outcome: outcome.step.seconds.value)
    best = outcomes[0]
    runner = next(
        (o for o in outcomes[1:] if place(o) != place(best)), next(iter(outcomes[1:]), None)
    )
    top = [evaluate(cluster, scenario, o.plan) for o in (best, runner) if o is not None]
    rest = [o for o in outcomes if o is not best and o is not runner]
    return Recommendation((*top, *rest), tuple(rejected))


def _distinct(
    layouts: Sequence[str], exchanges: Sequence[str], context: int, per_node: int
) -> list[tuple[str, str]]:
    """Return the combinations that differ.

    One worker exchanges nothing. Inside one node there is no hierarchy. With ulysses alone, every
    worker computes whole sequences, whatever the layout.
    """
    if context == 1:
        return [(layouts[0], exchanges[0])]
    plain = {e: e.removeprefix("hierarchical_") for e in exchanges}
    flat = [
        e for e in exchanges if context > per_node or plain[e] == e or plain[e] not in exchanges
    ]
    return [
        (layout, e) for layout in layouts for e in flat if e != "ulysses" or layout == layouts[0]
    ]


def place(outcome: PredictedScenario) -> tuple[str, str, int]:
    """Layout, exchange and context group: a runner-up differs in these, not in memory settings."""
    return outcome.layout, outcome.plan.exchange.label, outcome.context


def _why(error: Exception, exchange: str) -> str:
    return (
        str(error)
        .splitlines()[0]
        .partition("; allowed")[0]
        .removeprefix(f"topology.exchange={exchange}: ")
    )


def usable(plan: RunPlan) -> float:
    """Return the usable GiB of a GPU."""
    return USABLE * (plan.capacity or 0) / GIB


def _plans(
    cluster: Cluster,
    scenario: Scenario,
    workers: int,
    context: int,
    layout: str,
    exchange: str,
    recomputations: Sequence[str],
) -> Iterator[RunPlan]:
    check_enough_blocks(scenario.config, layout, workers, context)

    def plan_with(**changes: Any) -> RunPlan:
        config = replace(
            scenario.config, train=replace(scenario.config.train, memory="manual", **changes)
        )
        return plan_on(
            cluster,
            config,
            workers=workers,
            kernel=scenario.kernel,
            layout=layout,
            exchange=exchange,
            context_parallel=context,
        )

    # If the user set offloading, skip `none`: offloading moves what recomputation keeps.
    away = scenario.config.train.offload_activations
    plans = [
        plan_with(activation_checkpoint=kind)
        for kind in recomputations
        if kind != "none" or not away
    ]
    yield from plans
    good = [plan for plan in plans if plan.fits]
    if good:
        # Do not change what the user set.
        typed = any(word.startswith("train.keep_mlp=") for word in scenario.words)
        with_more = [] if typed else [(plan, with_products(plan)) for plan in good]
        yield from (
            with_setting(plan, setting) for plan, setting in with_more if setting is not None
        )
        return
    kinds = CHECKPOINTS if recomputations is RECOMPUTATIONS else recomputations
    settings = (
        search(plan_with()).settings
        if recomputations is RECOMPUTATIONS
        else search(plans[0]).settings
    )
    chosen = next(
        (s for s in settings if s.fits and s.config.train.activation_checkpoint in kinds), None
    )
    if chosen is not None:
        yield with_setting(plan_with(), chosen)


def _least(plans: Sequence[RunPlan]) -> RunPlan | None:
    """Return the plan that needs the least memory once ``train.memory=auto`` has saved what it can.

    plans: for each place the one that recomputes the most.
    """
    saving = [with_setting(plan, nearest_to_fitting(plan, search(plan).settings)) for plan in plans]
    return min(saving, key=lambda plan: plan.memory.total, default=None)


def _needed(
    cluster: Cluster,
    scenario: Scenario,
    workers: int,
    layouts: Sequence[str],
    exchanges: Sequence[str],
) -> Iterator[str]:
    """Yield single changes that would make the training fit."""

    def smallest(config: Config, of: Cluster, count: int) -> RunPlan | None:
        plans = []
        for layout, exchange in _distinct(layouts, exchanges, count, min(of.gpus_per_node, count)):
            try:
                tried = replace(scenario, config=config)
                plans += list(_plans(of, tried, count, count, layout, exchange, ("full",)))
            except (InvalidSetup, ConfigError):
                continue
        return min(plans, key=lambda plan: (not plan.fits, plan.memory.total), default=None)

    now = smallest(scenario.config, cluster, workers)
    if now is None:
        return

    def on_larger(gib: int) -> RunPlan | None:
        """Return a plan that fits GPUs of the same kind with ``gib`` of memory, or None."""
        gpu = replace(cluster.gpu, hbm_gib=Constant(gib, "guess", "", gib, gib))
        plan = smallest(scenario.config, replace(cluster, gpu=gpu), workers)
        return plan if plan is not None and plan.fits else None

    # Not a formula: with more GPU memory less is offloaded, so each size is a search of its own.
    possible = range(
        floor(cluster.gpu.hbm_gib.value) + 1,
        max(_LARGEST_GPU, ceil(now.memory.total / GIB / USABLE)) + 1,
    )
    gib = possible.start + bisect_left(possible, True, key=lambda gib: on_larger(gib) is not None)
    large = on_larger(gib)
    if large is not None:
        yield f"GPUs with {gib} GiB instead of {cluster.gpu.hbm_gib.value:.0f}: {label(large)}"
    nodes = 2 * cluster.nodes
    while nodes <= _MOST_NODES:
        if cluster.outer is None:
            yield (
                f"more nodes than {cluster.nodes}: {cluster.name} does not describe links between "
                "nodes (links.outer)"
            )
            break
        more = replace(cluster, nodes=nodes)
        plan = smallest(scenario.config, more, more.gpus)
        if plan is not None and plan.fits:
            yield (
                f"--nodes {nodes} instead of {cluster.nodes}: {label(plan)}, "
                f"{plan.memory.total / GIB:.1f} GiB"
            )
            break
        nodes *= 2
    seq = scenario.config.seq // 2
    while seq >= SHORTEST_SEQ:
        plan = smallest(replace(scenario.config, seq=seq), cluster, workers)
        if plan is not None and plan.fits:
            asked = format_size(scenario.config.seq)
            yield (
                f"seq={format_size(seq)} instead of {asked}: {label(plan)}, "
                f"{plan.memory.total / GIB:.1f} GiB"
            )
            break
        seq //= 2


def reasons(
    best: PredictedScenario, other: PredictedScenario, words: Sequence[str] = ()
) -> list[str]:
    """Explain with numbers why one step is faster than another, the largest difference first.

    words: settings as the user typed them.
    """
    mine, its = best.step, other.step
    gap = its.seconds.value - mine.seconds.value
    explanation = [
        f"{gap:.3g} s ({gap / its.seconds.value:.1%}) less a step"
        if gap > CLOSE * its.seconds.value
        else _close(best, other)
    ]
    differences = sorted(
        ((its.parts[name] - mine.parts[name], name) for name in _WORDS), reverse=True
    )
    for difference, name in differences[:_SHOWN]:
        if difference > 0.002 * its.seconds.value:
            explanation.append(
                f"{_WORDS[name]} takes {mine.parts[name]:.3g} s instead of {its.parts[name]:.3g} "
                f"s{_degree(best, other, name)}"
            )
    lost = [(d, name) for d, name in differences if d < -0.002 * its.seconds.value]
    if lost:
        difference, name = min(lost)
        explanation.append(
            f"but {_WORDS[name]} takes {mine.parts[name]:.3g} s instead of {its.parts[name]:.3g} s"
        )
    explanation.append(
        f"memory {mine.gib:.1f} GiB, the other {its.gib:.1f} GiB, of {usable(best.plan):.1f} "
        f"usable ({USABLE:.0%})"
    )
    if "train.keep_mlp" in memory_settings(best.plan.config) and not any(
        word.startswith("train.keep_mlp=") for word in words
    ):
        explanation.append(KEPT)
    return explanation


def _close(best: PredictedScenario, other: PredictedScenario) -> str:
    gap = other.step.seconds.value / best.step.seconds.value - 1
    return f"{gap:.1%} faster, less than the prediction can resolve: measure both"


def _degree(best: PredictedScenario, other: PredictedScenario, name: str) -> str:
    if name not in ("late", "attention"):
        return ""
    mine, its = (
        sum(p.work.worker for p in o.attention.passes.values()) / len(o.attention.passes)
        for o in (best, other)
    )
    return f" (worker imbalance of work {mine:.2f}, not {its:.2f})" if its > mine + 0.005 else ""
