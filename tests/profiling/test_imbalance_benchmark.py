"""Samples of attention alone and of training steps: every case, in turn, on the same sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gloo
import numpy as np
import pytest
import torch

from mtrain_cli.attention.index import BlockBitmap, StartBitmap
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.profiling import imbalance_benchmark
from mtrain_cli.profiling.imbalance_benchmark import _draw, _medians
from mtrain_cli.profiling.measurement import ATTENTION_ONLY, TRAINING, MeasurementPlan
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.records.record_files import ROW, as_frame, open_records
from mtrain_cli.training.trainer import Trainer
from mtrain_extras.validate import validation

CONFIG = compose(["seq=48", "train.micro_batch=2", "train.global_batch=2"])


def drawn(layout_name: str, workers: int, groups: int = 1, group: int = 0) -> list[torch.Tensor]:
    """Return q, k, v and dout of whole sequences, as all workers of one context group draw them."""
    layout = make_layout(layout_name, workers, 48, 4)
    choices = SimpleNamespace(layout=layout, dtype=torch.float32)
    parts = []
    for rank in range(workers):
        dims = ParallelDims.of(workers * groups, cp=workers)
        environment = SimpleNamespace(dims=dims, rank=group * workers + rank)
        bench = SimpleNamespace(device=torch.device("cpu"), environment=environment)
        exchange = SimpleNamespace(group=SimpleNamespace(rank=rank))
        case = SimpleNamespace(choices=choices, config=CONFIG, exchange=exchange)
        parts.append(list(_draw(case, bench)))  # type: ignore[arg-type]
    whole = [layout.to_sequence(torch.stack(of)) for of in zip(*parts, strict=True)]
    return [tensor[:, :48] for tensor in whole]


@pytest.mark.parametrize(("layout", "workers"), [("striped", 3), ("zigzag", 2), ("contiguous", 4)])
def test_all_layouts_compute_the_same_sequences(layout, workers):
    alone = drawn("contiguous", 1)
    heads, kv_heads = CONFIG.model.num_heads, CONFIG.model.num_kv_heads
    assert [t.shape[2] for t in alone] == [heads, kv_heads, kv_heads, heads]
    for tensor, other in zip(alone, drawn(layout, workers), strict=True):
        assert tensor.equal(other)
    assert not alone[0][0].equal(alone[0][1]), "sequences of a micro-batch differ"


def test_context_groups_compute_different_sequences():
    first, second = (drawn("striped", 2, 2, group) for group in (0, 1))
    for tensor, other in zip(first, second, strict=True):
        assert not tensor.equal(other)
    for tensor, alone in zip(first, drawn("striped", 2), strict=True):
        assert tensor.equal(alone)


def test_medians_and_spread_are_of_the_slowest_worker():
    """Seconds (forward, backward) of the slowest worker: 1 + 2, 2 + 4 and 9 + 3."""
    slowest = np.array([[1.0, 2.0], [2.0, 4.0], [9.0, 3.0]])
    found = _medians(SimpleNamespace(slowest=lambda _: slowest), [])  # type: ignore[arg-type]
    assert found == {"forward_ms": 2000.0, "backward_ms": 3000.0, "spread": pytest.approx(9 / 6)}


def two_lengths(rank: int, world: int, folder: str) -> list[Any]:
    """Measure two lengths. Return (file of rows, completed samples) after each sample."""
    cases = [(f"{seq} tokens", compose([f"seq={seq}"])) for seq in (48, 96)]
    plan = MeasurementPlan(ATTENTION_ONLY, cases, samples=2, quiet=True)
    run_dir = RunDir(Path(folder))
    plan.save(run_dir)
    calls: list[Any] = []

    class Watched(ProfileWriter):
        def sampled(self, number, samples):
            calls.append((number, samples))
            super().sampled(number, samples)

    imbalance_benchmark.ProfileWriter = Watched
    environment = gloo.environment(rank, world)
    assert not imbalance_benchmark.record_attention(cases[0][1], run_dir, environment, False)
    return calls


def test_each_sample_of_each_length_has_its_file_and_counts_once_all_lengths_have_it(tmp_path):
    assert gloo.run(1, two_lengths, str(tmp_path)) == [[(1, 0), (2, 0), (3, 1), (4, 2)]]
    frame = open_records(tmp_path).frame()
    assert set(zip(frame.case, frame.iteration, strict=True)) == {(0, 1), (0, 2), (1, 1), (1, 2)}


LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def block_lists(rank: int, world: int, folder: str) -> None:
    words = ["seq=200", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8"]
    words += [
        "sparsity=block_topk",
        "sparsity.block=16",
        "sparsity.density=0.5",
        "sparsity.score=exact",
    ]
    words += ["topology.block_size=16", "topology.exchange=ring", "model.hidden_size=32"]
    cases = [(name, compose([*words, f"topology.layout={name}"])) for name in LAYOUTS]
    run_dir = RunDir(Path(folder))
    MeasurementPlan(ATTENTION_ONLY, cases, samples=1, quiet=True).save(run_dir)
    environment = gloo.environment(rank, world)
    assert not imbalance_benchmark.record_attention(cases[0][1], run_dir, environment, False)


def work_of(rows: Any) -> set[tuple[Any, ...]]:
    """Return (direction, rank, step, pairs, blocks) of each kernel call of a layer."""
    attention = rows[(rows.phase == "attention") & (rows.pairs > 0)]
    return set(attention[["direction", "rank", "step", "pairs", "blocks"]].itertuples(index=False))


@pytest.mark.slow
def test_the_work_of_block_lists_is_predicted_exactly_from_a_record_of_any_workers(tmp_path):
    for workers in (1, 2, 3):
        (tmp_path / str(workers)).mkdir()
        gloo.run(workers, block_lists, str(tmp_path / str(workers)))
    runs = {workers: validation.open_run(tmp_path / str(workers)) for workers in (1, 2, 3)}
    cluster = load_cluster("h200_1x8")
    for workers, run in runs.items():
        measured = run.recorded.frame()
        assert [case.facts["layout"] for case in run.cases] == list(LAYOUTS)
        for case in run.cases:
            work = work_of(measured[measured.case == case.number])
            assert {call.rank for call in work} == set(range(workers))
            for other in runs.values():
                indices = replace(other.indices, setup=run.indices.setup)
                replayed = validation.replay(
                    replace(run, indices=indices), case, cluster, None, case.number
                )
                rows = as_frame({name: replayed.rows[name] for name in ROW.names})
                assert work_of(rows) == work
    # Queries see less than the whole of a chosen block, so these counts are not those of blocks.
    index = runs[3].indices.index("block_topk", 0)
    mask = MaskTables.make(runs[3].indices.masks, 16, bitmap=True)
    assert isinstance(index, StartBitmap)
    assert (index.counts(mask).pairs < BlockBitmap.whole(16, index.bits).counts(mask).pairs).all()


def profiled_and_plain(rank: int, world: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Return (loss, gradient norm) of each step of a sampled training, and of the same training."""
    config = compose(
        [
            *("seq=64", "topology.block_size=16", "train.global_batch=2", "optim.warmup_steps=1"),
            *("model.hidden_size=32", "model.num_layers=1", "model.head_dim=8"),
            "model.intermediate_size=48",
        ]
    )
    run_dir, environment = RunDir(Path(folder)), gloo.environment(rank, world)
    cases = [("a", config), ("b", config)]
    plan = MeasurementPlan(TRAINING, cases, samples=2, warmup=2, every=2, quiet=True)
    plan.save(run_dir)
    seen: list[Any] = []

    class Watched(Trainer):
        def train_step(self, stop):
            result = super().train_step(stop)
            seen.append((result.loss, result.grad_norm))
            return result

    imbalance_benchmark.Trainer = Watched
    assert not imbalance_benchmark.train_and_record(config, run_dir, environment, False)
    trainer = Trainer(config, environment)
    results = [trainer.train_step(False) for _ in seen]
    return seen, [(result.loss, result.grad_norm) for result in results]


def test_samples_are_taken_every_few_steps_and_leave_the_training_as_it_is(tmp_path):
    ((profiled, plain),) = gloo.run(1, profiled_and_plain, str(tmp_path))
    assert profiled == plain
    assert len(plain) == 5, "samples before steps 3 and 5"
    assert len(set(plain)) == 5
    frame = open_records(tmp_path).frame()
    assert set(zip(frame.case, frame.iteration, strict=True)) == {
        (case, step) for case in (0, 1) for step in (3, 5)
    }
