"""Index files: indices round-trip in little space; other files are refused in one line."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from attention.equal_indices import same_index
from attention.sparse_problems import held_rows, make_index

from mtrain_cli.attention.index import BlockBitmap, StartBitmap, VerticalSlash
from mtrain_cli.attention.mask import KeySlice, SequenceMask
from mtrain_cli.attention.mask_rule import FullLayers, MaskRule
from mtrain_cli.attention.named_masks import Dilated, SlidingWindow
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records.index_file import RecordedSetup, load_indices, save_indices

SETUP = RecordedSetup(
    seq=61, heads=4, kv_heads=2, head_dim=8, dtype_bytes=2, workers=4, per_node=2,
    layout="striped", exchange="ring", block_size=4,
    columns={"vertical_slash": 9}, iteration=7,
)  # fmt: skip
MASKS = (
    SequenceMask.causal(61, 64),
    SequenceMask.from_documents(np.sort(np.random.default_rng(0).integers(0, 6, 50)), 64),
)


def lines(blocks: int = 16, width: int = 9, used: int = 7) -> VerticalSlash:
    rng = np.random.default_rng(width)
    columns = np.full((2, 4, width), blocks * 4, np.int32)
    columns[..., :used] = np.sort(
        rng.permuted(np.tile(np.arange(61), (2, 4, 1)), axis=-1)[..., :used]
    )
    columns[1, 2] = blocks * 4
    return VerticalSlash(
        4, blocks, torch.from_numpy(rng.random((2, 4, blocks)) < 0.3), torch.from_numpy(columns)
    )


def bitmap(blocks: int = 16) -> BlockBitmap:
    return BlockBitmap.whole(
        4, torch.from_numpy(np.random.default_rng(1).random((2, 4, blocks, blocks)) < 0.3).tril()
    )


def test_indices_round_trip(tmp_path):
    path = tmp_path / "index.npz"
    indices = [
        ("vertical_slash", 3, lines()),
        ("vertical_slash", 0, lines(used=0)),
        ("xattention", 0, bitmap()),
        ("dense", 0, None),
    ]
    save_indices(path, SETUP, MASKS, iter(indices))
    assert [p.name for p in tmp_path.iterdir()] == ["index.npz"]
    found = load_indices(path)
    assert found.setup == SETUP
    assert found.patterns == ("vertical_slash", "xattention", "dense")
    assert found.layers("vertical_slash") == (0, 3)
    assert [found.block(name) for name in found.patterns] == [4, 4, None]
    for mask, expected in zip(found.masks, MASKS, strict=True):
        assert mask.length == expected.length
        np.testing.assert_array_equal(mask.first, expected.first)
    for pattern, layer, index in indices:
        back = found.index(pattern, layer)
        assert back is None if index is None else same_index(back, index)


def test_every_mask_round_trips(tmp_path):
    whole = MaskRule(True, Dilated(block=3, stride=2, count=4))
    ids = np.sort(np.random.default_rng(0).integers(0, 4, 61))
    near = SequenceMask.from_first(np.maximum(np.arange(64) - 6, 0), 61)
    masks = (whole(None, 61, 64), whole(ids, 61, 64), near, near.intersect(MASKS[1]))
    save_indices(tmp_path / "index.npz", SETUP, masks, iter([("dense", 0, None)]))
    found = load_indices(tmp_path / "index.npz")
    for mask, expected in zip(found.masks, masks, strict=True):
        assert (mask.length, mask.padded) == (expected.length, expected.padded)
        assert mask.same_as(expected)


def test_the_masks_of_full_layers_round_trip(tmp_path):
    rule = MaskRule(True, SlidingWindow(7))
    windows = [rule.undivided(mask.length, 64) for mask in MASKS]
    path = tmp_path / "index.npz"
    indices = [("dense", layer, None) for layer in range(4)]
    save_indices(path, SETUP, windows, indices, FullLayers(MASKS, frozenset({1, 3}), 4))
    found = load_indices(path)
    assert found.full is not None
    assert (found.full.layers, found.full.of) == ({1, 3}, 4)
    for kind, masks in ((windows, found.masks), (MASKS, found.full.masks)):
        assert [(m.length, m.padded) for m in masks] == [(m.length, m.padded) for m in kind]
        assert all(mask.same_as(other) for mask, other in zip(kind, masks, strict=True))
    save_indices(path, SETUP, windows, indices)
    assert load_indices(path).full is None


def test_only_layers_with_different_masks_raise_the_schema(tmp_path):
    """A reader of schema 1 would take all layers for windows."""
    path, full = tmp_path / "index.npz", FullLayers(MASKS, frozenset({1}), 2)

    def written(full: FullLayers | None) -> dict[str, Any]:
        save_indices(path, SETUP, MASKS, [("dense", layer, None) for layer in range(2)], full)
        with np.load(path) as file:
            return json.loads(str(file["about"]))

    assert written(None)["schema"] == 1
    about = written(full)
    assert about["schema"] == 2
    # Earlier versions wrote full layers under schema 1.
    changed(path, about=np.array(json.dumps(about | {"schema": 1})))
    found = load_indices(path).full
    assert found is not None
    assert found.layers == {1}


def test_damaged_intervals_are_refused(tmp_path):
    mask = SequenceMask.from_slices([KeySlice(0, 61, 0, 61)], 61, 64)
    for low, high in (
        (mask.low, mask.high + 9),
        (mask.low + 70, mask.high),
        (mask.low - 1, mask.high),
    ):
        wrong = SequenceMask(low, high, 61)
        save_indices(tmp_path / "index.npz", SETUP, [wrong], iter([("dense", 0, None)]))
        with pytest.raises(ConfigError, match="not an index file of mtrain, or damaged"):
            load_indices(tmp_path / "index.npz")


@pytest.mark.parametrize("kind", ["bitmap", "gated", "starts"])
def test_a_bitmap_is_recorded_worker_by_worker(tmp_path, kind):
    whole = make_index(kind, np.random.default_rng(1), 2, 4, 64, 4)
    assert isinstance(whole, BlockBitmap)
    parts = []
    for rank in (2, 0, 1):
        rows = torch.arange(rank, 16, 3, dtype=torch.int32)
        parts.append(("xattention", 5, held_rows(whole, rows)))
    save_indices(tmp_path / "index.npz", SETUP, MASKS, parts)
    recorded = whole.per_head() if isinstance(whole, StartBitmap) else whole
    assert same_index(load_indices(tmp_path / "index.npz").index("xattention", 5), recorded)


def test_a_recording_that_fails_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "index.npz"
    save_indices(path, SETUP, MASKS, [("vertical_slash", 0, lines())])
    before = path.read_bytes()

    def broken():
        yield "vertical_slash", 0, lines(used=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_indices(path, SETUP, MASKS, broken())
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_long_sequence_of_many_documents_and_layers_takes_a_few_megabytes(tmp_path):
    """1/12 of 36 layers of 16 heads and 4096 blocks, with columns that compress badly."""
    rng = np.random.default_rng(0)
    blocks, layers = 4096, 3
    masks = [SequenceMask.from_documents(np.sort(rng.integers(0, 500, blocks * 128)), blocks * 128)]

    def made():
        for layer in range(layers):
            columns = np.sort(rng.integers(0, blocks * 128, (1, 16, 2048), dtype=np.int32))
            yield (
                "vertical_slash",
                layer,
                VerticalSlash(
                    128,
                    blocks,
                    torch.from_numpy(rng.random((1, 16, blocks)) < 0.05),
                    torch.from_numpy(columns),
                ),
            )

    setup = RecordedSetup(**{**vars(SETUP), "seq": blocks * 128, "heads": 16})
    save_indices(tmp_path / "index.npz", setup, masks, made())
    assert (tmp_path / "index.npz").stat().st_size * 36 / layers < 6 << 20


def changed(path, **members) -> None:
    """Other members in the place of those of an archive; None takes one away."""
    with zipfile.ZipFile(path) as file:
        kept = {name: file.read(name) for name in file.namelist()}
    for name, values in members.items():
        kept.pop(f"{name}.npy", None)
        if values is not None:
            buffer = io.BytesIO()
            np.save(buffer, values)
            kept[f"{name}.npy"] = buffer.getvalue()
    with zipfile.ZipFile(path, "w") as file:
        for name, values in kept.items():
            file.writestr(name, values)


def test_other_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "index.npz"

    def refused(said: str) -> None:
        with pytest.raises(ConfigError) as error:
            load_indices(path)
        (line,) = error.value.problems
        assert line.startswith(str(path))
        assert said in line
        assert "\n" not in line

    refused("no such file")
    path.write_text("text")
    refused("not an index file of mtrain")
    path.write_bytes(b"")
    refused("not an index file of mtrain")
    np.savez(path, a=np.zeros(3))
    refused("not an index file of mtrain")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    refused("not an index file of mtrain")
    arrays = {name: tensor.numpy() for name, tensor in lines().tensors().items()}
    np.savez(path, kind="VerticalSlash", block=4, blocks=16, **arrays)
    refused("not an index file of mtrain")

    def about(**other) -> np.ndarray:
        save_indices(
            path, SETUP, MASKS, [("vertical_slash", 0, lines()), ("xattention", 0, bitmap())]
        )
        with np.load(path) as file:
            return np.array(json.dumps(json.loads(str(file["about"])) | other))

    changed(path, about=about(schema=99))
    refused("has schema 99, this version of mtrain reads 1 and 2; update mtrain, or record it")
    changed(path, about=about(kind="other"))
    refused("not an index file of mtrain")
    changed(path, about=about(setup={"seq": 3}))
    refused("not an index file of mtrain")
    changed(path, about=about(entries=[]))
    refused("not an index file of mtrain")
    changed(path, about=about(setup=vars(SETUP) | {"heads": 5}))
    refused("not an index file of mtrain")
    for name, values in {
        "lengths": None,
        "mask1": np.array([[0], [70]]),
        "mask0": np.array([[1], [0]]),
        "0.columns": None,
        "about": None,
    }.items():
        about()
        changed(path, **{name: values})
        refused("not an index file of mtrain")
    about()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused("not an index file of mtrain")
    path.unlink()
    path.mkdir()
    refused("no such file")


@pytest.mark.parametrize(
    "broken",
    [
        {"0.columns": np.zeros((2, 3, 4), np.int32)},
        {"0.slashes": np.zeros((2, 4, 1), np.uint8)},
        {"1.rows": np.arange(1, 17)},
    ],
)
def test_damaged_layers_are_told_when_they_are_read(tmp_path, broken):
    path = tmp_path / "index.npz"
    save_indices(path, SETUP, MASKS, [("vertical_slash", 0, lines()), ("xattention", 0, bitmap())])
    changed(path, **broken)
    found = load_indices(path)
    pattern = found.patterns[int(next(iter(broken))[0])]
    with pytest.raises(ConfigError, match=f"layer 0 of {pattern} is damaged"):
        found.index(pattern, 0)


def test_flipped_bytes_are_noticed(tmp_path):
    path = tmp_path / "index.npz"
    save_indices(path, SETUP, MASKS, [("vertical_slash", 0, lines())])
    with zipfile.ZipFile(path) as file:
        at = file.getinfo("0.slashes.npy").header_offset + 90
    data = bytearray(path.read_bytes())
    data[at] ^= 255
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="damaged"):
        load_indices(path).index("vertical_slash", 0)
