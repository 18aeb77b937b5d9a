"""Tables of `mtrain study learning`: the plan, predictions, differences from dense, needles."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.console import Console
from mtrain_cli.evaluation.cost import format_flop
from mtrain_cli.printable import one_line
from mtrain_cli.reporting.table import text_table
from mtrain_cli.reporting.terminal import print_table, say
from mtrain_extras.studies.cells import (
    DamagedCellError,
    Study,
    damage_of_base,
    estimated_flop,
    estimated_seconds,
    weights_of_base,
)
from mtrain_extras.studies.outcomes import (
    CONTROL,
    KEY_LOSS,
    LONG_LOSS,
    LOSS,
    MEASURES,
    NEEDLES,
    NOTHING,
    PLACES,
    UNKNOWN,
    Compared,
    Summary,
    control_loses,
)
from mtrain_extras.studies.t_interval import Interval
from mtrain_extras.studies.text_table import TextTable
from mtrain_extras.studies.tiers import AGAIN, DENSE, FIXED, HALF_A_BLOCK, Cell, Tier

LOSSES = (LOSS, LONG_LOSS, KEY_LOSS)
TOY = (
    "Toy size: it shows that all parts work, and says nothing about sparse attention. "
    "--tier a is the experiment."
)


def show_plan(console: Console, study: Study, cells: Sequence[Cell]) -> None:
    """Print the cells with FLOP and time."""
    tier, total, seconds, damage = study.tier, 0.0, 0.0, list[str]()
    heads = ("cell", "attention in training", "left", "steps", "FLOP", "minutes")
    rows = []
    wanted = [cell for cell in cells if not _is_done(study, cell, damage)]
    damage += filter(
        None, (damage_of_base(study, Cell(seed)) for seed in sorted({c.seed for c in wanted}))
    )
    begin = (Cell(cell.seed) for cell in wanted if cell.variant is not None)
    wanted += [base for base in dict.fromkeys(begin) if not weights_of_base(study, base)]
    for name in dict.fromkeys(cell.name for cell in cells):
        own = [cell for cell in cells if cell.name == name]
        left = [cell for cell in own if cell in wanted]
        flop, each = sum(estimated_flop(tier, own[0])), estimated_seconds(tier, own[0])
        total += flop * len(left)
        seconds += each * len(left)
        rows.append((
            name, _attention(own[0]), ", ".join(str(cell.seed) for cell in left) or "done",
            _steps(tier, own[0]), format_flop(flop), f"{each / 60:.1f}",
        ))  # fmt: skip
    print_table(console, text_table(heads, rows, words=3))
    # As in the table below ten minutes, where "0 minutes" or "1 minutes" would appear.
    minutes = f"{seconds / 60:.{0 if seconds >= 600 else 1}f}"
    say(
        console,
        "left: seeds to compute. FLOP and minutes are those of one seed. "
        f"{format_flop(total)} are left, {minutes} minutes at an assumed "
        f"{format_flop(tier.base_flops)}/s of each worker for a base and "
        f"{format_flop(tier.flops)}/s of one worker for the other cells, without the time to start "
        "processes. All count dense attention; sparse cells compute less, on a GPU.",
    )
    say(console, f"Sequences: {format_size(tier.base_seq)}, then {format_size(tier.long_seq)}.")
    for line in damage:
        say(console, one_line(line))


def _is_done(study: Study, cell: Cell, damage: list[str]) -> bool:
    """Return whether a cell is finished. damage: gets a line if its file cannot be read."""
    try:
        return study.done(cell) is not None
    except DamagedCellError as error:
        damage += error.problems
        return False


def _attention(cell: Cell) -> str:
    variant = cell.variant
    if variant is None or not (variant.words or not variant.is_trained):
        return "dense"
    if not variant.is_trained:
        return "-"
    if variant.density_of:
        return "random keys"
    words = (word for word in variant.words if "sparsity." in word and word != HALF_A_BLOCK)
    settings = " ".join(word.removeprefix("sparsity.") for word in words)
    settings = re.sub(r"p_v=(\S+) p_s=\1", r"p_v=p_s=\1", settings)
    return textwrap.shorten(settings, 30, placeholder=" ...") or "defaults"


def _steps(tier: Tier, cell: Cell) -> str:
    variant = cell.variant
    if variant is None:
        return str(tier.base_steps)
    if variant.time_of:
        return "by time"
    return str(tier.steps) if variant.is_trained else "0"


def show_summary(console: Console, summary: Summary) -> None:
    """Print what is known, failed predictions first. Of a toy, first that it shows nothing."""
    lines = remarks(summary)
    if TOY in lines:
        say(console, TOY)
        lines.remove(TOY)
    for each in tables(summary):
        if each.rows:
            each.print(console)
    for line in lines:
        say(console, line)


def tables(summary: Summary) -> list[TextTable]:
    """Return the tables of the terminal and of the page."""
    return [
        _predictions(summary), _prices(summary), _differences(summary), _noise(summary),
        _needles(summary), _contexts(summary),
    ]  # fmt: skip


def remarks(summary: Summary) -> list[str]:
    """Return what a reader must know before reading the numbers."""
    tier, lines = summary.tier, list(map(one_line, summary.damage))
    if tier.gate is None:
        lines.append(TOY)
    gates = {seed: gate for seed, gate in summary.gates.items() if gate is not None}
    if gates:
        listed = ", ".join(f"{gate:.1f} % (seed {seed})" for seed, gate in gates.items())
        needed = "no gate" if tier.gate is None else f"gate {tier.gate:g} %"
        lines.append(
            f"Needles that the bases find at {format_size(tier.base_seq)}: {listed}; {needed}."
        )
        if tier.gate is not None and min(gates.values()) < tier.gate:
            lines.append(
                "A base misses the gate: needles that it cannot find say nothing about attention."
            )
    seeds = max((len(each.seeds) for each in summary.compared), default=0)
    if seeds == 1:
        lines.append("One seed decides nothing: a verdict needs at least two.")
    finished = seeds > 1 and any(each.variant.name == FIXED for each in summary.compared)
    blind = [
        MEASURES[name]
        for name in (*LOSSES, NEEDLES)
        if any(name in each.difference for each in summary.compared)
        and not control_loses(summary.compared, name, dense=False)
    ]
    if blind and finished:
        lines.append(
            f"The control does not lose by {'; '.join(blind)}: the experiment could not see a loss "
            "there, so equal numbers show nothing."
        )
    total = len(tier.seeds) * (len(tier.variants) + 1)
    if len(summary.done) < total:
        lines.append(f"{len(summary.done)} of {total} cells are finished.")
    return lines


def value(number: Interval | None, *, loss: bool, signed: bool = False) -> str:
    """Return ``2.3456 [2.3, 2.4]``: a mean and its interval.

    An interval whose ends would read the same has one more digit.
    """
    if number is None:
        return "-"
    digits, sign, low, high = 4 if loss else 1, "+" if signed else "", number.low, number.high
    if low is None or high is None:
        return f"{number.mean:{sign}.{digits}f}"
    if low < high and f"{low:.{digits}f}" == f"{high:.{digits}f}":
        digits += 1
    return f"{number.mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def label(compared: Compared) -> str:
    """Return ``moba, dense inference``."""
    same = compared.attention == DENSE
    if not compared.variant.words:
        return compared.variant.name
    return f"{compared.variant.name}, {'dense' if same else 'sparse'} inference"


def document(summary: Summary) -> dict[str, Any]:
    """Return the summary for --json."""
    return {
        "tier": summary.tier.name,
        "toy": summary.tier.gate is None,
        "spread": summary.spread,
        "gates": summary.gates,
        "cells": {key: asdict(done) for key, done in summary.done.items()},
        "seeds": summary.tier.seeds,
        "compared": [
            {
                **asdict(each),
                "variant": each.variant.name,
                "step_seconds": _step_seconds(summary, each.variant.name),
            }
            for each in summary.compared
        ],
        "predictions": [asdict(each) for each in summary.outcomes],
        "remarks": remarks(summary),
    }


def _predictions(summary: Summary) -> TextTable:
    """Return the predictions. A toy shows only those that it judges: most are about needles."""
    is_toy = summary.tier.gate is None
    shown = [each for each in summary.outcomes if not (is_toy and each.state == UNKNOWN)]
    rows = [
        [
            each.state, each.prediction.text, each.found,
            ", ".join(map(str, each.prediction.judged_by(summary.tier))),
            each.prediction.written,
        ]
        for each in shown
    ]  # fmt: skip
    heads = ("", "prediction", "found: mean [95 % interval]", "seeds", "written")
    every = summary.tier.seeds
    late = any(each.prediction.judged_by(summary.tier) != every for each in shown)
    note = "Those with fewer seeds were written after the other seeds had run." if late else ""
    if hidden := len(summary.outcomes) - len(shown):
        are = "is" if hidden == 1 else "are"
        note = f"{with_count(hidden, 'other')} {are} not judged yet, or not at this size."
    return TextTable("Predictions", heads, rows, words=5, note=note)


def _prices(summary: Summary) -> TextTable:
    rows, dense = [], _step_seconds(summary, DENSE)
    for each in summary.compared:
        seconds = _step_seconds(summary, each.variant.name)
        if seconds is None or (each.variant.words and each.attention == DENSE):
            continue
        faster = f"{dense / seconds:.2f}x" if dense else "-"
        rows.append(
            [
                each.variant.name, f"{100 * each.density:.1f}%", f"{seconds:.3f}", faster,
                _beside(each, LONG_LOSS), _beside(each, NEEDLES), str(len(each.seeds)),
            ]
        )  # fmt: skip
    heads = (
        "trained with", "density", "s / step", "dense / it", MEASURES[LONG_LOSS], "needles, %",
        "seeds",
    )  # fmt: skip
    note = (
        "density: share of causal pairs that training computes. Loss and needles with the attention"
        f" of the training, and their difference from dense. {FIXED}: random keys, a control."
    )
    return TextTable("Price and loss", heads, rows, note=note)


def _step_seconds(summary: Summary, name: str) -> float | None:
    keys = (Cell(seed, summary.tier.variant(name)).key for seed in summary.tier.seeds)
    found = [summary.done[key].step_seconds for key in keys if key in summary.done]
    return sum(found) / len(found) if any(found) else None


def _differences(summary: Summary) -> TextTable:
    heads = ("trained with", "measure", "mean", "difference from dense", "verdict", "seeds")
    rows = []
    for each in summary.compared:
        for name in (*LOSSES, NEEDLES):
            if name not in each.mean:
                continue
            loss = name in LOSSES
            rows.append(
                [
                    label(each), MEASURES[name], value(each.mean[name], loss=loss),
                    value(each.difference.get(name), loss=loss, signed=True),
                    each.verdict.get(name, CONTROL), str(len(each.seeds)),
                ]
            )  # fmt: skip
    note = "[low, high]: 95 % t-interval over seeds, paired"
    return TextTable("Beside dense", heads, rows, words=2, note=note)


def _noise(summary: Summary) -> TextTable:
    again = next((each for each in summary.compared if each.variant.name == AGAIN), None)
    rows = [
        [
            MEASURES[name], f"{summary.spread[name]:.{4 if name in LOSSES else 1}f}",
            value(again.difference.get(name), loss=name in LOSSES, signed=True),
        ]
        for name in MEASURES
        if again is not None and name in summary.spread
    ]  # fmt: skip
    heads = ("measure", "spread: largest of any seed", "mean of the seeds")
    note = (
        f'"{NOTHING}" needs the interval of a difference to lie between -spread and +spread. The '
        "largest of several seeds is a lenient limit: compare it with the interval of the mean"
    )
    return TextTable("Two dense trainings", heads, rows, note=note)


def _needles(summary: Summary) -> TextTable:
    rows = [
        [label(each), *(_beside(each, name) for name in (NEEDLES, *PLACES))]
        for each in summary.compared
    ]
    heads = ("trained with", *(MEASURES[name] for name in (NEEDLES, *PLACES)))
    probe = summary.tier.probe
    note = (
        "% found exactly, by the place of the question, and points above dense [95 % interval]; "
        f"probed rows: the last {probe} tokens"
    )
    return TextTable("Needles", heads, rows, note=note)


def _beside(compared: Compared, name: str) -> str:
    """Return ``94.2, -1.8 [-2.0, -1.6]``: the mean of a measure, and the difference from dense."""
    mean, difference = compared.mean.get(name), compared.difference.get(name)
    if mean is None:
        return "-"
    loss = name in LOSSES
    beside = "" if difference is None else f", {value(difference, loss=loss, signed=True)}"
    return f"{value(replace(mean, low=None, high=None), loss=loss)}{beside}"


def _contexts(summary: Summary) -> TextTable:
    spans = sorted({span for m in summary.measured for span in m.buckets})
    rows = []
    for each in summary.compared:
        which = each.variant.name, each.attention
        own = [m for m in summary.measured if (m.cell.name, m.attention) == which]
        found = [[m.buckets[span] for m in own if span in m.buckets] for span in spans]
        means = [f"{sum(losses) / len(losses):.4f}" if losses else "-" for losses in found]
        rows.append([label(each), *means])
    heads = ("trained with", *(f"{format_size(a)} to {format_size(b)}" for a, b in spans))
    note = "nats per token by the number of earlier tokens, mean over seeds"
    return TextTable("Loss by context", heads, rows, note=note)
