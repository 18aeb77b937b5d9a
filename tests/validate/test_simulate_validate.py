"""`mtrain simulate validate`: predictions, new or saved, are compared with measurements."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli import resource_dir
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.commands import app as command_line
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.records import record_files
from mtrain_cli.records.index_file import RecordedSetup, save_indices
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.what_if import ReplaySetup, topology_of
from mtrain_extras.validate.validation import key_of


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str, columns: int = 200):
    return CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(
        command_line.app, ["simulate", *words], prog_name="mtrain"
    )


def test_a_replay_uses_the_exchange_options_of_the_profile(tmp_path):
    """Cases of one run that differ only in these options are two cases."""
    setup = RecordedSetup(
        seq=4096,
        heads=4,
        kv_heads=2,
        head_dim=64,
        dtype_bytes=2,
        workers=4,
        per_node=4,
        layout="striped",
        exchange="ring",
    )
    masks = (SequenceMask.causal(4096, 4096),)
    problem = AttentionWorkload(setup, masks, (0,), lambda layer: None, "dense")  # noqa: ARG005
    plain = ReplaySetup("striped", "ring", 4, 4)
    of_heads = ReplaySetup("striped", "ulysses", 2, 2)
    typed = [
        plain,
        replace(plain, options=replace(topology_of(plain), prefetch=2, circulates="queries")),
        replace(plain, options=replace(topology_of(plain), ulysses=2)),
        replace(plain, exchange="all_gather", options=replace(topology_of(plain), chunks=2)),
        of_heads,
    ]
    facts = []
    for number, one in enumerate(typed):
        result = predict(
            load_cluster("h200_1x8"), problem, one, kernel="flash4", rows=True, number=number
        )
        record_files.write_part(result.rows, tmp_path / "run", number)
        facts.append(result.facts)
    record_files.join_parts(tmp_path / "run")
    save_indices(tmp_path / "run" / record_files.INDEX, setup, masks, [("dense", 0, None)])
    about = {
        "kind": "profile",
        "mode": "attention",
        "complete": True,
        "workers": 4,
        "samples_wanted": 1,
        "samples": 1,
        "cases": facts,
    }
    record_files.write_summary(
        tmp_path / "run", about | {"environment": {"started": "2026-01-02T00:00:00+0000"}}
    )
    labels = [fact["exchange"] for fact in facts]
    assert labels[1:] == [
        "ring (2 hops ahead, queries circulate in backward)", "ulysses over 2, then ring",
        "all_gather (2 parts of the heads)",
        "ulysses over 2",
    ]  # fmt: skip
    assert len({key_of(fact) for fact in facts}) == len(typed)
    result = run("validate", str(tmp_path / "run"), "--out", str(tmp_path / "v"), "--json")
    assert result.exit_code == 0, result.output
    message = json.loads(result.stdout)
    assert (len(message["cases"]), message["not_predicted"]) == (len(typed), [])
    assert message["agreement"]["mape"] < 1e-3


def test_a_profile_of_other_hardware_is_named_before_the_errors(tmp_path):
    ships = resource_dir("profiles") / "predicted-4xh200"
    saved = "predicted-4xh200/predictions"
    shown = run("validate", str(ships), "--prediction", saved, "--no-files")
    assert "different hardware" not in shown.stdout
    copied = shutil.copytree(ships, tmp_path / "on_cpu")
    summary = json.loads((copied / record_files.SUMMARY).read_text())
    summary["environment"]["gpus"] = []
    (copied / record_files.SUMMARY).write_text(json.dumps(summary))
    shown = run("validate", str(copied), "--prediction", saved, "--no-files")
    first, table = " ".join(shown.stdout.split()).split("predicted against measured")
    assert first == (
        f"warning: {copied} ran on CPU, but the prediction is for machine, which has NVIDIA H200. "
        "The errors compare different hardware; give --cluster FILE that describes the machine of "
        "the profile "
    )
    assert "different hardware" not in table
    as_json = run("validate", str(copied), "--prediction", saved, "--no-files", "--json")
    (line,) = json.loads(as_json.stdout)["elsewhere"]
    assert line.startswith(f"{copied} ran on CPU")
    summary["environment"]["gpus"] = [{"name": "NVIDIA A100-SXM4-80GB"}]
    (copied / record_files.SUMMARY).write_text(json.dumps(summary))
    shown = run("validate", str(copied), "--prediction", saved, "--no-files")
    assert shown.stdout.startswith(f"warning: {copied} ran on NVIDIA A100-SXM4-80GB, but")


def test_a_saved_prediction_can_be_validated_later():
    """The shipped predictions and measurement, which the README quotes."""
    ships = resource_dir("profiles") / "predicted-4xh200"
    before = [
        word
        for folder in sorted((ships / "predictions").iterdir())
        for word in ("--prediction", str(folder))
    ]
    result = run("validate", str(ships), *before, "--json", "--no-files")
    assert result.exit_code == 0, result.stderr
    assert not list(Path().iterdir())
    by_name = run(
        "validate",
        "predicted-4xh200",
        "--prediction",
        "predicted-4xh200/predictions",
        "--json",
        "--no-files",
    )
    assert (
        json.loads(by_name.stdout)["agreement"]["mape"]
        == json.loads(result.stdout)["agreement"]["mape"]
    )
    alone = run("validate", "predicted-4xh200")
    assert (alone.exit_code, alone.stderr.count("\n")) == (2, 1)
    assert "as --prediction predicted-4xh200/predictions, or measure one length" in alone.stderr
    refused = run("validate", "predicted-4xh200", "--layout", "zigzag")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "No such option: --layout" in refused.stderr
    agreement = json.loads(result.stdout)["agreement"]
    assert agreement["work_cells_equal"] == agreement["work_cells"] == 1472
    assert agreement["mape"] == pytest.approx(0.056, abs=5e-4)
    assert agreement["degree_mean_error"] == pytest.approx(0.044, abs=5e-4)
