"""`profile.every`: steps of a training are recorded as they are, and it goes on as if they were not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import mtrain

from mtrain_cli.profiling.index_file import load_indices
from mtrain_cli.profiling.records import open_records

WORDS = [
    "seq=512", "topology.device=cpu", "topology.workers=2", "topology.exchange=ring", "model.num_layers=2", "train.checkpoint_every=0",
    "sparsity=vertical_slash", "sparsity.last_q=32", "sparsity.min_slashes=2", "sparsity.max_slashes=2", "sparsity.max_bars=64",
    "train.global_batch=2", "train.micro_batch=1",
]  # fmt: skip


def train(folder: Path, *words: str) -> list[dict]:
    found = mtrain(folder, "train", *words)
    assert found.returncode == 0, found.stderr
    (folder / "stdout").write_text(found.stdout)
    return [json.loads(line) for line in (folder / "runs/one/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Four steps, of which the second and the fourth are recorded, then two more after a resume."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, *WORDS, "train.steps=4", "profile.every=2", "run.name=one")
    first = open_records(folder / "runs/one/profile")
    assert first.complete
    assert set(first.frame().iteration) == {2, 4}
    assert "recorded 2 steps" in (folder / "stdout").read_text()
    train(folder, "--resume", "runs/one", "train.steps=6")
    return folder


def test_a_resumed_training_goes_on_with_its_profile(trained):
    recorded = open_records(trained / "runs/one/profile")
    frame = recorded.frame()
    assert recorded.complete
    assert set(frame.iteration) == {2, 4, 6}
    assert set(frame["rank"]) == {0, 1}
    assert set(frame.micro[frame.layer >= 0]) == {0, 1}  # two sequences a step, one after the other
    assert set(frame.layer) == {-1, 0, 1}
    (facts,) = recorded.summary["cases"]
    assert facts["pattern"] == "vertical_slash"
    (result,) = recorded.summary["results"]
    assert result["passes"]["forward"]["work"]["worker"]["n"] == 3 * 2 * 2
    assert len(list((trained / "runs/one/profile").glob("records*"))) == 1
    assert load_indices(trained / "runs/one/profile/index.npz").layers("vertical_slash") == (0, 1)


def test_the_density_of_a_profile_is_that_of_the_metrics(trained):
    metrics = [json.loads(line) for line in (trained / "runs/one/metrics.jsonl").read_text().splitlines()]
    recorded = open_records(trained / "runs/one/profile")
    assert recorded.summary["cases"][0]["density"] == pytest.approx(metrics[-1]["density"], rel=1e-6)
    # And of every recorded step, layer by layer.
    frame = recorded.frame()
    forward = frame[frame.direction == "forward"]
    for step in (2, 4, 6):
        for layer in (0, 1):
            pairs = forward.pairs[(forward.iteration == step) & (forward.layer == layer)].sum()
            assert pairs / (4 * 2 * 512 * 513 / 2) == pytest.approx(metrics[step - 1]["density_by_layer"][layer], rel=1e-6)


def test_losses_are_those_without_a_profile(trained, tmp_path):
    plain = train(tmp_path, *WORDS, "train.steps=4", "run.name=one")
    recorded = [json.loads(line) for line in (trained / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert [step["loss"] for step in plain] == [step["loss"] for step in recorded[:4]]


def test_negative_numbers_of_steps_are_refused(tmp_path):
    found = mtrain(tmp_path, "train", "profile.every=-1")
    assert found.returncode == 2
    assert found.stderr == "mtrain: profile.every=-1: must be 0 or more\n"
