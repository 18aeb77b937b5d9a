"""The masks and positions of a token store, and the sequences that are made of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention.mask_definitions import by_slices, question
from masked_documents import (
    prepared,
    question_record,
    without_checksums,
    write_jsonl,
)

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import prepare
from mtrain_cli.data.corpora import EVERYTHING, Filters
from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.sampler import shuffled_order
from mtrain_cli.data.store import SLICES, TokenStore
from mtrain_cli.data.token_documents import RecordKey, TokenFields


def records(number: int = 30) -> list[dict[str, Any]]:
    """Documents with masks, with positions, with both and with neither."""
    rng = np.random.default_rng(5)
    made = []
    for which in range(number):
        first, answers, length = rng.integers(1, 8, 3).tolist()
        size = first + answers * length
        mask: Any = question(first, answers, length).tolist()
        if which % 3 == 1:
            mask = [[0, size, 0, size, 2], [size // 2, size, 0, size // 2, 1]]
        at = [*range(first), *list(range(first, first + length)) * answers]
        made.append(
            {
                "ids": rng.integers(0, 256, size).tolist(),
                "mask": None if which % 5 == 2 else mask,
                "at": None if which % 4 == 3 else at,
                "domain": "odd" if which % 2 else "even",
            }
        )
    return made


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return prepared(write_jsonl(tmp_path / "a.jsonl", records()), tmp_path / "store")


def test_documents_come_back_as_they_were_given(store: TokenStore) -> None:
    store.verify()
    assert store.meta.num_documents == 30
    for number, record in enumerate(records()):
        assert store.document(number).tolist() == record["ids"]  # without an end token
        slices = store.slices_of(number)
        if record["mask"] is None:
            assert slices is None
        else:
            length = len(record["ids"])
            expected = by_slices(np.array(record["mask"]), length)
            assert np.array_equal(by_slices(slices, length), expected)
        own = store.positions_of(number)
        assert (None if own is None else own.tolist()) == record["at"]
    meta = store.meta
    assert (meta.mask_key, meta.positions_key, meta.keys) == ("mask", "at", ["mask", "at"])
    columns = meta.columns
    assert (columns.masked, columns.positioned, columns.intervals) == (24, 23, 2)
    assert columns.largest_position == max(max(r["at"]) for r in records() if r["at"])
    assert meta.eos is None


def test_parquet_files_hold_the_same(store: TokenStore, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {name: [record[name] for record in records()] for name in ("ids", "mask", "at")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=7)
    other = prepared(tmp_path / "a.parquet", tmp_path / "other")
    assert other.meta.sha256 == store.meta.sha256
    missing = TokenFields(RecordKey("ids", "--tokens-key"), RecordKey("masks", "--mask-key"))
    with pytest.raises(ConfigError, match=r"no such key\. Its keys: ids, mask, at"):
        prepared(tmp_path / "a.parquet", tmp_path / "third", fields=missing)


def test_filters_drop_the_columns_too(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", records())
    filters = Filters(domains=("odd",), max_tokens=9, min_tokens=3)
    store = prepared(source, tmp_path / "store", filters=filters)
    kept = [r for r in records() if r["domain"] == "odd" and 3 <= len(r["ids"]) <= 9]
    assert store.meta.num_documents == len(kept)
    assert store.meta.left_out["longer than --max-tokens"] > 2
    for number, record in enumerate(kept):
        slices, length = store.slices_of(number), len(record["ids"])
        assert store.document(number).tolist() == record["ids"]
        if record["mask"] is None:
            assert slices is None
        else:
            whole = by_slices(np.array(record["mask"]), length)
            assert np.array_equal(by_slices(slices, length), whole)
        own = store.positions_of(number)
        assert (None if own is None else own.tolist()) == record["at"]


def test_a_document_whose_tokens_see_nothing_is_not_causal(tmp_path: Path) -> None:
    line = {"ids": [1] * 6, "mask": [[0, 6, 5, 5, "full"]], "at": None}
    source = write_jsonl(tmp_path / "a.jsonl", [line])
    store = prepared(source, tmp_path / "store")
    assert not by_slices(store.slices_of(0), 6).any()


def mask_counts(folder: Path, lines: list[dict[str, Any]], filters: Filters = EVERYTHING) -> tuple:
    folder.mkdir()
    store = prepared(write_jsonl(folder / "a.jsonl", lines), folder / "store", filters=filters)
    return store.meta.columns.keyless, store.meta.columns.empty_slices


def test_an_interrupted_store_equals_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_PIECES", 5)
    monkeypatch.setattr(prepare, "_COMMIT_TOKENS", 1)
    source = write_jsonl(tmp_path / "a.jsonl", records())
    whole = prepared(source, tmp_path / "whole")
    contents = {path.name: path.read_bytes() for path in whole.folder.iterdir()}
    real, ended = prepare.StoreWriter.end_document, 0

    def stopping(writer: Any, *given: Any) -> None:
        nonlocal ended
        ended += 1
        if ended in (9, 24):
            raise KeyboardInterrupt
        real(writer, *given)

    monkeypatch.setattr(prepare.StoreWriter, "end_document", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepared(source, tmp_path / "out")
    again = prepared(source, tmp_path / "out")
    assert ended > 30, "documents were not all written at once"
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == contents


def _shorten(folder: Path) -> None:
    (folder / SLICES).write_bytes((folder / SLICES).read_bytes()[:-8])


def _unsorted(folder: Path) -> None:
    offsets = np.fromfile(folder / "slice_offsets.bin", "<i8")
    offsets[1:-1] = offsets[1:-1][::-1]
    (folder / "slice_offsets.bin").write_bytes(offsets.tobytes())


def _no_positions(folder: Path) -> None:
    (folder / "positions.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_shorten, "slices.bin has "),
        (_unsorted, "slice_offsets.bin is corrupt: its offsets do not rise from 0 to "),
        (_no_positions, "positions.bin is missing"),
    ],
)
def test_a_damaged_column_is_one_clear_line(
    store: TokenStore, damage: Callable[[Path], None], message: str
) -> None:
    damage(store.folder)
    with pytest.raises(ConfigError) as caught:
        TokenStore.open(store.folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_checksum_covers_the_columns(store: TokenStore) -> None:
    path = store.folder / "positions.bin"
    path.write_bytes(path.read_bytes()[:-4] + b"\1\0\0\0")
    with pytest.raises(ConfigError, match=r"positions\.bin has changed"):
        TokenStore.open(store.folder)
    with pytest.raises(ConfigError, match=r"or another file has changed.*sha256"):
        TokenStore.open(without_checksums(store.folder)).verify()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seq", [7, 20, 64, 300])
def test_a_sequence_has_the_masks_and_positions_of_its_parts(
    store: TokenStore, seq: int, shuffle: bool
) -> None:
    """Documents are cut where a sequence ends, and no pair crosses documents."""
    dataset = PackedDataset(store, seq, shuffle=shuffle, masked=True, positioned=True)
    order = shuffled_order(30, 0) if shuffle else np.arange(30)
    given = [records()[number] for number in order]
    lengths = [len(record["ids"]) for record in given]
    total = sum(lengths)
    seen, at, place = np.zeros((total, total), bool), np.arange(total), 0
    own = np.zeros(total, bool)
    for record, length in zip(given, lengths, strict=True):
        mask, part = record["mask"], slice(place, place + length)
        causal = np.tri(length, dtype=bool)
        seen[part, part] = causal if mask is None else by_slices(np.array(mask), length)
        if record["at"] is not None:
            at[part], own[part] = record["at"], True
        place += length
    starts = {0, *np.cumsum(lengths).tolist()}
    for number in range(len(dataset)):
        sample, begin = dataset[number], number * seq
        real = min(seq, total - begin)
        mask = SequenceMask.from_slices(sample.slices, seq, seq)
        everyone, part = np.arange(seq), slice(begin, begin + real)
        shown = mask.spans(everyone, everyone).seen()
        assert np.array_equal(shown[:real, :real], seen[part, part])
        assert not shown[real:].any()
        assert not shown[:, real:].any()
        expected = np.where(own[part], at[part], np.arange(real))
        assert sample.positions[:real].tolist() == expected.tolist()
        assert sample.positions.shape == (seq,)
        for place in range(begin, begin + real):
            continued = place + 1 < total and place + 1 not in starts
            continued = continued and bool(seen[place + 1, place])
            if continued and own[place]:
                continued = at[place + 1] > at[place]
            assert (sample.labels[place - begin] != IGNORED) == continued


@pytest.mark.parametrize(("name", "value"), [("slices.bin", 2**40), ("positions.bin", 2**30)])
def test_impossible_values_are_one_clear_line(store: TokenStore, name: str, value: int) -> None:
    path = store.folder / name
    kind = "<i4" if name == "positions.bin" else "<i8"
    values = np.fromfile(path, kind)
    values[values >= 0] = value
    values.tofile(path)
    opened = TokenStore.open(without_checksums(store.folder))
    dataset = PackedDataset(opened, 300, masked=True, positioned=True)
    with pytest.raises(ConfigError) as caught:
        dataset[0]
    assert str(caught.value) == (
        f"{store.folder}: {name} is corrupt: it holds impossible values. Prepare the store again."
    )


def test_a_store_that_lists_too_many_intervals_is_one_clear_line(store: TokenStore) -> None:
    meta = store.folder / "meta.json"
    content = json.loads(meta.read_text())
    content["columns"]["intervals"] = 16
    meta.write_text(json.dumps(content))
    TokenStore.open(store.folder)
    content["columns"]["intervals"] = 17
    meta.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        TokenStore.open(store.folder, "data.path=mine")
    assert str(caught.value) == (
        "data.path=mine: meta.json lists queries with 17 separate intervals of keys; at most 16 "
        "are allowed. Prepare documents with slices that touch or overlap, or with fewer slices "
        "per query."
    )


@pytest.mark.parametrize("positioned", [False, True])
@pytest.mark.parametrize("seq", [22, 11])
def test_the_end_of_an_answer_does_not_predict_the_next_answer(
    tmp_path: Path, seq: int, positioned: bool
) -> None:
    """A question of 4 tokens and 3 answers of 6: the next token of an answer's end is no label."""
    record = question_record(4, 3, 6)
    store = prepared(write_jsonl(tmp_path / "a.jsonl", [record] * 2), tmp_path / "store")
    dataset = PackedDataset(store, seq, shuffle=False, masked=True, positioned=positioned)
    labels = np.concatenate([dataset[number].labels for number in range(44 // seq)])
    ignored = np.flatnonzero(labels == IGNORED).tolist()
    # Token 3 ends the question, which the first answer continues.
    ends = [9, 15, 21]
    assert ignored == [*ends, *(22 + end for end in ends)]
    plain = PackedDataset(store, seq, shuffle=False)
    labels = np.concatenate([plain[number].labels for number in range(44 // seq)])
    assert np.flatnonzero(labels == IGNORED).tolist() == [21, 43]
