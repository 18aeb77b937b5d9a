"""`mtrain profile`: what it prints and leaves, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app

SMALL = [
    "seq=256",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "sparsity.block=16",
    "sparsity.last_q=32",
    "sparsity.chunk=32",
    "sparsity.top_k=3",
]


def run(*words: str):
    return CliRunner().invoke(app, ["profile", *words])


def test_sparsity_measures_every_layer_and_head_of_the_steps_asked_for(tmp_path):
    import pandas

    out = tmp_path / "found" / "sparsity.parquet"
    result = run("sparsity", *SMALL, "--pattern", "vertical_slash,moba", "--steps", "3", "--every", "2", "--rows", "40", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "step 3/3  loss" in result.output
    assert "vertical_slash, step 1" in result.output
    assert "moba, step 3" in result.output
    found = pandas.read_parquet(out)
    assert len(found) == 3 * 2 * 2 * 4
    assert set(found.step) == {1, 2, 3}
    assert found.recall.between(0.3, 1.0).all()
    assert (found.worst <= found.recall + 1e-6).all()
    assert found.density.between(0.05, 1.0).all()
    assert (found.of_mask >= found.density - 1e-9).all()
    assert (found[found.pattern == "moba"].slashes == 0).all()
    assert (found[found.pattern == "vertical_slash"].slashes >= 1).all()


def test_kernels_are_timed_beside_dense_and_leave_a_calibration(tmp_path):
    out = tmp_path / "calibration.json"
    result = run(
        "kernels", "--seq", "256", "--density", "0.5,0.2", "--bars", "8", "--heads", "4/2", "--head-dim", "16", "--block", "16",
        "--kernel", "sdpa", "--repeats", "1", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (document["schema"], document["kind"]) == (1, "kernels")
    dense, half, fifth = document["times"]
    assert dense["case"]["density"] is None
    assert dense["pairs"] == 4 * 256 * 257 // 2
    assert [t["case"]["density"] for t in (half, fifth)] == [0.5, 0.2]
    assert dense["pairs"] > half["pairs"] > fifth["pairs"] > 0
    assert half["forward_ratio"] == pytest.approx(dense["forward_ms"] / half["forward_ms"])
    assert half["backward_tflops"] == pytest.approx(10 * 16 * half["pairs"] / half["backward_ms"] / 1e9)


def test_the_calibration_that_ships_is_read_and_names_its_hardware():
    from mtrain_cli import resource_dir

    document = json.loads((resource_dir("profiles") / "kernels-h200.json").read_text())
    assert document["device"] == "NVIDIA H200"
    assert document["command"].startswith("mtrain profile kernels")
    assert {t["kernel"] for t in document["times"]} == {"flash4", "triton"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sparsity", "--pattern", "mobb"], "--pattern mobb: no such pattern; did you mean moba?"),
        (["sparsity", "--pattern", "dense"], "--pattern dense: no such pattern"),
        (["sparsity", "--pattern", ","], "names no pattern"),
        (["sparsity", "sparsity.chunk=512"], "sparsity.chunk=512: is a key of none of the patterns vertical_slash"),
        (["sparsity", "--out", "x.csv"], "--out x.csv: give a file that ends in .parquet"),
        (["sparsity", "sparsity.p_v=2"], "sparsity.p_v=2: must be above 0 and at most 1"),
        (["kernels", "--seq", "12q"], "--seq 12q: 12q is no number"),
        (["kernels", "--density", "0"], "--density 0: each must be above 0 and at most 1"),
        (["kernels", "--heads", "16/3"], "--heads 16/3: expected query heads / key-value heads that divide them"),
        (["kernels", "--block", "100"], "--block 100: must be 16, 32, 64 or 128"),
        (["kernels", "--kernel", "flash5"], "--kernel flash5: no such kernel"),
    ],
)
def test_mistakes_are_one_line(words, line):
    result = run(*words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert "Traceback" not in result.stderr
