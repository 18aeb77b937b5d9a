"""`train` from banner to last words: when it saves, when it stops, what it leaves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import gloo
import pytest

from mtrain_cli.config.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import open_dataset
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training.checkpoint import Checkpointer
from mtrain_cli.training.trainer import Trainer, train

SMALL = [
    "seq=96",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "optim.warmup_steps=2",
]


def run(rank: int, world: int, folder: str, overrides: list[str], resume: bool = False, stop_after: int | None = None) -> list[int]:
    """One run; returns the steps whose checkpoints were begun."""
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    environment = Environment(
        device="cpu",
        workers=world,
        cp=world,
        dp=1,
        workers_per_node=world,
        nodes=1,
        rank=rank,
        local_rank=rank,
        launcher="mtrain",
        local_workers=world,
    )
    begun: list[int] = []
    save, step = Checkpointer.save, Trainer.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "save", lambda self, number, state: (begun.append(number), save(self, number, state))[1])
        if stop_after is not None:
            patch.setattr(Trainer, "train_step", lambda self, stop: step(self, stop or self.step + 1 >= stop_after))
        train(compose([*SMALL, *overrides]), run_dir, environment, resume)
    return begun


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_it_saves_every_so_many_steps_and_at_the_end_and_keeps_the_newest(tmp_path):
    words = ["train.steps=5", "train.checkpoint_every=2", "train.keep_checkpoints=2"]
    assert gloo.run(2, run, str(tmp_path), words) == [[2, 4, 5], [2, 4, 5]]
    assert checkpoints(tmp_path) == ["step-4", "step-5"]
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_an_end_that_was_just_saved_is_not_saved_twice(tmp_path):
    assert gloo.run(1, run, str(tmp_path), ["train.steps=4", "train.checkpoint_every=2"]) == [[2, 4]]


def test_nothing_is_saved_where_that_is_asked_for(tmp_path):
    assert gloo.run(1, run, str(tmp_path), ["train.steps=2", "train.checkpoint_every=0", "train.checkpoint_at_end=false"]) == [[]]


def test_a_stop_saves_at_once_and_resuming_gives_the_same_losses(tmp_path):
    words = ["train.steps=6", "train.checkpoint_every=0"]
    gloo.run(2, run, str(tmp_path / "whole"), words)
    assert gloo.run(2, run, str(tmp_path / "parts"), words, False, 3) == [[3], [3]]
    assert gloo.run(2, run, str(tmp_path / "parts"), words, True) == [[6], [6]]
    whole, parts = ([(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert "stopped on request after step 3, saved" in log
    assert "resumed from the checkpoint of step 3" in log


def other_data(rank: int, world: int) -> str:
    environment = Environment(
        device="cpu",
        workers=world,
        cp=world,
        dp=1,
        workers_per_node=world,
        nodes=1,
        rank=rank,
        local_rank=rank,
        launcher="mtrain",
        local_workers=world,
    )
    config = compose(SMALL)
    dataset = open_dataset(config)
    dataset.fingerprint = f"of machine {rank // 2}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrain_cli.training.trainer.open_dataset", lambda _: dataset)
        with pytest.raises(ConfigError) as caught:
            Trainer(config, environment)
    return str(caught.value)


def test_machines_with_other_data_are_refused():
    for said in gloo.run(3, other_data):
        assert said == "data.kind=stdlib: rank 2 reads another corpus than rank 0; give all machines the same data"
