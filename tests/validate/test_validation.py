"""Predictions compared with profiles: played profiles agree exactly, changed ones by the change."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.commands import app as command_line
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.parallel.recording import ATTENTION, KINDS
from mtrain_cli.records import record_files
from mtrain_cli.records.index_file import RecordedSetup, save_indices
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.synthetic_index import SyntheticIndex
from mtrain_cli.simulation.what_if import ReplaySetup
from mtrain_extras.validate import validation
from mtrain_extras.validate.validation import (
    CaseComparison,
    PassComparison,
    agreement,
    key_of,
    open_run,
    work_table,
)

SEQ, WORKERS = 8192, 4
CASES = [("zigzag", "ring"), ("striped", "ring"), ("striped", "all_gather")]


def run(*words: object):
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(
        command_line.app, list(map(str, words)), prog_name="mtrain"
    )


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A profile that the simulator itself played, with the indices that it played."""
    folder = tmp_path_factory.mktemp("runs") / "played"
    setup = RecordedSetup(
        seq=SEQ,
        heads=4,
        kv_heads=2,
        head_dim=64,
        dtype_bytes=2,
        workers=WORKERS,
        per_node=WORKERS,
        layout="striped",
        exchange="ring",
        columns={"vertical_slash": 64},
    )
    masks = (SequenceMask.causal(SEQ, SEQ),)
    family = SyntheticIndex(density=0.2, columns=64)
    problem = AttentionWorkload(
        setup, masks, (0,), lambda layer: family.index(layer, SEQ, 4), "vertical_slash", 64
    )
    facts = []
    for number, (layout, exchange) in enumerate(CASES):
        found = predict(
            load_cluster("h200_1x8"),
            problem,
            ReplaySetup(layout, exchange, WORKERS, WORKERS),
            kernel="flash4",
            rows=True,
            number=number,
        )
        record_files.write_part(found.rows, folder, number)
        facts.append(found.facts)
    record_files.join_parts(folder)
    save_indices(
        folder / record_files.INDEX, setup, masks, [("vertical_slash", 0, family.index(0, SEQ, 4))]
    )
    document = {
        "kind": "profile",
        "mode": "attention",
        "complete": True,
        "workers": WORKERS,
        "samples_wanted": 1,
        "samples": 1,
    }
    record_files.write_summary(
        folder, document | {"cases": facts, "environment": {"started": "2026-01-02T00:00:00+0000"}}
    )
    return folder


def changed(recorded: Path, to: Path, **columns) -> Path:
    """The same profile with other rows: each function gets all rows and gives a column."""
    shutil.copytree(recorded, to)
    rows = np.zeros(
        sum(len(b["case"]) for b in record_files.open_records(recorded).batches()), record_files.ROW
    )
    for name in record_files.ROW.names:
        rows[name] = np.concatenate(
            [b[name] for b in record_files.open_records(recorded).batches()]
        )
    for name, function in columns.items():
        rows[name] = function(rows)
    record_files.write_rows(rows, to / record_files.RECORDS)
    return to


