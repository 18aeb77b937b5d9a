"""Predictions: counted work, messages priced by link, bounds, and records like a profile's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention.sparse_problems import gated_index
from simulation.counting import count_work
from simulation.recordings import lines

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.records import record_files
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import HIGH, LOW
from mtrain_cli.simulation.costs import LISTED_BLOCKS
from mtrain_cli.simulation.prediction import (
    AttentionWorkload,
    BoundedTime,
    Prediction,
    _CasePlayer,
    default_kernel,
    predict,
)
from mtrain_cli.simulation.synthetic_index import SyntheticIndex
from mtrain_cli.simulation.what_if import ReplaySetup

SEQ, HEADS, BLOCK = 16384, 4, 128


def problem(family: str | None = "clustered", layers: int = 1, seq: int = SEQ) -> AttentionWorkload:
    made = RecordedSetup(
        seq=seq,
        heads=HEADS,
        kv_heads=2,
        head_dim=128,
        dtype_bytes=2,
        workers=8,
        per_node=8,
        layout="striped",
        exchange="ring",
    )
    of = None if family is None else SyntheticIndex(density=0.1, columns=64)
    masks = (SequenceMask.causal(seq, seq),)
    return AttentionWorkload(
        made,
        masks,
        tuple(range(layers)),
        lambda layer: None if of is None else of.index(layer, seq, HEADS),
        family or "dense",
    )


def test_swapped_bounds_are_detected(monkeypatch):
    """Sorting three figures would make valid bounds of any of them."""
    make = _CasePlayer.__init__

    def swapped(self, *arguments):
        make(self, *arguments)
        self.costs[LOW], self.costs[HIGH] = self.costs[HIGH], self.costs[LOW]

    monkeypatch.setattr(_CasePlayer, "__init__", swapped)
    for of_pass in predict(
        load_cluster("a100_4x8"), problem(), ReplaySetup("striped", "ring", 8, 8)
    ).passes.values():
        assert of_pass.duration.low == of_pass.duration.value == of_pass.duration.high
    assert (
        BoundedTime.around(2.0) == BoundedTime.around(2.0, 3.0, 1.0) == BoundedTime(2.0, 2.0, 2.0)
    )


@pytest.mark.parametrize("name", ["h200_1x8", "a100_4x8"])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_every_estimate_has_bounds(name, exchange):
    cluster = load_cluster(name)
    found = predict(cluster, problem(), ReplaySetup("striped", exchange, 8, 8))
    for of_pass in found.passes.values():
        assert of_pass.duration.low < of_pass.duration.value < of_pass.duration.high
    # Fixed times, which have wide bounds, dominate such a small problem.
    assert found.duration.high < (14 if name == "h200_1x8" else 32) * found.duration.low
    assert any("not calibrated" in remark for remark in found.remarks) == (name != "h200_1x8")
    assert found.costs[LOW].copied(1 << 30) < found.costs[HIGH].copied(1 << 30)


def test_pairs_of_columns_are_counted_separately_in_every_exchange():
    one = problem()
    index = one.index(0)
    expected = int(index.counts(MaskTables.make(one.masks, BLOCK)).column_pairs.sum())
    assert expected > 0
    for exchange, shared_columns, apart in (
        ("all_gather", True, False),
        ("ring", False, False),
        ("ring", True, True),
    ):
        schedule = make_schedule(exchange, ScheduleOptions(8, 8))
        layout = make_layout("striped", 8, SEQ, BLOCK, unit=BLOCK)
        for work in count_work(
            schedule, layout, one.masks, index, heads=HEADS, shared_columns=shared_columns
        ).values():
            assert (int(work.of_columns.sum()), int(work.column_pairs.sum())) == (
                (0, expected) if apart else (expected, 0)
            )
            assert (work.of_columns <= work.pairs).all()


def test_a_simulation_reads_like_a_profile(tmp_path):
    cluster = load_cluster("a100_4x8", nodes=2)
    setups = [
        ReplaySetup("zigzag", "ring", 16, 8),
        ReplaySetup("striped", "hierarchical_ring", 16, 8),
    ]
    found = [
        predict(
            cluster,
            problem(layers=2),
            s,
            number=i,
            rows=True,
            recompute=Recompute.EVERYTHING,
            bounds=False,
        )
        for i, s in enumerate(setups)
    ]
    for i, prediction in enumerate(found):
        record_files.write_part(prediction.rows, tmp_path, i)
    record_files.join_parts(tmp_path)
    document = {
        "kind": "simulation",
        "mode": "attention",
        "complete": True,
        "workers": 16,
        "samples_wanted": 1,
    }
    record_files.write_summary(
        tmp_path, document | {"cases": [prediction.facts for prediction in found]}
    )
    for case, prediction in zip(analyse(record_files.open_records(tmp_path)), found, strict=True):
        assert set(case.passes) == {"forward", "recompute", "backward"}
        assert case.bins.sum(-1) == pytest.approx(case.passes_ms, rel=1e-4), "bins fill the passes"
        for direction, of_pass in prediction.passes.items():
            told = case.passes[direction]
            assert told.duration.mean == pytest.approx(of_pass.duration.value, rel=1e-3)
            for degree in ("worker", "step", "total", "critical"):
                assert getattr(told.time, degree).mean == pytest.approx(
                    getattr(of_pass.time, degree), rel=1e-3
                )
                assert getattr(told.work, degree).mean == pytest.approx(
                    getattr(of_pass.work, degree), rel=1e-6
                )
            assert told.computation.total.mean == pytest.approx(of_pass.computed, rel=1e-3)
            assert case.bin_ms("late", direction) / 2 == pytest.approx(
                of_pass.late, rel=1e-3, abs=1e-6
            )
            for link, ms in of_pass.exposed.items():
                assert case.bin_ms(f"exposed {link}", direction) / 2 == pytest.approx(
                    ms, rel=1e-3, abs=1e-6
                )


def exposed(found: Prediction) -> float:
    return sum(sum(of_pass.exposed.values()) for of_pass in found.passes.values())


def test_the_default_kernel_computes_the_blocks_and_gates_of_an_index():
    h200, a100 = (load_cluster(name).gpu for name in ("h200_1x8", "a100_4x8"))
    gated = gated_index(np.random.default_rng(0), 1, 2, 1024, 128, 128)
    whole = BlockBitmap.whole(128, gated.bits)
    found = [default_kernel(h200, index) for index in (None, whole, gated, lines(0))]
    assert found == ["flash4", "flash4", "triton", "triton"], "blocks of 16 tokens are the last"
    assert [default_kernel(a100, index) for index in (None, whole)] == ["sdpa", "triton"]


@pytest.mark.parametrize(("kernel", "slower"), [("triton", True), ("flash4", False)])
def test_only_triton_takes_longer_for_lists_of_blocks(kernel, slower, monkeypatch):
    index = BlockBitmap.whole(BLOCK, torch.ones(1, HEADS, SEQ // BLOCK, SEQ // BLOCK).bool())
    lists = replace(problem("blocks"), index=lambda _: index)
    cluster, setup = load_cluster("h200_1x8"), ReplaySetup("striped", "ring", 8, 8)
    times = []
    for factor in (1.0, 10.0):
        constant = replace(LISTED_BLOCKS, value=factor)
        monkeypatch.setattr("mtrain_cli.simulation.prediction.LISTED_BLOCKS", constant)
        found = predict(cluster, lists, setup, kernel=kernel, bounds=False)
        times.append(found.passes["forward"].computed)
    assert times[1] > times[0] if slower else times[1] == times[0]
