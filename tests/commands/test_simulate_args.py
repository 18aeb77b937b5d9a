"""Options and settings of `mtrain simulate` take effect together or are refused, never ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from command import python_path
from commands.typed_line import DENSE, STRIPED, document, run, simulate
from simulation.recordings import SEQ, record

from mtrain_cli import resource_dir
from mtrain_cli.commands.simulate_request import SimulateRequest
from mtrain_cli.simulation.sweep_axes import axes


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_slow_rank_needs_a_group_of_one_size():
    words = ("recommend", DENSE, "train.global_batch=8 --slow 3=2 --no-files", STRIPED)
    refused = simulate(*words)
    assert refused.exit_code == 2, refused.output
    assert (
        "--slow 3=2: groups of any size are tried; add topology.context_parallel=N"
        in refused.stderr
    )
    fixed = simulate(*words, "topology.context_parallel=4")
    assert fixed.exit_code == 0, fixed.output
    # Ranks are numbered over all workers and groups.
    assert simulate(*words, "--slow 7=2 topology.context_parallel=4").exit_code == 0
    beyond = simulate(*words, "--slow 8=2 topology.context_parallel=4")
    assert (
        beyond.exit_code,
        "--slow 8=2: there is no rank 8; allowed: 0 to 7" in beyond.stderr,
    ) == (2, True)
    # `auto` is no size.
    assert simulate(*words, "topology.context_parallel=auto").exit_code == 2


def test_without_a_model_ineffective_settings_are_refused(tmp_path):
    path = record(tmp_path / "one", "vertical_slash")
    for word in ("topology.prefetch=2", "train.kernel=sdpa"):
        refused = simulate("--index", str(path), word, "--workers 4 --no-files", STRIPED)
        assert refused.exit_code == 2
        assert (
            f"{word}: --index {path} without model= gives only the shape of attention; add model="
            in refused.stderr
        )


def test_cpu_workers_get_no_message_about_cuda(tmp_path):
    """Attention on CPUs is predicted in float32; whole steps are refused in one line."""
    made = yaml.safe_load((resource_dir("conf") / "cluster/h200_1x8.yaml").read_text())
    for gpu in ({"name": "AMD EPYC 9654"}, {"name": "some chip", "device": "cpu"}):
        made["gpu"] |= gpu
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
        words = ("model=tiny seq=16k --columns 64 --cluster mine.yaml", STRIPED)
        for more in (("run",), ("recommend",), ("sweep", "workers=2,4")):
            refused = simulate(*more, *words, "--no-files")
            assert refused.exit_code == 2
            message = (
                f"--cluster mine.yaml: {gpu['name']} is a CPU, and steps are predicted for GPUs "
                "only; "
            )
            assert refused.stderr.startswith(f"mtrain: {message}")
            assert refused.stderr.endswith(" --attention-only\n" if more == ("run",) else "only`\n")
        alone = document(*words, "--attention-only")
        assert alone["cases"][0]["kernel"] == "sdpa"
        assert not [remark for remark in alone["predicted"][0]["remarks"] if "triton" in remark]
        typed = document(*words, "topology.device=cpu --attention-only")
        assert alone["predicted"] == typed["predicted"]
        refused = simulate(*words, "topology.device=cuda --attention-only --no-files")
        assert (
            f"topology.device=cuda: mine has {gpu['name']}, a CPU; allowed: cpu" in refused.stderr
        )
    made["gpu"]["device"] = "tpu"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
    assert "mine.yaml: gpu.device=tpu: allowed: cuda, cpu" in simulate(*words, "--no-files").stderr


def test_invalid_settings_are_reported_before_importing_torch():
    """Uses a process of its own, since this one has imported it."""
    wrong = [
        "model=tinyy",
        "train.micro_batch=3",
        "topology.workers=3",
        "--slow 99=2",
        "--slow 1=x",
        "--jitter 9",
        "--density 7",
        "--cluster no",
    ]
    code = f"""
import sys
from typer.testing import CliRunner
from mtrain_cli.commands import app as command_line
for word in {wrong}:
    result = CliRunner().invoke(command_line.app, ["simulate", *word.split()], prog_name="mtrain")
    assert (result.exit_code, "torch" in sys.modules) == (2, False), (word, result.output)
    assert word.split()[-1].partition("=")[0] in result.stderr, result.stderr
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_density_may_be_a_percentage():
    words = (
        "simulate model=tiny seq=16k --columns 64 --layout zigzag --exchange",
        "ring --json --no-files",
    )
    found = [run(*words, "--density", density).stdout for density in ("20%", "0.2", "5%")]
    assert len({json.loads(text)["cases"][0]["density"] for text in found}) == 2
    assert json.loads(found[0])["cases"] == json.loads(found[1])["cases"]
    assert axes(["density=20%,0.05"]) == {"density": ["20%", "0.05"]}


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
