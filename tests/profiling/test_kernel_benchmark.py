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
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.profiling import timing
from mtrain_cli.profiling.kernel_benchmark import (
    KernelBench,
    KernelCase,
    KernelTime,
    profile_kernels,
    profile_worker_calls,
)
from mtrain_cli.profiling.timing import median_ms, save_times
from mtrain_cli.records import record_files
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import (
    ALONE_COLUMNS,
    DENSE,
    DIAGONALS,
    LISTS,
    SPARSE,
    kernels_for,
    load_calibration,
)
from mtrain_cli.simulation.families import IndexFamily
from mtrain_cli.simulation.prediction import predict
from mtrain_cli.simulation.what_if import ReplaySetup
from mtrain_cli.simulation.workload import AttentionWorkload

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
    kernel = Watching(name="watching", skips=True, needs_out=False, tiles=[], delta=[])
    monkeypatch.setattr(KernelBench, "kernels", lambda *_: iter([kernel]))
    other = replace(CASE, density=0.25)
    times = list(profile_kernels(KernelBench([], torch.float32, "cpu", 1), [CASE, other]))
    assert [t.case for t in times] == [CASE.dense, CASE, other]
    pairs = list(dict.fromkeys(int(t.seen().expand(1, 4, -1, -1).sum()) for t in kernel.tiles))
    assert pairs == [t.pairs for t in times]


@pytest.mark.parametrize(
    ("needs_out", "with_delta", "given"),
    [(False, True, True), (False, False, False), (True, True, False), (True, False, False)],
)
def test_delta_is_computed_before_the_timed_calls_unless_the_kernel_derives_it(
    needs_out, with_delta, given
):
    kernel = Watching(needs_out=needs_out, tiles=[], delta=[])
    bench, whole = KernelBench([], torch.float32, "cpu", 1), np.arange(CASE.seq)
    tiles = bench.tiles(SequenceMask.causal(CASE.seq, CASE.seq), whole, whole, CASE.dense)
    bench.time_passes(kernel, CASE, tiles, with_delta=with_delta)  # type: ignore[arg-type]
    assert {delta is not None for delta in kernel.delta} == {given}


SMALL_CASE = KernelCase(seq=128, heads=4, kv_heads=2, head_dim=16, block=16, density=0.3, columns=8)
ABOUT = {"kind": "kernels", "device": "cpu", "dtype": torch.float32}


@pytest.fixture(scope="module")
def timed() -> list[tuple[KernelTime, int]]:
    """Return the times, and the pairs in the tiles of each call."""
    seen = [-1]

    class CountingBench(KernelBench):
        def time_passes(self, kernel, case, tiles: Tiles, *rest, **options):
            seen[0] = int(tiles.seen().expand(1, case.heads, -1, -1).sum())
            return super().time_passes(kernel, case, tiles, *rest, **options)

    found = []
    bench = CountingBench(["sdpa"], torch.float32, "cpu", 1)
    for time in profile_worker_calls(bench, [SMALL_CASE], [2, 4, 7]):
        found.append((time, seen[0]))
        seen[0] = -1
    return found


def test_counts_match_the_tiles(timed):
    assert {found.workers for found, _ in timed} == {2, 4}, "7 do not divide 128 tokens"
    assert len({(found.workers, found.what, found.form) for found, _ in timed}) == len(timed) > 24
    for found, seen in timed:
        if found.form == ALONE_COLUMNS:
            assert found.pairs == found.column_pairs > 0
        else:
            assert found.pairs == seen
        if found.form in (DENSE, LISTS):
            assert found.mask_pairs == found.pairs
        assert not found.skips
        assert found.forward_ms > 0 < found.backward_ms
    mask = SequenceMask.causal(128, 128)
    whole = {
        f.pairs for f, _ in timed if f.workers == 4 and f.form == LISTS and "all_gather" in f.what
    }
    last = np.concatenate([np.arange(b * 16, (b + 1) * 16) for b in (3, 7)])
    assert whole == {4 * mask.spans(last, np.arange(128)).pairs}


def test_a_calibration_has_a_curve_for_each_kind_of_call(timed, tmp_path):
    path = tmp_path / "mine.json"
    save_times(path, [found for found, _ in timed], "test", **ABOUT)
    calibration = load_calibration(path)
    forms = {curve.form for curve in calibration.curves}
    assert forms == {DENSE, LISTS, SPARSE, DIAGONALS, ALONE_COLUMNS}
    assert not any(curve.skips for curve in calibration.curves), (
        "sdpa hides what an index leaves out"
    )
    kernels = kernels_for(calibration.device, 1e12, "sdpa", SPARSE, calibration)
    for direction in ("forward", "backward"):
        assert kernels.part(direction, DIAGONALS).form == DIAGONALS
        assert kernels.part(direction, ALONE_COLUMNS).form == ALONE_COLUMNS
        assert kernels.part(direction, DIAGONALS).fixed_bounds is None, "it was measured"
        work = {f.mask_pairs for f, _ in timed if f.form == DIAGONALS}
        assert len(work) > 3, "of what is hidden, all is counted"


def test_a_kernel_that_cannot_skip_is_priced_by_all_pairs(timed, tmp_path):
    """sdpa computes all pairs of the mask at any density, but only the gathered columns."""
    path = tmp_path / "mine.json"
    save_times(path, [found for found, _ in timed], "test", **ABOUT)
    calibration = load_calibration(path)
    made = RecordedSetup(
        seq=4096, heads=4, kv_heads=2, head_dim=16, dtype_bytes=4, workers=4, per_node=4,
        layout="striped", exchange="ring", block_size=16,
    )  # fmt: skip
    base = load_cluster("h200_1x8")
    cluster = dataclasses.replace(base, gpu=dataclasses.replace(base.gpu, name=calibration.device))

    def attention(exchange: str, density: float) -> np.ndarray:
        family = IndexFamily("uniform", density=density, columns=0, block=16)
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
