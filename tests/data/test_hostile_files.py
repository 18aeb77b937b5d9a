"""Files made to read other files or to fill memory are refused by their headers alone."""

from __future__ import annotations

import gzip
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_mds import REAL, write_mds

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import parquet_pages, text_files
from mtrain_cli.data.mds import MdsFolder
from mtrain_cli.data.text_files import text_corpus

COLUMNS = {"input_ids": "ndarray:uint32"}
SAMPLES = [
    {"input_ids": np.arange(5, dtype=np.uint32)},
    {"input_ids": np.arange(3, dtype=np.uint32)},
]


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content["shards"][0])
    (folder / "index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["/etc/passwd", "../shard.00000.mds", "a/../../b", "", "a\0b"])
@pytest.mark.parametrize("which", ["raw_data", "zip_data"])
def test_shards_outside_their_folder_are_refused(tmp_path, name, which):
    folder = write_mds(tmp_path / "mds", COLUMNS, SAMPLES, compression="gz")
    change_index(folder, lambda shard: shard[which].update(basename=name))
    with pytest.raises(ConfigError) as caught:
        MdsFolder(folder)
    assert (
        str(caught.value)
        == f"{folder}: index.json names the shard {name!r}, which is not in the folder"
    )


def test_shards_in_subfolders_are_read(tmp_path):
    folder = write_mds(tmp_path / "mds", COLUMNS, SAMPLES)
    (folder / "part").mkdir()
    (folder / "shard.00000.mds").rename(folder / "part" / "shard.00000.mds")
    change_index(folder, lambda shard: shard["raw_data"].update(basename="part/shard.00000.mds"))
    assert MdsFolder(folder).sample(1, ["input_ids"])["input_ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "value"), [("samples", -1), ("samples", 1 << 40), ("bytes", -5), ("bytes", 1 << 40)]
)
def test_impossible_shard_sizes_are_refused(tmp_path, key, value):
    folder = write_mds(tmp_path / "mds", COLUMNS, SAMPLES)
    change_index(
        folder,
        lambda shard: (shard if key == "samples" else shard["raw_data"]).update({key: value}),
    )
    with pytest.raises(
        ConfigError, match=r"index\.json lists shard\.00000\.mds .* which no MDS shard can have$"
    ):
        MdsFolder(folder)


@pytest.mark.parametrize("compression", ["gz", "zstd"])
def test_unpacking_a_shard_stops_at_the_size_in_the_index(tmp_path, compression):
    zstandard = pytest.importorskip("zstandard") if compression == "zstd" else None
    folder = Path(shutil.copytree(REAL / "raw_zstd", tmp_path / "mds"))
    change_index(folder, lambda shard: shard.update(compression=compression))
    zeros = bytes(1 << 28)
    bomb = zstandard.ZstdCompressor().compress(zeros) if zstandard else gzip.compress(zeros, 1)
    del zeros
    index = json.loads((folder / "index.json").read_text())["shards"][0]
    (folder / index["zip_data"]["basename"]).write_bytes(bomb)
    change_index(folder, lambda shard: shard["zip_data"].update(bytes=len(bomb), hashes={}))
    tracemalloc.start()
    try:
        with pytest.raises(
            ConfigError,
            match=f"unpacks to more bytes but index.json lists {index['raw_data']['bytes']:,}$",
        ):
            MdsFolder(folder).sample(0, ["input_ids"])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


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


def test_an_absurdly_long_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_LINE", 100)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b" * 200}) + "\n")
    reading = documents(path)
    assert "".join(next(reading).pieces) == "a"
    with pytest.raises(
        ConfigError,
        match=r"t\.jsonl line 2: is longer than 100 bytes\. Put one document on each line\.$",
    ):
        next(reading)
