"""`mtrain profile what-if`: table, JSON, and refused options."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from commands import typed_line
from simulation.recordings import SEQ, record

from mtrain_cli.config.cluster import shipped


def run(*words: str, columns: int = 80):
    return typed_line.run("profile what-if", *words, columns=columns)


def test_json_matches_the_table(tmp_path):
    path = record(tmp_path, "vertical_slash", "dense")
    result = run(
        str(path),
        "--json --exchange ring --workers 1,6 --per-node 8 --layers 3 --pattern",
        "vertical_slash",
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
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
    ("words", "message"),
    [
        (["--layout zigzig"], "--layout zigzig: no such layout (did you mean zigzag?); allowed:"),
        (["--exchange rong"], "--exchange rong: no such exchange (did you mean ring?); allowed:"),
        (["--layout ,"], "--layout ',': names nothing; allowed: contiguous"),
        (["--pattern mobo"], "--pattern mobo: no such pattern (did you mean moba?); allowed:"),
        (["--workers 8,x"], "--workers 8,x: x is not a number; give items such as 8,32"),
        (["--workers 8,"], "--workers 8,: an empty item is not a number"),
        (["--workers 0"], "--workers 0: allowed: 1 to 512"),
        (["--workers 64"], "--workers 64: 1000 tokens in blocks of 16 are too few for 64"),
        (["--workers 6 --per-node 4"], "--per-node 4: does not divide 6 workers; allowed: 1, 2"),
        (["--workers 5"], "--per-node 4: does not divide 5 workers; allowed: 1, 5"),
        (["--workers 12 --cluster h200_1x8"], "--per-node 8: does not divide 12 workers"),
        (["--cluster h200"], "--cluster h200: no such cluster (did you mean h200_1x8?)"),
        (["--per-node 0"], "--per-node 0: must be at least 1"),
        (["--layers 0,4"], "--layers 0,4: layer 4 of vertical_slash was not recorded; allowed:"),
        (["--exchange ulysses --workers 8"], "topology.exchange=ulysses: cannot share 4 query"),
    ],
)
def test_invalid_replays_are_one_line(tmp_path, words, message):
    record(tmp_path, "vertical_slash", "moba")
    result = run(str(tmp_path), *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_cluster_prices_the_rows_of_a_balanced_layout(tmp_path):
    """If rows cost nothing, all workers compute the same number of pairs."""
    content = yaml.safe_load(shipped()["h100_4x8"].read_text())
    content["links"]["inner"]["collective_bandwidth_gbps"] = {"value": 1e6, "source": "guess"}
    (tmp_path / "fast.yaml").write_text(yaml.safe_dump(content))
    record(tmp_path, "dense")
    words = f"{tmp_path} --layout balanced --exchange group_cast --workers 4 --json"
    fast, usual = (
        json.loads(run(words, f"--cluster {name}").stdout)["cases"][0]["forward"]["worker"]
        for name in (tmp_path / "fast.yaml", "h100_4x8")
    )
    assert fast < 1.01
    assert usual > 1.1


def test_a_cluster_gives_the_workers_of_a_node(tmp_path):
    record(tmp_path, "dense")
    result = run(str(tmp_path), "--cluster h100_4x8 --workers 8,16 --json")
    cases = json.loads(result.stdout)["cases"]
    assert {(case["workers"], case["per_node"]) for case in cases} == {(8, 8), (16, 8)}


def test_a_run_without_indices_is_one_line(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "text").write_text("text")
    for name, message in {
        "other": "holds no index.npz; `mtrain profile imbalance` and",
        "absent": "no such run, measurement or shipped profile",
        "text": "not an index file of mtrain, or damaged",
    }.items():
        result = run(str(tmp_path / name))
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_the_default_is_the_newest_profile(tmp_path, monkeypatch):
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
    result = run("--layout striped --exchange ring")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("moba")
