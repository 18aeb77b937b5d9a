"""Training on documents that bring their masks and positions."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
from masked_documents import prepared, question_record, write_jsonl
from slow_cases import mostly_slow
from training.masked_runs import SMALL, Trained, changes_of_losses, trained

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.trainer import Trainer

MASKED = [
    "data=tokens", "data.mask_key=mask", "data.positions_key=at", "data.eval_sequences=1",
    "seq=150",
]  # fmt: skip
STEPS = 6
WAYS = {
    "ring": ["topology.exchange=ring", "topology.layout=zigzag"],
    "group_cast": ["topology.exchange=group_cast", "topology.layout=contiguous"],
    "ulysses": ["topology.exchange=ulysses"],
    "balanced": ["topology.exchange=group_cast", "topology.layout=balanced"],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return documents(tmp_path_factory.mktemp("masked"))


def documents(folder: Path) -> Path:
    """Prepare questions with answers, causal documents, and documents of slices of all kinds."""
    rng, records = np.random.default_rng(3), []
    for number in range(40):
        first, answers, length = rng.integers(3, 12, 3).tolist()
        record = question_record(first, answers, length)
        total = len(record["ids"])
        record["ids"] = rng.integers(97, 110, total).tolist()
        if number % 4 == 1:
            record |= {"mask": None, "at": None}
        if number % 4 == 2:
            mask = [[0, total, 0, total, 3], [2, total, 0, total // 2, "inverse"]]
            record |= {"mask": mask, "at": None}
        records.append(record)
    prepared(write_jsonl(folder / "documents.jsonl", records), folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def alone(store) -> Trained:
    (run,) = gloo.run(1, trained, [*MASKED, f"data.path={store}"], STEPS)
    return run


@mostly_slow("way", WAYS, keep=(0, 1))
def test_two_workers_train_like_one(way, store, alone):
    for run in gloo.run(2, trained, [*MASKED, f"data.path={store}", *WAYS[way]], STEPS):
        assert run.losses == pytest.approx(alone.losses, abs=2e-5)
        assert run.held_out == pytest.approx(alone.held_out, abs=2e-5)
        assert run.pairs == alone.pairs
    assert alone.losses[-1] < alone.losses[0]


def test_masks_and_positions_change_the_loss(store, alone):
    for key in ("data.mask_key=null", "data.positions_key=null"):
        (run,) = gloo.run(1, trained, [*MASKED, f"data.path={store}", key], 1)
        assert abs(run.losses[0] - alone.losses[0]) > 1e-6


def test_no_loss_depends_on_its_label_in_the_input(store):
    ((counted, shown),) = gloo.run(1, changes_of_losses, [*MASKED, f"data.path={store}"])
    assert len(counted) > 10
    assert max(counted) < 1e-6
    assert max(shown) > 1e-4


def one_step(rank: int, world: int, path: str, positions: str) -> dict[str, torch.Tensor]:
    words = [f"data.path={path}", f"data.positions_key={positions}", "data.mask_key=null"]
    trainer = Trainer(compose([*SMALL, *MASKED, *words]), gloo.environment(rank, world, world))
    batch = trainer.batch_maker.to_device(next(iter(trainer.loader))[0])
    trainer.close()
    return {"positions": batch.positions, "labels": batch.labels}


def test_positions_of_the_data_reach_the_model(store):
    (given,) = gloo.run(1, one_step, str(store), "at")
    (usual,) = gloo.run(1, one_step, str(store), "null")
    assert usual["positions"][0, :150].tolist() == list(range(150))
    steps = given["positions"][0, :150].diff()
    assert (steps < 1).any()
    # A token whose next token continues another text has no label.
    restarts = torch.nonzero(steps < 1).flatten()
    assert (given["labels"][0, restarts] == -100).all()
    kept = given["labels"] != -100
    assert given["labels"][kept].equal(usual["labels"][kept])
    assert int((usual["labels"] != -100).sum()) > int(kept.sum())
