"""Spikes and non-finite steps: what is left out, and that the rest equals a run without it."""

from __future__ import annotations

import json
from pathlib import Path

import gloo
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.data.sampler import Sampler
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training.checkpointer import load_model_state
from mtrain_cli.training.loop import train
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "seq=64", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=1",
    "model.head_dim=8", "model.intermediate_size=48", "optim.warmup_steps=2", "optim.lr=0.01",
    "train.steps=24", "train.checkpoint_every=4", "train.global_batch=2", "run.spike_sigma=0",
    "train.checkpoint_at_end=true",
]  # fmt: skip
ON = ["train.rollback.limit=2"]


class Lost(RuntimeError):
    """Stands for the loss of a worker."""


def run(
    rank: int,
    world: int,
    folder: str,
    words: list[str],
    *,
    bad: dict[int, float] | None = None,
    without: tuple[int, int] | None = None,
    lost_at: int | None = None,
    resume: bool = False,
    dp: int = 1,
) -> str:
    """Train and return the error's text.

    bad: {sequence of the data, counted from 0: factor of its loss}.
    without: sequences (first, end) that the data do not have.
    lost_at: step at which the run ends as if a worker was lost.
    """
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    sequence, step = Sampler.sequence, Trainer.train_step

    def shorter(self: Sampler, number: int) -> int:
        first, end = without or (0, 0)
        return sequence(self, number if number < first else number + end - first)

    def stepped(self: Trainer, stop: bool, save: bool):
        if self.step + 1 == lost_at:
            raise Lost
        whole, after = self.decoder.forward, self.sampler.position(self.sampler.consumed)
        hit = [factor for number, factor in (bad or {}).items() if after <= number < after + 2]
        self.decoder.forward = lambda *inputs: (hit[0] if hit else 1.0) * whole(*inputs)
        try:
            return step(self, stop, save)
        finally:
            self.decoder.forward = whole

    environment = gloo.environment(rank, world, cp=world // dp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sequence", shorter)
        patch.setattr(Trainer, "train_step", stepped)
        try:
            train(compose([*SMALL, *words]), run_dir, environment, resume)
        except (RunError, Lost) as error:
            return str(error) or type(error).__name__
    return ""


_TIMES = {"seconds", "data_seconds", "tokens_per_second_per_gpu", "targets_per_second_per_gpu"}


def rows(folder: Path, *, but: tuple[str, ...] = ()) -> list[dict]:
    """Return the steps of a run without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    drop = _TIMES | {*but}
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model_state(folder)[1]


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first | second)


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollbacks.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_rolled_back_run_equals_one_without_the_data(tmp_path, dp):
    # Step 19 reads sequences 36 and 37. The checkpoint is that of step 16, at sequence 32.
    gloo.run(2, spiking, str(tmp_path / "spike"), {37: 50.0}, dp)
    gloo.run(2, without, str(tmp_path / "never"), (32, 38), dp)
    assert rows(tmp_path / "spike", but=("epoch",)) == rows(tmp_path / "never", but=("epoch",))
    assert [row["step"] for row in rows(tmp_path / "spike")] == [*range(1, 25)]
    assert same_weights(tmp_path / "spike", tmp_path / "never"), "bitwise"
    (event,) = events(tmp_path / "spike")
    assert (event["reached"], event["step"], event["first"], event["end"]) == (19, 16, 32, 38)
    assert event["reason"].startswith("step 19: loss ")
    last, never = (rows(tmp_path / name)[-1] for name in ("spike", "never"))
    assert last["epoch"] > never["epoch"], "passes count the data left out"


def spiking(rank: int, world: int, folder: str, bad: dict[int, float], dp: int) -> None:
    assert run(rank, world, folder, ON, bad=bad, dp=dp) == ""


def without(rank: int, world: int, folder: str, sequences: tuple[int, int], dp: int) -> None:
    assert run(rank, world, folder, ON, without=sequences, dp=dp) == ""
