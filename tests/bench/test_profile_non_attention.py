"""`mtrain profile non-attention`: output, the calibration file, and refused options."""

from __future__ import annotations

import json

import pytest
from command import mtrain
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands.app import app


def test_the_calibration_prices_simulated_steps(tmp_path):
    words = split(
        "model=tiny model.num_layers=2 sparsity=vertical_slash --seq 128,256", "--repeats 1"
    )
    result = mtrain(
        tmp_path, "profile", "non-attention", *words, "--out", "mine/non-attention.json"
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["part", "tokens", "tile", "ms", "TF"]
    assert [line.split()[:2] for line in lines[1:9]] == [
        [part, n] for n in ("128", "256") for part in ("forward", "backward", "loss", "index")
    ]
    assert lines[-1] == "8 measured times in mine/non-attention.json"
    document = json.loads((tmp_path / "mine/non-attention.json").read_text())
    assert (document["kind"], document["dtype"], document["pattern"]) == (
        "non_attention",
        "float32",
        "vertical_slash",
    )
    again = mtrain(
        tmp_path,
        *split(
            "profile non-attention model=tiny --seq 128 --repeats 1 --out",
            "mine/non-attention.json",
        ),
    )
    assert again.stdout.splitlines()[-1] == "3 measured times in mine/non-attention.json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seq=1k"], "seq=1k: only one worker and one sequence on the device are timed; give"),
        (["topology.workers=2"], "topology.workers=2: only one worker and one sequence on the"),
        (["--seq", "1k,x"], "--seq 1k,x: x is not a number; give items such as 32k,128k"),
        (["--seq", "1"], "seq=1"),
        (["model=huge"], "model=huge"),
        (["train.memory=auto"], "train.memory=auto: the result of auto depends on the number of"),
        (["model=tiny", "--seq", "128", "--out", "notes.txt"], "--out notes.txt: exists and is"),
    ],
)
def test_invalid_requests_are_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["profile", "non-attention", *words])
    assert result.exit_code == 2
    assert result.output.startswith(f"mtrain: {message}")
    assert len(result.output.splitlines()) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("command", ["non-attention", "kernels"])
def test_an_interrupted_measurement_keeps_partial_times_and_the_old_file(
    command, tmp_path, monkeypatch
):
    from mtrain_extras.bench import kernels, non_attention

    monkeypatch.chdir(tmp_path)
    words = {
        "non-attention": ["model=tiny", "--seq", "128"],
        "kernels": split(
            "--seq 128 --density 0.3 --columns 8 --heads 4/2 --head-dim 16 --kernel", "sdpa"
        ),
    }
    assert (
        CliRunner()
        .invoke(app, ["profile", command, *words[command], "--repeats", "1", "--out", "mine.json"])
        .exit_code
        == 0
    )
    earlier = (tmp_path / "mine.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    module, name = (
        (non_attention, "profile_non_attention")
        if command == "non-attention"
        else (kernels, "profile_kernels")
    )
    measure = getattr(module, name)

    def stopped(*arguments):
        yield next(measure(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, stopped)
    result = CliRunner().invoke(
        app, ["profile", command, *words[command], "--repeats", "1", "--out", "mine.json"]
    )
    assert result.exit_code == 130
    assert "stopped: 1 measured times are saved in mine.json.partial" in result.output
    assert (tmp_path / "mine.json").read_bytes() == earlier
    assert len(json.loads((tmp_path / "mine.json.partial").read_text())["times"]) == 1
