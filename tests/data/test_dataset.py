"""Packing documents into sequences."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.store import StoreWriter, TokenStore
from mtrain_cli.data.tokenizers import ByteTokenizer


def _store(lengths: list[int]) -> TokenStore:
    """Make documents whose tokens identify (document, position) as far as 256 values can.

    The last token of the longer documents is the end token.
    """
    tokenizer = ByteTokenizer()
    tokenizer.eos = None
    writer = StoreWriter.in_memory(tokenizer)
    for number, length in enumerate(lengths):
        writer.append((np.arange(length - 1) * 7 + number * 31 + 1) % 256)
        writer.append(np.array([257 if length > 1 else number % 256]))
        writer.end_document()
    return writer.memory_store(Corpus("a test", "", "", ()))


_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def _expected_stream(dataset: PackedDataset, store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the stream and their document's position in the dataset's order."""
    order = dataset._packing._order
    order = range(store.meta.num_documents) if order is None else order
    documents = [store.document(number) for number in order]
    return np.concatenate(documents), np.repeat(
        np.arange(len(documents)), [document.size for document in documents]
    )


@given(
    lengths=_LENGTHS,
    seq=st.integers(1, 60),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
    mask=st.booleans(),
)
def test_every_token_is_in_one_sequence_and_labels_are_next_tokens_of_the_document(
    lengths: list[int], seq: int, seed: int, shuffle: bool, mask: bool
) -> None:
    store = _store(lengths)
    dataset = PackedDataset(store, seq, seed=seed, shuffle=shuffle, document_mask=mask)
    tokens, documents = _expected_stream(dataset, store)
    assert sorted(tokens.tolist()) == sorted(store.tokens.tolist())
    samples = [dataset[index] for index in range(len(dataset))]
    packed = min(tokens.size, len(dataset) * seq)

    for index, sample in enumerate(samples):
        assert {part.dtype for part in (sample.tokens, sample.labels, sample.documents)} == {
            np.dtype(np.int32)
        }
        assert {part.shape for part in (sample.tokens, sample.labels, sample.documents)} == {(seq,)}
        assert np.all(np.diff(sample.documents) >= 0)
        if mask:
            here = documents[index * seq : (index + 1) * seq]
            assert np.array_equal(sample.documents[: here.size], here - here[0])
        else:
            assert not sample.documents.any()

    if samples:
        all_tokens = np.concatenate([sample.tokens for sample in samples])
        all_labels = np.concatenate([sample.labels for sample in samples])
        assert np.array_equal(all_tokens[:packed], tokens[:packed])
        following = np.full(tokens.size, IGNORED)
        following[:-1] = tokens[1:]
        if mask:
            following[:-1][documents[1:] != documents[:-1]] = IGNORED
        assert np.array_equal(all_labels[:packed], following[:packed])
        assert not all_tokens[packed:].any()
        assert np.all(all_labels[packed:] == IGNORED)
    # The tail left out is less than 5 % of a sequence, or a single token that cannot have a label.
    assert tokens.size - packed < max(2, 0.05 * seq)


def test_padding_is_a_document_of_its_own_at_the_end() -> None:
    dataset = PackedDataset(_store([10, 5]), 8, shuffle=False)
    assert len(dataset) == 2
    last = dataset[1]
    assert last.documents.tolist() == [0, 0, 1, 1, 1, 1, 1, 2]
    assert last.labels[1] == last.labels[6] == last.labels[7] == IGNORED
    assert last.tokens[7] == 0


def test_documents_are_shuffled_whole_by_seed() -> None:
    store = _store([30] * 50)
    plain = PackedDataset(store, 1500, shuffle=False)[0].tokens
    first, again, other = (PackedDataset(store, 1500, seed=seed)[0].tokens for seed in (0, 0, 1))
    assert np.array_equal(plain, store.tokens)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert sorted(map(tuple, first.reshape(50, 30))) == sorted(map(tuple, plain.reshape(50, 30)))


def test_positions_outside_the_dataset_end_iteration() -> None:
    dataset = PackedDataset(_store([50]), 10)
    assert len(list(dataset)) == 5
    for index in (5, -1):
        with pytest.raises(IndexError):
            dataset[index]


def test_a_billion_tokens_open_at_once_and_a_sequence_reads_only_its_slice(tmp_path: Path) -> None:
    """The file is sparse: only blocks that are touched exist."""
    documents, length = 200_000, 5_000
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(documents * length * 2)
    (np.arange(documents + 1, dtype="<i8") * length).tofile(tmp_path / "documents.bin")
    meta = _store([3]).meta
    replace(meta, num_tokens=documents * length, num_documents=documents).write(tmp_path)
    begin = time.process_time()
    dataset = PackedDataset(TokenStore.open(tmp_path), 4096)
    sample = dataset[len(dataset) // 2]
    assert time.process_time() - begin < 2
    assert len(dataset) == -(-documents * length // 4096)
    assert sample.documents[-1] in (1, 2)


def test_a_short_tail_is_left_out_and_a_longer_one_is_padded() -> None:
    assert len(PackedDataset(_store([100, 104]), 100)) == 2
    assert len(PackedDataset(_store([100, 105]), 100)) == 3
