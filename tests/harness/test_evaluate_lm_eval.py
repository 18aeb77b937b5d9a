"""`mtrain eval lm-eval`: from task files to a report, and one line for each mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands.test_evaluate import evaluate, refused
from evaluation.evaluated_runs import small_run
from harness.harness_fakes import write_tasks
from inference.small_models import write_hf, write_run
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.evaluation.results import read_results


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lm-eval")
    write_tasks(folder / "tasks")
    return small_run(folder, "topology.device=cpu")


@pytest.fixture(autouse=True)
def folder(run, monkeypatch) -> Path:
    monkeypatch.chdir(run.parent)
    return run.parent


LOCAL = ("lm-eval", "run", "--include-path", "tasks")


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "needs the package lm-eval: pip install" in refused(*LOCAL, "--tasks", "arc_easy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lm-eval", "run", "--tasks", ""), "--tasks '': is empty; give NAME,..."),
        (("lm-eval", "run", "--tasks", "a", "--include-path", "no"), "no: no such folder"),
        (
            ("lm-eval", "run", "--tasks", "a", "--include-path", "run/resolved.yaml"),
            "is a file; give a folder of YAML files",
        ),
        (("lm-eval", "nowhere", "--tasks", "a"), "nowhere: no such folder"),
        (("lm-eval", "run", "--tasks", "a", "--attention", "dens"), "did you mean dense?"),
    ],
)
def test_mistakes_get_one_line(words, message):
    assert message in refused(*words)


def test_a_model_without_tokenizer_or_with_a_later_view_is_refused(tmp_path):
    write_hf(tmp_path / "hf")
    assert "has no tokenizer" in refused("lm-eval", str(tmp_path / "hf"), "--tasks", "a")
    write_run(tmp_path / "run", "mask=prefix_lm", "mask.prefix=48")
    line = refused("lm-eval", str(tmp_path / "run"), "--tasks", "a")
    assert "needs the loss of each token" in line


def test_tasks_give_a_table_a_report_and_json():
    pytest.importorskip("lm_eval")
    words = (*LOCAL, "--tasks", "local_group,local_rolling", "--samples", "2")
    sparse = ("sparsity.block=16", "sparsity.last_q=16", "train.kernel=reference")
    done = evaluate(*words, "--attention", "dense,vertical_slash", *sparse)
    assert "8 requests of 3 tasks, up to" in done.stderr
    assert "lm-eval ± standard error" in done.stdout
    assert "bits_per_byte" in done.stdout
    found = {result.task for result in read_results(Path("run"))}
    assert found == {
        "lm-eval:local_sums:acc", "lm-eval:local_write:exact_match",
        "lm-eval:local_rolling:bits_per_byte", "lm-eval:local_group:acc",
    }  # fmt: skip
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["report", "run", "--out", "page"])
    assert shown.exit_code == 0, shown.output
    assert "local_write" in Path("page/tables/evaluations.csv").read_text()
    again = evaluate(*words, "--attention", "dense", "--json")
    results = list(map(json.loads, again.stdout.splitlines()))
    assert {one["samples"] for one in results} == {2}
    assert len(results) == 4
