"""Which configuration to choose: every layout, exchange, context group and recomputation that can be, the fastest that fits, and why.

What fits is tried once more with the products of as many layers' MLPs kept as there is ample room for (``train.keep_mlp``), as
``train.memory=auto`` has it: the same attention in another step. Where none of the recomputations fits, the way of using memory that
``train.memory=auto`` takes is tried in their place.
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
    check_dealt,
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
CLOSE = 0.02  # of a step: less than what the prediction can tell apart
_SHOWN = 3
_MOST_NODES = 512
_LARGEST_GPU = 512  # GiB, of those that are looked at in any case
# What a difference between two steps is called, by the part of the step.
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
    """A configuration that cannot be or does not fit. why: the same words for the same reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Recommendation:
    """ranked: what fits, fastest first; the first two with bounds. Where nothing fits, ``least`` says what needs least, of all that was
    tried and of what ``train.memory=auto`` could make of it, and ``needed`` what would help.
    """

    ranked: tuple[PredictedScenario, ...]
    rejected: tuple[RejectedSetup, ...]
    needed: tuple[str, ...] = ()
    least: RunPlan | None = None

    @property
    def best(self) -> PredictedScenario:
        return self.ranked[0]


def label(plan: RunPlan) -> str:
    """A configuration in words."""
    environment, train = plan.environment, plan.config.train
    groups = f", {environment.dp} x {environment.cp} workers" if environment.dp > 1 else ""
    kind = "no" if train.activation_checkpoint == "none" else train.activation_checkpoint
    other = " ".join(f"{key}={value}" for key, value in memory_settings(plan.config).items())
    return f"{plan.layout.name} {plan.exchange.label}{groups}, {kind} recomputation{', ' if other else ''}{other}"


def memory_settings(config: Config) -> dict[str, str]:
    """What `train.memory=auto` may change beside the kind of recomputation, where it is not as usual."""
    found = {
        key: get_setting(config, key) for key in CHOICES if key != "train.activation_checkpoint"
    }
    if config.train.activation_checkpoint != "sequence_selective":
        del found["train.checkpoint_keep"]
    return {key: format_value(value) for key, value in found.items() if value != CHOICES[key][0]}


def contexts(config: Config, workers: int, per_node: int) -> list[int]:
    """Sizes of context groups that lie well on nodes, the largest first."""
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
    """progress: is told how many attentions of how many have been played.

    Raises:
        Unfit, ConfigError: no configuration can be, whatever the memory.
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
            short = f"train.global_batch={train.global_batch} cannot be dealt to so many groups"
            if train.micro_batch > 1:
                short += f", train.micro_batch={train.micro_batch} to each"
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
    # The nearest first.
    unfit.sort(key=lambda plan: plan.memory.total)
    rejected += [
        RejectedSetup(
            f"{label(plan)} ({plan.memory.total / GIB:.1f} of {usable(plan):.1f} GiB)", DOES_NOT_FIT
        )
        for plan in unfit
    ]
    if mistakes and not fitting and not unfit:
        raise mistakes[0]
    found: list[PredictedScenario] = []
    for done, plans in enumerate(fitting):
        progress(done, len(fitting))
        full = any(recomputes_attention(plan.config.train) for plan in plans)
        first = evaluate(cluster, scenario, plans[0], bounds=False, recompute=full)
        found += [
            first,
            *(
                with_step(cluster, scenario, plan, first.attention, bounds=False)
                for plan in plans[1:]
            ),
        ]
    if not found:
        return Recommendation(
            (),
            tuple(rejected),
            tuple(_needed(cluster, scenario, workers, layouts, exchanges)),
            _least(tight),
        )
    found.sort(key=lambda outcome: outcome.step.seconds.value)
    best = found[0]
    runner = next((o for o in found[1:] if place(o) != place(best)), next(iter(found[1:]), None))
    top = [evaluate(cluster, scenario, o.plan) for o in (best, runner) if o is not None]
    rest = [o for o in found if o is not best and o is not runner]
    return Recommendation((*top, *rest), tuple(rejected))


def _distinct(
    layouts: Sequence[str], exchanges: Sequence[str], context: int, per_node: int
) -> list[tuple[str, str]]:
    """Combinations that differ: one worker exchanges nothing, inside a node hierarchies are none, and where heads are all that is shared
    every worker computes whole sequences, whatever the layout.
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
    """Layout, exchange and context group: in what a runner-up differs from the best, beside what is kept in memory."""
    return outcome.layout, outcome.plan.exchange.label, outcome.context


def _why(error: Exception, exchange: str) -> str:
    return (
        str(error)
        .splitlines()[0]
        .partition("; allowed")[0]
        .removeprefix(f"topology.exchange={exchange}: ")
    )


