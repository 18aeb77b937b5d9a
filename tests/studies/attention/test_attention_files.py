"""Results on attention read back as written; damaged files and pickles are refused."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pandas
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.studies.attention.files import (
    KEYS,
    AttentionFiles,
    HeadMap,
    OverlapRow,
    RopeRow,
    TopKeyRow,
    read_attention_files,
    without_lists,
)

PLACE = {"step": 3, "sample": 0, "layer": 1, "head": 2}
BETWEEN = {"first": 1, "second": 3, "sample": 0, "layer": 1, "head": 2}
SHARES = {"slash": 0.5, "vertical": 0.1, "both": 0.6, "rest": 0.4}


def results() -> AttentionFiles:
    table = np.array([[0.5, np.nan], [0.25, 0.5]], np.float32)
    return AttentionFiles(
        top_keys=[
            TopKeyRow(**PLACE, k=4, mean=0.5, worst=0.25, queries=[7, 9], mass=[0.75, 0.25]),
            TopKeyRow(**PLACE, k=64, mean=None, worst=None, queries=[], mass=[]),
        ],
        overlap=[
            OverlapRow(kind=KEYS, k=4, pattern="", **BETWEEN, jaccard=0.5),
            OverlapRow(kind=KEYS, k=64, pattern="", **BETWEEN, jaccard=None),
        ],
        rope=[
            RopeRow(**PLACE, r2=0.9, **SHARES, distances=[0, 1], measured=[1.0, 2.0],
                    predicted=[1.5, 2.0]),
        ],
        maps=[HeadMap(**PLACE, width=8, attention=table, gradient=table * 2)],
    )  # fmt: skip


def test_results_read_back_as_written(tmp_path):
    written = results()
    written.write(tmp_path)
    read = read_attention_files(tmp_path)
    assert (read.top_keys, read.overlap, read.rope) == (
        written.top_keys,
        written.overlap,
        written.rope,
    )
    (mine,), (theirs,) = read.maps, written.maps
    assert mine.label == "step 3, layer 1, head 2"
    assert mine.width == 8
    np.testing.assert_array_equal(mine.attention, theirs.attention)
    np.testing.assert_array_equal(mine.gradient, theirs.gradient)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("maps.npz", "overlap.parquet", "rope.parquet", "top_keys.parquet")
    ]


def test_a_folder_without_results_is_empty(tmp_path):
    AttentionFiles().write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not read_attention_files(tmp_path)
    assert results()


def test_maps_sort_by_place():
    maps = [HeadMap(step, sample, layer, 0, 1, np.zeros((1, 1), np.float32), np.zeros((1, 1)))
            for step, sample, layer in ((2, 0, 1), (2, 0, 0), (1, 1, 0), (1, 0, 3))]  # fmt: skip
    files = AttentionFiles(maps=maps)
    files.sort()
    assert [(m.step, m.sample, m.layer) for m in files.maps] == [
        *((1, 0, 3), (1, 1, 0), (2, 0, 0), (2, 0, 1))
    ]


def test_rows_without_lists():
    found = {"k": 4, "mean": 0.5, "worst": 0.25, "uniform": None}
    assert without_lists(results().top_keys[0]) == {**PLACE, **found}


def test_a_file_without_the_share_of_even_attention_reads(tmp_path):
    rows = [dataclasses.replace(results().top_keys[0], uniform=0.125)]
    AttentionFiles(top_keys=rows).write(tmp_path)
    assert read_attention_files(tmp_path).top_keys == rows
    file = tmp_path / "top_keys.parquet"
    pandas.read_parquet(file).drop(columns="uniform").to_parquet(file)
    assert read_attention_files(tmp_path).top_keys[0].uniform is None


@pytest.mark.parametrize("name", ["top_keys.parquet", "maps.npz"])
def test_damaged_files_are_refused(tmp_path, name):
    results().write(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read \(.*\); measure again"):
        read_attention_files(tmp_path)


def test_foreign_columns_and_types_are_refused(tmp_path):
    pandas.DataFrame([{"step": 1}]).to_parquet(tmp_path / "rope.parquet")
    with pytest.raises(ConfigError, match=r"rope\.parquet: cannot be read \(sample is missing\)"):
        read_attention_files(tmp_path)
    (tmp_path / "rope.parquet").unlink()
    row = {**vars(results().overlap[0]), "first": "one"}
    pandas.DataFrame([row]).to_parquet(tmp_path / "overlap.parquet")
    with pytest.raises(ConfigError, match=r"overlap\.parquet: cannot be read \(first=.*wrong type"):
        read_attention_files(tmp_path)


class _Harm:
    def __reduce__(self):
        return (print, ("executed",))


def test_maps_execute_no_pickle(tmp_path, capsys):
    harmful = np.array([_Harm()], dtype=object)
    with (tmp_path / "maps.npz").open("wb") as file:
        np.savez(file, places=harmful)
    with pytest.raises(ConfigError, match=r"maps\.npz: cannot be read"):
        read_attention_files(tmp_path)
    (tmp_path / "maps.npz").write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(ConfigError, match=r"maps\.npz: cannot be read"):
        read_attention_files(tmp_path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "damaged",
    [{"places": np.zeros((1, 4), np.int64)}, {"attention-0": np.zeros((2, 3), np.float32)},
     {"gradient-0": np.zeros((2, 2), np.int32)}],
)  # fmt: skip
def test_maps_of_other_shapes_are_refused(tmp_path, damaged):
    table = np.zeros((2, 2), np.float32)
    places = np.array([[1, 0, 0, 0, 4]], np.int64)
    whole = {"places": places, "attention-0": table, "gradient-0": table}
    with (tmp_path / "maps.npz").open("wb") as file:
        np.savez(file, **{**whole, **damaged})
    with pytest.raises(ConfigError, match=r"maps\.npz: cannot be read"):
        read_attention_files(tmp_path)
