"""Spans and slices describe exactly the pairs that the mask's definition allows."""

from __future__ import annotations

import numpy as np
import pytest
from attention.mask_definitions import cells
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.attention.mask import KeySlice, KeySpans, SequenceMask, SliceKind
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.mask_settings import MASKS, MOST_INTERVALS


@st.composite
def problems(draw):
    """A packed sequence, and any ascending query and key positions."""
    padded = draw(st.integers(1, 40))
    length = draw(st.integers(1, padded))
    ids = np.sort(np.array(draw(st.lists(st.integers(0, 4), min_size=length, max_size=length))))
    queries, keys = (
        np.array(sorted(draw(st.sets(st.integers(0, padded - 1), min_size=1)))) for _ in range(2)
    )
    return ids, padded, queries, keys


def by_definition(ids: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    length = len(ids)
    return np.array([[q < length and k <= q and ids[k] == ids[q] for k in keys] for q in queries])


@settings(max_examples=60, deadline=None)
@given(problems())
def test_spans_and_slices_of_documents_equal_the_definition(problem):
    ids, padded, queries, keys = problem
    mask = SequenceMask.from_documents(ids, padded)
    spans, allowed = mask.spans(queries, keys), by_definition(ids, queries, keys)
    assert (spans.seen() == allowed).all()
    assert spans.pairs == allowed.sum()
    assert (cells(spans.slices, len(queries), len(keys)) == allowed).all(), "each pair once"
    for key, last in enumerate(mask.last()[: len(ids)]):
        assert last == np.flatnonzero(ids == ids[key])[-1]


def test_keys_may_be_all_or_some_or_none():
    """All keys change nothing, and slots count the keys of the subset."""
    spans = SequenceMask.from_documents(np.repeat([0, 1], [3, 4]), 8).spans(
        np.arange(8), np.arange(8)
    )
    assert spans.restrict(np.arange(8)) is spans
    for keys in (np.array([1, 2, 5]), np.arange(7), np.arange(1, 8), np.array([], int)):
        some = spans.restrict(keys)
        assert some.num_keys == len(keys)
        assert (some.seen() == spans.seen()[:, keys]).all()


def test_a_row_between_a_band_and_a_rectangle_belongs_to_the_rectangle():
    """So documents stay whole rectangles next to documents of one token."""
    positions = np.arange(6)
    mask = SequenceMask.from_documents(np.array([0, 1, 2, 2, 2, 3]), 6)
    assert mask.spans(positions, positions).slices == (
        KeySlice(0, 2, 0, 2, SliceKind.BICAUSAL),
        KeySlice(2, 5, 2, 5, SliceKind.CAUSAL),
        KeySlice(5, 6, 5, 6, SliceKind.FULL),
    )


def test_an_empty_mask_has_no_slices():
    assert KeySpans(np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64), 9).slices == ()


def test_decreasing_document_ids_are_refused():
    with pytest.raises(ValueError, match="non-decreasing"):
        SequenceMask.from_documents(np.array([1, 0]), 2)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 12))
def test_last_is_the_last_query_that_sees_each_key(problem, window):
    ids, padded, _, _ = problem
    nearest = np.maximum(np.arange(padded) - window + 1, 0)
    mask = SequenceMask.from_documents(ids, padded).intersect(
        SequenceMask.from_first(nearest, len(ids))
    )
    everywhere = np.arange(padded)
    spans = mask.spans(everywhere, everywhere)
    for key, last in enumerate(mask.last()[: len(ids)]):
        assert last == np.flatnonzero(spans.seen()[:, key])[-1]


def test_masks_of_other_lengths_are_others():
    short, long = SequenceMask.causal(5, 8), SequenceMask.causal(7, 8)
    assert not short.same_as(long)
    assert not long.same_as(short)
    assert short.same_as(SequenceMask.causal(5, 16))
    for mask in (short.intersect(long), long.intersect(short)):
        assert mask.length == 5
        assert mask.same_as(short)


def test_only_causal_attention_without_padding_and_documents_is_plain():
    assert SequenceMask.causal(8, 8).plain
    assert not SequenceMask.causal(7, 8).plain
    assert not SequenceMask.from_documents(np.array([0, 0, 1, 1]), 4).plain


@st.composite
def unions(draw):
    """Slices that may overlap, and any ascending query and key positions."""
    length = draw(st.integers(1, 30))
    padded = length + draw(st.integers(0, 6))
    bounds = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    slices = [
        KeySlice(*draw(bounds), *draw(bounds), draw(st.sampled_from(SliceKind)))
        for _ in range(draw(st.integers(0, 6)))
    ]
    queries, keys = (
        np.array(sorted(draw(st.sets(st.integers(0, padded - 1), min_size=1)))) for _ in range(2)
    )
    return slices, length, padded, queries, keys


