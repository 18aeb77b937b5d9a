"""Read MDS shards: files from mosaicml-streaming's own writer in tests/mds/shards, and broken
folders.

The fixtures were written once by its `MDSWriter` (0.13.0). `write_mds` writes the same bytes, as
the first test checks.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain_cli.commands.data import show
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_extras.mds.shards import MdsFolder

REAL = Path(__file__).parent / "shards"
CODES = {"uint8": 8, "uint16": 16, "int32": 33, "uint32": 32, "int64": 65}


def encoded(encoding: str, value: Any) -> bytes:
    if encoding.startswith("ndarray"):
        parts = encoding.split(":")
        head = b"" if len(parts) > 1 else bytes([CODES[value.dtype.name]])
        if len(parts) < 3:
            width = next(
                code
                for code, limit in enumerate((1 << 8, 1 << 16, 1 << 32))
                if max(value.shape) < limit
            )
            head += (
                bytes([value.ndim << 2 | width])
                + np.array(value.shape).astype(f"<u{1 << width}").tobytes()
            )
        return head + value.tobytes()
    if encoding in ("int", "uint16"):
        return np.array(value, "<i8" if encoding == "int" else "<u2").tobytes()
    return (
        value
        if encoding == "bytes"
        else (value if encoding == "str" else json.dumps(value)).encode()
    )


def sizes(columns: dict[str, str]) -> list[int | None]:
    found: dict[str, int | None] = {"int": 8, "uint16": 2}
    return [
        int(e.split(":")[2]) * np.dtype(e.split(":")[1]).itemsize
        if e.startswith("ndarray") and e.count(":") == 2
        else found.get(e)
        for _, e in sorted(columns.items())
    ]


def write_mds(
    folder: Path,
    columns: dict[str, str],
    samples: list[dict[str, Any]],
    *,
    per_shard: int = 2,
    size_limit: int = 1 << 20,
    hashes: tuple[str, ...] = (),
    compression: str | None = None,
) -> Path:
    """Write a folder as MDSWriter does, with ``per_shard`` samples in each shard."""
    folder.mkdir(parents=True)
    names, fixed, shards = sorted(columns), sizes(columns), []
    for number, start in enumerate(range(0, len(samples), per_shard)):
        chosen = samples[start : start + per_shard]
        facts = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": list(hashes),
            "size_limit": size_limit,
            "column_names": names,
            "column_encodings": [columns[name] for name in names],
            "column_sizes": fixed,
        }
        config, bodies = json.dumps(facts, sort_keys=True).encode(), []
        for sample in chosen:
            data = [encoded(columns[name], sample[name]) for name in names]
            head = b"".join(
                np.uint32(len(part)).tobytes()
                for part, size in zip(data, fixed, strict=True)
                if size is None
            )
            bodies.append(head + b"".join(data))
        offsets = np.cumsum([0, *map(len, bodies)]) + 4 + 4 * (len(chosen) + 1) + len(config)
        raw = (
            np.uint32(len(chosen)).tobytes()
            + offsets.astype("<u4").tobytes()
            + config
            + b"".join(bodies)
        )
        name = f"shard.{number:05}.mds"

        def described(basename: str, content: bytes) -> dict[str, Any]:
            return {
                "basename": basename,
                "bytes": len(content),
                "hashes": {h: hashlib.new(h, content).hexdigest() for h in hashes},
            }

        entry = {
            **facts,
            "samples": len(chosen),
            "raw_data": described(name, raw),
            "zip_data": None,
        }
        if compression == "gz":
            packed = gzip.compress(raw)
            entry["zip_data"] = described(f"{name}.gz", packed)
            (folder / f"{name}.gz").write_bytes(packed)
        else:
            (folder / name).write_bytes(raw)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}, sort_keys=True))
    return folder


RAW = {"domain": "str", "input_ids": "ndarray:uint32", "length": "int"}
PACKED = {"input_ids": "ndarray:int32:32", "indices": "json", "mask": "ndarray", "blob": "bytes"}


def raw_samples(count: int = 7) -> list[dict[str, Any]]:
    lengths = [5 + 3 * i for i in range(count)]
    return [
        {
            "domain": ("code", "book")[i % 2],
            "input_ids": (np.arange(n) + 100 * i).astype(np.uint32),
            "length": n,
        }
        for i, n in enumerate(lengths)
    ]


def packed_samples() -> list[dict[str, Any]]:
    return [
        {
            "input_ids": (np.arange(32) + 50 * i).astype(np.int32),
            "indices": [[0, 10 + i], [10 + i, 32]],
            "mask": np.ones((32,), np.uint8),
            "blob": b"x" * i,
        }
        for i in range(5)
    ]


def test_the_test_writer_matches_the_real_writer(tmp_path: Path) -> None:
    write_mds(tmp_path / "packed", PACKED, packed_samples(), per_shard=5, hashes=("sha256",))
    for name in ("index.json", "shard.00000.mds"):
        assert (tmp_path / "packed" / name).read_bytes() == (REAL / "packed" / name).read_bytes()
    write_mds(tmp_path / "raw", RAW, raw_samples()[:2], size_limit=400)
    assert (tmp_path / "raw/shard.00000.mds").read_bytes() == (
        REAL / "raw/shard.00000.mds"
    ).read_bytes()


@pytest.mark.parametrize("name", ["raw", "raw_zstd"])
def test_documents_of_the_real_writer_are_read(name: str) -> None:
    folder, samples = MdsFolder(REAL / name), raw_samples()
    assert folder.num_samples == len(samples)
    for number in (6, 0, 3, 2, 1, 5, 4):
        found = folder.sample(number, ["domain", "input_ids", "length"])
        assert np.array_equal(found.pop("input_ids"), samples[number]["input_ids"])
        assert found == {"domain": samples[number]["domain"], "length": samples[number]["length"]}
    lengths = np.concatenate(
        [folder.array_lengths("input_ids", shard) for shard in range(len(folder.shards))]
    )
    assert lengths.tolist() == [sample["length"] for sample in samples]


def _corrupt(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (folder / name).write_bytes(change((folder / name).read_bytes()))


def _index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content)
    (folder / "index.json").write_text(json.dumps(content))


def _every(folder: Path, **facts: Any) -> None:
    """Every shard of the index says so."""
    _index(folder, lambda content: [shard.update(facts) for shard in content["shards"]])


def _first(folder: Path, **facts: Any) -> None:
    _index(folder, lambda content: content["shards"][0].update(facts))


def _unchecked(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the first shard and drop its checksum from the index."""
    _corrupt(folder, "shard.00000.mds", change)
    _index(folder, lambda content: content["shards"][0]["raw_data"].update(hashes={}))


