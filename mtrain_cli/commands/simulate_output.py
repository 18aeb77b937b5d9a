"""The terminal output of `mtrain simulate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mtrain_cli.commands.simulate_args import SimulateJob
from mtrain_cli.commands.simulate_request import DENSE
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.schema import Config
from mtrain_cli.console import Console
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.exchange_selection import short_label
from mtrain_cli.reporting.table import BEST, NOT, Column, Table, count, fixed, number, percent
from mtrain_cli.reporting.terminal_width import say
from mtrain_cli.simulation.expert_exchange import WAIT_FOR_NUMBERS
from mtrain_cli.simulation.families import FAMILIES
from mtrain_cli.simulation.predicted_step import EXPERTS, PIPELINE, TENSOR
from mtrain_cli.simulation.prediction import BoundedTime, Prediction
from mtrain_cli.simulation.recommend import (
    CLOSE,
    Recommendation,
    label,
    memory_settings,
    place,
    reasons,
    usable,
)
from mtrain_cli.simulation.scenario import PredictedScenario, train_line
from mtrain_cli.simulation.workload import AttentionWorkload
from mtrain_cli.training.flops import own_tiles
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.run_plan import FITS, RunPlan

_CASTS = "group_cast: only keys that some query of a worker sees under the mask travel to it."
LEGEND = (
    "ms: attention of a layer on the slowest worker, mean over layers. best, worst: by the bounds "
    "of the constants. worker, step: imbalance degrees of time, largest over mean, and of work in "
    "brackets. late: waits for slower workers. exposed: communication without overlap, by link. "
    f"{_CASTS}"
)
STEP_LEGEND = (
    "s / step: one optimizer step. best, worst: by the bounds of the constants. MFU, HFU: share of "
    "the peak FLOP/s, by the model's FLOP and by all executed FLOP. waits: for slower workers, "
    "for transfers of keys and values, and for transfers of weights and gradients. worker, step: "
    "imbalance degrees of attention work, largest over mean. GiB: per GPU, as planned by "
    "`mtrain train --dry-run`. all_gather in N: gathers N head groups, each while the previous one "
    f"is computed. {_CASTS} {FITS}."
)


_ROWS = "rows s"
_WAITS = ("late", "links", "weights", TENSOR, EXPERTS, PIPELINE)
# What the last waits of a row are for, if it has them.
_FOR = {
    TENSOR: ("tensor", "hidden states"),
    EXPERTS: ("expert", "rows of experts"),
    PIPELINE: ("pipeline", "other stages"),
}
_BOTH = ("forward", "backward")
_NAMED = 3  # constants named in one line
_LABEL = len("note   ")  # width of the label that begins each line


def title(cluster: Cluster, problem: AttentionWorkload, density: float, workers: int) -> str:
    """Return the title of a table: cluster, number of workers, length, pattern and density."""
    made, nodes = problem.made, f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    shown = f"{problem.pattern}, density {density:.1%}" if problem.pattern != DENSE else DENSE
    shown += " with columns" * (problem.pattern in FAMILIES)
    return f"{cluster.name} ({nodes}), {workers} workers, seq {made.seq:,}, {shown}"


def attention_table(
    cluster: Cluster, problem: AttentionWorkload, predictions: Sequence[Prediction]
) -> Table:
    """Return the table of predictions of a layer's attention; the fastest is bold."""
    first = predictions[0]
    layers = f"{len(problem.layers)} layer{'s' * (len(problem.layers) > 1)}"
    heading = title(cluster, problem, first.facts["density"], first.setup.workers)

    def degree(name: str, drop: int) -> Column:
        return Column(
            name,
            lambda p: f"{_mean_degree(p, 'time', name):.2f} ({_mean_degree(p, 'work', name):.2f})",
            drop=drop,
        )

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
        Column("computed", _computed, fixed(2), drop=3),
        Column("late ms", lambda p: sum(one.late for one in p.passes.values()), fixed(2), drop=1),
        Column("exposed ms", _exposed, words=True, drop=5),
    ]
    fastest = min(predictions, key=lambda p: p.duration.value)
    return Table(
        f"{heading}, {layers}: predicted",
        columns,
        predictions,
        LEGEND,
        state=lambda p: BEST * (p is fastest and len(predictions) > 1),
    )


def _mean_degree(prediction: Prediction, of: str, name: str) -> float:
    """Return an imbalance degree, averaged over both passes."""
    passes = prediction.passes
    return sum(getattr(getattr(passes[d], of), name) for d in _BOTH) / 2


def _computed(prediction: Prediction) -> float:
    both = [prediction.passes[name] for name in _BOTH]
    return sum(b.computed * b.duration.value for b in both) / sum(b.duration.value for b in both)


