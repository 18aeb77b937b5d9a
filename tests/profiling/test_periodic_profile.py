"""`profile.every` records training steps without changing the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import mtrain
from commands.replay import replayed
from slow_cases import mostly_slow

from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.index_file import load_indices
from mtrain_cli.records.record_files import open_records

WORDS = [
    "seq=500", "topology.device=cpu", "topology.workers=2", "topology.exchange=ring",
    "model.num_layers=2", "train.checkpoint_every=0",
    "sparsity=vertical_slash", "sparsity.last_q=32", "sparsity.min_slashes=2",
    "sparsity.max_slashes=2", "sparsity.max_columns=64",
    "train.global_batch=2", "train.micro_batch=1",
]  # fmt: skip


def train(folder: Path, *words: str) -> list[dict]:
    results = mtrain(folder, "train", *words)
    assert results.returncode == 0, results.stderr
    (folder / "stdout").write_text(results.stdout)
    return metrics(folder)


def metrics(folder: Path) -> list[dict]:
    lines = (folder / "runs/one/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Train four steps, recording the second and fourth, then two more after a resume."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, *WORDS, "train.steps=4", "profile.every=2", "run.name=one")
    first = open_records(folder / "runs/one/profile")
    assert first.complete
    assert set(first.frame().iteration) == {2, 4}
    assert "recorded 2 steps" in (folder / "stdout").read_text()
    train(folder, "--resume", "runs/one", "train.steps=6")
    return folder


def test_a_resumed_training_continues_its_profile(trained):
    recorded = open_records(trained / "runs/one/profile")
    frame = recorded.frame()
    assert recorded.complete
    assert set(frame.iteration) == {2, 4, 6}
    assert set(frame["rank"]) == {0, 1}
    assert set(frame.micro[frame.layer >= 0]) == {0, 1}  # two sequences per step, in turn
    assert set(frame.layer) == {-1, 0, 1}
    (facts,) = recorded.summary["cases"]
    assert facts["layout"] == "striped", "what auto takes"
    assert (facts["pattern"], facts["label"]) == ("vertical_slash", "vertical_slash striped ring")
    assert (facts["seq"], facts["padded_seq"]) == (500, 512)
    assert facts["column_width"] == 128, "sparsity.max_columns, in whole tiles"
    (case,) = analyse(recorded)
    assert case.passes["forward"].work.worker.n == 3 * 2 * 2
    assert (recorded.summary["samples"], recorded.summary["samples_wanted"]) == (3, 3)
    assert (trained / "runs/one/profile/trace.json").is_file()
    assert load_indices(trained / "runs/one/profile/index.npz").layers("vertical_slash") == (0, 1)


def test_a_profile_has_the_density_of_the_metrics(trained):
    steps = metrics(trained)
    recorded = open_records(trained / "runs/one/profile")
    assert recorded.summary["cases"][0]["density"] == pytest.approx(steps[-1]["density"], rel=1e-6)
    # Also for every recorded step and layer.
    frame = recorded.frame()
    forward = frame[frame.direction == "forward"]
    for step in (2, 4, 6):
        for layer in (0, 1):
            pairs = forward.pairs[(forward.iteration == step) & (forward.layer == layer)].sum()
            assert pairs / (4 * 2 * 500 * 501 / 2) == pytest.approx(
                steps[step - 1]["density_by_layer"][layer], rel=1e-6
            )


@pytest.mark.slow
def test_losses_equal_those_without_a_profile(trained, tmp_path):
    plain = train(tmp_path, *WORDS, "train.steps=4", "run.name=one")
    assert [step["loss"] for step in plain] == [step["loss"] for step in metrics(trained)[:4]]


@pytest.mark.slow
def test_repeated_steps_are_recorded_once_and_other_workers_are_another_case(tmp_path):
    """Stopped after step 5, with a checkpoint of step 3; then resumed on three workers."""
    dense = [word for word in WORDS if not word.startswith(("sparsity", "train.checkpoint_every"))]
    words = ["train.steps=5", "profile.every=1", "train.checkpoint_every=3", "run.name=one"]
    train(tmp_path, *dense, *words, "train.checkpoint_at_end=false")
    profile = tmp_path / "runs/one/profile"
    assert set(open_records(profile).frame().iteration) == {1, 2, 3, 4, 5}
    train(tmp_path, "--resume", "runs/one", "topology.workers=3")
    recorded = open_records(profile)
    frame = recorded.frame()
    steps = set(zip(frame.case, frame.iteration, strict=True))
    assert steps == {(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)}
    assert [case["workers"] for case in recorded.summary["cases"]] == [2, 3]
    assert [case["label"] for case in recorded.summary["cases"]] == [
        "dense striped ring",
        "dense striped ring, from step 4",
    ]
    assert recorded.complete
    assert [case.workers for case in analyse(recorded)] == [2, 3]
    assert [case.missing for case in analyse(recorded)] == [(), ()]


@pytest.mark.slow
def test_a_profile_that_cannot_be_continued_is_set_aside_and_training_goes_on(tmp_path):
    dense = [word for word in WORDS if not word.startswith("sparsity")]
    train(tmp_path, *dense, "train.steps=2", "profile.every=1", "run.name=one")
    summary = tmp_path / "runs/one/profile/summary.json"
    summary.write_text("{")
    assert len(train(tmp_path, "--resume", "runs/one", "train.steps=3")) == 3
    assert "not a profile that can be continued; moved to profile-1" in " ".join(
        (tmp_path / "stdout").read_text().split()
    )
    assert set(open_records(tmp_path / "runs/one/profile").frame().iteration) == {3}
    assert (tmp_path / "runs/one/profile-1/summary.json").read_text() == "{"


@pytest.mark.slow
def test_dense_first_steps_are_a_case_of_their_own(tmp_path):
    words = ["sparsity.dense_steps=2", "train.steps=3", "profile.every=1", "run.name=one"]
    train(tmp_path, *WORDS, *words)
    recorded = open_records(tmp_path / "runs/one/profile")
    frame = recorded.frame()
    labels = [case["label"] for case in recorded.summary["cases"]]
    assert labels == ["vertical_slash striped ring", "dense striped ring, first steps"]
    assert set(frame.iteration[frame.case == 1]) == {1, 2}
    assert set(frame.iteration[frame.case == 0]) == {3}
    sparse, dense = (case["density"] for case in recorded.summary["cases"])
    assert sparse < 0.9
    assert dense == 1


@mostly_slow("stages", [1, 2], keep=(1,))
def test_dense_layers_of_a_sparse_model_are_recorded_by_kind(tmp_path, stages):
    """With two stages, one has the sparse layer and the other the dense one."""
    words = ["sparsity.dense_layers=1", "data.document_mask=false", "train.steps=2"]
    words.append(f"topology.pipeline_parallel={stages}")
    steps = train(tmp_path, *WORDS, *words, "profile.every=1", "run.name=one")
    folder = tmp_path / "runs/one/profile"
    recorded = open_records(folder)
    (facts,) = recorded.summary["cases"]
    assert facts["layer_kinds"] == {"sparse": [0], "dense": [1]}
    frame = recorded.frame()
    forward = frame[(frame.direction == "forward") & (frame.layer >= 0)]
    pairs = forward[forward.iteration == 2].groupby("layer").pairs.sum()
    sparse, dense = steps[-1]["density_by_layer"]
    assert pairs[0] / pairs[1] == pytest.approx(sparse / dense, rel=1e-4)
    assert sparse < dense
    assert facts["density"] == pytest.approx(steps[-1]["density"], rel=2e-5)
    indices = load_indices(folder / "index.npz")
    assert indices.index("vertical_slash", 0) is not None
    assert indices.index("vertical_slash", 1) is None
    # The replay counts the same pairs in each layer.
    replayed(folder)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["vertical_slash", "moba"])
def test_a_pipeline_parallel_training_records_its_stages(tmp_path, pattern):
    """Four workers: two stages of two. Each layer's index is that of its own stage."""
    of_run = [word for word in WORDS if not word.startswith(("topology.workers", "sparsity"))]
    of_pattern = [word for word in WORDS if word.startswith("sparsity.")]
    words = [
        *of_run, "topology.workers=4", "topology.pipeline_parallel=2", "sparsity.dense_steps=0",
        *([f"sparsity={pattern}", "sparsity.chunk=128"] if pattern == "moba" else
          ["sparsity=vertical_slash", *of_pattern]),
        "train.steps=2", "train.global_batch=3", "profile.every=2", "run.name=one",
    ]  # fmt: skip
    with_profile = train(tmp_path, *words)
    recorded = open_records(tmp_path / "runs/one/profile")
    assert recorded.complete
    frame = recorded.frame()
    (facts,) = recorded.summary["cases"]
    assert (facts["workers"], facts["cp"]) == (4, 2)
    assert facts["pipeline"] == {
        "schedule": "1f1b", "stages": 2, "virtual_stages": 1, "micro_batches": 3
    }  # fmt: skip
    assert facts["density"] == pytest.approx(with_profile[-1]["density"], rel=1e-6)
    stages = frame[frame.phase == "stage"]
    assert set(stages.step[stages["rank"] < 2]) == {0}
    assert set(stages.step[stages["rank"] >= 2]) == {1}
    assert len(stages) == 4 * 2 * 3
    # A pass of attention lies within the pass of its stage, with the same micro-batch.
    for one in frame[(frame.phase == "pass") & (frame["rank"] == 2)].itertuples():
        way = "backward" if one.direction == "recompute" else one.direction
        (of,) = stages[
            (stages["rank"] == 2) & (stages.micro == one.micro) & (stages.direction == way)
        ].itertuples()
        assert one.layer == 1
        assert of.start_us <= one.start_us
        assert one.start_us + one.dur_us <= of.start_us + of.dur_us + 1
    waits = frame[(frame.phase == "wait") & (frame.link == "stage") & (frame.payload != "")]
    assert set(waits.payload) == {"activations", "gradients"}
    assert set(zip(waits["rank"], waits.peer, strict=True)) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert set(waits.bytes) == {256 * 128 * 4}
    (case,) = analyse(recorded)
    times = case.pipeline
    assert times is not None
    assert 0.05 < times.bubble < 0.9
    # Work and idle time of the stages are their whole time.
    assert times.work.mean() == pytest.approx((1 - times.bubble) * times.makespan, rel=0.05)
    assert times.late.sum() > 0
    assert case.tokens == 3 * 500
    indices = load_indices(recorded.folder / "index.npz")
    assert indices.layers(pattern) == (0, 1)
    (tmp_path / "plain").mkdir()
    plain = train(tmp_path / "plain", *words, "profile.every=0")
    assert [step["loss"] for step in with_profile] == [step["loss"] for step in plain]
    shown = mtrain(tmp_path, "report", "runs/one")
    assert shown.returncode == 0, shown.stderr
    assert "1f1b, 2 stages, 3" in " ".join(shown.stdout.split())