def _snappy(folder: Path) -> None:
    path = (folder / "shard.00000.mds").rename(folder / "x")
    _first(folder, compression="snappy", zip_data={"basename": "x", "bytes": path.stat().st_size})


LARGER = (np.uint32(22).tobytes(), np.uint32(2200).tobytes())
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (
        lambda f: (f / "index.json").unlink(),
        "no index.json in it. Give a folder of MDS shards",
    ),
    "index of nonsense": (lambda f: (f / "index.json").write_text("{"), "index.json is not JSON"),
    "index of a list": (
        lambda f: (f / "index.json").write_text("[]"),
        "index.json has version None, but mtrain reads version 2",
    ),
    "index without shards": (
        lambda f: _index(f, lambda c: c["shards"].clear()),
        "it lists no shards",
    ),
    "samples in words": (
        lambda f: _first(f, samples="many"),
        'samples="many" has the wrong type',
    ),
    "a hash without its algorithm": (
        lambda f: _first(f, raw_data={"basename": "a.mds", "bytes": 9, "hashes": "abc"}),
        'hashes="abc" has the wrong type',
    ),
    "no shard": (
        lambda f: (f / "shard.00001.mds").unlink(),
        "shard.00001.mds is missing, but index.json lists it",
    ),
    "truncated": (
        lambda f: _corrupt(f, "shard.00001.mds", lambda b: b[:-3]),
        "but index.json lists",
    ),
    "changed": (
        lambda f: _corrupt(f, "shard.00000.mds", lambda b: b[:-1] + b"?"),
        "shard.00000.mds is corrupt: its sha1 is",
    ),
    "another header": (
        lambda f: _unchecked(f, lambda b: b"\x09" + b[1:]),
        "its header does not match index.json",
    ),
    "a size beyond the sample": (
        lambda f: _unchecked(f, lambda b: b.replace(*LARGER, 1)),
        "input_ids (ndarray:uint32) does not hold rows",
    ),
    "pickles": (
        lambda f: _every(f, column_encodings=["str", "pkl", "int"]),
        "column input_ids is pkl, not ndarray",
    ),
    "floats": (
        lambda f: _every(f, column_encodings=["str", "ndarray:float32", "int"]),
        "It must hold one-dimensional arrays of integers",
    ),
    "no tokens": (
        lambda f: _every(f, column_names=["domain", "text", "length"]),
        "has no column input_ids; its columns: domain (str), text",
    ),
    "mixed columns": (
        lambda f: _first(f, column_names=["a", "b", "c"]),
        "its shards have different columns",
    ),
    "compressed otherwise": (_snappy, "is compressed with snappy. Only zstd and gz can be read."),
}