def usable(plan: RunPlan) -> float:
    """GiB of a GPU."""
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
    check_dealt(scenario.config, layout, workers, context)

    def made(**changes: Any) -> RunPlan:
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

    # An offload that was typed is for kinds that leave something to be moved.
    away = scenario.config.train.offload_activations
    plans = [
        made(activation_checkpoint=kind) for kind in recomputations if kind != "none" or not away
    ]
    yield from plans
    good = [plan for plan in plans if plan.fits]
    if good:
        # What was typed stays, whatever it is.
        typed = any(word.startswith("train.keep_mlp=") for word in scenario.words)
        with_more = [] if typed else [(plan, with_products(plan)) for plan in good]
        yield from (
            with_setting(plan, setting) for plan, setting in with_more if setting is not None
        )
        return
    kinds = CHECKPOINTS if recomputations is RECOMPUTATIONS else recomputations
    settings = (
        search(made()).settings if recomputations is RECOMPUTATIONS else search(plans[0]).settings
    )
    chosen = next(
        (s for s in settings if s.fits and s.config.train.activation_checkpoint in kinds), None
    )
    if chosen is not None:
        yield with_setting(made(), chosen)


def _least(plans: Sequence[RunPlan]) -> RunPlan | None:
    """Of plans of which none fits, the one that needs least when ``train.memory=auto`` has saved what can be; they recompute most."""
    found = [with_setting(plan, nearest_to_fitting(plan, search(plan).settings)) for plan in plans]
    return min(found, key=lambda plan: plan.memory.total, default=None)


def _needed(
    cluster: Cluster,
    scenario: Scenario,
    workers: int,
    layouts: Sequence[str],
    exchanges: Sequence[str],
) -> Iterator[str]:
    """What would make it fit, one change at a time."""

    def smallest(config: Config, of: Cluster, count: int) -> RunPlan | None:
        found = []
        for layout, exchange in _distinct(layouts, exchanges, count, min(of.gpus_per_node, count)):
            try:
                tried = replace(scenario, config=config)
                found += list(_plans(of, tried, count, count, layout, exchange, ("full",)))
            except (InvalidSetup, ConfigError):
                continue
        return min(found, key=lambda plan: (not plan.fits, plan.memory.total), default=None)

    now = smallest(scenario.config, cluster, workers)
    if now is None:
        return

    def on_larger(gib: int) -> RunPlan | None:
        """What fits GPUs of the same kind with so much memory."""
        gpu = replace(cluster.gpu, hbm_gib=Constant(gib, "guess", "", gib, gib))
        found = smallest(scenario.config, replace(cluster, gpu=gpu), workers)
        return found if found is not None and found.fits else None

    # The more a GPU holds the less has to leave it: what the host takes is another search for each.
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
            yield f"more nodes than {cluster.nodes}: {cluster.name} does not say how nodes are linked (links.outer)"
            break
        more = replace(cluster, nodes=nodes)
        found = smallest(scenario.config, more, more.gpus)
        if found is not None and found.fits:
            yield f"--nodes {nodes} instead of {cluster.nodes}: {label(found)}, {found.memory.total / GIB:.1f} GiB"
            break
        nodes *= 2
    seq = scenario.config.seq // 2
    while seq >= SHORTEST_SEQ:
        found = smallest(replace(scenario.config, seq=seq), cluster, workers)
        if found is not None and found.fits:
            asked = format_size(scenario.config.seq)
            yield f"seq={format_size(seq)} instead of {asked}: {label(found)}, {found.memory.total / GIB:.1f} GiB"
            break
        seq //= 2


def reasons(
    best: PredictedScenario, other: PredictedScenario, words: Sequence[str] = ()
) -> list[str]:
    """Why one step is faster than another, dearest first, in words with numbers. words: that were typed."""
    mine, its = best.step, other.step
    gap = its.seconds.value - mine.seconds.value
    said = [
        f"{gap:.3g} s ({gap / its.seconds.value:.1%}) a step less"
        if gap > CLOSE * its.seconds.value
        else _close(best, other)
    ]
    differences = sorted(
        ((its.parts[name] - mine.parts[name], name) for name in _WORDS), reverse=True
    )
    for difference, name in differences[:_SHOWN]:
        if difference > 0.002 * its.seconds.value:
            said.append(
                f"{_WORDS[name]} takes {mine.parts[name]:.3g} s instead of {its.parts[name]:.3g} s{_degree(best, other, name)}"
            )
    lost = [(d, name) for d, name in differences if d < -0.002 * its.seconds.value]
    if lost:
        difference, name = min(lost)
        said.append(
            f"against it: {_WORDS[name]} takes {mine.parts[name]:.3g} s instead of {its.parts[name]:.3g} s"
        )
    said.append(
        f"memory {mine.gib:.1f} GiB, the other {its.gib:.1f} GiB, of {usable(best.plan):.1f} that can be used ({USABLE:.0%})"
    )
    if "train.keep_mlp" in memory_settings(best.plan.config) and not any(
        word.startswith("train.keep_mlp=") for word in words
    ):
        said.append(KEPT)
    return said


def _close(best: PredictedScenario, other: PredictedScenario) -> str:
    gap = other.step.seconds.value / best.step.seconds.value - 1
    return f"{gap:.1%} faster, which is less than the prediction can tell apart: measure both"


def _degree(best: PredictedScenario, other: PredictedScenario, name: str) -> str:
    if name not in ("late", "attention"):
        return ""
    mine, its = (
        sum(p.work.worker for p in o.attention.passes.values()) / len(o.attention.passes)
        for o in (best, other)
    )
    return f" (worker imbalance of work {mine:.2f}, not {its:.2f})" if its > mine + 0.005 else ""
