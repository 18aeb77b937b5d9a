"""The terminal output of `mtrain simulate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtrain_cli.commands.simulate_request import DENSE, Job
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.console import Console
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.exchange_selection import short_label
from mtrain_cli.reporting.table import BEST, Column, Table, fixed, number
from mtrain_cli.reporting.terminal import say
from mtrain_cli.simulation.predicted_step import part_name
from mtrain_cli.simulation.prediction import AttentionWorkload, Prediction
from mtrain_cli.simulation.recommend import (
    CLOSE,
    Recommendation,
    label,
    memory_settings,
    reasons,
    usable,
)
from mtrain_cli.simulation.scenario import PredictedScenario, train_line
from mtrain_cli.training.memory import GIB

LEGEND = (
    "ms: attention of a layer on the slowest worker, mean over layers. best, worst: by the bounds "
    "of the constants. worker, step: imbalance degrees of time, largest over mean, and of work in "
    "brackets. late: waits for slower workers. exposed: communication without overlap, by link. "
    "group_cast: only keys that some query of a worker sees under the mask travel to it."
)
_BOTH = ("forward", "backward")
_DEGREES = ("tensor_parallel", "pipeline_parallel", "virtual_stages", "expert_parallel")
_LABEL = len("note   ")  # width of the label that begins each line


def attention_table(
    cluster: Cluster, problem: AttentionWorkload, predictions: Sequence[Prediction]
) -> Table:
    """Return the table of predictions of a layer's attention; the fastest is bold."""
    first = predictions[0]
    nodes = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    shown = f"{problem.pattern}, density {first.facts['density']:.1%}"
    heading = (
        f"{cluster.name} ({nodes}), {first.setup.workers} workers, seq {problem.made.seq:,}, "
        f"{shown if problem.pattern != DENSE else DENSE}"
    )

    def degree(name: str, drop: int) -> Column:
        def shown(p: Prediction) -> str:
            return f"{mean_degree(p, 'time', name):.2f} ({mean_degree(p, 'work', name):.2f})"

        return Column(name, shown, drop=drop)

    columns = [
        Column("layout", lambda p: p.setup.layout, words=True),
        Column("exchange", lambda p: short_label(p.exchange), words=True),
        Column("kernel", lambda p: p.kernel, words=True, drop=6),
        *(
            Column(name, lambda p, name=name: p.passes[name].duration.value, fixed(2))
            for name in first.passes
        ),
        Column("all, ms per layer", lambda p: p.duration.value, fixed(2)),
        Column("best - worst", lambda p: f"{p.duration.low:.1f} - {p.duration.high:.1f}", drop=7),
        degree("worker", 4),
        degree("step", 2),
        Column("late ms", lambda p: sum(one.late for one in p.passes.values()), fixed(2), drop=1),
        Column("exposed ms", _exposed, words=True, drop=5),
    ]
    fastest = min(predictions, key=lambda p: p.duration.value)
    return Table(
        f"{heading}, layers: {len(problem.layers)}, predicted",
        columns,
        predictions,
        LEGEND,
        state=lambda p: BEST * (p is fastest and len(predictions) > 1),
    )


def mean_degree(prediction: Prediction, of: str, name: str) -> float:
    """Return an imbalance degree of time or work, the mean of forward and backward."""
    passes = prediction.passes
    return sum(getattr(getattr(passes[d], of), name) for d in _BOTH) / 2


def _exposed(prediction: Prediction) -> str:
    links: dict[str, float] = {}
    for attention_pass in prediction.passes.values():
        for link, ms in attention_pass.exposed.items():
            links[link] = links.get(link, 0.0) + ms
    return ", ".join(f"{link} {ms:.2f}" for link, ms in links.items() if ms >= 0.005) or "none"


def main_outcome(outcomes: Sequence[PredictedScenario]) -> PredictedScenario:
    """Return the fastest outcome that fits, else the outcome that needs the least memory."""
    fitting = [o for o in outcomes if o.step.fits]
    if fitting:
        return min(fitting, key=lambda o: o.step.order)
    return min(outcomes, key=lambda o: o.plan.memory.total)


def best_line(outcomes: Sequence[PredictedScenario]) -> str:
    """Return a line on the fastest outcome that fits, and its lead."""
    fitting = sorted((o for o in outcomes if o.step.fits), key=lambda o: o.step.order)
    if not fitting:
        return "best   none of these fits; `mtrain simulate recommend` says what would fit"
    best, more = fitting[0], ""
    if len(fitting) > 1:
        gap = fitting[1].step.seconds.value / best.step.seconds.value - 1
        more = f", {gap:.1%} faster than the next"
        more += ": too close for the prediction to tell, so measure both" * (gap < CLOSE)
    more += "; `mtrain simulate recommend` also tries other parallelism and memory settings"
    return f"best   {best.layout} {best.plan.exchange.label}{more}"


