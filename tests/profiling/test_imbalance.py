"""Imbalance degrees of matrices of which the answer is known, and what a recording of an exchange must hold."""

from __future__ import annotations

import itertools

import gloo
import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.parallel.recording import Recorder, Span
from mtrain_cli.profiling.imbalance import computation, degrees, imbalance


@pytest.mark.parametrize(
    ("table", "worker", "step", "total", "critical"),
    [
        ([[2, 2], [2, 2]], 1, 1, 1, 1),
        ([[4, 0], [0, 4]], 2, 2, 1, 2),  # each has as much, never at the same time
        ([[3, 3], [1, 1]], 1.5, 1, 1.5, 1.5),
        ([[1, 3], [1, 3]], 1, 1.5, 1, 1),
        ([[8, 1], [0, 1]], 1.5, (8 / 4.5 + 2) / 2, 9 / 5, 9 / 5),
        ([[5, 0, 1], [3, 0, 3]], (5 / 4 + 3 / 2) / 2, (5 / 3 + 1) / 2, 1, 8 / 6),  # in step 1 nobody computes
        ([[0, 0], [0, 0]], 1, 1, 1, 1),
        ([[7]], 1, 1, 1, 1),
    ],
)
def test_degrees_of_small_matrices(table, worker, step, total, critical):
    found = imbalance(table)
    assert (found.worker, found.step, found.total, found.critical) == pytest.approx((worker, step, total, critical))


@pytest.mark.parametrize("table", [[], [[]], [1.0], [[-1.0, 2.0]], [[float("nan")]], [[float("inf")]]])
def test_no_table_of_times_is_refused(table):
    with pytest.raises(ValueError, match="finite numbers"):
        imbalance(table)


def recorded(rank: int, world: int, exchange_name: str, heads: int) -> list[Span]:
    group = make_context_group(rank, world, world, torch.device("cpu"), per_node=2, heads=heads)
    layout = make_layout("zigzag", world, 96, 4)
    exchange = make_exchange(exchange_name, layout, group)
    attend = ContextAttention.make(exchange, SdpaKernel(), [SequenceMask.causal(96, layout.padded_seq)], "cpu")
    q, k, v = (torch.randn(1, layout.tokens_per_worker, h, 8, requires_grad=True) for h in (4, 2, 2))
    recorder = Recorder(torch.device("cpu"))
    exchange.record(recorder)
    attend(q, k, v, 7).sum().backward()
    recorder.start()
    attend(q, k, v, 7).sum().backward()
    found = recorder.read()
    attend(q, k, v, 7).sum().backward()
    recorder.start()
    assert recorder.read() == [], "what is done outside of a recording is not in it"
    return found


@pytest.mark.parametrize(
    ("exchange", "heads", "links"),
    [
        ("ring", 1, {"context"}),
        ("hierarchical_ring", 1, {"inner", "outer"}),
        ("all_gather", 1, {"context"}),
        ("ring", 2, {"context", "heads"}),
    ],
)
def test_every_step_has_its_attention_and_its_waits(exchange, heads, links):
    for rank, spans in enumerate(gloo.run(4, recorded, exchange, heads)):
        assert {s.layer for s in spans} == {"layer 7"}
        for direction in ("forward", "backward"):
            mine = [s for s in spans if s.direction == direction]
            computed = [s.step for s in mine if s.kind == "attention"]
            # Zigzag: every pair of shards has something to compute.
            assert computed == list(range(4 // heads if "ring" in exchange else 1)), (rank, direction)
            assert {s.link for s in mine if s.kind == "wait"} == links
            assert {s.link for s in mine if s.kind != "wait"} == {""}
        # One thing after the other, on one thread.
        ordered = sorted(spans, key=lambda s: s.start)
        assert all(a.start + a.seconds <= b.start + 1e-6 for a, b in itertools.pairwise(ordered))
        assert min(s.start for s in spans) >= 0
        assert all(np.isfinite(s.seconds) and s.seconds >= 0 for s in spans)


@pytest.mark.parametrize(
    ("attention", "elapsed", "wall", "step", "total"),
    [
        ([[2, 2], [2, 2]], [[2, 2], [2, 2]], None, 1, 1),
        ([[1, 3], [2, 2]], [[2, 3], [4, 4]], None, (1 / 2 + 1 + 1 / 2 + 1 / 2) / 4, (4 / 8 + 4 / 8) / 2),
        ([[1, 3], [2, 2]], [[2, 3], [4, 4]], 10.0, (1 / 2 + 1 + 1 / 2 + 1 / 2) / 4, 0.4),
        ([[4, 0], [0, 4]], [[4, 1], [4, 4]], None, (1 + 0 + 0 + 1) / 4, (4 / 8 + 4 / 8) / 2),  # one that only waits counts, with 0
        ([[2, 0], [2, 0]], [[2, 6], [2, 6]], None, 1, 2 / 8),  # a step in which nobody computes is in the whole only
        ([[3]], [[4]], None, 0.75, 0.75),
        ([[0, 0]], [[0, 0]], None, 0, 0),
        ([[2, 0]], [[2, 0]], 0.0, 1, 0),
    ],
)
def test_computation_ratios_of_small_matrices(attention, elapsed, wall, step, total):
    found = computation(attention, elapsed, wall)
    assert (found.step, found.total) == pytest.approx((step, total))


def test_computation_of_tables_that_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="no part of time"):
        computation([[1.0, 2.0]], [[1.0], [2.0]])


def test_many_tables_at_once_are_each_of_them():
    tables = np.random.default_rng(0).gamma(2, size=(7, 5, 6)) * (np.random.default_rng(1).random((7, 5, 6)) > 0.4)
    for table, found in zip(tables, degrees(tables).T, strict=True):
        alone = imbalance(table)
        assert tuple(found) == pytest.approx((alone.worker, alone.step, alone.total, alone.critical))
