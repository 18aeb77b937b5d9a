"""Times become throughput and ratios, and a calibration file that the simulator reads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from mtrain_cli.profiling import kernel_benchmark
from mtrain_cli.profiling.kernel_benchmark import (
    KernelBench,
    KernelCase,
    KernelTime,
    median_ms,
    profile_kernels,
    save_times,
)
from mtrain_cli.simulation.calibration import load_calibration

CASE = KernelCase(seq=64, heads=4, kv_heads=2, head_dim=16, block=16, density=0.5, columns=4)


def test_the_time_of_a_call_is_the_median_after_two_warm_ups(monkeypatch):
    took = iter([900.0, 900.0, 3.0, 1.0, 50.0])  # ms
    now = [0.0]

    def call() -> None:
        now[0] += next(took) / 1e3

    monkeypatch.setattr(kernel_benchmark.time, "perf_counter", lambda: now[0])
    assert median_ms(call, "cpu", 3) == pytest.approx(3.0)


def test_throughput_counts_two_products_forward_and_five_backward():
    kernel = SimpleNamespace(name="k", skips=True)
    dense = KernelTime.make(kernel, CASE.dense, (4.0, 10.0), (2_000_000, 0, 0))
    sparse = KernelTime.make(kernel, CASE, (1.0, 5.0), (500_000, 3, 7), dense=dense)
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
    save_times(path, times, "a command", torch.float32, "cpu", seed=3)
    document = json.loads(path.read_text())
    assert (document["command"], document["dtype"], document["seed"]) == ("a command", "float32", 3)
    assert load_calibration(path).device == document["device"]


def test_every_call_draws_the_same_index():
    assert CASE.index().columns.equal(CASE.index().columns)
    assert CASE.index().columns.shape[-1] == CASE.columns