def step_lines(outcome: PredictedScenario) -> Iterable[str]:
    """Yield lines on the parts of the step time, and on memory."""
    step, plan = outcome.step, outcome.plan
    by_size = sorted(step.parts.items(), key=lambda item: -item[1])
    shares = [(name, seconds / step.seconds.value) for name, seconds in by_size]
    listed = ", ".join(f"{part_name(name)} {share:.1%}" for name, share in shares if share >= 5e-4)
    yield (
        f"time   {outcome.layout} {plan.exchange.label}: {listed}; {step.hidden:.2f} s of weight "
        "transfers hidden"
    )
    if (rows := step.experts) is not None:
        yield (
            f"experts dealt over {plan.config.topology.expert_parallel} workers: "
            f"{rows.size / GIB:.2f} GiB of rows reach each worker in a step; {rows.exposed:.3g} s "
            f"exposed, {rows.hidden:.3g} s hidden, {rows.late:.3g} s late"
        )
    memory = plan.memory
    parts = {name.replace("_", " "): size for name, size in memory.peak.parts.items()}
    parts["CUDA and NCCL"] = memory.reserve
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size >= 2**20)
    yield (
        f"memory {memory.total / GIB:.2f} GiB of {plan.hardware.memory / GIB:.1f} "
        f"({usable(plan):.1f} usable) at its peak, the {memory.peak.name}: {listed}"
    )
    if memory.host:
        more = f" and {memory.saving / GIB:.2f} while saving" if memory.saving else ""
        share = plan.host_share / GIB
        yield f"host   {memory.host / GIB:.2f} GiB per GPU{more}, of {share:.1f} usable"


def recommendation_lines(
    cluster: Cluster, result: Recommendation, words: Sequence[str]
) -> Iterable[str]:
    """Yield lines on the two best configurations: reasons, a command, rejected configurations."""
    if not result.ranked:
        yield f"nothing fits {cluster.name}{_smallest(result)}; try more nodes or a shorter seq"
    else:
        best, others = result.ranked[0], result.ranked[1:]
        config = best.plan.config
        yield f"best   {label(best.plan)}: {_figures(best)}"
        if others:
            yield f"next   {label(others[0].plan)}: {_figures(others[0])}"
            yield "why    " + "; ".join(reasons(best, others[0], words))
        changes = {
            "topology.layout": best.layout,
            "topology.exchange": config.topology.exchange,
            **({"topology.context_parallel": best.context} if best.plan.dims.dp > 1 else {}),
            **{
                f"topology.{name}": degree
                for name in _DEGREES
                if (degree := getattr(config.topology, name)) > 1
            },
            "train.activation_checkpoint": config.train.activation_checkpoint,
            **memory_settings(config),
        }
        yield f"type   {train_line(cluster, best.plan, words, changes)}"
    for why, rejected in grouped(result.rejected, lambda one: one[1]).items():
        names = [what for what, _ in rejected]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"not    {'; '.join(names[:3])}{more}: {why}"


def _smallest(result: Recommendation) -> str:
    if (plan := result.least) is None:
        return ""
    size = f"{plan.memory.total / GIB:.1f} of {usable(plan):.1f} GiB usable"
    if host := plan.memory.host_peak:
        size += f", and {host / GIB:.1f} of {plan.host_share / GIB:.1f} GiB of host memory"
    return f": a GPU needs at least {size} ({label(plan)})"


def _figures(outcome: PredictedScenario) -> str:
    step = outcome.step
    return (
        f"{number(step.seconds.value, 4)} s per step "
        f"({number(step.seconds.low)} - {number(step.seconds.high)}), "
        f"{step.tokens_per_second_per_gpu.value:,.0f} tokens/s/GPU, {step.gib:.1f} GiB"
    )


def print_assumed(console: Console, job: Job, pairs: str, kernels: Iterable[str | None]) -> None:
    """Print which pairs and which kernels the prediction assumes. pairs: name of their pattern."""
    pair_line = f"pairs  {job.request.describe_pairs(pairs)}"
    print_lines(console, [pair_line, *kernel_lines(kernels)])


def kernel_lines(kernels: Iterable[str | None]) -> list[str]:
    """Return a line with the names of kernels; no line without a name."""
    names = ", ".join(dict.fromkeys(name for name in kernels if name))
    return [f"kernel {names}, with all packages installed"] if names else []


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print labeled lines. A command stays on one line, so that it can be copied."""
    for line in lines:
        if line.startswith("type "):
            console.print(line)
        else:
            say(console, line, _LABEL)


def print_notes(console: Console, remarks: Iterable[str]) -> None:
    """Print each remark once."""
    for remark in dict.fromkeys(remarks):
        say(console, f"note   {remark}", _LABEL, style="yellow")