def _read_all(config: Any) -> None:
    dataset = open_dataset(config)
    for number in range(len(dataset)):
        dataset[number]


@pytest.mark.parametrize(("change", "expected"), BROKEN.values(), ids=BROKEN.keys())
def test_every_mistake_is_one_line_that_names_the_folder(
    tmp_path: Path, make_config: Callable[..., Any], change: Callable[[Path], object], expected: str
) -> None:
    folder = write_mds(tmp_path / "s", RAW, raw_samples(), hashes=("sha1",))
    change(folder)
    with pytest.raises(ConfigError) as caught:
        _read_all(make_config(kind="mds", path=str(folder), seq=20, vocab_size=1000))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"data.path={folder}: ")
    assert expected in line


def test_a_sample_whose_size_contradicts_its_columns_is_refused(tmp_path: Path) -> None:
    folder = write_mds(
        tmp_path / "s",
        {"input_ids": "ndarray:uint16:8"},
        [{"input_ids": np.arange(8, dtype=np.uint16)}] * 2,
    )
    _every(folder, column_encodings=["ndarray:uint16:7"], column_sizes=[14])
    with pytest.raises(
        ConfigError,
        match=r"^mine: a shard is corrupt: its samples and columns differ in size$",
    ):
        MdsFolder(folder, "mine").sample(1, ["input_ids"])


def test_a_shard_without_samples_holds_nothing(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "s", RAW, raw_samples()[:2])
    _unchecked(folder, lambda b: bytes(4) + len(b).to_bytes(4, "little") + b[8:])
    _first(folder, samples=0)
    assert MdsFolder(folder).array_lengths("input_ids", 0).tolist() == []
    with pytest.raises(ConfigError, match=r"--document 0: PATH has 0 documents, numbered from 0"):
        show(folder)


def test_shards_are_shown_with_their_domains(capsys: pytest.CaptureFixture[str]) -> None:
    show(REAL / "raw_zstd", document=1, check=True)
    text = capsys.readouterr().out
    assert "7 samples, 98 tokens in 5 MDS shards (0.0 MiB, zstd)" in text
    assert "columns domain (str), input_ids (ndarray:uint32), length (int)" in text
    assert "every sample was read; sizes and available checksums match" in text
    assert [line.split()[:3] for line in text.splitlines() if " code " in line] == [
        ["code", "4", "56"]
    ]
    assert "document 1 (8 tokens) begins with ids 100, 101, 102" in text


ONLY_IDS = {"input_ids": "ndarray:uint32"}
TWO_SAMPLES = [
    {"input_ids": np.arange(5, dtype=np.uint32)},
    {"input_ids": np.arange(3, dtype=np.uint32)},
]


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content["shards"][0])
    (folder / "index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["/etc/passwd", "../shard.00000.mds", "a/../../b", "", "a\\b"])
@pytest.mark.parametrize("which", ["raw_data", "zip_data"])
def test_shards_outside_their_folder_are_refused(tmp_path, name, which):
    folder = write_mds(tmp_path / "mds", ONLY_IDS, TWO_SAMPLES, compression="gz")
    change_index(folder, lambda shard: shard[which].update(basename=name))
    with pytest.raises(ConfigError) as caught:
        MdsFolder(folder)
    assert str(caught.value).endswith(f"({name!r} is not in the folder)")


@pytest.mark.parametrize(
    ("key", "value"), [("samples", -1), ("samples", 1 << 40), ("bytes", -5), ("bytes", 1 << 40)]
)
def test_impossible_shard_sizes_are_refused(tmp_path, key, value):
    folder = write_mds(tmp_path / "mds", ONLY_IDS, TWO_SAMPLES)
    change_index(
        folder,
        lambda shard: (shard if key == "samples" else shard["raw_data"]).update({key: value}),
    )
    with pytest.raises(ConfigError, match=r"shard\.00000\.mds cannot hold .* samples in .* bytes"):
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
            match=f"unpacks to more bytes, but index.json lists {index['raw_data']['bytes']:,}$",
        ):
            MdsFolder(folder).sample(0, ["input_ids"])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
