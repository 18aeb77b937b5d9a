"""Parquet files that would fill memory are refused by their page headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import parquet_pages
from mtrain_cli.data.text_files import text_corpus


def parquet(path: Path, texts: list[str], **options: Any) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pyarrow.table({"text": texts}), path, **options)
    return pyarrow


def documents(path: Path) -> Any:
    return text_corpus(str(path), "text").units[0].documents(0)


def test_rows_that_repeat_a_long_value_are_read_in_small_batches(tmp_path, monkeypatch):
    """The file has some kilobytes: 1,000 rows refer to one value."""
    monkeypatch.setattr(parquet_pages, "_EXPANDED_BYTES", 1 << 22)
    pyarrow = parquet(tmp_path / "t.parquet", ["x" * (1 << 17)] * 1000, compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 16
    before = pyarrow.total_allocated_bytes()
    reading = documents(tmp_path / "t.parquet")
    assert "".join(next(reading).pieces) == "x" * (1 << 17)
    assert pyarrow.total_allocated_bytes() - before < 1 << 25


def test_a_column_that_unpacks_to_more_than_memory_is_refused(tmp_path, monkeypatch):
    parquet(tmp_path / "t.parquet", [str(i) * 999 for i in range(2000)], compression="zstd")
    monkeypatch.setattr(parquet_pages, "host_memory", lambda: 1 << 20)
    with pytest.raises(
        ConfigError,
        match=r"row group 0: column text unpacks to .* more than half of this machine's memory",
    ):
        next(documents(tmp_path / "t.parquet"))


def test_a_page_that_unpacks_to_more_than_its_column_claims_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    parquet(path, ["a" * 3000], use_dictionary=False, compression="zstd", write_statistics=False)
    content = path.read_bytes()
    # Sizes in the header of the first page, after the magic number. Field 2 is the unpacked size in
    # zigzag encoding, here a little over 3,000.
    assert content[4:7] == b"\x15\x00\x15"
    end = 7
    while content[end] > 127:
        end += 1
    assert end == 8
    path.write_bytes(content[:7] + b"\xfe\xff"[: end - 7] + b"\x7f" + content[end + 1 :])
    with pytest.raises(ConfigError) as caught:
        next(documents(path))
    assert "unpacks to more than the" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"data_page_version": "2.0"},
        {"compression": "none", "write_statistics": False},
        {"data_page_size": 90},
    ],
)
def test_headers_of_all_page_kinds_are_parsed(tmp_path, options):
    texts = [f"row {i} " * (i % 50) for i in range(3000)]
    parquet(tmp_path / "t.parquet", texts, row_group_size=1700, **options)
    assert ["".join(document.pieces) for document in documents(tmp_path / "t.parquet")] == texts
