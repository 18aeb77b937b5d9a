"""Links and the machine are timed: medians over repeats, and the slowest rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtrain_extras.bench import links as measuring
from mtrain_extras.bench import timing
from mtrain_extras.bench.link_fit import HOP, INNER


def test_a_machine_is_measured_by_copies_additions_and_products(monkeypatch):
    """All take 1 ms: a copy moves 16 MiB, an addition three times as much, a product 2^31 FLOP."""
    monkeypatch.setattr(measuring, "median_ms", lambda *_: 1.0)
    monkeypatch.setattr(measuring, "_launch_us", lambda _: (1.0, 2.0, 3.0))
    found = measuring._machine(torch.device("cpu"))
    assert (found.copy_gbps, found.added_gbps) == (
        pytest.approx(2 * 2**24 / 1e6),
        pytest.approx(3 * 2**24 / 1e6),
    )
    assert found.matmul_tflops == pytest.approx(2**31 / 1e9)
    assert found.launch_us == (1, 2, 3)


def test_a_launch_takes_the_median_time(monkeypatch):
    """Two warm-ups, then ten times 200 launches: 1 to 10 us each."""
    now = [0.0]
    took = iter([900.0, 900.0, *map(float, range(1, 11))])
    ticks = iter(range(100))

    def clock() -> float:
        if next(ticks) % 2:
            now[0] += next(took) * 200 / 1e6
        return now[0]

    monkeypatch.setattr(timing.time, "perf_counter", clock)
    low, middle, high = measuring._launch_us(torch.device("cpu"))
    assert (low, middle, high) == (pytest.approx(1.9), pytest.approx(5.5), pytest.approx(9.1))


def test_the_slowest_rank_sets_the_time(monkeypatch):
    """Four ranks need 5, 70, 6 and 7 us."""
    bench = SimpleNamespace(
        device=torch.device("cpu"),
        synchronize=lambda: None,
        free_memory=lambda: None,
        stop_requested=lambda: False,
        gather=lambda _: [(us, None) for us in (5.0, 70.0, 6.0, 7.0)],
    )
    monkeypatch.setattr(measuring, "_on_cpu", lambda *_: (6.0, None))
    operation = SimpleNamespace(
        link=INNER, what=HOP, ranks=4, takes_part=True, start=lambda size: (lambda: [], size)
    )
    plan = SimpleNamespace(sizes=(4096,), repeats=3, loaded_repeats=0)
    progress = SimpleNamespace(done=lambda: None)
    (found,) = measuring._measured(operation, plan, bench, None, progress)
    assert (found.us, found.low, found.high, found.size, found.ranks) == (70, 70, 70, 4096, 4)
