"""`mtrain profile imbalance` on CPU processes: cases side by side, files, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import mtrain_cli
from mtrain_cli.profiling.imbalance import imbalance

SMALL = ["seq=512", "topology.workers=2", "topology.device=cpu", "topology.block_size=32"]


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(mtrain_cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mtrain_cli", "profile", "imbalance", *words]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)


def test_cases_are_measured_side_by_side(tmp_path):
    sparse = ["sparsity.block=32", "sparsity.last_q=32", "sparsity.min_slashes=3", "sparsity.max_slashes=3", "sparsity.max_bars=64"]
    words = ["--layout", "zigzag,striped", "--exchange", "ring,all_gather", "--pattern", "dense,vertical_slash", "--repeats", "2"]
    found = run(tmp_path, *words, *SMALL, *sparse, "run.name=one")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len([line for line in lines if "zigzag" in line or "striped" in line]) == 8
    document = json.loads((tmp_path / "measurements/one/summary.json").read_text())
    assert document["schema"] == 1
    records = pandas.read_parquet(tmp_path / "measurements/one/records.parquet")
    for case in document["cases"]:
        mine = records[records.case == case["label"]]
        assert set(mine["rank"]) == {0, 1}
        assert set(mine.iteration) == {0, 1}
        assert case["density"] == 1.0 if case["pattern"] == "dense" else 0.1 < case["density"] < 0.6
        assert (case["by_kind"]["index"] > 0) == (case["pattern"] != "dense")
        assert case["forward"] > 0 < case["backward"]
        # The summary is what the records say.
        spent = mine.groupby("kind").seconds.sum() * 1e3 / 4
        assert case["by_kind"]["attention"] == pytest.approx(spent["attention"])
        degrees = [imbalance(table) for table in case["tables"].values()]
        assert case["time"]["step"] == pytest.approx(sum(d.step for d in degrees) / 2, abs=1e-3)
        if "columns" not in set(mine.kind):
            assert case["time"]["worker"] == pytest.approx(sum(d.worker for d in degrees) / 2, abs=1e-3)
        steps = 2 if case["exchange"].startswith("ring") else 1
        assert all(len(row) == steps for table in case["tables"].values() for row in table)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "zigzig"], "topology.layout=zigzig: expected one of contiguous, zigzag, striped; did you mean zigzag?"),
        (["--pattern", "vertical"], "--pattern vertical: no such pattern; did you mean vertical_slash?; allowed: dense, vertical_slash"),
        (["--peer", "seq=512"], "--peer: PyTorch's context parallelism with cuDNN needs GPUs"),
        (["--layout", ","], "--layout ',': names nothing"),
        (["topology.layout=zigzag"], "topology.layout=zigzag: give what is compared as --layout NAME,..."),
        (["sparsity=moba"], "sparsity=moba: give what is compared as --pattern NAME,..."),
        (["sparsity.p_v=0.5"], "sparsity.p_v=0.5: is a key of none of the patterns dense"),
        (["--seq", "512,x"], "seq=x: "),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, words, said):
    found = run(tmp_path, *words, "topology.workers=2", "topology.device=cpu")
    assert found.returncode == 2
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
