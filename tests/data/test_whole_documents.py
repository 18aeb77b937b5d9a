"""Sequences of whole documents, as conversations need them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.packing import Bins
from mtrain_cli.data.store import StoreMeta, TokenStore

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def store_of(lengths: list[int]) -> TokenStore:
    """Return a store of whole documents. The tokens of document d are d + 1."""
    tokens = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.uint16), lengths)
    meta = StoreMeta(
        dtype="uint16",
        tokenizer="numbers",
        vocab_size=len(lengths) + 1,
        num_tokens=tokens.size,
        num_documents=len(lengths),
        sha256="",
        source="made",
        whole=True,
    )
    return TokenStore(meta, tokens, np.cumsum([0, *lengths]))


def bins_of(bins: Bins) -> list[list[tuple[int, int, int]]]:
    """Return (unit, start, stop) of each part of each sequence."""
    return [[part[:3] for part in bins.parts(number)] for number in range(bins.sequences)]


@given(lengths=LENGTHS, seq=st.integers(8, 64), seed=st.none() | st.integers(0, 9))
def test_each_document_is_whole_in_one_sequence(
    lengths: list[int], seq: int, seed: int | None
) -> None:
    sizes = np.array(lengths)
    cut = Bins(sizes, seq, seed, "truncate_left")
    parts = [part for one in bins_of(cut) for part in one]
    assert sorted(parts) == [(n, max(0, size - seq), size) for n, size in enumerate(lengths)]
    filled = [sum(stop - start for _, start, stop in one) for one in bins_of(cut)]
    assert max(filled) <= seq
    # The packing is as good as that of first fit: at most one sequence is half empty.
    assert sum(2 * size <= seq for size in filled) <= 1
    assert cut.filled == sum(filled)
    assert bins_of(Bins(sizes, seq, seed, "truncate_left")) == bins_of(cut)
    skipping = Bins(sizes, seq, seed, "skip")
    kept = sorted(unit for one in bins_of(skipping) for unit, _, _ in one)
    assert kept == [number for number, size in enumerate(lengths) if size <= seq]
    assert skipping.long == len(lengths) - len(kept)


def test_the_seed_decides_who_shares_a_sequence() -> None:
    sizes = np.full(60, 10)
    first, again, other = (bins_of(Bins(sizes, 30, seed, "skip")) for seed in (1, 1, 2))
    assert first == again
    assert {frozenset(one) for one in first} != {frozenset(one) for one in other}


def test_shortest_documents_are_not_all_in_the_last_sequences() -> None:
    """The last sequences are held out, and must be like the others."""
    sizes = np.tile(np.arange(1, 21), 40)
    bins = bins_of(Bins(sizes, 100, 0, "skip"))
    counts = [len(one) for one in bins]
    half = len(counts) // 2
    assert abs(np.mean(counts[:half]) - np.mean(counts[half:])) < 0.3 * np.mean(counts)


@given(lengths=LENGTHS, shuffle=st.booleans())
def test_labels_stay_inside_a_document_and_padding_is_its_own(
    lengths: list[int], shuffle: bool
) -> None:
    dataset = PackedDataset(store_of(lengths), 40, shuffle=shuffle)
    seen = np.zeros(len(lengths) + 1, int)
    for sample in map(dataset.__getitem__, range(len(dataset))):
        real = sample.real
        assert real is not None
        on = sample.labels != IGNORED
        assert (sample.labels[on] == sample.tokens[on]).all()
        assert (sample.labels[:-1][on[:-1]] == sample.tokens[1:][on[:-1]]).all()
        same = np.diff(sample.documents) == 0
        assert (on[:-1] == (same & (np.arange(39) < real - 1))).all()
        assert not on[real - 1 :].any()
        assert not sample.tokens[real:].any()
        assert sample.ends_document
        if real < 40:
            assert sample.documents[real] == sample.documents[real - 1] + 1
            assert (sample.documents[real:] == sample.documents[real]).all()
        seen += np.bincount(sample.tokens[:real], minlength=len(seen))
    assert seen[1:].tolist() == lengths
    padding = 1 - sum(lengths) / (40 * len(dataset))
    assert f"with whole documents, {padding:.1%} padding" in dataset.describe()


@pytest.mark.parametrize("held_out", [1, 3])
def test_held_out_sequences_are_not_trained_on(held_out: int) -> None:
    dataset = PackedDataset(store_of([7] * 40), 21, held_out=held_out)
    trained = {int(t) for n in range(len(dataset)) for t in dataset[n].tokens}
    kept = {int(t) for sample in dataset.held_out for t in sample.tokens}
    assert len(dataset.held_out) == held_out
    assert not (trained & kept) - {0}


def test_many_documents_leave_little_padding() -> None:
    sizes = np.random.default_rng(0).integers(1, 4096, 100_000)
    bins = Bins(sizes, 8192, 0, "skip")
    assert 1 - bins.filled / (bins.sequences * 8192) < 0.01