def _exposed(prediction: Prediction) -> str:
    links: dict[str, float] = {}
    for one in prediction.passes.values():
        for link, ms in one.exposed.items():
            links[link] = links.get(link, 0.0) + ms
    return ", ".join(f"{link} {ms:.2f}" for link, ms in links.items() if ms >= 0.005) or "none"


def step_legend(outcomes: Sequence[PredictedScenario]) -> str:
    """Return the legend of the table of steps."""
    legend = STEP_LEGEND
    for part, (kind, goods) in _FOR.items():
        if any(part in o.step.parts for o in outcomes):
            also = "another" if legend == STEP_LEGEND else "the next"
            legend += f" With {kind} parallelism, {also} wait is for {goods}."
    if any(o.step.experts for o in outcomes):
        legend += f" {_ROWS}: time of these rows without and with overlap (exposed + hidden)."
    return legend


def step_table(
    cluster: Cluster, problem: AttentionWorkload, outcomes: Sequence[PredictedScenario]
) -> Table:
    """Return the table of predicted steps; the fastest that fits is bold."""
    first = outcomes[0]
    dims, batch = first.plan.dims, first.plan.config.train.global_batch
    heading = title(cluster, problem, first.attention.facts["density"], dims.workers)
    groups = [name for name, get in _GROUPS.items() if any(get(o.plan.dims) > 1 for o in outcomes)]
    chosen = [column for column in _CHOICES if len({column.value(o) for o in outcomes}) > 1]
    rows = [Column(_ROWS, _exposed_rows, drop=7)] if any(o.step.experts for o in outcomes) else []
    mfu = [Column("MFU", lambda o: o.step.mfu, percent, drop=3)] if first.dense else []
    columns = [
        Column("layout", lambda o: o.layout, words=True),
        Column("exchange", lambda o: short_label(o.plan.exchange.label), words=True),
        *([_groups_column(groups[0])] if groups else []),
        *chosen,
        Column("s / step", lambda o: o.step.seconds.value, partial(number, digits=4)),
        Column("best - worst", _bounds, drop=5),
        Column("tokens/s/GPU", lambda o: o.step.tokens_per_second_per_gpu.value, count),
        *mfu,
        Column("HFU", lambda o: o.step.hfu, percent, drop=6),
        Column("waits s", _waits, drop=1),
        Column("worker", lambda o: _mean_degree(o.attention, "work", "worker"), fixed(2), drop=4),
        Column("step", lambda o: _mean_degree(o.attention, "work", "step"), fixed(2), drop=2),
        *rows,
        Column("GiB", lambda o: o.step.gib, fixed(1)),
        Column("fits", lambda o: "yes" if o.step.fits else "no", words=True),
    ]
    fitting = [o for o in outcomes if o.step.fits]
    fastest = min(fitting, key=lambda o: o.step.seconds.value, default=None)

    def state(outcome: PredictedScenario) -> str:
        if not outcome.step.fits:
            return NOT
        return BEST * (outcome is fastest and len(outcomes) > 1)

    heading += f", {batch} sequence{'s' * (batch > 1)} per step: predicted"
    return Table(heading, columns, outcomes, step_legend(outcomes), state=state)


# Kinds of groups besides context groups, and their degree. The first that is used names the column.
_GROUPS: dict[str, Callable[[ParallelDims], int]] = {
    "pipeline x data x context x tensor": lambda dims: dims.pp,
    "data x context x tensor": lambda dims: dims.tp,
    "data x context": lambda dims: dims.dp,
}
_CHOICES = (
    Column("recompute", lambda o: o.plan.config.train.activation_checkpoint, words=True),
    Column("keep_mlp", lambda o: _layers_with_products(o.plan)),
)


def _groups_column(name: str) -> Column:
    def sizes(outcome: PredictedScenario) -> str:
        dims = outcome.plan.dims
        degree = {"pipeline": dims.pp, "data": dims.dp, "context": dims.cp, "tensor": dims.tp}
        return " x ".join(str(degree[kind]) for kind in name.split(" x "))

    return Column(name, sizes, words=True, drop=8)


def _bounds(outcome: PredictedScenario) -> str:
    seconds = outcome.step.seconds
    if seconds.low >= seconds.high:
        return ""
    return f"{number(seconds.low)} - {number(seconds.high)}"


def _waits(outcome: PredictedScenario) -> str:
    parts = outcome.step.parts
    return " + ".join(f"{parts[name]:.2f}" for name in _WAITS if name in parts)


def _exposed_rows(outcome: PredictedScenario) -> str:
    rows = outcome.step.experts
    return f"{rows.exposed:.2f} + {rows.hidden:.2f}" if rows else "none"


