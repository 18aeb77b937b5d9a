"""`mtrain simulate`: its table, its JSON, the files that `mtrain report` reads, and what is refused in one line."""

from __future__ import annotations

import json

import pytest
import yaml
from simulation.recordings import SEQ, record
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line
from mtrain_cli.simulation.cluster import shipped

SMALL = ("model=tiny", "seq=16k", "--columns", "64", "--density", "0.1")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str, columns: int = 80):
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner(env=environment).invoke(command_line.app, list(words), prog_name="mtrain")


def test_every_configuration_is_one_row_however_narrow_the_terminal(tmp_path):
    for columns in (40, 200):
        found = run("simulate", *SMALL, "--no-files", columns=columns)
        assert (found.exit_code, found.stderr) == (0, "")
        rows = [line for line in found.stdout.splitlines() if line.strip().startswith(("zigzag", "striped"))]
        assert len(rows) == 6
    assert "h200_1x8 (1 x 8 NVIDIA H200), 8 workers, seq 16,384, clustered" in found.stdout
    assert "constants are guesses" in found.stdout
    assert not list(tmp_path.iterdir())


def test_what_it_leaves_is_reported_like_a_profile(tmp_path):
    found = run(
        "simulate",
        *SMALL,
        "train.activation_checkpoint=full",
        "--layers",
        "2",
        "--out",
        "mine",
        "--exchange",
        "ring",
        "--slow",
        "3=2",
        "--jitter",
        "0.1",
    )
    assert found.exit_code == 0, found.stderr
    assert "mtrain report mine" in found.stdout
    summary = json.loads((tmp_path / "mine/summary.json").read_text())
    assert summary["kind"] == "simulation"
    assert summary["cluster"]["constants"]["gpu.peak_tflops"]["source"] == "datasheet"
    assert len(summary["results"]) == len(summary["cases"]) == 2
    for predicted, result in zip(summary["predicted"], summary["results"], strict=True):
        for name in ("forward", "recompute", "backward"):
            assert result["passes"][name]["duration_ms"]["mean"] == pytest.approx(predicted["passes"][name]["ms"]["value"], rel=1e-3)
    shown = run("report", "mine", columns=200)
    assert shown.exit_code == 0, shown.stderr
    assert "rank 3" in shown.stdout
    assert (tmp_path / "mine/report.html").is_file()
    again = run("simulate", *SMALL, "--out", "mine", "--exchange", "ring")
    assert again.exit_code == 2
    assert "--out mine: holds a profile or simulation already" in again.stderr


def test_recorded_indices_on_another_cluster(tmp_path):
    path = record(tmp_path / "measurements/one", "vertical_slash")
    for index in (str(path), str(path.parent)):
        found = run("simulate", "--index", index, "--cluster", "a100_4x8", "--workers", "8", "--exchange", "ring", "--json", "--no-files")
        assert found.exit_code == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["layers"] == [0, 3, 5]
        assert [case["seq"] for case in document["cases"]] == [SEQ, SEQ]
        assert "not calibrated on NVIDIA A100-SXM4-40GB" in document["predicted"][0]["remarks"][0]
        for predicted in document["predicted"]:
            assert predicted["ms"]["low"] < predicted["ms"]["value"] < predicted["ms"]["high"]


def test_dense_and_a_cluster_of_ones_own(tmp_path):
    content = yaml.safe_load(shipped()["a800_4x8"].read_text()) | {"nodes": 2, "gpus_per_node": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    found = run("simulate", "model=tiny", "seq=16k", "--cluster", "mine.yaml", "--index", "dense", "--json", "--no-files")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert (document["cluster"]["name"], document["workers"]) == ("mine", 8)
    assert {case["density"] for case in document["cases"]} == {1.0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "zigzig"], "--layout zigzig: unknown; did you mean zigzag?; allowed: contiguous, zigzag, striped"),
        (["--exchange", "rong"], "--exchange rong: unknown; did you mean ring?"),
        (["--kernel", "flsh4"], "--kernel flsh4: unknown; did you mean flash4?; allowed: auto, reference, sdpa, triton, flash4"),
        (["--cluster", "h200"], "--cluster h200: no such cluster"),
        (["--nodes", "0"], "--nodes=0: must be at least 1"),
        (["--workers", "9"], "--workers 9: h200_1x8 has 8 GPUs; allowed: 1 to 8"),
        (["--index", "nothing"], "--index nothing: is neither a file nor a folder with index.npz; allowed besides: dense, local,"),
        (["--density", "0"], "--density 0: must be above 0 and at most 1"),
        (["--slow", "9=2"], "--slow 9=2: there is no rank 9; allowed: 0 to 7"),
        (["--slow", "fast"], "--slow fast: expected RANK=X, such as 3=1.5"),
        (["--jitter", "-1"], "--jitter -1: must be between 0 and 2"),
        (["--calibration", "no.json"], "--calibration no.json: there is no such file"),
        (["seq=1k", "--cluster", "h100_4x8", "--layout", "striped"], "--workers 32: 1024 tokens in blocks of"),
        (["model=huge"], "model=huge: no such model"),
        (["--exchange", "ulysses", "--cluster", "h100_4x8"], "--exchange ulysses: cannot share"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, said):
    before = sorted(tmp_path.iterdir())
    found = run("simulate", *([] if any(w.startswith(("seq", "model")) for w in words) else ["model=tiny", "seq=16k"]), *words)
    assert found.exit_code == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_index_of_another_shape_is_refused(tmp_path):
    path = record(tmp_path, "vertical_slash")
    found = run("simulate", "model=qwen3b", "seq=32k", "--index", str(path))
    assert found.exit_code == 2
    lines = found.stderr.strip().splitlines()
    assert f"seq=32768: --index {path} was recorded with {SEQ}; leave it out" in lines[0]
    assert any("model.num_heads=16" in line for line in lines)
