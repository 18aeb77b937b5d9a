"""What `mtrain profile sparsity` found about attention itself, in sentences with its numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mtrain_extras.studies.attention.files import (
    KEYS,
    AttentionFiles,
    HeadMap,
    OverlapRow,
    RopeRow,
    TopKeyRow,
)

STRIPS = 16  # parts into which the distance of a map is divided
_GOOD = 0.9  # R^2 above which rotary embedding alone predicts a head's slashes well


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def overlap_label(row: OverlapRow) -> str:
    """Return the name of the sets that a row compares."""
    return f"top {row.k} keys" if row.kind == KEYS else f"{row.kind} of {row.pattern}"


def largest_keys(files: AttentionFiles) -> str:
    """Say how much attention the largest keys hold, and how it changes over the steps."""
    rows = _of_largest_count(files)
    if not rows:
        return ""
    first, last = _ends(rows)
    k, at_end = rows[0].k, [row for row in rows if row.step == last]
    share, even = mean(row.mean for row in at_end), mean(row.uniform for row in at_end)
    text = f"At step {last}, the {k} largest keys of a query hold {share:.1%} of its attention"
    if even is not None:
        text += f"; even attention would give them {even:.1%}"
    if first != last:
        before = mean(row.mean for row in rows if row.step == first)
        text += f". At step {first}, they held {before:.1%}"
    return f"{text}."


def heads_of_largest_keys(files: AttentionFiles) -> str:
    """Name the heads whose attention is most and least concentrated at the last step."""
    rows = _of_largest_count(files)
    heads = _by(_at_last(rows), lambda row: (row.layer, row.head), "mean")
    if len(heads) < 2:
        return ""
    most, least = max(heads, key=heads.__getitem__), min(heads, key=heads.__getitem__)
    return (
        f"At step {_ends(rows)[1]}, the {rows[0].k} largest keys hold most attention in "
        f"{_head(most)} ({heads[most]:.1%}), and least in {_head(least)} ({heads[least]:.1%})."
    )


def samples_of_largest_keys(files: AttentionFiles) -> str:
    """Compare how much the share varies between samples with how much between steps."""
    rows = _of_largest_count(files)
    steps = _by(rows, lambda row: row.step, "mean")
    samples = _by(rows, lambda row: row.sample, "mean")
    if len(samples) < 2:
        return ""
    text = (
        f"The share of the {rows[0].k} largest keys differs by {_points(samples)} between samples"
    )
    return f"{text}, and by {_points(steps)} between steps." if len(steps) > 1 else f"{text}."


def overlaps(files: AttentionFiles) -> str:
    """Say how alike the largest keys of the first, the next and the last checkpoint are."""
    rows = _of_one_kind(files)
    if not rows:
        return ""
    pairs = _by(rows, lambda row: (row.first, row.second), "jaccard")
    steps = sorted({step for pair in pairs for step in pair})
    whole = (steps[0], steps[-1])
    text = f"For the same input, the {overlap_label(rows[0])} of steps {whole[0]} and {whole[1]} "
    text += f"have an overlap of {pairs[whole]:.3f}"
    near = [pairs[pair] for pair in itertools.pairwise(steps) if pair in pairs]
    if len(near) > 1:
        text += f"; neighboring checkpoints have {_range(near, '.3f')}"
    return f"{text}."


def overlaps_of_layers(files: AttentionFiles) -> str:
    """Name the layers whose largest keys change most and least from the first to the last step."""
    rows = _of_one_kind(files)
    ends = min((r.first for r in rows), default=0), max((r.second for r in rows), default=0)
    layers = _by([r for r in rows if (r.first, r.second) == ends], lambda r: r.layer, "jaccard")
    if len(layers) < 2:
        return ""
    least, most = min(layers, key=layers.__getitem__), max(layers, key=layers.__getitem__)
    return (
        f"Between steps {ends[0]} and {ends[1]}, the {overlap_label(rows[0])} change most in layer "
        f"{least} (overlap {layers[least]:.3f}), and least in layer {most} ({layers[most]:.3f})."
    )


def maps(files: AttentionFiles) -> str:
    """Compare the maps of attention with those of its gradient."""
    known = [value for value in map(rank_correlation, files.maps) if value is not None]
    if not known:
        return ""
    count = f"In {len(files.maps)} maps" if len(files.maps) > 1 else "In the map"
    text = f"{count}, |A| and |dL/dS| have a rank correlation of {_range(known, '.2f')} over cells"
    attention, gradient = (
        mean(near_share(each, name) for each in files.maps) for name in ("attention", "gradient")
    )
    if attention is not None and gradient is not None:
        text += (
            f". The {STRIPS}th of all cells that is closest to the diagonal has {attention:.0%} of "
            f"|A| and {gradient:.0%} of |dL/dS|"
        )
    return f"{text}."


def near_share(each: HeadMap, name: str) -> float | None:
    """Return the share of a map in the cells near the diagonal.

    Cells on the diagonal and at its end count like all others.
    """
    values = np.nan_to_num(getattr(each, name).astype(np.float64))
    total = values.sum()
    distance = np.subtract.outer(np.arange(len(values)), np.arange(len(values)))
    near = (distance >= 0) & (distance < max(1, len(values) // STRIPS))
    return float(values[near].sum() / total) if total > 0 else None


def rank_correlation(each: HeadMap) -> float | None:
    """Return the rank correlation of |A| and |dL/dS| over cells; None with fewer than 2 cells."""
    there = ~np.isnan(each.attention)
    if there.sum() < 2:
        return None
    one, other = (np.argsort(np.argsort(t[there])) for t in (each.attention, each.gradient))
    return float(np.corrcoef(one, other)[0, 1])


def rotary_prediction(files: AttentionFiles) -> str:
    """Say how well the mean query and key predict the mean score at each distance."""
    rows = _at_last(files.rope)
    known = [row.r2 for row in rows if row.r2 is not None]
    if not known:
        return ""
    good = sum(value > _GOOD for value in known)
    return (
        f"At step {rows[0].step}, the mean query and key predict the mean score at each distance "
        f"with a median R² of {statistics.median(known):.3f}; R² is above {_GOOD} in {good} of "
        f"{len(known)} cases (a head and a sample)."
    )


def variance(files: AttentionFiles) -> str:
    """Say how much of the scores' variance distance and key explain, and in how many heads."""
    rows: list[RopeRow] = _at_last(files.rope)
    slash, vertical, both = (
        mean(getattr(row, name) for row in rows) for name in ("slash", "vertical", "both")
    )
    if slash is None or vertical is None or both is None:
        return ""
    known = [r for r in rows if r.slash is not None and r.vertical is not None]
    slashes = sum((r.slash or 0) > (r.vertical or 0) for r in known)
    return (
        f"At step {rows[0].step}, the distance explains {slash:.0%} of the variance of scores, the "
        f"key {vertical:.0%}, and both together {both:.0%}. The distance explains more than the "
        f"key in {slashes} of {len(known)} cases (a head and a sample)."
    )