def main_outcome(outcomes: Sequence[PredictedScenario]) -> PredictedScenario:
    """Return the fastest outcome that fits, else the outcome that needs the least memory."""
    fitting = [o for o in outcomes if o.step.fits]
    if fitting:
        return min(fitting, key=lambda o: o.step.seconds.value)
    return min(outcomes, key=lambda o: o.plan.memory.total)


def best_line(outcomes: Sequence[PredictedScenario]) -> str:
    """Return a line on the fastest outcome that fits, its lead, and what else to try."""
    fitting = sorted((o for o in outcomes if o.step.fits), key=lambda o: o.step.seconds.value)
    if not fitting:
        return (
            "best   none of these fits; `mtrain simulate recommend` tries settings that need less "
            "memory, or says what would fit"
        )
    best, more = fitting[0], ""
    if len(fitting) > 1:
        gap = fitting[1].step.seconds.value / best.step.seconds.value - 1
        more = f", {gap:.1%} faster than the next"
        if gap < CLOSE:
            more += ": too close for the prediction to tell, so measure both"
    return (
        f"best   {best.layout} {best.plan.exchange.label}{more}; `mtrain simulate recommend` also "
        "tries context groups, other kinds of parallelism, recomputation and train.keep_mlp"
    )


def step_lines(
    outcome: PredictedScenario, tokens: float | None, price: float | None
) -> Iterable[str]:
    """Yield lines on the parts of the step time, on memory, and on the cost of the training run.

    Args:
        tokens: tokens to train on; None yields no cost.
        price: dollars per GPU-hour; None if unknown.
    """
    step, plan = outcome.step, outcome.plan
    by_size = sorted(step.parts.items(), key=lambda item: -item[1])
    shares = [(name, seconds / step.seconds.value) for name, seconds in by_size]
    # What is waited for, where the name of a part could be read as work.
    waits = {name: f"waits for {what}" for name, (_, what) in _FOR.items()}
    listed = ", ".join(
        f"{waits.get(name, name)} {share:.1%}" for name, share in shares if share >= 5e-4
    )
    yield (
        f"time   {outcome.layout} {plan.exchange.label}: {listed}; {step.hidden:.2f} s of weight "
        "transfers hidden"
    )
    if plan.dims.tp > 1:
        yield (
            f"tensor {step.hidden_states / GIB:.2f} GiB of hidden states reach each worker in a "
            f"step, from {plan.dims.tp - 1} of its tensor group"
        )
    if (rows := step.experts) is not None:
        degree = plan.config.topology.expert_parallel
        yield (
            f"experts dealt over {degree} workers: {rows.size / GIB:.2f} GiB of rows reach each "
            f"worker in a step; {rows.exposed:.3g} s exposed, with "
            f"{WAIT_FOR_NUMBERS.value / 1e3:g} ms per layer and micro-batch for the wait of the "
            f"host and all that predictions lack; {rows.hidden:.3g} s hidden; "
            f"{rows.late:.3g} s of waits for workers with popular experts"
        )
    if plan.pipeline is not None:
        received = plan.pipeline.received / GIB
        yield (
            f"stages {plan.pipeline.stages_and_schedule}; a stage between others receives "
            f"{received:.2f} GiB of hidden states in a step"
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
        saving = memory.saving / GIB
        more = f", {saving:.2f} more while saving a checkpoint" if memory.saving else ""
        yield (
            f"host   {memory.host / GIB:.2f} GiB per GPU{more}, of {plan.host_share / GIB:.1f} "
            "usable"
        )
    if tokens is None:
        return
    text = f"train  {tokens:.3g} tokens on {plan.dims.workers} GPUs: "
    text += _days(step.days(tokens))
    if price is None:
        yield f"{text}; cost unknown, give --price X in dollars per GPU-hour"
        return
    cost = step.dollars(tokens, price)
    yield (
        f"{text}; ${cost.value:,.0f} (${cost.low:,.0f} - ${cost.high:,.0f}) at ${price:g} per "
        "GPU-hour"
    )


def _days(days: BoundedTime) -> str:
    """Format a time in days; below two days in hours, and below two hours in minutes."""
    units = (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0))
    unit, by = next((pair for pair in units if days.value * pair[1] >= 2), units[-1])
    return f"{days.value * by:.3g} {unit} ({days.low * by:.3g} - {days.high * by:.3g})"


def _layers_with_products(plan: RunPlan) -> int:
    """Return how many layers keep MLP products: all if nothing is recomputed or tiled."""
    model, train = plan.config.model, plan.config.train
    tokens, rows = own_tiles(plan.config, plan.layout, plan.dtype_bytes)
    by_hand = train.activation_checkpoint != "none" or rows < tokens or plan.dims.tp > 1
    if not by_hand:
        return model.num_layers
    return layers_with_products(train.keep_mlp, model.num_layers)


