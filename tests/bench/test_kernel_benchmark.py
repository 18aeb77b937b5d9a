"""Times of whole sequences and of one worker's calls: counts, ratios, and calibration files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.records import record_files
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import (
    DENSE,
    SPARSE,
    load_calibration,
)
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.synthetic_index import SyntheticIndex
from mtrain_cli.simulation.what_if import ReplaySetup
from mtrain_extras.bench import timing
from mtrain_extras.bench.kernels import (
    KernelBench,
    KernelCase,
    KernelTime,
    profile_kernels,
)
from mtrain_extras.bench.timing import median_ms, save_times

CASE = KernelCase(seq=64, heads=4, kv_heads=2, head_dim=16, block=16, density=0.5, columns=4)


def test_the_time_of_a_call_is_the_median_after_two_warm_ups(monkeypatch):
    took = iter([900.0, 900.0, 3.0, 1.0, 50.0])  # ms
    now = [0.0]

    def call() -> None:
        now[0] += next(took) / 1e3

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert median_ms(call, "cpu", 3) == pytest.approx(3.0)


def test_throughput_counts_two_products_forward_and_five_backward():
    dense = KernelTime(
        kernel="k", case=CASE.dense, pairs=2_000_000, forward_ms=4.0, backward_ms=10.0
    )
    sparse = KernelTime(kernel="k", case=CASE, pairs=500_000, forward_ms=1.0, backward_ms=5.0)
    sparse = sparse.compared(dense)
    assert dense.forward_ratio is dense.backward_ratio is None
    assert (sparse.forward_ratio, sparse.backward_ratio) == (4.0, 2.0)
    assert sparse.forward_tflops == pytest.approx(2 * 2 * 16 * 500_000 / 1e-3 / 1e12)
    assert sparse.backward_tflops == pytest.approx(5 * 2 * 16 * 500_000 / 5e-3 / 1e12)


def test_a_case_and_its_dense_attention_are_counted_and_saved(tmp_path):
    bench = KernelBench(["sdpa"], torch.float32, "cpu", 1)
    times = list(profile_kernels(bench, [CASE]))
    assert [t.case for t in times] == [CASE.dense, CASE]
    whole, sparse = times
    assert whole.pairs == whole.mask_pairs == 4 * 64 * 65 // 2
    assert 0 < sparse.pairs < whole.pairs == sparse.mask_pairs
    path = tmp_path / "folder" / "mine.json"
    about = {"kind": "kernels", "device": "cpu", "dtype": torch.float32}
    save_times(path, times, "a command", **about, seed=3)
    document = json.loads(path.read_text())
    assert (document["command"], document["dtype"], document["seed"]) == ("a command", "float32", 3)
    assert load_calibration(path).device == document["device"]


class Watching(SimpleNamespace):
    """A kernel that keeps what its calls get. tiles: of each call; delta: of each backward call."""

    def forward(self, q, *rest):
        self.tiles.append(rest[2])
        return q, torch.zeros(q.shape[:-1]).transpose(1, 2)

    def backward(self, _dout, saved, tiles, _scale):
        self.tiles.append(tiles)
        self.delta.append(saved.delta)


def test_dense_attention_is_timed_once_and_sparse_calls_get_the_index(monkeypatch):
    kernel = Watching(name="watching", skips=True, tiles=[], delta=[])
    monkeypatch.setattr(KernelBench, "kernels", lambda *_: iter([kernel]))
    other = replace(CASE, density=0.25)
    times = list(profile_kernels(KernelBench([], torch.float32, "cpu", 1), [CASE, other]))
    assert [t.case for t in times] == [CASE.dense, CASE, other]
    pairs = list(dict.fromkeys(int(t.seen().expand(1, 4, -1, -1).sum()) for t in kernel.tiles))
    assert pairs == [t.pairs for t in times]


ABOUT = {"kind": "kernels", "device": "cpu", "dtype": torch.float32}


def test_a_kernel_that_cannot_skip_is_priced_by_all_pairs(tmp_path):
    """sdpa computes all pairs of the mask at any density, but only the gathered columns."""
    path = tmp_path / "mine.json"
    bench = KernelBench(["sdpa"], torch.float32, "cpu", 3)
    cases = [replace(CASE, seq=seq, density=0.3, columns=8) for seq in (64, 128, 256, 512)]
    save_times(path, list(profile_kernels(bench, cases)), "test", **ABOUT)
    calibration = load_calibration(path)
    assert {(curve.form, curve.skips) for curve in calibration.curves} == {
        (DENSE, False), (SPARSE, False)
    }  # fmt: skip
    made = RecordedSetup(
        seq=4096, heads=4, kv_heads=2, head_dim=16, dtype_bytes=4, workers=4, per_node=4,
        layout="striped", exchange="ring", block_size=16,
    )  # fmt: skip
    base = load_cluster("h200_1x8")
    cluster = dataclasses.replace(base, gpu=dataclasses.replace(base.gpu, name=calibration.device))

    def attention(exchange: str, density: float) -> np.ndarray:
        family = SyntheticIndex(density=density, columns=0, block=16)
        problem = AttentionWorkload(
            made,
            (SequenceMask.causal(4096, 4096),),
            (0,),
            lambda layer: family.index(layer, 4096, 4),
            "uniform",
        )
        setup = ReplaySetup("striped", exchange, 4, 4)
        rows = predict(
            cluster, problem, setup, kernel="sdpa", calibration=calibration, rows=True, bounds=False
        ).rows
        assert rows is not None
        mine = rows[rows["phase"] == record_files.WORDS["phase"].index("attention")]
        assert 0 < mine["pairs"].sum() < 0.6 * 2 * 4 * 4096 * 4097 / 2
        return np.sort(mine["dur_us"])

    for exchange in ("ring", "all_gather"):
        assert attention(exchange, 0.1) == pytest.approx(attention(exchange, 0.5), rel=0.1)