def document(*words: object) -> dict:
    found = run("simulate", *words, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_played_profile_is_predicted_exactly(recorded, tmp_path):
    said = document("validate", recorded, "--out", tmp_path / "v")
    together = said["agreement"]
    assert together["mape"] < 1e-3
    assert together["inside_bounds"] == 1
    assert together["degree_worst_error"] < 1e-3
    assert together["work_cells"] == together["work_cells_equal"] == 2 * (2 * 4 * 9 + 4 * 3)
    ((name, rank),) = together["spearman"].items()
    assert name.endswith(": vertical_slash 8192 4")
    assert rank == pytest.approx(1)
    assert together["fastest_found"][name]
    assert [case["case"] for case in said["cases"]] == [
        f"vertical_slash {layout} {exchange}" for layout, exchange in CASES
    ]
    for case in said["cases"]:
        for of_pass in case["passes"].values():
            assert of_pass["ranks"]["error"] == pytest.approx(np.zeros(WORKERS), abs=1e-3)
    assert json.loads((tmp_path / "v/validation.json").read_text()) == said


def test_errors_have_the_sign_and_size_of_the_change(recorded, tmp_path):
    """All times are four times as long; work is one pair more."""
    slow = changed(
        recorded,
        tmp_path / "slow",
        dur_us=lambda rows: 4 * rows["dur_us"],
        start_us=lambda rows: 4 * rows["start_us"],
        late_us=lambda rows: 4 * rows["late_us"],
        pairs=lambda rows: rows["pairs"] + ((rows["case"] == 1) & (rows["pairs"] > 0)),
    )
    said = document("validate", slow, "--out", tmp_path / "v")
    together = said["agreement"]
    assert together["mape"] == pytest.approx(0.75, abs=1e-3)
    assert together["worst_error"] == pytest.approx(-0.75, abs=1e-3)
    assert together["degree_worst_error"] < 1e-3, "balance is the same"
    assert together["common_factor"] == pytest.approx(0.25, abs=1e-3)
    assert together["mape_beside_common_factor"] < 1e-3
    assert together["work_cells"] - together["work_cells_equal"] == 2 * (
        WORKERS * WORKERS + WORKERS
    )
    for case in said["cases"]:
        assert case["error"] == pytest.approx(-0.75, abs=1e-3)
        for of_pass in case["passes"].values():
            assert of_pass["error"] == pytest.approx(-0.75, abs=1e-3)
            assert of_pass["attention_mape"] == pytest.approx(0.75, abs=1e-3)
            assert of_pass["inside_bounds"] == (of_pass["high_ms"] >= of_pass["measured_ms"])
    one = changed(
        recorded,
        tmp_path / "one",
        dur_us=lambda rows: (
            np.where((rows["rank"] == 2) & (rows["phase"] == KINDS.index(ATTENTION)), 9, 1)
            * rows["dur_us"]
        ),
    )
    ranks = document("validate", one, "--out", tmp_path / "w")["cases"][0]["passes"]["forward"][
        "ranks"
    ]["error"]
    assert min(range(WORKERS), key=lambda rank: ranks[rank]) == 2


def test_written_predictions_are_used_and_protected_against_changes(recorded):
    words = [
        "--index",
        recorded,
        "--workers",
        WORKERS,
        "train.kernel=flash4",
        "--layout",
        "zigzag,striped",
    ]
    written = run("simulate", *words, "--exchange", "ring,all_gather", "--out", "written")
    assert written.exit_code == 0, written.output
    (said,) = [line.split()[1] for line in written.stdout.splitlines() if line.startswith("sha256")]
    found = run("simulate", "validate", recorded, "--prediction", "written", "--out", "v")
    assert found.exit_code == 0, found.output
    assert f"sha256     {said}  written/summary.json" in found.stdout
    assert "AFTER it was measured" in found.stdout
    validated = json.loads(Path("v/validation.json").read_text())
    assert validated["agreement"]["mape"] < 1e-3
    assert validated["predictions"] == [{"folder": "written", "sha256": said}]
    assert not any(Path("v").glob("predicted*"))
    summary = json.loads(Path("written/summary.json").read_text())
    for predicted in summary["predicted"]:
        for of_pass in predicted["passes"].values():
            of_pass["ms"] = {name: 2 * value for name, value in of_pass["ms"].items()}
    Path("written/summary.json").write_text(json.dumps(summary))
    other = document("validate", recorded, "--prediction", "written", "--out", "w")
    assert other["agreement"]["mape"] == pytest.approx(1, abs=1e-3), (
        "what is written counts, and its digest is another"
    )
    assert other["predictions"][0]["sha256"] != said
    shutil.copy(recorded / record_files.RECORDS, "written")
    refused = run("simulate", "validate", recorded, "--prediction", "written")
    assert refused.exit_code == 2
    assert (
        "--prediction written: records.parquet is not the file written with summary.json"
        in refused.stderr
    )


@pytest.mark.parametrize(
    ("name", "value"), [("kernel", None), ("layout", "spiral"), ("per_node", None)]
)
def test_a_case_that_lacks_facts_is_one_line(recorded, tmp_path, name, value):
    cases = json.loads((recorded / record_files.SUMMARY).read_text())["cases"]
    wrong = edited(recorded, tmp_path / "wrong", cases=[facts | {name: value} for facts in cases])
    found = run("simulate", "validate", wrong, "--no-files")
    assert (found.exit_code, len(found.stderr.splitlines())) == (2, 1), found.output
    assert f"wrong: summary.json has {name}={value} of" in found.stderr


def edited(recorded: Path, to: Path, **values) -> Path:
    shutil.copytree(recorded, to)
    summary = json.loads((to / record_files.SUMMARY).read_text())
    (to / record_files.SUMMARY).write_text(json.dumps(summary | values))
    return to


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _, to: to, "RUN bad: no such profile; allowed: predicted-4xh200, or a folder"),
        (lambda _, to: to.mkdir() or to, "RUN bad: no profile (summary.json is missing)"),
        (
            lambda r, to: (edited(r, to) / record_files.INDEX).unlink(),
            "RUN bad: index.npz is missing",
        ),
        (
            lambda r, to: edited(r, to, complete=False, samples=2, samples_wanted=5),
            "RUN bad: ended early (2 of 5 samples)",
        ),
        (lambda r, to: edited(r, to, schema=1), "has schema 1, this version of mtrain reads 2"),
        (
            lambda r, to: edited(r, to, kind="simulation"),
            "RUN bad: is a simulation, not a measurement; give it as --prediction bad",
        ),
        (
            lambda r, to: (edited(r, to) / record_files.INDEX).write_bytes(b"no"),
            "index.npz: not an index file of mtrain, or damaged",
        ),
        (lambda r, to: (edited(r, to) / record_files.RECORDS).unlink(), "RUN bad: no records"),
    ],
)
def test_an_invalid_folder_is_one_line(recorded, tmp_path, make, said):
    make(recorded, tmp_path / "bad")
    found = run("simulate", "validate", "bad")
    assert found.exit_code == 2, found.output
    assert said in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "measurements").exists()