def recommendation_lines(
    cluster: Cluster, result: Recommendation, words: Sequence[str]
) -> Iterable[str]:
    """Yield lines on the two best configurations: reasons, a command, rejected configurations."""
    if not result.ranked:
        yield f"nothing fits {cluster.name}{_smallest(result)}. What would fit:"
        yield from (f"  {line}" for line in result.needed)
    else:
        best, others = result.best, result.ranked[1:]
        config = best.plan.config
        yield f"best   {label(best.plan)}: {_figures(best)}"
        if others:
            other = "; the fastest with another layout, exchange or group"
            if place(others[0]) == place(best):
                other = ""
            yield f"next   {label(others[0].plan)}: {_figures(others[0])}{other}"
            yield "why    " + "; ".join(reasons(best, others[0], words))
        changes = {
            "topology.layout": best.layout,
            "topology.exchange": config.topology.exchange,
            **({"topology.context_parallel": best.context} if best.plan.dims.dp > 1 else {}),
            **_degrees(config),
            "train.activation_checkpoint": config.train.activation_checkpoint,
            **memory_settings(config),
        }
        yield f"type   {train_line(cluster, best.plan, words, changes)}"
    by_reason: dict[str, list[str]] = {}
    for rejected in result.rejected:
        by_reason.setdefault(rejected.why, []).append(rejected.what)
    for why, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"not    {'; '.join(names[:3])}{more}: {why}"


def _degrees(config: Config) -> dict[str, int]:
    names = ("tensor_parallel", "pipeline_parallel", "virtual_stages", "expert_parallel")
    degrees = {f"topology.{name}": getattr(config.topology, name) for name in names}
    return {key: degree for key, degree in degrees.items() if degree > 1}


def _smallest(result: Recommendation) -> str:
    plan = result.least
    if plan is None:
        return ""
    host, available = "", f"{usable(plan):.1f} GiB"
    if plan.memory.host_peak:
        host = f" and {plan.memory.host_peak / GIB:.1f} GiB of host memory"
        available = f"{usable(plan):.1f} and {plan.host_share / GIB:.1f} GiB"
    return (
        f": a GPU needs at least {plan.memory.total / GIB:.1f} GiB{host}, of {available} usable "
        f"({label(plan)})"
    )


def _figures(outcome: PredictedScenario) -> str:
    step = outcome.step
    return (
        f"{number(step.seconds.value, 4)} s per step "
        f"({number(step.seconds.low)} - {number(step.seconds.high)}), "
        f"{step.tokens_per_second_per_gpu.value:,.0f} tokens/s/GPU, {step.gib:.1f} GiB"
    )


def print_assumed(
    console: Console, job: SimulateJob, pairs: str, kernels: Iterable[str | None]
) -> None:
    """Print which pairs and which kernels the prediction assumes.

    pairs: name of the pattern of the pairs.
    """
    pair_line = f"pairs  {job.request.describe_pairs(pairs)}"
    print_lines(console, [pair_line, *kernel_lines(kernels)])


def kernel_lines(kernels: Iterable[str | None]) -> list[str]:
    """Return a line with the names of kernels, each once; no line without a name."""
    names = ", ".join(dict.fromkeys(name for name in kernels if name))
    return [f"kernel {names}, with all packages installed"] if names else []


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print labeled lines. A command stays on one line, so that it can be copied."""
    for line in lines:
        if line.startswith("type "):
            console.print(line)
        else:
            say(console, line, _LABEL)


def automatic_remarks(chosen: Sequence[str]) -> list[str]:
    """Return a remark on the exchanges that ``--exchange auto`` chose; none without ``auto``."""
    labels = " or ".join(dict.fromkeys(chosen))
    return [f"--exchange auto chooses {labels} here"] if labels else []


def print_notes(console: Console, remarks: Iterable[str]) -> None:
    """Print each remark once."""
    for remark in dict.fromkeys(remarks):
        say(console, f"note   {brief_remark(remark)}", _LABEL, style="yellow")


def brief_remark(remark: str) -> str:
    """Shorten the list of names in a remark on guessed constants. Keep any other remark."""
    match = re.fullmatch(r"(.*) constants are guesses \((.*)\)", remark)
    names = match[2].split(", ") if match else []
    if match is None or len(names) <= _NAMED + 1:
        return remark
    return (
        f"{match[1]} constants are guesses ({', '.join(names[:_NAMED])} and "
        f"{len(names) - _NAMED} more; --json has all, with bounds)"
    )
