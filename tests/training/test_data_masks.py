"""Training on documents that bring their masks and positions."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
from masked_documents import prepared, question_record, write_jsonl

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.evaluation import evaluate
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "data=tokens", "data.mask_key=mask", "data.positions_key=at", "data.eval_sequences=1",
    "seq=150", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=2",
    "model.head_dim=8", "model.intermediate_size=48", "train.dtype=float32",
    "optim.warmup_steps=2", "train.steps=6",
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
    """Questions with answers, causal documents, and documents of slices of all kinds."""
    folder, rng, records = tmp_path_factory.mktemp("masked"), np.random.default_rng(3), []
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


def trained(rank: int, world: int, words: list[str]) -> tuple[list[float], float, int]:
    """The loss of each step, the held-out loss at the end, and the pairs of the last step."""
    trainer = Trainer(compose([*SMALL, *words]), gloo.environment(rank, world, world))
    results = [trainer.train_step(False) for _ in range(STEPS)]
    held_out = evaluate(trainer)
    trainer.close()
    return [result.loss for result in results], held_out.loss, results[-1].pairs


@pytest.fixture(scope="module")
def alone(store) -> tuple[list[float], float, int]:
    ((losses, held_out, pairs),) = gloo.run(1, trained, [f"data.path={store}"])
    return losses, held_out, pairs


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_train_like_one(way, store, alone):
    losses, held_out, pairs = alone
    for result in gloo.run(2, trained, [f"data.path={store}", *WAYS[way]]):
        assert result[0] == pytest.approx(losses, abs=2e-5)
        assert result[1] == pytest.approx(held_out, abs=2e-5)
        assert result[2] == pairs
    assert losses[-1] < losses[0]


def test_masks_and_positions_change_the_loss(store, alone):
    for key in ("data.mask_key=null", "data.positions_key=null"):
        ((losses, _, _),) = gloo.run(1, trained, [f"data.path={store}", key])
        assert abs(losses[0] - alone[0][0]) > 1e-6


def one_step(rank: int, world: int, path: str, positions: str) -> dict[str, torch.Tensor]:
    words = [f"data.path={path}", f"data.positions_key={positions}", "data.mask_key=null"]
    trainer = Trainer(compose([*SMALL, *words]), gloo.environment(rank, world, world))
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
