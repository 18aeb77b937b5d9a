"""Plan, banner, status and `mtrain simulate` show one estimate of a step."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from slow_cases import mostly_slow
from typer.testing import CliRunner

from mtrain_cli.commands import train
from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.simulation import scenario as module
from mtrain_cli.simulation.scenario import MOST_CONTEXT, PairSource, estimate_step
from mtrain_cli.training.dry_run import banner, render
from mtrain_cli.training.planning import make_plan

ON_H200 = ["model=qwen3b", "seq=256k", "topology=h200_1x8"]
SPARSE = "sparsity=vertical_slash"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The longest sequence that fits has tests of its own, and takes seconds to find.
    monkeypatch.setattr("mtrain_cli.training.dry_run.longest_seq", lambda _: None)


def mtrain(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words, prog_name="mtrain")
    assert result.exit_code in (0, 1), result.output
    return " ".join(result.stdout.split())


def simulated(*words: str) -> dict:
    return json.loads(mtrain("simulate", *words, "--no-files", "--json"))


@mostly_slow(
    "more",
    [
        [],
        [SPARSE],
        [SPARSE, "sparsity.dense_layers=9"],
        ["sparsity=fixed", "sparsity.density=0.03"],
        ["sparsity=block_topk", "sparsity.score=exact", "topology.tensor_parallel=2"],
        [SPARSE, "topology.pipeline_parallel=2", "train.global_batch=4"],
        ["topology.tensor_parallel=2", SPARSE],
        ["mask=sliding_window", "data.document_mask=false"],
        ["topology.gpu_memory_gib=20"],
        pytest.param(["topology.gpu_memory_gib=20", "train.memory=auto"], marks=pytest.mark.slow),
        ["model=qwen3_30b_a3b", "seq=32k", "topology.expert_parallel=8", "train.memory=auto"],
        ["model=qwen3_30b_a3b", "seq=32k", "topology.expert_parallel=auto", SPARSE],
    ],
    ids=" ".join,
    keep=(0, 1, 2, 3, 5, 6),
)
def test_a_plan_shows_the_time_and_the_density_that_simulate_predicts(more):
    words = [*ON_H200, *more]
    plan = make_plan(compose(words))
    layout = plan.layout.name
    (predicted,) = simulated(*words, "--layout", layout, "--exchange", "auto")["predicted"]
    row = predicted["step"]
    shown = mtrain("train", *words, "--dry-run")
    (time,) = re.findall(r"([\d.,]+) s per step", shown)
    assert time == f"{row['seconds']['value']:.4g}"
    assert row["memory_bytes"] == plan.memory.total
    found = estimate_step(plan)
    assert found.density == pytest.approx(row["density"], rel=1e-12)
    if SPARSE in more:
        assert f"at density {row['density']:.1%} (slashes on 5% of the blocks, plus 2,048" in shown
        assert re.search(rf"dense: \S+ GFLOP executed; at {row['density']:.1%}: ", shown)


def test_the_banner_and_the_status_show_the_time_of_the_plan():
    plan = make_plan(compose([*ON_H200, SPARSE]))
    found = train.estimate(plan)
    assert found == estimate_step(plan)
    assert found.seconds is not None
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(banner(plan, Path("runs/x"), "stdlib", estimate=found))
    assert found.describe() in console.file.getvalue()
    console.print(render(plan, found))
    assert console.file.getvalue().count(found.describe()) == 2


def test_a_failure_of_the_prediction_does_not_stop_a_run(monkeypatch):
    def fails(plan):  # noqa: ARG001
        raise KeyError(0)

    monkeypatch.setattr(module, "estimate_step", fails)
    found = train.estimate(make_plan(compose(ON_H200)))
    assert found.describe() == "not predicted: KeyError: 0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sparsity=moba"], "not predicted: sparsity=moba has no synthetic index; `mtrain simul"),
        (["train.dtype=float32", "train.kernel=triton"], "not predicted: kernels were measured in"),
        (["topology.workers=16"], "no cluster of mtrain has several nodes of NVIDIA H200; give "),
        (
            ["topology.workers=32", "topology.gpus_per_node=32"],
            "no cluster of mtrain has a node with 32 NVIDIA H200; give ",
        ),
        (
            ["topology=b200_4x8", "topology.workers=128", "mask=sliding_window"],
            f"{4 * 32} workers share a sequence; `mtr",
        ),
    ],
)
def test_a_plan_says_why_it_shows_no_time(words, said):
    assert MOST_CONTEXT < 128
    found = estimate_step(make_plan(compose([*ON_H200, *words])))
    assert found.seconds is None
    assert said in found.describe()


def test_a_plan_for_cpus_has_the_density_and_no_time():
    words = ["seq=32k", SPARSE, "topology.device=cpu", "topology.workers=2"]
    plan = make_plan(compose(words))
    found = estimate_step(plan)
    assert (found.seconds, found.describe()) == (None, "")
    assert found.density == pytest.approx(PairSource.of(plan.config).problem(plan.config).density)
    shown = mtrain("train", *words, "--dry-run")
    assert re.search(rf"dense: [\d.]+ MFLOP executed; at {found.density:.1%}: ", shown)
    assert "per step," not in shown
