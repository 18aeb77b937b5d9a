"""The keys of masks: which belong together, which conflict, and their text."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.attention.named_masks import CAUSAL, SlidingWindow
from mtrain_cli.config import validate
from mtrain_cli.config.keys import all_keys
from mtrain_cli.config.mask_settings import MASKS, MaskSettings, mask_problems

SEQ = 4096
VIDEO = MASKS["video"](frames=16, height=16, width=16, window=(4, 16, 16), causal=False)
DILATED = MASKS["dilated"](block=64, stride=2, count=8)


def lines(mask: MaskSettings, pattern: str = "dense") -> list[str]:
    return list(mask_problems(mask, SEQ, pattern))


def keys_of(kind: str, **given) -> list[str]:
    """Return the lines on keys that the mask lacks, and on keys of other masks."""
    leaves = {**dict.fromkeys(all_keys()), "sparsity.pattern": "dense", "mask.kind": kind}
    found = validate.variant_keys({**leaves, **{f"mask.{key}": given[key] for key in given}})
    return [line for line in found if "mask" in line]


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ({"count": 16}, {"count": 17}),
        ({"count": 17, "stride": 4}, {"count": 17, "stride": 3}),
    ],
)
def test_a_dilated_query_sees_at_most_16_blocks(allowed, refused):
    assert lines(dataclasses.replace(DILATED, **allowed)) == []
    assert len(lines(dataclasses.replace(DILATED, **refused))) == 1


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ((16, 16, 16), (17, 16, 16)),
        ((1, 1, 1), (0, 1, 1)),
        ((1, 16, 16), (1, 17, 16)),
        ((4, 4, 15), (4, 5, 15)),
        ((16, 15, 16), (4, 16, 17)),
    ],
)
def test_a_window_of_a_video_ends_at_the_video_and_at_16_intervals(allowed, refused):
    assert lines(dataclasses.replace(VIDEO, window=allowed)) == []
    assert len(lines(dataclasses.replace(VIDEO, window=refused))) == 1


def test_a_prefix_and_global_tokens_end_at_the_sequence():
    assert lines(MASKS["prefix_lm"](prefix=SEQ)) == []
    assert lines(dataclasses.replace(SlidingWindow(8), global_tokens=SEQ)) == []


@pytest.mark.parametrize(("window", "intervals"), [(SEQ - 4, 1), (SEQ - 5, 2)])
def test_global_tokens_beside_a_window_join_it(window, intervals):
    mask = dataclasses.replace(SlidingWindow(window), global_tokens=4)
    assert mask.intervals(SEQ) == intervals


@pytest.mark.parametrize(
    ("mask", "intervals"),
    [
        (CAUSAL, 1),
        (SlidingWindow(64), 1),
        (dataclasses.replace(SlidingWindow(64), global_tokens=4), 2),
        (dataclasses.replace(SlidingWindow(SEQ), global_tokens=4), 1),
        (VIDEO, 1),
        (dataclasses.replace(VIDEO, window=(4, 15, 16)), 4),
        (dataclasses.replace(VIDEO, window=(2, 3, 15)), 6),
        (DILATED, 8),
        (dataclasses.replace(DILATED, stride=1), 1),
        (dataclasses.replace(DILATED, stride=32), 2),
    ],
)
def test_intervals_join_where_keys_are_adjacent(mask, intervals):
    assert lines(mask) == []
    assert mask.intervals(SEQ) == intervals


@pytest.mark.parametrize(
    ("mask", "key"),
    [
        (SlidingWindow(64, full_every=2), "mask.full_every=2"),
        (SlidingWindow(64, full_first=2), "mask.full_first=2"),
        (dataclasses.replace(SlidingWindow(64), global_tokens=4), "mask.global_tokens=4"),
        (MASKS["full"](), "mask.kind=full"),
    ],
)
def test_sparse_patterns_refuse_other_masks(mask, key):
    (line,) = lines(mask, "moba")
    assert line.startswith(f"{key}: ")
    assert "sparsity.pattern=moba" in line
    assert lines(SlidingWindow(64), "moba") == lines(CAUSAL, "moba") == []


def test_the_text_leaves_out_what_is_off():
    assert CAUSAL.describe() == "causal"
    assert SlidingWindow(4096).describe() == "sliding_window, window 4,096"
    assert SlidingWindow(64, full_every=6).describe() == "sliding_window, window 64, full_every 6"
    video = dataclasses.replace(VIDEO, causal=True).describe()
    assert video == "video, frames 16, height 16, width 16, window 4x16x16, causal"


def test_every_nth_layer_is_full():
    mask = SlidingWindow(64, full_every=3)
    assert [layer for layer in range(7) if mask.is_full(layer)] == [2, 5]
    assert not any(map(SlidingWindow(64).is_full, range(7)))
    assert mask.is_mixed
    assert not SlidingWindow(64).is_mixed


def test_the_first_layers_are_full():
    mask = SlidingWindow(64, full_first=3)
    assert [layer for layer in range(7) if mask.is_full(layer)] == [0, 1, 2]
    assert mask.is_mixed
    both = SlidingWindow(64, full_every=3, full_first=1)
    assert [layer for layer in range(7) if both.is_full(layer)] == [0, 2, 5]
    assert both.of_window_layers == mask.of_window_layers == SlidingWindow(64)
    assert CAUSAL.of_window_layers == CAUSAL
    assert mask.describe() == "sliding_window, window 64, full_first 3"
