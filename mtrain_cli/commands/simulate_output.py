"""The terminal output and the files of `mtrain simulate`."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain_cli.console import Console
    from mtrain_cli.simulation.calibration import Calibration
    from mtrain_cli.simulation.cluster import Cluster
    from mtrain_cli.simulation.prediction import AttentionWorkload, BoundedTime, Prediction
    from mtrain_cli.simulation.recommend import Recommendation
    from mtrain_cli.simulation.scenario import PredictedScenario
    from mtrain_cli.training.run_plan import RunPlan

DENSE = "dense"
LEGEND = (
    "ms: attention of a layer on the slowest worker, mean over layers. best, worst: by the bounds "
    "of the constants. worker, step: imbalance degrees of time, largest over mean, and of work in "
    "brackets. late: waits for slower workers. exposed: transfers that nothing hid, by link."
)
_STEPS = (
    "s / step: one optimizer step. best, worst: by the bounds of the constants. MFU, HFU: share of "
    "the peak FLOP/s, by the model's FLOP and by all that are computed. waits: for slower workers, "
    "for transfers of keys and values, and for transfers of weights and gradients. worker, step: "
    "imbalance degrees of attention work, largest over mean. GiB: per GPU, as planned by "
    "`mtrain train --dry-run`. all_gather in N: gathers N head groups, each while the previous one "
    "is computed."
)


# Columns that a narrow terminal omits, in this order.
SPARE_OF_STEPS = ("waits s", "step", "MFU", "worker", "best - worst", "HFU", "data x context")
SPARE_OF_ATTENTION = (
    "late ms",
    "step",
    "computed",
    "worker",
    "exposed ms",
    "kernel",
    "best - worst",
)
_PROBE = ".mtrain"
_NAMED = 3  # constants named in one line
_LABEL = len("note   ")  # width of the label that begins each line


def step_legend() -> str:
    from mtrain_cli.training.run_plan import FITS

    return f"{_STEPS} {FITS}."


def title(cluster: Cluster, problem: AttentionWorkload, density: float, workers: int) -> str:
    made, nodes = problem.made, f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    shown = f"{problem.pattern}, density {density:.1%}" if problem.pattern != DENSE else DENSE
    return f"{cluster.name} ({nodes}), {workers} workers, seq {made.seq:,}, {shown}"


def attention_table(
    cluster: Cluster, problem: AttentionWorkload, predictions: Sequence[Prediction]
) -> Table:
    """Return the table of predictions of a layer's attention; the fastest is bold."""
    from rich.box import SIMPLE
    from rich.table import Table

    from mtrain_cli.parallel.exchange_selection import short_label

    layers = f"{len(problem.layers)} layer{'s' * (len(problem.layers) > 1)}"
    density, workers = predictions[0].facts["density"], predictions[0].setup.workers
    heading = f"{title(cluster, problem, density, workers)}, {layers}: predicted"
    table = Table(title=heading, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("layout", "exchange", "kernel"):
        table.add_column(name)
    for name in (
        *predictions[0].passes,
        "all, ms per layer",
        "best - worst",
        "worker",
        "step",
        "computed",
        "late ms",
    ):
        table.add_column(name, justify="right")
    table.add_column("exposed ms")
    fastest = min(predictions, key=lambda p: p.duration.value)
    for p in predictions:
        links: dict[str, float] = {}
        for attention_pass in p.passes.values():
            for link, ms in attention_pass.exposed.items():
                links[link] = links.get(link, 0.0) + ms
        both = [p.passes[name] for name in ("forward", "backward")]
        degrees = [
            f"{sum(getattr(b.time, name) for b in both) / 2:.2f} "
            f"({sum(getattr(b.work, name) for b in both) / 2:.2f})"
            for name in ("worker", "step")
        ]
        busy_ms = sum(b.computed * b.duration.value for b in both)
        table.add_row(
            p.setup.layout,
            short_label(p.exchange),
            p.kernel,
            *(f"{one.duration.value:.2f}" for one in p.passes.values()),
            f"{p.duration.value:.2f}",
            f"{p.duration.low:.1f} - {p.duration.high:.1f}",
            *degrees,
            f"{busy_ms / sum(b.duration.value for b in both):.2f}",
            f"{sum(one.late for one in p.passes.values()):.2f}",
            ", ".join(f"{link} {ms:.2f}" for link, ms in links.items() if ms >= 0.005) or "none",
            style="bold" if p is fastest and len(predictions) > 1 else None,
        )
    return table


def step_table(
    cluster: Cluster, problem: AttentionWorkload, outcomes: Sequence[PredictedScenario]
) -> Table:
    """Return the table of predicted steps; the fastest that fits is bold."""
    from rich.box import SIMPLE
    from rich.table import Table

    from mtrain_cli.parallel.exchange_selection import short_label
    from mtrain_cli.reporting.terminal_width import number

    first = outcomes[0]
    environment, train = first.plan.environment, first.plan.config.train
    density = first.attention.facts["density"]
    batch = f"{train.global_batch} sequence{'s' * (train.global_batch > 1)} per step"
    heading = f"{title(cluster, problem, density, environment.workers)}, {batch}: predicted"
    table = Table(title=heading, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    grouped = any(o.plan.environment.dp > 1 for o in outcomes)
    recomputed = len({o.plan.config.train.activation_checkpoint for o in outcomes}) > 1
    kept = [_layers_with_products(o.plan) for o in outcomes]
    for name in (
        "layout",
        "exchange",
        *(("data x context",) if grouped else ()),
        *(("recompute",) if recomputed else ()),
    ):
        table.add_column(name)
    dense = first.dense
    shares = ("MFU", "HFU") if dense else ("HFU",)
    if len(set(kept)) > 1:
        table.add_column("keep_mlp", justify="right")
    for name in (
        "s / step",
        "best - worst",
        "tokens/s/GPU",
        *shares,
        "waits s",
        "worker",
        "step",
        "GiB",
    ):
        table.add_column(name, justify="right")
    table.add_column("fits")
    fitting = [o for o in outcomes if o.step.fits]
    fastest = min(fitting, key=lambda o: o.step.seconds.value, default=None)
    for o, layers in zip(outcomes, kept, strict=True):
        step = o.step
        both = [o.attention.passes[name] for name in ("forward", "backward")]
        degrees = [
            f"{sum(getattr(b.work, name) for b in both) / 2:.2f}" for name in ("worker", "step")
        ]
        waits = " + ".join(f"{step.parts[name]:.2f}" for name in ("late", "links", "weights"))
        table.add_row(
            o.layout,
            short_label(o.plan.exchange.label),
            *((f"{o.plan.environment.dp} x {o.context}",) if grouped else ()),
            *((o.plan.config.train.activation_checkpoint,) if recomputed else ()),
            *((str(layers),) if len(set(kept)) > 1 else ()),
            number(step.seconds.value, 4),
            f"{number(step.seconds.low)} - {number(step.seconds.high)}"
            if step.seconds.low < step.seconds.high
            else "",
            f"{step.tokens_per_second_per_gpu.value:,.0f}",
            *([f"{step.mfu:.1%}"] if dense else []),
            f"{step.hfu:.1%}",
            waits,
            *degrees,
            f"{step.gib:.1f}",
            "yes" if step.fits else "no",
            style="bold"
            if o is fastest and len(outcomes) > 1
            else "dim"
            if not step.fits
            else None,
        )
    return table


def main_outcome(outcomes: Sequence[PredictedScenario]) -> PredictedScenario:
    """Return the outcome to describe in detail: the fastest that fits, or the smallest."""
    fitting = [o for o in outcomes if o.step.fits]
    return (
        min(fitting, key=lambda o: o.step.seconds.value)
        if fitting
        else min(outcomes, key=lambda o: o.plan.memory.total)
    )


def best_line(outcomes: Sequence[PredictedScenario]) -> str:
    """Return which outcome to take, by how much it is faster, and what else to try."""
    from mtrain_cli.simulation.recommend import CLOSE

    fitting = sorted((o for o in outcomes if o.step.fits), key=lambda o: o.step.seconds.value)
    if not fitting:
        return (
            "best   none of these fits; --recommend tries settings that need less memory, or says "
            "what would fit"
        )
    best = fitting[0]
    line = f"best   {best.layout} {best.plan.exchange.label}"
    if len(fitting) > 1:
        gap = fitting[1].step.seconds.value / best.step.seconds.value - 1
        line += f", {gap:.1%} faster than the next" + (
            ": too close for the prediction to tell, so measure both" if gap < CLOSE else ""
        )
    return f"{line}; --recommend also tries context groups, recomputation and train.keep_mlp"


def step_lines(
    outcome: PredictedScenario, tokens: float | None, price: float | None
) -> Iterable[str]:
    """Yield lines on the time of a step by part, on memory by part, and on a training's cost."""
    from mtrain_cli.simulation.recommend import usable
    from mtrain_cli.training.memory import GIB

    step, plan = outcome.step, outcome.plan
    whole = step.seconds.value
    shares = {name: seconds / whole for name, seconds in step.parts.items()}
    listed = ", ".join(
        f"{name} {share:.1%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 5e-4
    )
    yield (
        f"time   {outcome.layout} {plan.exchange.label}: {listed}; {step.hidden:.2f} s of weight "
        "transfers hidden"
    )
    memory = plan.memory
    parts = {
        **{name.replace("_", " "): size for name, size in memory.peak.parts.items()},
        "CUDA and NCCL": memory.reserve,
    }
    capacity = (plan.capacity or 0) / 2**30
    listed = ", ".join(
        f"{name} {size / 2**30:.2f}" for name, size in parts.items() if size >= 2**20
    )
    yield (
        f"memory {memory.total / 2**30:.2f} GiB of {capacity:.1f} ({usable(plan):.1f} usable) at "
        f"its peak, the {memory.peak.name}: {listed}"
    )
    if memory.host:
        saving = (
            f", {memory.saving / GIB:.2f} more while saving a checkpoint" if memory.saving else ""
        )
        yield (
            f"host   {memory.host / GIB:.2f} GiB per GPU{saving}, of {plan.host_share / GIB:.1f} "
            "usable"
        )
    if tokens is None:
        return
    days = step.days(tokens)
    text = f"train  {tokens:.3g} tokens on {plan.environment.workers} GPUs: {_days(days)}"
    if price is None:
        yield f"{text}; cost unknown, give --price X in dollars per GPU and hour"
        return
    cost = step.dollars(tokens, price)
    yield (
        f"{text}; ${cost.value:,.0f} (${cost.low:,.0f} - ${cost.high:,.0f}) at ${price:g} per GPU "
        "and hour"
    )


def _days(days: BoundedTime) -> str:
    unit, by = (
        ("days", 1.0)
        if days.value >= 2
        else ("hours", 24.0)
        if days.value * 24 >= 2
        else ("minutes", 1440.0)
    )
    return f"{days.value * by:.3g} {unit} ({days.low * by:.3g} - {days.high * by:.3g})"


def _layers_with_products(plan: RunPlan) -> int:
    """Return how many layers keep their MLP products: all, if nothing is recomputed or tiled."""
    from mtrain_cli.model.tiling import layers_with_products, tile_rows

    model, train = plan.config.model, plan.config.train
    tokens, itemsize = (
        plan.layout.tokens_per_worker * train.micro_batch,
        2 if plan.dtype == "bfloat16" else 4,
    )
    tiled = (
        tile_rows(
            tokens, model.hidden_size, model.intermediate_size, itemsize, train.tile_mib << 20
        )
        < tokens
    )
    if train.activation_checkpoint == "none" and not tiled:
        return model.num_layers
    return layers_with_products(train.keep_mlp, model.num_layers)


def recommendation_lines(
    cluster: Cluster, result: Recommendation, words: Sequence[str]
) -> Iterable[str]:
    """Yield the best and the runner-up with reasons, the command to run, and what was rejected."""
    from mtrain_cli.simulation.recommend import label, memory_settings, place, reasons
    from mtrain_cli.simulation.scenario import train_line

    if not result.ranked:
        yield f"nothing fits {cluster.name}{_smallest(result)}. What would fit:"
        yield from (f"  {line}" for line in result.needed)
    else:
        best, others = result.best, result.ranked[1:]
        train = best.plan.config.train
        yield f"best   {label(best.plan)}: {_figures(best)}"
        if others:
            other = (
                ""
                if place(others[0]) == place(best)
                else "; the fastest with another layout, exchange or context group"
            )
            yield f"next   {label(others[0].plan)}: {_figures(others[0])}{other}"
            yield "why    " + "; ".join(reasons(best, others[0], words))
        changes = {
            "topology.layout": best.layout,
            "topology.exchange": best.plan.config.topology.exchange,
            **({"topology.context_parallel": best.context} if best.plan.environment.dp > 1 else {}),
            "train.activation_checkpoint": train.activation_checkpoint,
            **memory_settings(best.plan.config),
        }
        yield f"type   {train_line(cluster, best.plan, words, changes)}"
    by_reason: dict[str, list[str]] = {}
    for rejected in result.rejected:
        by_reason.setdefault(rejected.why, []).append(rejected.what)
    yield from (f"not    {_first_few(names)}: {why}" for why, names in by_reason.items())


def _smallest(result: Recommendation) -> str:
    """Return how much memory the smallest configuration needs."""
    from mtrain_cli.simulation.recommend import label, usable
    from mtrain_cli.training.memory import GIB

    plan = result.least
    if plan is None:
        return ""
    host = (
        f" and {plan.memory.host_peak / GIB:.1f} GiB of host memory"
        if plan.memory.host_peak
        else ""
    )
    available = (
        f"{usable(plan):.1f} and {plan.host_share / GIB:.1f} GiB"
        if host
        else f"{usable(plan):.1f} GiB"
    )
    return (
        f": a GPU needs at least {plan.memory.total / GIB:.1f} GiB{host}, of {available} usable "
        f"({label(plan)})"
    )


def _first_few(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _figures(outcome: PredictedScenario) -> str:
    from mtrain_cli.reporting.terminal_width import number

    step = outcome.step
    seconds = step.seconds
    return (
        f"{number(seconds.value, 4)} s per step ({number(seconds.low)} - {number(seconds.high)}), "
        f"{step.tokens_per_second_per_gpu.value:,.0f} tokens/s/GPU, {step.gib:.1f} GiB"
    )


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print labeled lines. A command stays on one line, so that it can be copied."""
    from mtrain_cli.reporting.terminal_width import say

    for line in lines:
        if line.startswith("type "):
            console.print(line)
        else:
            say(console, line, _LABEL)


def print_notes(console: Console, remarks: Iterable[str]) -> None:
    from mtrain_cli.reporting.terminal_width import say

    for remark in dict.fromkeys(remarks):
        say(console, f"note   {brief_remark(remark)}", _LABEL, style="yellow")


def brief_remark(remark: str) -> str:
    """Shorten a list of guessed constants, whose names tell a first reader little."""
    match = re.fullmatch(r"(.*) constants are guesses \((.*)\)", remark)
    names = match[2].split(", ") if match else []
    if match is None or len(names) <= _NAMED + 1:
        return remark
    return (
        f"{match[1]} constants are guesses ({', '.join(names[:_NAMED])} and "
        f"{len(names) - _NAMED} more; --json has all, with bounds)"
    )


# Files


def _range(time: BoundedTime) -> dict[str, float]:
    return {
        "low": round(time.low, 5),
        "value": round(time.value, 5),
        "high": round(time.high, 5),
    }


def document(cluster: Cluster, calibration: Calibration | None, **more: Any) -> dict[str, Any]:
    """Return the common part of a simulation's summary.json. calibration: the user's own."""
    from mtrain_cli import __version__
    from mtrain_cli.simulation.calibration import describe_source
    from mtrain_cli.simulation.constants import CONSTANTS

    constants = {**cluster.constants(), **CONSTANTS}
    return {
        "kind": "simulation",
        "mode": "attention",
        "complete": True,
        "samples_wanted": 1,
        "samples": 1,
        "command": ["mtrain", *sys.argv[1:]],
        "environment": {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": {"mtrain": __version__},
            "gpus": [],
        },
        "clock": {"uncertainty_us": 0.0},
        "overhead": None,
        "cluster": {
            "name": cluster.name, "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node, "gpu": cluster.gpu.name,
            "constants": {key: dataclasses.asdict(constant) for key, constant in constants.items()},
        },
        "calibration": describe_source(cluster.gpu.name, calibration),
        **more,
    }  # fmt: skip


def prediction_entries(
    problem: AttentionWorkload,
    predictions: Sequence[Prediction],
    steps: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the entries of predictions. steps: of whole steps (`sweep.row_of`), if predicted."""
    predicted: list[dict[str, Any]] = [
        {
            "label": p.facts["label"],
            "ms": _range(p.duration),
            "remarks": list(p.remarks),
            "passes": {
                name: {
                    "ms": _range(attention_pass.duration),
                    "time": dataclasses.asdict(attention_pass.time),
                    "work": dataclasses.asdict(attention_pass.work),
                    "computed": attention_pass.computed,
                    "late_ms": attention_pass.late,
                    "exposed_ms": attention_pass.exposed,
                }
                for name, attention_pass in p.passes.items()
            },
        }
        for p in predictions
    ]
    for entry, step in zip(predicted, steps, strict=False):
        entry["step"] = dict(step)
    return {
        "workers": predictions[0].setup.workers,
        "layers": list(problem.layers),
        "cases": [p.facts for p in predictions],
        "predicted": predicted,
        "results": [],
    }


def new_folder(out: Path | None) -> Path:
    """Return the folder for the files. Check that it can be written, but leave nothing there.

    Raises:
        ConfigError: it holds a profile or simulation already, or cannot be written.
    """
    from mtrain_cli.records import record_files

    folder = out or Path("measurements", f"simulation-{time.strftime('%Y%m%d-%H%M%S')}")
    if (folder / record_files.SUMMARY).exists():
        raise ConfigError(
            f"--out {folder}: already holds a profile or simulation; give a new folder"
        )
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _PROBE).touch()
        (folder / _PROBE).unlink()
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ConfigError(f"--out {folder}: {reason}; give another folder, or --no-files") from None
    finally:
        for place in missing:
            if place.is_dir():
                place.rmdir()
    return folder


def write_files(
    folder: Path, content: dict[str, Any], predictions: Sequence[Prediction] = ()
) -> None:
    """Write summary.json and the records, in the format of a profile."""
    from mtrain_cli.launch.failures import RunError
    from mtrain_cli.records import record_files
    from mtrain_cli.records.analysis import analyse
    from mtrain_cli.simulation.validation import digest

    with_rows = [p for p in predictions if p.rows is not None]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, prediction in enumerate(with_rows):
            assert prediction.rows is not None
            record_files.write_part(prediction.rows, folder, number)
        record_files.join_parts(folder)
        record_files.write_summary(folder, content)
        if with_rows:
            # The summary's digest then covers the records too.
            content["records_sha256"] = digest(folder / record_files.RECORDS)
            record_files.write_summary(folder, content)
            content["results"] = [
                result.to_json() for result in analyse(record_files.open_records(folder))
            ]
            record_files.write_summary(folder, content)
    except OSError as error:
        raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error
