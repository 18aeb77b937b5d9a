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
from masked_documents import masked_store

from mtrain_cli import resource_dir
from mtrain_cli.commands.simulate import SimulateOptions
from mtrain_cli.commands.simulate_args import parse_job
from mtrain_cli.simulation.sweep_axes import axes


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_slow_rank_needs_a_group_of_one_size():
    words = ("recommend", DENSE, "train.global_batch=8 --no-files", STRIPED)
    refused = simulate(*words, "--slow 3=2")
    assert refused.exit_code == 2, refused.output
    assert (
        "--slow 3=2: this command tries context groups of several sizes; add "
        "topology.context_parallel=N" in refused.stderr
    )
    fixed = simulate(*words, "--slow 3=2 topology.context_parallel=4")
    assert fixed.exit_code == 0, fixed.output
    # Ranks are numbered over all workers and groups.
    assert simulate(*words, "--slow 7=2 topology.context_parallel=4").exit_code == 0
    beyond = simulate(*words, "--slow 8=2 topology.context_parallel=4")
    assert (
        beyond.exit_code,
        "--slow 8=2: there is no rank 8; allowed: 0 to 7" in beyond.stderr,
    ) == (2, True)
    # `auto` is no size.
    assert simulate(*words, "--slow 3=2 topology.context_parallel=auto").exit_code == 2


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


@pytest.mark.parametrize(
    ("words", "casts"),
    [
        (["cluster=a100_4x8"], []),
        (["mask=sliding_window"], ["group_cast"]),
        (
            ["mask=sliding_window", "cluster=a100_4x8"],
            ["group_cast", "hierarchical_group_cast"],
        ),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_group_casts_are_compared_under_a_mask_other_than_causal(words, casts, every):
    typed = SimulateOptions(overrides=[*words, "seq=4k"])
    job = parse_job(typed, every_exchange=every)
    assert [name for name in job.exchanges if "cast" in name] == casts
    swept = parse_job(typed, ["density=2%,5%"])
    assert [name for name in swept.exchanges if "cast" in name] == casts


def test_the_layout_and_the_exchange_of_a_recipe_are_compared_too(tmp_path):
    store = masked_store(tmp_path)
    recipe = ["recipe=shared_question", f"data.path={store}", "data.positions_key=at"]
    usual, chosen = (parse_job(SimulateOptions(overrides=words)) for words in ([], recipe))
    assert chosen.layouts == [*usual.layouts, "balanced"]
    assert chosen.exchanges == [*usual.exchanges, "group_cast"]
    one = parse_job(SimulateOptions(overrides=recipe, layout="zigzag", exchange="ring"))
    assert (one.layouts, one.exchanges) == (["zigzag"], ["ring"])
    rings = ["topology.exchange=hierarchical_ring", "topology.layout=auto"]
    assert parse_job(SimulateOptions(overrides=rings)).exchanges == ["hierarchical_ring"]
    on_one_node = parse_job(SimulateOptions(overrides=["topology=hierarchical"]))
    assert set(usual.exchanges) <= set(on_one_node.exchanges)
