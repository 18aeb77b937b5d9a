"""What is predicted follows from settings, options and a recorded index, or is refused."""

from __future__ import annotations

import json

import pytest
from commands.typed_line import STRIPED, run, simulate
from simulation.recordings import SEQ, record

from mtrain_cli.commands.simulate_request import SimulateRequest
from mtrain_cli.config.cluster import shipped


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_model_ineffective_settings_are_refused(tmp_path):
    path = record(tmp_path / "one", "vertical_slash")
    for word in ("topology.prefetch=2", "train.kernel=sdpa"):
        refused = simulate("--index", str(path), word, "--workers 4 --no-files", STRIPED)
        assert refused.exit_code == 2
        assert (
            f"{word}: has no effect without model=, because --index {path} gives only the shape "
            "of attention; add model=NAME" in refused.stderr
        )


@pytest.mark.parametrize("index", [None, "local", "clustered", "uniform", "drifting"])
def test_a_family_respects_the_slash_limits_of_the_pattern(index):
    """At 16k there are 128."""

    def diagonals(*words: str, density: float | None = None) -> set[int]:
        asked = SimulateRequest(
            ("model=tiny", "seq=16k", "sparsity=vertical_slash", *words),
            index,
            density,
            0,
            2,
            "auto",
            None,
            "",
            0.0,
        )
        problem = asked.scenario().problem
        return {int(n) for layer in (0, 1) for n in problem.index(layer).slashes.sum(-1).flatten()}

    assert diagonals("sparsity.max_slashes=3") == {3}
    assert diagonals("sparsity.min_slashes=32") == {32}
    assert diagonals("sparsity.min_slashes=9", "sparsity.max_slashes=9") == {9}
    free = diagonals()
    assert all(3 <= n < 32 for n in free)
    assert diagonals("sparsity.min_slashes=1", "sparsity.max_slashes=100") == free
    assert min(diagonals(density=0.5)) > 30


def test_a_relative_file_of_a_cluster_is_the_cluster_of_the_prediction(tmp_path):
    (tmp_path / "mine.yaml").write_text(shipped()["h200_1x8"].read_text())
    words = "model=tiny seq=16k --workers 4 --exchange ring --no-files"
    for cluster in ("topology.cluster=mine.yaml", "topology.cluster=mine.yaml cluster=mine.yaml"):
        assert simulate(cluster, words, STRIPED).exit_code == 0


def test_an_index_of_another_model_is_refused(tmp_path):
    path = record(tmp_path / "one", "vertical_slash")
    shape = ["model=tiny", f"seq={SEQ}", "train.global_batch=2"]
    for more, message in (
        (
            ["train.micro_batch=2", "model.num_layers=5"],
            "model.num_layers=5: --index {} holds layer 5, so it is from another model",
        ),
        (["model.num_layers=6"], "train.micro_batch=1: --index {} holds 2 sequences"),
    ):
        found = run("simulate", *shape, *more, "--index", str(path), "--json --no-files")
        assert found.exit_code == 2
        assert message.format(path) in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    good = run(
        "simulate",
        *shape,
        "model.num_layers=6 train.micro_batch=2 --workers 4 --index",
        str(path),
        "--json --no-files",
    )
    assert good.exit_code == 0, good.stderr
    assert all(
        entry["step"]["seconds"]["value"] > 0 for entry in json.loads(good.stdout)["predicted"]
    )


def test_an_index_of_another_shape_is_refused(tmp_path):
    path = record(tmp_path, "vertical_slash")
    found = run("simulate model=qwen3b seq=32k --index", str(path))
    assert found.exit_code == 2
    lines = found.stderr.strip().splitlines()
    assert f"seq=32768: --index {path} was recorded with {SEQ}; leave it out" in lines[0]
    assert any("model.num_heads=16" in line for line in lines)
    for option, value in (("--density", "0.03"), ("--columns", "0")):
        found = run("simulate --index", str(path), option, value)
        assert found.exit_code == 2
        assert (
            f"{option} {value}: --index {path} has its own pairs; give only one of the two"
            in found.stderr
        )
