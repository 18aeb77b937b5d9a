"""Spans and slices describe exactly the pairs that the mask's definition allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.attention.mask import KeySlice, KeySpans, MaskRule, SequenceMask


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


@settings(max_examples=300, deadline=None)
@given(problems())
def test_spans_equal_the_definition(problem):
    ids, padded, queries, keys = problem
    spans = SequenceMask.from_documents(ids, padded).spans(queries, keys)
    slots = np.arange(len(keys))
    seen = (slots >= spans.low[:, None]) & (slots < spans.high[:, None])
    assert (seen == by_definition(ids, queries, keys)).all()
    assert spans.pairs == seen.sum()


@settings(max_examples=300, deadline=None)
@given(problems())
def test_slices_cover_each_allowed_pair_once_and_nothing_else(problem):
    ids, padded, queries, keys = problem
    spans = SequenceMask.from_documents(ids, padded).spans(queries, keys)
    count = np.zeros((len(queries), len(keys)), int)
    for s in spans.slices:
        for row in range(s.q_start, s.q_stop):
            count[row, s.k_start : s.k_stop - (s.q_stop - 1 - row) if s.causal else s.k_stop] += 1
    assert (count == by_definition(ids, queries, keys)).all()


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_pairs_of_a_sequence_equal_those_of_its_spans(problem):
    ids, padded, _, _ = problem
    mask = SequenceMask.from_documents(ids, padded)
    everywhere = np.arange(padded)
    assert mask.pairs == mask.spans(everywhere, everywhere).pairs


def test_causal_attention_is_one_slice():
    positions = np.arange(12)
    assert SequenceMask.causal(10, 12).spans(positions, positions).slices == (
        KeySlice(0, 10, 0, 10, True),
    )


def test_a_document_is_one_slice():
    mask = SequenceMask.from_documents(np.array([0, 0, 0, 5, 5, 7]), 8)
    positions = np.arange(8)
    assert mask.spans(positions, positions).slices == (
        KeySlice(0, 3, 0, 3, True),
        KeySlice(3, 5, 3, 5, True),
        KeySlice(5, 6, 5, 6, False),
    )


def test_an_empty_mask_has_no_slices():
    assert KeySpans(np.zeros(4, np.int64), np.zeros(4, np.int64), 9).slices == ()


def test_decreasing_document_ids_are_refused():
    with pytest.raises(ValueError, match="non-decreasing"):
        SequenceMask.from_documents(np.array([1, 0]), 2)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 12))
def test_an_intersection_allows_what_both_masks_allow(problem, window):
    ids, padded, queries, keys = problem
    nearest = np.maximum(np.arange(padded) - window + 1, 0)
    documents, near = SequenceMask.from_documents(ids, padded), SequenceMask(nearest, len(ids))
    spans = documents.intersect(near).spans(queries, keys)
    slots = np.arange(len(keys))
    seen = (slots >= spans.low[:, None]) & (slots < spans.high[:, None])
    allowed = by_definition(ids, queries, keys) & (queries[:, None] - keys < window)
    assert (seen == allowed).all()


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 12))
def test_last_is_the_last_query_that_sees_each_key(problem, window):
    ids, padded, _, _ = problem
    nearest = np.maximum(np.arange(padded) - window + 1, 0)
    mask = SequenceMask.from_documents(ids, padded).intersect(SequenceMask(nearest, len(ids)))
    everywhere = np.arange(padded)
    spans = mask.spans(everywhere, everywhere)
    for key, last in enumerate(mask.last()[: len(ids)]):
        assert last == np.flatnonzero((spans.low <= key) & (spans.high > key))[-1]


def test_a_rule_masks_documents_if_the_run_asks_for_it():
    ids = np.repeat([0, 1], [3, 4])
    whole, parts = MaskRule(document_mask=False), MaskRule(document_mask=True)
    assert whole(ids, 7, 9).pairs == parts(None, 7, 9).pairs == 7 * 8 // 2
    assert parts(ids, 7, 9).first.tolist() == SequenceMask.from_documents(ids, 9).first.tolist()
    assert parts(ids, 7, 9).length == 7


def test_last_is_the_last_query_that_sees_a_key():
    mask = SequenceMask.from_documents(np.array([0, 0, 0, 1, 2, 2, 2]), 9)
    assert mask.last().tolist() == [2, 2, 2, 3, 6, 6, 6, 6, 6]
    assert SequenceMask.causal(5, 6).last().tolist() == [4] * 6
