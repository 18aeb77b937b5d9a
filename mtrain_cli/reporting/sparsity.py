"""`mtrain profile sparsity`: tables of recall and density by layer and step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from mtrain_cli.grouping import grouped
from mtrain_cli.reporting.table import TOTAL, Column, Table, fixed

Rows = Sequence[dict[str, Any]]  # with the keys of `HeadRecord`


def sparsity_tables(rows: Rows) -> list[Table]:
    """Return a table of layers per pattern for the last measured step, and one of all steps."""
    groups = _groups(rows)
    last = max((step for _, step in groups), default=0)
    tables = []
    for (pattern, step), own in groups.items():
        if step == last:
            layers = sorted(grouped(own, lambda row: row["layer"]).items())
            columns = [Column("layer", itemgetter(0)), *_measures(own)]
            of_layers = [*layers, ("all", own)]
            about = f"means over heads; {_note(own)}"
            tables.append(Table(f"{pattern}, step {step}", columns, of_layers, about, "", _all))
    if len({step for _, step in groups}) > 1:
        columns = [
            Column("pattern", lambda row: row[0][0], words=True, once=True),
            Column("step", lambda row: row[0][1]),
            *_measures(rows),
        ]
        about = f"means over layers and heads; {_note(rows)}"
        tables.append(Table("All steps", columns, [*groups.items()], about))
    return tables


def _groups(rows: Rows) -> dict[tuple[str, int], Rows]:
    """Return the rows of each (pattern, step), in the order of patterns and steps."""
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    ordered = sorted(rows, key=lambda row: (patterns.index(row["pattern"]), row["step"]))
    return dict(grouped(ordered, lambda row: (row["pattern"], row["step"])))


def _all(row: tuple[Any, Rows]) -> str:
    return TOTAL * (row[0] == "all")


def _measures(rows: Rows) -> list[Column]:
    """Return the columns of rows whose last item is a list of records of heads."""

    def mean(name: str, form: Callable[[float], str], label: str = "") -> Column:
        def value(row: tuple[Any, ...]) -> float | None:
            known = _known(row[-1], name)
            return statistics.fmean(known) if known else None

        return Column(label or name, value, form)

    share = "{:.2%}".format
    return [
        mean("recall", fixed(4)),
        Column("worst", lambda row: min(head["worst"] for head in row[-1]), fixed(3)),
        mean("density", share),
        *([mean("of_mask", share, "density in mask")] if _is_masked(rows) else []),
        mean("slashes", fixed(1)),
        mean("columns", fixed(0)),
        *([mean("cut", share)] if _known(rows, "cut") else []),
    ]


def _known(rows: Rows, name: str) -> list[Any]:
    """Return the known values of a key that older files and other patterns lack."""
    return [row[name] for row in rows if row.get(name) is not None]


def _is_masked(rows: Rows) -> bool:
    return any(abs(row["of_mask"] - row["density"]) >= 5e-5 for row in rows)


def _note(rows: Rows) -> str:
    notes = [
        "recall: over sampled queries that the pattern does not probe",
        "worst: recall of the worst query",
        "density: computed share of all causal pairs",
    ]
    if _is_masked(rows):
        notes.append("density in mask: computed share of the pairs inside documents")
    if _known(rows, "cut"):
        notes.append("cut: share of the blocks that reached the level but exceeded row_cap")
    if updates := _known(rows, "updates"):
        notes.append(
            f"learned scores: from {min(updates):.0f} or more updates with other sequences in this "
            "command, not from a checkpoint"
        )
    return "; ".join(notes)
