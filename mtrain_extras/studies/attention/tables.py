"""Tables of what `mtrain profile sparsity` finds about attention itself, for terminal and page."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from mtrain_extras.studies.attention import findings as attention_findings
from mtrain_extras.studies.attention.files import AttentionFiles
from mtrain_extras.studies.attention.findings import (
    STRIPS,
    mean,
    near_share,
    overlap_label,
    rank_correlation,
)
from mtrain_extras.studies.text_table import TextTable


def tables(files: AttentionFiles) -> list[TextTable]:
    """Return the tables that have rows."""
    made = [_top_keys(files), _overlap(files), _maps(files), _rope(files)]
    return [table for table in made if table.rows]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _by_layer(
    rows: Sequence[Any], columns: Sequence[Callable[[list[Any]], str]], step: int | None = None
) -> list[list[str]]:
    layers = sorted({row.layer for row in rows})
    groups = [(str(layer), [row for row in rows if row.layer == layer]) for layer in layers]
    lead = [] if step is None else [str(step)]
    return [
        [*lead, name, *(column(mine) for column in columns)]
        for name, mine in [*groups, ("all", list(rows))]
    ]


def first_and_last(rows: Sequence[Any]) -> list[int]:
    """Return the first and the last step of the rows."""
    steps = sorted({row.step for row in rows})
    return sorted({*steps[:1], *steps[-1:]})


def _top_keys(files: AttentionFiles) -> TextTable:
    rows = files.top_keys
    counts = sorted({row.k for row in rows})

    def column(k: int) -> Callable[[list[Any]], str]:
        return lambda mine: _share(mean(row.mean for row in mine if row.k == k))

    cells = [
        cells
        for step in first_and_last(rows)
        for cells in _by_layer(
            [row for row in rows if row.step == step], [column(k) for k in counts], step
        )
    ]
    return TextTable(
        "Attention of the largest keys",
        ("step", "layer", *(f"top {k}" for k in counts)),
        cells,
        0,
        "share of attention that the k largest keys of a query hold; mean over heads, samples and "
        "the sampled queries that see more than k keys",
        finding=attention_findings.largest_keys(files),
    )


def _overlap(files: AttentionFiles) -> TextTable:
    rows = files.overlap
    steps = sorted({row.first for row in rows} | {row.second for row in rows})
    pairs = list(itertools.pairwise(steps))
    if len(pairs) > 1:
        pairs.append((steps[0], steps[-1]))
    kinds = dict.fromkeys(overlap_label(row) for row in rows)
    cells = [
        [
            f"{first} and {second}",
            *(
                _share(
                    mean(
                        row.jaccard
                        for row in rows
                        if (row.first, row.second) == (first, second) and overlap_label(row) == kind
                    )
                )
                for kind in kinds
            ),
        ]
        for first, second in pairs
    ]
    return TextTable(
        "Overlap of checkpoints",
        ("steps", *kinds),
        cells,
        1,
        "Jaccard index of what two checkpoints choose for the same input: intersection / union; "
        "mean over layers, heads and samples",
        finding=attention_findings.overlaps(files),
    )


def _maps(files: AttentionFiles) -> TextTable:
    steps = first_and_last(files.maps)
    cells = [
        [
            m.label,
            *(_share(near_share(m, name)) for name in ("attention", "gradient")),
            "-" if (value := rank_correlation(m)) is None else f"{value:.3f}",
        ]
        for m in files.maps
        if m.step in steps
    ]
    return TextTable(
        "Maps of attention and its gradient",
        ("map", "|A| near", "|dL/dS| near", "correlation"),
        cells,
        1,
        f"near: share in the {STRIPS}th of all cells that is closest to the diagonal; "
        "correlation: rank correlation of |A| and |dL/dS| over cells",
        finding=attention_findings.maps(files),
    )


def _rope(files: AttentionFiles) -> TextTable:
    names = ("r2", "slash", "vertical", "both", "rest")

    def column(name: str) -> Callable[[list[Any]], str]:
        return lambda mine: _share(mean(getattr(row, name) for row in mine))

    cells = [
        cells
        for step in first_and_last(files.rope)
        for cells in _by_layer(
            [row for row in files.rope if row.step == step], [column(n) for n in names], step
        )
    ]
    return TextTable(
        "Scores and rotary embedding",
        ("step", "layer", "R²", *names[1:]),
        cells,
        0,
        "means over heads and samples; R²: how well the mean query and key predict the mean score "
        "at each distance; slash, vertical, both: share of the variance of scores that the "
        "distance, the key, and their sum explain; rest: 1 - both",
        finding=f"{attention_findings.rotary_prediction(files)} "
        f"{attention_findings.variance(files)}".strip(),
    )
