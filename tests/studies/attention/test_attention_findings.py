"""Sentences on attention state the numbers of their rows."""

from __future__ import annotations

import itertools

import numpy as np

from mtrain_extras.studies.attention import findings as subject
from mtrain_extras.studies.attention.files import (
    COLUMNS,
    KEYS,
    AttentionFiles,
    HeadMap,
    OverlapRow,
    RopeRow,
    TopKeyRow,
)


def top_keys() -> list[TopKeyRow]:
    """Shares that rise by 0.1 per layer, 0.02 per head and 0.01 per sample; more keys hold more."""
    places = itertools.product((10, 20), (0, 1), (0, 1), (0, 1), (4, 16))
    rows = []
    for step, sample, layer, head, k in places:
        share = step / 50 + 0.1 * layer + 0.02 * head + 0.01 * sample + (k > 4) * 0.3
        mine = TopKeyRow(
            step=step, sample=sample, layer=layer, head=head, k=k, mean=share, worst=0.0,
            queries=[30], mass=[share], uniform=k / 100,
        )  # fmt: skip
        rows.append(mine)
    return rows


def overlap() -> list[OverlapRow]:
    rows = []
    for (first, second), value in {(10, 20): 0.5, (20, 30): 0.8, (10, 30): 0.4}.items():
        for layer, (kind, k, pattern) in itertools.product(
            (0, 1), ((COLUMNS, 0, "p"), (KEYS, 4, ""), (KEYS, 16, ""))
        ):
            same = 0.9 if k != 4 else value + 0.2 * layer
            rows.append(OverlapRow(kind, k, pattern, first, second, 0, layer, 0, same))
    return rows


def head_map(gradient_of=lambda values: values) -> HeadMap:
    values = np.where(np.tri(32) > 0, np.arange(1024).reshape(32, 32) + 1.0, np.nan)
    return HeadMap(5, 0, 0, 0, 8, values.astype(np.float32), gradient_of(values.astype(np.float32)))


def rope() -> list[RopeRow]:
    numbers = ((1, 0.1, 0.9, 0.9, 0.9), (5, 0.95, 0.6, 0.2, 0.7), (5, 0.5, 0.1, 0.3, 0.4),
               (5, None, None, None, None))  # fmt: skip
    return [
        RopeRow(
            step=step, sample=0, layer=0, head=head, r2=r2, slash=slash, vertical=vertical,
            both=both, rest=None, distances=[0, 1, 2], measured=[0.0, 1.0, 2.0],
            predicted=[0.0, 1.0, 2.0],
        )
        for head, (step, r2, slash, vertical, both) in enumerate(numbers)
    ]  # fmt: skip


def files() -> AttentionFiles:
    return AttentionFiles(top_keys(), overlap(), rope(), [head_map()])


def test_largest_keys_are_of_the_last_step_and_the_smallest_count():
    assert subject.largest_keys(files()) == (
        "At step 20, the 4 largest keys of a query hold 46.5% of its attention; even attention "
        "would give them 4.0%. At step 10, they held 26.5%."
    )
    only = AttentionFiles([row for row in top_keys() if row.step == 10])
    assert "At step 10, the 4 largest" in subject.largest_keys(only)
    assert "they held" not in subject.largest_keys(only)


def test_heads_and_samples_of_largest_keys():
    assert subject.heads_of_largest_keys(files()) == (
        "At step 20, the 4 largest keys hold most attention in layer 1, head 1 (52.5%), and least "
        "in layer 0, head 0 (40.5%)."
    )
    assert subject.samples_of_largest_keys(files()) == (
        "The share of the 4 largest keys differs by 1.0 points between samples, and by 20.0 points "
        "between steps."
    )


def test_overlap_of_the_first_and_the_last_checkpoint():
    assert subject.overlaps(files()) == (
        "For the same input, the top 4 keys of steps 10 and 30 have an overlap of 0.500; "
        "neighboring checkpoints have 0.600 to 0.900."
    )
    assert subject.overlaps_of_layers(files()) == (
        "Between steps 10 and 30, the top 4 keys change most in layer 0 (overlap 0.400), and least "
        "in layer 1 (0.600)."
    )


def test_maps_have_their_rank_correlation_and_the_share_near_the_diagonal():
    near = np.tri(32) - np.tri(32, k=-2) > 0
    values = np.nan_to_num(head_map().attention)
    share = f"{values[near].sum() / values.sum():.0%}"
    assert subject.maps(AttentionFiles(maps=[head_map()])) == (
        "In the map, |A| and |dL/dS| have a rank correlation of 1.00 over cells. The 16th of all "
        f"cells that is closest to the diagonal has {share} of |A| and {share} of |dL/dS|."
    )
    both = AttentionFiles(maps=[head_map(), head_map(lambda values: 2000 - values)])
    assert subject.maps(both).startswith(
        "In 2 maps, |A| and |dL/dS| have a rank correlation of -1.00 to 1.00"
    )


def test_rotary_prediction_and_variance_are_of_the_last_step():
    assert subject.rotary_prediction(files()) == (
        "At step 5, the mean query and key predict the mean score at each distance with a median "
        "R² of 0.725; R² is above 0.9 in 1 of 2 cases (a head and a sample)."
    )
    assert subject.variance(files()) == (
        "At step 5, the distance explains 35% of the variance of scores, the key 25%, and both "
        "together 55%. The distance explains more than the key in 1 of 2 cases (a head and a "
        "sample)."
    )


def test_without_results_there_is_nothing_to_say():
    for say in (
        *(subject.largest_keys, subject.heads_of_largest_keys, subject.samples_of_largest_keys),
        *(subject.overlaps, subject.overlaps_of_layers, subject.maps),
        *(subject.rotary_prediction, subject.variance),
    ):
        assert say(AttentionFiles()) == ""