def _of_largest_count(files: AttentionFiles) -> list[TopKeyRow]:
    """Return the rows of the smallest number of keys; without those that have no queries."""
    known = [row for row in files.top_keys if row.mean is not None]
    least = min((row.k for row in known), default=0)
    return [row for row in known if row.k == least]


def _of_one_kind(files: AttentionFiles) -> list[OverlapRow]:
    """Return the rows of the smallest number of keys, or of the first pattern without any."""
    known = [row for row in files.overlap if row.jaccard is not None]
    keys = sorted((row for row in known if row.kind == KEYS), key=lambda row: row.k)
    chosen = (keys or known)[:1]
    return [row for row in known if overlap_label(row) == overlap_label(chosen[0])]


def _ends(rows: Sequence[Any]) -> tuple[int, int]:
    steps = [row.step for row in rows]
    return min(steps), max(steps)


def _at_last(rows: Sequence[Any]) -> list[Any]:
    last = max((row.step for row in rows), default=0)
    return [row for row in rows if row.step == last]


def _by(rows: Iterable[Any], key: Callable[[Any], Any], value: str) -> dict[Any, float]:
    groups: dict[Any, list[float | None]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(getattr(row, value))
    means = {place: mean(values) for place, values in groups.items()}
    return {place: found for place, found in means.items() if found is not None}


def _head(place: tuple[int, int]) -> str:
    return f"layer {place[0]}, head {place[1]}"


def _points(shares: dict[Any, float]) -> str:
    """Return the range of some shares in percentage points."""
    return f"{100 * (max(shares.values()) - min(shares.values())):.1f} points"


def _range(values: Sequence[float], digits: str) -> str:
    low, high = (f"{value:{digits}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