@settings(max_examples=80, deadline=None)
@given(unions())
def test_a_union_of_slices_allows_each_pair_of_any_slice_once(problem):
    slices, length, padded, queries, keys = problem
    mask = SequenceMask.from_slices(slices, length, padded)
    allowed = cells(slices, padded, padded) > 0
    assert mask.pairs == allowed.sum()
    spans = mask.spans(queries, keys)
    part = allowed[np.ix_(queries, keys)]
    assert (spans.seen() == part).all()
    assert spans.pairs == part.sum(), "the intervals are disjoint"
    assert (cells(spans.slices, len(queries), len(keys)) == part).all()
    used = mask.high > mask.low
    assert (mask.low[1:] > mask.high[:-1])[used[1:]].all(), "ascending, with a gap between"
    assert not (used[1:] & ~used[:-1]).any(), "unused intervals come last"


@settings(max_examples=60, deadline=None)
@given(unions(), unions(), st.data())
def test_intersections_equal_their_definition(problem, other, data):
    slices, length, padded, *_ = problem
    ids = np.sort(data.draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)))
    mask = SequenceMask.from_slices(slices, length, padded)
    documents = SequenceMask.from_documents(ids, padded, causal=False)
    same = np.zeros((padded, padded), bool)
    same[:length, :length] = ids[:, None] == ids
    everywhere = np.arange(padded)
    inside = mask.intersect(documents)
    allowed = (cells(slices, padded, padded) > 0) & same
    assert (inside.spans(everywhere, everywhere).seen() == allowed).all()
    assert inside.pairs == allowed.sum()
    clipped = [s for s in other[0] if max(s.q_stop, s.k_stop) <= length]
    both = inside.intersect(SequenceMask.from_slices(clipped, length, padded))
    allowed &= cells(clipped, padded, padded) > 0
    assert (both.spans(everywhere, everywhere).seen() == allowed).all()
    assert both.pairs == allowed.sum()


@settings(max_examples=60, deadline=None)
@given(unions())
def test_a_label_counts_only_if_no_earlier_query_sees_past_it(problem):
    slices, length, padded, *_ = problem
    mask = SequenceMask.from_slices(slices, length, padded)
    allowed = cells(slices, padded, padded) > 0
    shown = [bool(allowed[: p + 1, p + 1 :].any()) for p in range(length)]
    assert mask.shows_later_keys()[:length].tolist() == shown


def test_a_sliding_window_is_one_causal_slice_and_one_band():
    positions = np.arange(1 << 17)
    mask = MaskRule(False, MASKS["sliding_window"](window=4096, global_tokens=0))(
        None, len(positions), len(positions)
    )
    assert mask.spans(positions, positions).slices == (
        KeySlice(0, 4096, 0, 4096, SliceKind.CAUSAL),
        KeySlice(4096, 1 << 17, 1, 1 << 17, SliceKind.BICAUSAL),
    )
    assert mask.is_causal_interval


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([KeySlice(0, 9, 0, 8)], r"slice \[0, 9, 0, 8, 0\].* does not lie in .* 8 tokens"),
        ([KeySlice(0, 8, -1, 8)], "does not lie"),
        ([KeySlice(5, 4, 0, 8)], "does not lie"),
        ([KeySlice(0, 8, 0, 8, 4)], r"slice \[0, 8, 0, 8, 4\].* unknown kind.* 0 .full.*bicausal"),
    ],
)
def test_wrong_slices_are_refused(slices, message):
    with pytest.raises(ValueError, match=message):
        SequenceMask.from_slices(slices, 8, 10)


def test_more_than_16_intervals_are_refused():
    slices = [KeySlice(40, 41, 2 * i, 2 * i + 1) for i in range(MOST_INTERVALS)]
    assert SequenceMask.from_slices(slices, 64, 64).intervals == MOST_INTERVALS
    one_more = [*slices, KeySlice(40, 41, 50, 51)]
    with pytest.raises(ValueError, match=r"position 40 sees 17 separate intervals.*at most 16"):
        SequenceMask.from_slices(one_more, 64, 64)
    touching = [*slices, *(KeySlice(40, 41, i, i + 1) for i in range(33))]
    assert SequenceMask.from_slices(touching, 64, 64).intervals == 1


def test_tables_of_dynamic_indices_refuse_other_masks():
    mask = SequenceMask.from_slices([KeySlice(0, 8, 0, 8)], 8, 8)
    assert not mask.is_causal_interval
    with pytest.raises(ValueError, match="one interval of keys"):
        mask.last()


@pytest.mark.parametrize(
    ("slices", "causal"),
    [
        ([KeySlice(0, 4, 0, 4, 1), KeySlice(4, 8, 2, 8, 1)], True),
        ([KeySlice(0, 4, 0, 4, 3), KeySlice(4, 8, 0, 8, 1)], False),  # the start goes back
        ([KeySlice(0, 8, 0, 8, 1), KeySlice(2, 3, 0, 4)], False),  # a later key
        ([KeySlice(0, 7, 0, 7, 1)], False),  # a query without keys
        ([KeySlice(0, 8, 0, 8, 3), KeySlice(6, 8, 0, 2)], False),  # two intervals
    ],
)
def test_only_causal_intervals_that_move_forward_take_an_index(slices, causal):
    assert SequenceMask.from_slices(slices, 8, 10).is_causal_interval == causal