def test_options_that_do_not_go_together_are_one_line(recorded, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, said in (
        (
            ["validate", recorded, "--prediction", "empty"],
            "--prediction empty: no prediction (summary.json is missing)",
        ),
        (["validate", recorded, "--prediction", recorded], "is a profile, not a prediction"),
        (["--prediction", recorded], "No such option: --prediction"),
        (["validate", recorded, "nothing"], "RUN nothing: no such profile; allowed: "),
        (
            ["validate", recorded, "--prediction", "nothing"],
            "--prediction nothing: no such prediction; allowed: predicted-4xh200/predictions, or",
        ),
        (["validate", recorded, "--cluster", "small.yaml"], "has 2 GPUs, but"),
    ):
        import yaml

        from mtrain_cli.config.cluster import shipped

        content = yaml.safe_load(shipped()["h200_1x8"].read_text()) | {"gpus_per_node": 2}
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
        found = run("simulate", *words)
        assert found.exit_code == 2, found.output
        assert said in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1


def test_one_layer_is_compared_with_the_median_and_several_with_their_mean(recorded, tmp_path):
    summary = json.loads((recorded / record_files.SUMMARY).read_text())
    cases = [facts | {"forward_ms": 1234.0} for facts in summary["cases"]]
    run = open_run(edited(recorded, tmp_path / "one", cases=cases))
    case = run.cases[0]
    assert case.bare_ms("forward") == 1234
    assert case.bare_ms("backward") is None
    assert dataclasses.replace(case, layers=(0, 1)).bare_ms("forward") is None
    played = case.passes["forward"]
    bounds = {"low": 1.0, "value": 617.0, "high": 1300.0}

    def compared(bare: float | None) -> validation.PassComparison:
        return validation._compare_pass(played, played, bounds, bare, work_table(played))

    assert compared(1234.0).error == pytest.approx(-0.5)
    assert compared(None).measured == played.duration.mean


def test_several_runs_are_compared_together(recorded, tmp_path):
    edited(recorded, tmp_path / "measurements/other")
    said = document("validate", recorded, "other", "--out", tmp_path / "v")
    assert len(said["cases"]) == 2 * len(CASES)
    assert len(said["agreement"]["spearman"]) == 2


@pytest.mark.parametrize("full_layers", [[], [2, 5]])
def test_a_length_without_recorded_masks_has_the_masks_of_the_run(monkeypatch, full_layers):
    window = ["mask=sliding_window", "mask.window=8", "train.micro_batch=2", "train.global_batch=2"]
    more = ["mask.full_every=3", "model.num_layers=6"] if full_layers else []
    monkeypatch.setattr(validation, "_config", lambda *_: compose(["seq=256", *window, *more]))
    setup = RecordedSetup(
        seq=SEQ,
        heads=4,
        kv_heads=2,
        head_dim=64,
        dtype_bytes=2,
        workers=1,
        per_node=1,
        layout="striped",
        exchange="ring",
    )
    measured = SimpleNamespace(indices=SimpleNamespace(setup=setup, patterns=()))
    case = SimpleNamespace(facts={"pattern": "dense", "seq": 256}, layers=(0, 2))
    found = validation._workload(measured, case)
    assert [mask.pairs for mask in found.masks] == [256 * 8 - 8 * 7 // 2] * 2
    assert found.layers == (0, 2)
    if not full_layers:
        assert found.full is None
        return
    assert [mask.pairs for mask in found.full.masks] == [256 * 257 // 2] * 2
    assert (sorted(found.full.layers), found.full.of) == (full_layers, 6)


def compared(
    measured: float,
    predicted: float,
    low: float,
    high: float,
    degrees: tuple[float, float] = (1.0, 1.0),
) -> PassComparison:
    return PassComparison(
        None,
        measured,
        0.0,
        predicted,
        low,
        high,
        (np.ones(1), np.ones(1)),
        0.0,
        {"worker": degrees, "step": (1.0, 1.0)},
        4,
        3,
    )


def case(label: str, *passes: PassComparison) -> CaseComparison:
    return CaseComparison(
        "run",
        label,
        ("run", "dense", 8192, 4),
        dict(zip(("forward", "backward"), passes, strict=True)),
    )


def test_errors_of_both_signs_do_not_cancel():
    """Cases of 6, 6 and 4 ms, predicted as 3, 12 and 4 ms: errors -1/2, +1 and 0."""
    cases = [
        case(
            "first", compared(4, 2, 1, 3, (1.0, 1.3)), compared(2, 1, 1, 2)
        ),  # above its bounds; at the upper one
        case(
            "second", compared(4, 8, 5, 9, (1.5, 1.2)), compared(2, 4, 2, 5)
        ),  # below; at the lower one
        case("third", compared(2, 2, 1, 3), compared(2, 2, 1, 3)),
    ]
    found = agreement(cases)
    assert found["mape"] == pytest.approx(0.5)
    assert found["worst_error"] == pytest.approx(1.0), "with its sign, and not the first"
    assert found["common_factor"] == pytest.approx(1.0), (
        "the middle one of 1/2, 1, 2; their mean is 7/6"
    )
    assert found["mape_beside_common_factor"] == pytest.approx(0.5)
    assert found["mape_of_passes"] == pytest.approx({"forward": 0.5, "backward": 0.5})
    assert found["inside_bounds"] == pytest.approx(4 / 6)
    # +0.3 and -0.3 of twelve degrees.
    assert found["degree_mean_error"] == pytest.approx(0.6 / 12)
    assert found["degree_worst_error"] == pytest.approx(0.3)
    assert (found["work_cells"], found["work_cells_equal"]) == (24, 18)
    # Measured ranks 2.5, 2.5, 1 (6, 6, 4), predicted 1, 3, 2 (3, 12, 4): covariance 0.
    assert found["spearman"] == {"run: dense 8192 4": pytest.approx(0.0)}
    assert found["fastest_found"] == {"run: dense 8192 4": False}
    worst = dataclasses.replace(cases[0], passes={"forward": compared(10, 1, 0, 2)})
    assert agreement([cases[1], cases[2], worst])["worst_error"] == pytest.approx(1.0), (
        "-0.9 is smaller"
    )


def test_a_predicted_degree_that_is_too_large_has_a_positive_error():
    assert compared(1, 1, 1, 1, (1.0, 1.3)).to_json()["degrees"]["worker"] == {
        "measured": 1.0,
        "predicted": 1.3,
        "error": pytest.approx(0.3),
    }


def test_cases_that_differ_in_an_identifying_fact_are_different():
    facts = {
        "pattern": "dense",
        "layout": "zigzag",
        "exchange": "ring",
        "per_node": 8,
        "seq": 8192,
        "micro_batch": 1,
        "cp": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "kernel": "flash4",
    }
    others = {"pattern": "moba", "layout": "striped", "exchange": "all_gather", "kernel": "triton"}
    for name, value in facts.items():
        if name != "per_node":
            assert key_of(facts | {name: others.get(name, 2 * value)}) != key_of(facts), name
    assert key_of(facts | {"per_node": 2}) == key_of(facts), "a plain ring does not know nodes"
