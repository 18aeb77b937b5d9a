"""Tables of training runs: metrics of the steps, and held-out losses by context."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.metrics import WARM_UP_STEPS, rate_unit, steady_steps
from mtrain_cli.records.step_remarks import nothing_left_out
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.tables import fixed
from mtrain_cli.reporting.terminal_width import new_table
from mtrain_cli.training.evaluation import losses_by_bucket
from mtrain_cli.training.progress import format_duration

SPARE_OF_TRAINING = (
    "targets",
    "peak GiB",
    "density",
    "MFU",
    "s / step",
)  # a narrow terminal drops them


def training_headings(sources: Sequence[ReportSource]) -> list[str]:
    """Return the headings of `training_row`."""
    rate = rate_unit([step for source in sources for step in source.metrics])
    of_steps = ["steps", "loss, first", "last", "s / step", rate, "MFU", "HFU", "density"]
    return [*of_steps, "targets", "peak GiB"]


def medians_note(sources: Sequence[ReportSource]) -> str:
    """Return a note on the steps that the medians of `training_row` cover, and on density."""
    note = f"medians without the first {WARM_UP_STEPS} steps, which warm up"
    if any(len(source.metrics) <= WARM_UP_STEPS for source in sources):
        note += "; of a shorter run, the last step"
    for source in sources:
        if remark := next(filter(None, map(nothing_left_out, source.metrics)), ""):
            note += f"; {f'{source.name}: ' * (len(sources) > 1)}{remark}"
    return note


def training_row(source: ReportSource) -> list[str]:
    """Return a run's cells, in the order of `training_headings`."""
    steps = source.metrics
    rest = steady_steps(steps, [restart.step for restart in source.restarts])

    def median(name: str, form: str) -> str:
        values = [value for step in rest if (value := getattr(step, name)) is not None]
        return format(statistics.median(values), form) if values else "-"

    # A sparse run may start with dense steps, whose MFU does not describe the run.
    dense = all(step.mfu_model is not None for step in rest)
    # A step without labels has no loss.
    losses: list[float | None] = [step.loss for step in steps if step.loss is not None] or [None]
    peak = [step.peak_memory_gib for step in steps if step.peak_memory_gib is not None]
    return [
        str(steps[-1].step),
        fixed(losses[0], 3),
        fixed(losses[-1], 3),
        median("seconds", ".3g"),
        median("tokens_per_second_per_gpu", ",.0f"),
        median("mfu_model", ".1%") if dense else "-",
        median("mfu_executed", ".1%"),
        median("density", ".1%"),
        median("targets", ",.0f"),
        f"{max(peak):.1f}" if peak else "-",
    ]


def totals(source: ReportSource) -> list[str]:
    """Return a run's tokens, and the time of its steps."""
    seconds = sum(step.seconds or 0.0 for step in source.metrics)
    return [f"{source.metrics[-1].tokens or 0:,}", format_duration(seconds)]


def training_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per training run."""
    several = len(sources) > 1  # For a single run, a line above the table has the name.
    # Break this heading at a good place. A narrow terminal would break it anywhere.
    headings = [
        heading.replace("tokens/s/", "tokens/s\n/") for heading in training_headings(sources)
    ]
    if several:
        headings.insert(0, "run")
    table = new_table(headings, words=int(several), title="Training", caption=medians_note(sources))
    for source in sources:
        table.add_row(*([Text(source.name)] if several else []), *training_row(source))
    return table


def positions_table(sources: Sequence[ReportSource]) -> Table | None:
    """Return a table of held-out losses by context (number of earlier tokens).

    For one run, the table has the first and the last evaluation. For several runs, it has only
    the last evaluation of each run.
    """
    evaluated = [source for source in sources if source.evaluations]
    if not evaluated:
        return None
    shown = [(source.name, source.evaluations[-1]) for source in evaluated]
    if len(evaluated) == 1 and len(evaluated[0].evaluations) > 1:
        shown.insert(0, (evaluated[0].name, evaluated[0].evaluations[0]))
    evaluations = [evaluation for _, evaluation in shown]
    headings = [
        "\n".join([*([name] if len(sources) > 1 else []), f"step {e.step}", e.attention])
        for name, e in shown
    ]
    last = evaluations[-1]
    table = new_table(
        ("earlier tokens", "tokens", *headings),
        words=0,
        title="Held-out loss by context",
        caption=f"nats per token, over {last.sequences} sequences not in the training data",
    )
    tokens = {(b.begin, b.end): b.tokens for b in last.buckets}
    for begin, end, losses in losses_by_bucket(evaluations):
        table.add_row(
            f"{format_size(begin)} to {format_size(end)}",
            f"{tokens.get((begin, end), 0):,}",
            *(fixed(loss, 4) for loss in losses),
        )
    table.add_row("all", f"{last.tokens:,}", *(fixed(e.loss, 4) for e in evaluations), style="bold")
    return table
