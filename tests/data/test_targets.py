"""Documents of token ids that say which tokens the loss counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from masked_documents import prepared, write_jsonl

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import prepare
from mtrain_cli.data.corpora import Filters
from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.store import StoreWriter, TokenStore
from mtrain_cli.data.text_files import token_corpus
from mtrain_cli.data.token_documents import RecordKey, TokenFields
from mtrain_cli.data.tokenizers import NO_BEGIN, ByteTokenizer

FIELDS = TokenFields(RecordKey("ids", "--tokens-key"), targets=RecordKey("on", "--targets-key"))


def records(count: int = 40) -> list[dict[str, Any]]:
    """Return documents of different lengths, some with all targets, some with none."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        ids = rng.integers(0, 256, rng.integers(1, 30)).tolist()
        on: list[bool] | None = (rng.random(len(ids)) < 0.4).tolist()
        made.append({"ids": ids, "on": None if number % 7 == 3 else on})
    made[5]["on"] = [False] * len(made[5]["ids"])
    return made


def flags(record: dict[str, Any]) -> list[bool]:
    return record["on"] or [True] * len(record["ids"])


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return prepared(write_jsonl(tmp_path / "a.jsonl", records()), tmp_path / "store", FIELDS)


def test_targets_come_back_as_given(store: TokenStore, tmp_path: Path) -> None:
    given = records()
    for number, record in enumerate(given):
        read = store.read(number, 0, len(record["ids"]))
        assert read.targets is not None
        assert read.targets.tolist() == flags(record)
    assert store.meta.targets_key == "on"
    assert store.meta.columns.targets == sum(sum(flags(record)) for record in given)
    silent = sum(not any(flags(record)[1:]) for record in given)
    assert silent > 1
    assert store.meta.notes == {"without a target": silent}
    assert f"{silent} documents without a target" in PackedDataset(store, 32).describe()
    numbers = [{**one, "on": one["on"] and [int(flag) for flag in one["on"]]} for one in given]
    for name, rows in (("bools", given), ("numbers", numbers)):
        table = pyarrow.table({key: [row[key] for row in rows] for key in ("ids", "on")})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        again = prepared(tmp_path / f"{name}.parquet", tmp_path / name, FIELDS)
        assert again.meta.sha256 == store.meta.sha256


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seq", [7, 64])
def test_a_label_is_a_target_of_its_document(store: TokenStore, seq: int, shuffle: bool) -> None:
    dataset = PackedDataset(store, seq, shuffle=shuffle)
    expected = sorted(
        (record["ids"][at - 1], record["ids"][at])
        for record in records()
        for at in range(1, len(record["ids"]))
        if flags(record)[at]
    )
    found = []
    for sample in dataset.held_out or map(dataset.__getitem__, range(len(dataset))):
        on = sample.labels != IGNORED
        found += zip(sample.tokens[on].tolist(), sample.labels[on].tolist(), strict=True)
    assert sorted(found) == expected


def test_a_store_in_memory_equals_one_on_disk(store: TokenStore, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos, tokenizer.begin = None, NO_BEGIN
    corpus = token_corpus(str(tmp_path / "a.jsonl"), FIELDS)
    writer = StoreWriter.in_memory(tokenizer, FIELDS)
    list(prepare.tokenise(corpus, tokenizer, writer))
    memory = writer.memory_store(corpus)
    assert memory.meta.sha256 == store.meta.sha256
    assert memory.targets is not None
    assert store.targets is not None
    assert memory.targets.tolist() == store.targets.tolist()


def test_an_interrupted_store_with_targets_equals_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_PIECES", 5)
    monkeypatch.setattr(prepare, "_COMMIT_TOKENS", 1)
    source = write_jsonl(tmp_path / "a.jsonl", records())
    whole = prepared(source, tmp_path / "whole", FIELDS)
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
            prepared(source, tmp_path / "out", FIELDS)
    again = prepared(source, tmp_path / "out", FIELDS)
    assert ended > 40, "documents were not all written at once"
    assert again.folder is not None
    assert whole.folder is not None
    for path in whole.folder.iterdir():
        assert (again.folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_filters_drop_the_targets_too(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", records())
    long = prepared(source, tmp_path / "long", FIELDS, Filters(min_tokens=10))
    kept = [record for record in records() if len(record["ids"]) >= 10]
    assert long.targets is not None
    assert long.targets.tolist() == [flag for record in kept for flag in flags(record)]


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ([True], "holds [True] for 3 tokens. Give true or false for each token."),
        ([0, 2, 1], "holds [0, 2, 1] for 3 tokens."),
        ([0.5, 1, 1], "holds [0.5, 1, 1], not a list of integers"),
        ("all", "holds 'all', not a list of integers"),
    ],
)
def test_wrong_targets_are_one_line(on: Any, expected: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"ids": [1, 2, 3], "on": on}])
    with pytest.raises(ConfigError) as caught:
        prepared(source, tmp_path / "store", FIELDS)
    (line,) = caught.value.problems
    assert line.startswith(f"--targets-key on: {source} line 1 ")
    assert expected in line
