"""Convert the ids of one tokenizer to another's, with filters, and survive an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow
from test_mds import PACKED, RAW, write_mds

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import prepare
from mtrain_cli.data.corpora import EVERYTHING, Filters
from mtrain_cli.data.prepare import PreparationProgress, prepare_store
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import ByteTokenizer, open_tokenizer
from mtrain_extras.mds import shards as mds
from mtrain_extras.mds.shards import mds_corpus

TEXTS = [
    f"the quick fox {number} jumps é over\nthe lazy dog " * (number + 1) for number in range(9)
]
DOMAINS = ["code", "book", "wiki"]


@pytest.fixture
def shards(tmp_path: Path, bpe_file: Path) -> Path:
    """Texts as ids of a BPE, two per shard."""
    ids = open_tokenizer(str(bpe_file)).encode(TEXTS)
    samples = [
        {"domain": DOMAINS[number % 3], "input_ids": found.astype(np.uint32), "length": found.size}
        for number, found in enumerate(ids)
    ]
    return write_mds(tmp_path / "shards", RAW, samples)


def silent(_: PreparationProgress) -> None:
    pass


def prepared(
    shards: Path, out: Path, bpe_file: Path, filters: Filters = EVERYTHING, tokenizer: str = "bytes"
) -> TokenStore:
    corpus = mds_corpus(str(shards), open_tokenizer(str(bpe_file)), filters.domains)
    return prepare_store(corpus, out, tokenizer, None, silent, filters)


def texts(store: TokenStore) -> list[str]:
    return [
        ByteTokenizer().decode(store.document(number)) for number in range(store.meta.num_documents)
    ]


def test_text_and_domains_survive(shards: Path, tmp_path: Path, bpe_file: Path) -> None:
    store = prepared(shards, tmp_path / "out", bpe_file)
    assert texts(store) == TEXTS
    assert store.domains is not None
    assert [store.meta.domains[number] for number in store.domains] == [
        DOMAINS[number % 3] for number in range(9)
    ]
    assert TokenStore.open(tmp_path / "out").meta.left_out == {}


@pytest.mark.parametrize(
    ("filters", "kept", "left_out"),
    [
        (Filters(domains=("book",)), [1, 4, 7], {"of another domain": 6}),
        (
            Filters(min_tokens=len(TEXTS[3].encode()) + 1),
            [3, 4, 5, 6, 7, 8],
            {"shorter than --min-tokens": 3},
        ),
        (
            Filters(max_tokens=len(TEXTS[3].encode()) + 1),
            [0, 1, 2, 3],
            {"longer than --max-tokens": 5},
        ),
        (
            Filters(domains=("code", "wiki"), max_tokens=len(TEXTS[3].encode())),
            [0, 2],
            {"of another domain": 3, "longer than --max-tokens": 4},
        ),
    ],
)
def test_filters_select_documents_and_count_the_rejected_ones(
    shards: Path,
    tmp_path: Path,
    bpe_file: Path,
    filters: Filters,
    kept: list[int],
    left_out: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        prepare, "_BATCH_CHARACTERS", 50
    )  # Documents longer than a batch are removed from the file again.
    monkeypatch.setattr(
        "mtrain_extras.mds.shards.split_text",
        lambda blocks: (text[i : i + 20] for text in blocks for i in range(0, len(text), 20)),
    )
    store = prepared(shards, tmp_path / "out", bpe_file, filters)
    assert texts(store) == [TEXTS[number] for number in kept]
    assert store.meta.left_out == left_out
    store.verify()


@mostly_slow("tokenizer", ["bytes", "bpe"], keep=(0,))
def test_an_interrupted_call_resumes_with_the_same_result(
    shards: Path, tmp_path: Path, bpe_file: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_PIECES", 1)
    monkeypatch.setattr(prepare, "_COMMIT_TOKENS", 1)
    monkeypatch.setattr(mds, "_DECODED_TOKENS", 100)
    filters = Filters(domains=("code", "book"), min_tokens=20, max_tokens=200)
    chosen = str(bpe_file) if tokenizer == "bpe" else tokenizer
    whole = prepared(shards, tmp_path / "whole", bpe_file, filters, chosen)
    # In bytes some documents are too long, with a BPE none.
    assert ("longer than --max-tokens" in whole.meta.left_out) == (tokenizer == "bytes")
    for stop in range(1, 40):
        calls = 0

        def interrupt(_: PreparationProgress, stop: int = stop) -> None:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise KeyboardInterrupt

        out = tmp_path / f"out{stop}"
        corpus = mds_corpus(str(shards), open_tokenizer(str(bpe_file)), filters.domains)
        try:
            prepare_store(corpus, out, chosen, None, interrupt, filters)
        except KeyboardInterrupt:
            store = prepared(shards, out, bpe_file, filters, chosen)
        else:
            break
        for name in ("tokens.bin", "documents.bin", "domains.bin"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (
                stop,
                name,
            )
        assert store.meta == whole.meta
    assert stop > 5


def test_spans_of_packed_samples_and_folders_of_folders(tmp_path: Path) -> None:
    ids = np.frombuffer(b"one document;and another one....", np.uint8).astype(np.int32)
    sample = {
        "input_ids": ids,
        "indices": [[0, 13], [13, 28]],
        "mask": np.ones(32, np.uint8),
        "blob": b"",
    }
    for name in ("a", "b"):
        write_mds(tmp_path / "all" / name, PACKED, [sample])
    store = prepare_store(
        mds_corpus(str(tmp_path / "all"), ByteTokenizer()), tmp_path / "out", "bytes", None, silent
    )
    assert texts(store) == ["one document;", "and another one"] * 2
    assert store.meta.domains == ["a", "b"]


def test_domains_come_from_records_or_folders_and_stores_without_them_have_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "src" / "x").mkdir(parents=True)
    (tmp_path / "src" / "x" / "a.txt").write_text("text of x")
    (tmp_path / "src" / "b.jsonl").write_text(
        '{"text": "one", "domain": "y"}\n{"text": "two", "domain": 7}\n'
    )
    corpus = text_corpus(str(tmp_path / "src"), "text", "SOURCE", "--text-key")
    store = prepare_store(corpus, tmp_path / "out", "bytes", None, silent)
    assert store.domains is not None
    names = [store.meta.domains[number] for number in store.domains]
    assert list(zip(texts(store), names, strict=True)) == [
        ("one", "y"),
        ("two", ""),
        ("text of x", "x"),
    ]
    plain = prepare_store(
        text_corpus(str(tmp_path / "src" / "x"), "text", "SOURCE"),
        tmp_path / "plain",
        "bytes",
        None,
        silent,
    )
    assert plain.domains is None
    assert not (tmp_path / "plain" / "domains.bin").exists()


def test_mistakes_are_one_line(shards: Path, tmp_path: Path, bpe_file: Path) -> None:
    def line(make: Filters | None = None, **filters: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            prepared(shards, tmp_path / "out", bpe_file, make or Filters(**filters))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial").exists()
        return str(caught.value)

    assert (
        line(domains=("novels",))
        == f"SOURCE={shards}: holds no text; left out: 9 of another domain"
    )
    assert (
        line(max_tokens=5)
        == f"SOURCE={shards}: holds no text; left out: 9 longer than --max-tokens"
    )
    assert line(min_tokens=9, max_tokens=5).startswith("--max-tokens 5: is below --min-tokens 9")
    large = write_mds(
        tmp_path / "large",
        RAW,
        [{"domain": "a", "input_ids": np.array([7, 99999], np.uint32), "length": 2}],
    )
    with pytest.raises(ConfigError, match=r"^--from-tokenizer: token 99999 is outside the 296 ids"):
        prepared(large, tmp_path / "out", bpe_file)
