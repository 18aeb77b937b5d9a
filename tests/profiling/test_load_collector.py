"""Recorded loads are those of the routers, on every rank, with the time of their experts."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling import imbalance_benchmark
from mtrain_cli.profiling.measurement import TRAINING, MeasurementPlan
from mtrain_cli.profiling.record_collector import own_loads
from mtrain_cli.records.expert_loads import ROW, analyse_experts
from mtrain_cli.records.record_files import open_records
from mtrain_cli.training.router_batches import OwnLoads


def test_rows_name_layer_expert_and_rank():
    chosen = torch.zeros(4, 3, dtype=torch.float64)
    chosen[1], chosen[3] = torch.tensor([5.0, 1, 0]), torch.tensor([2.0, 2, 2])
    beyond = torch.zeros_like(chosen)
    beyond[1, 0] = 2
    own = OwnLoads((1, 3), (chosen, chosen), (beyond, beyond))
    rows = own_loads(own, 2, 7, 9)
    assert rows["layer"].tolist() == [1, 1, 1, 3, 3, 3]
    assert rows["expert"].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["tokens"].tolist() == [6, 2, 0, 4, 4, 4]
    assert rows["dropped"].tolist() == [4, 0, 0, 0, 0, 0]
    assert {name: set(rows[name].tolist()) for name in ("case", "step", "rank")} == {
        "case": {2},
        "step": {7},
        "rank": {9},
    }
    assert len(own_loads(None, 0, 1, 0)) == 0
    assert own_loads(None, 0, 1, 0).dtype == ROW


def profiled(rank: int, world: int, folder: str) -> None:
    words = "model=tiny_moe seq=75 topology.block_size=16 model.moe.expert_size=20"
    words += " train.global_batch=2 train.micro_batch=1 model.num_layers=2 model.moe.dense_layers=1"
    words += " topology.expert_parallel=2 model.hidden_size=32"
    config = compose([*words.split(), "train.expert_capacity=1"])
    plan = MeasurementPlan(TRAINING, [("a", config)], samples=1, warmup=0, quiet=True)
    plan.save(RunDir(Path(folder)))
    assert not imbalance_benchmark.train_and_record(
        config, RunDir(Path(folder)), gloo.environment(rank, world), False
    )


def test_a_profile_on_two_ranks_counts_every_token_once(tmp_path):
    gloo.run(2, profiled, str(tmp_path))
    recorded = open_records(tmp_path)
    (found,) = analyse_experts(recorded)
    assert (found.layers, found.ranks, found.experts) == ((1,), (0, 1), 8)
    assert found.parallel == 2
    assert found.worker == found.dealt[2]
    tokens = found.by_rank.sum()
    dropped = found.dropped * 2 * 2 * 75
    assert 0 < dropped < 150
    assert tokens + dropped == pytest.approx(2 * 2 * 75), "top 2 of two sequences, no padding"
    frame = recorded.frame()
    spans = frame[frame.phase == "experts"]
    assert set(spans.layer) == {1}
    assert set(zip(spans["rank"], spans.micro, spans.direction, strict=True)) == {
        (rank, micro, direction)
        for rank in (0, 1)
        for micro in (0, 1)
        for direction in ("forward", "recompute", "backward")
    }
    assert (spans.dur_us > 0).all()
    assert found.time is not None
    (result,) = recorded.summary["results"]
    assert result["experts"]["worker"]["mean"] == pytest.approx(found.worker.mean, abs=1e-4)
    assert np.isfinite(result["experts"]["time"]["worker"]["mean"])
