"""`mtrain profile what-if`: its table, its JSON, and what is refused in one line."""

from __future__ import annotations

import json
import os

import pytest
from simulation.recordings import SEQ, record
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line


def run(*words: str, columns: int = 80):
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner(env=environment).invoke(
        command_line.app, ["profile", "what-if", *words], prog_name="mtrain"
    )


def test_every_configuration_is_one_row_however_narrow_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "measurements/one", "vertical_slash", "moba")
    words = [
        "one",
        "--layout",
        "zigzag,striped",
        "--exchange",
        "ring,hierarchical_all_gather",
        "--workers",
        "2,4",
        "--per-node",
        "2",
    ]
    for columns in (40, 80, 300):
        found = run(*words, columns=columns)
        assert (found.exit_code, found.stderr) == (0, "")
        # One with a bar; a title may begin like that, too.
        rows = [
            line
            for line in found.stdout.splitlines()
            if line.strip().startswith(("zigzag", "striped")) and "█" in line
        ]
        assert len(rows) == 2 * 8
        assert all("hierarchical_all_gather" in row or "ring" in row for row in rows)
        assert sum("2x2" in row for row in rows) == 8
        assert all("█" in row for row in rows)
    assert (
        f"vertical_slash, seq {SEQ}, 3 layers of iteration 3, recorded with 4 workers, striped"
        in found.stdout
    )


def test_json_has_what_the_table_shows(tmp_path):
    path = record(tmp_path, "vertical_slash", "dense")
    found = run(
        str(path),
        "--json",
        "--exchange",
        "ring",
        "--workers",
        "1,6",
        "--per-node",
        "8",
        "--layers",
        "3",
        "--pattern",
        "vertical_slash",
    )
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["recorded"]["seq"] == SEQ
    assert [(c["workers"], c["layout"]) for c in document["cases"]] == [
        (n, name) for n in (1, 6) for name in ("contiguous", "zigzag", "striped")
    ]
    for case in document["cases"]:
        assert case["pattern"] == "vertical_slash"
        assert case["layers"] == [3]
        assert len(case["shares"]) == len(case["forward"]["pairs"]) == case["workers"]
        assert sum(case["forward"]["pairs"]) == sum(document["cases"][0]["backward"]["pairs"]) > 0
        assert all(
            case[name][degree] >= 1
            for name in ("forward", "backward")
            for degree in ("worker", "step", "total", "critical")
        )
        assert (case["forward"]["sent_bytes"] > 0) == (case["workers"] > 1)
    largest = {case["layout"]: max(case["shares"]) for case in document["cases"][3:]}
    assert largest["striped"] < largest["contiguous"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--layout", "zigzig"],
            "--layout zigzig: unknown; did you mean zigzag?; allowed: contiguous, zigzag, striped",
        ),
        (
            ["--exchange", "rong"],
            "--exchange rong: unknown; did you mean ring?; allowed: auto, all_gather,",
        ),
        (["--layout", ","], "--layout ',': names nothing; allowed: contiguous"),
        (
            ["--pattern", "mobo"],
            "--pattern mobo: unknown; did you mean moba?; allowed: vertical_slash, moba",
        ),
        (
            ["--workers", "8,x"],
            "--workers 8,x: x is no whole number of at least 0; give some such as 8,32",
        ),
        (["--workers", "8,"], "--workers 8,: an empty item is no whole number"),
        (["--workers", "0"], "--workers 0: 0 is out of range; allowed: 1 to 512"),
        (
            ["--workers", "64"],
            "--workers 64: 1000 tokens in blocks of 16 are too few for so many workers; allowed: 1 to 62",
        ),
        (
            ["--workers", "6", "--per-node", "4"],
            "--per-node 4: does not divide 6 workers; allowed: 1, 2, 3, 6",
        ),
        (["--per-node", "0"], "--per-node=0: must be at least 1"),
        (
            ["--layers", "0,4"],
            "--layers 0,4: layer 4 of vertical_slash was not recorded; allowed: 0, 3, 5",
        ),
        (
            ["--exchange", "ulysses", "--workers", "8"],
            "--exchange ulysses: cannot share 4 query heads and 2 key-value heads among 8",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_line(tmp_path, words, said):
    record(tmp_path, "vertical_slash", "moba")
    found = run(str(tmp_path), *words)
    assert (found.exit_code, found.stdout) == (2, "")
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_run_without_indices_is_one_line(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "text").write_text("text")
    for name, said in {
        "other": "holds no index.npz; `mtrain profile imbalance` and",
        "absent": "no such folder, and no run or measurement of that name",
        "text": "holds no indices of mtrain, or is damaged",
    }.items():
        found = run(str(tmp_path / name))
        assert found.exit_code == 2
        assert said in found.stderr
        assert len(found.stderr.splitlines()) == 1


def test_without_a_name_the_newest_profile_counts_and_not_the_newest_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("runs/goes-on", "measurements/newest-profile", "measurements/a-step")
    for hour, name in enumerate(names):
        folder = tmp_path / name / ("profile" if name.startswith("runs") else "")
        folder.mkdir(parents=True)
        for file in ("summary.json", "records.parquet"):
            (folder / file).write_text("{}")
        if hour < 2:
            os.utime(record(folder, "moba" if hour else "vertical_slash"), (hour, hour))
    (tmp_path / "runs/goes-on/metrics.jsonl").write_text("{}\n")
    found = run("--layout", "striped", "--exchange", "ring")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("moba")


def test_help_has_examples_in_80_columns():
    found = run("--help")
    assert found.exit_code == 0
    assert "mtrain profile what-if RUN --exchange ring,hierarchical_ring" in " ".join(
        found.stdout.split()
    )
    assert max(map(len, found.stdout.splitlines())) <= 80
