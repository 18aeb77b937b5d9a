"""`mtrain profile step` on CPU processes: parts, training, files, tables, and refused options."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from command import mtrain, python_path
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.reporting.report_source import open_source

SMALL = split(
    "seq=512 topology.device=cpu topology.workers=2 topology.block_size=32",
    "model.num_layers=2 topology.exchange=ring",
)
SPARSE = split(
    "sparsity=vertical_slash sparsity.block=32 sparsity.last_q=32",
    "sparsity.min_slashes=3 sparsity.max_slashes=3",
)
# The learning rate depends on the number of steps.
SCHEDULE = "train.steps=6 optim.schedule=cosine optim.warmup_steps=1"
SETTINGS = [*SMALL, *SPARSE, *split(SCHEDULE)]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return mtrain(folder, "profile", "step", *split(*words))


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    result = run(folder, "--warmup 4 --steps 2", *SETTINGS, "run.name=one")
    assert result.returncode == 0, result.stderr
    assert "USDT" not in result.stderr, "the profiler talks"
    (folder / "stdout").write_text(result.stdout)
    return folder / "measurements/one"


@pytest.fixture(scope="module")
def summary(profile) -> dict:
    return json.loads((profile / "summary.json").read_text())


def shown(*words: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(
        command_line.app, list(words), prog_name="mtrain"
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_parts_of_each_rank_add_up_to_the_step(summary):
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    for rank in summary["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["step_ms"], rel=1e-9)
        # The worker's clock and the profiler's agree.
        assert rank["step_ms"] == pytest.approx(rank["recorded_ms"], rel=0.05)
        assert rank["plain_ms"] > 0
        # All parts occur, forward and backward: a sparse ring on two processes.
        parts = "attention index products element-wise loss weights optimizer links host"
        assert all(rank["parts"][name] > 0 for name in parts.split()), rank["parts"]
    assert (summary["plain"]["first"], summary["plain"]["steps"]) == (2, 3)
    assert summary["plain"]["density"] < 1
    assert summary["plain"]["tokens_per_second_per_gpu"] == pytest.approx(
        512 / 2 / summary["ranks"][0]["plain_ms"] * 1e3
    )
    assert summary["plain"]["mfu_model"] is summary["plain"]["peak_memory_gib"] is None


def test_profile_step_trains_exactly_like_train(profile, summary, tmp_path):
    result = mtrain(tmp_path, "train", *SETTINGS, "run.name=same", "train.checkpoint_at_end=false")
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "runs/same/metrics.jsonl").read_text().splitlines()
    assert summary["losses"] == [json.loads(line)["loss"] for line in lines]
    assert len(set(summary["losses"])) == 6
    assert not (profile / "checkpoints").exists()


def test_banner_and_steps_are_printed_without_a_terminal(profile):
    told = (profile.parents[1] / "stdout").read_text()
    banner, steps = told.split("\nstep 1, ", 1)
    assert "model     tiny (qwen2)" in banner
    assert "exchange  ring" in banner
    assert str(profile) in banner.replace("\n", "").replace(" ", "")
    result = re.findall(r"^step (\d), ([a-z ]+): ([\d.]+) s$", f"step 1, {steps}", re.MULTILINE)
    assert [(number, kind) for number, kind, _ in result] == [
        *((str(n), "not recorded") for n in (1, 2, 3, 4)),
        ("5", "recorded"),
        ("6", "recorded"),
    ]
    ranks = json.loads((profile / "summary.json").read_text())["ranks"]
    assert sum(float(seconds) for *_, seconds in result[4:]) / 2 * 1e3 == pytest.approx(
        ranks[0]["recorded_ms"], rel=0.01
    )


def test_operator_rows_add_up_to_the_parts(profile, summary):
    rows = list(csv.DictReader((profile / "kernels.csv").open()))
    by_part: dict[tuple[int, str], float] = defaultdict(float)
    for row in rows:
        by_part[int(row["rank"]), row["part"]] += float(row["ms"])
    for rank in summary["ranks"]:
        for name, ms in rank["parts"].items():
            if name not in ("links", "host"):
                assert by_part[rank["rank"], name] == pytest.approx(ms, abs=1e-6), name
    # Two layers, forward and backward, one ring of two steps each: per step, of two recorded ones.
    (backward,) = (
        row
        for row in rows
        if row["rank"] == "0" and row["name"].endswith("attention_for_cpu_backward")
    )
    assert backward["part"] == "attention"
    assert float(backward["calls"]) == 4
    assert len(summary["top"]) == 10
    assert [kind["ms"] for kind in summary["top"]] == sorted(
        (kind["ms"] for kind in summary["top"]), reverse=True
    )


def test_the_files_describe_the_measurement(profile, summary):
    assert summary["kind"] == "step"
    assert summary["complete"]
    assert summary["command"][:3] == ["mtrain", "profile", "step"]
    assert summary["versions"]["torch"]
    facts = [summary[name] for name in ("device", "workers", "warmup", "steps")]
    assert facts == ["CPU", 2, 4, 2]
    assert summary["settings"]["exchange"] == "ring"
    assert summary["settings"]["layout"] == "striped"
    assert summary["settings"]["pattern"] == "vertical_slash"
    for rank in range(2):
        with gzip.open(profile / f"trace-rank-{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        ranges = [event for event in events if event.get("cat") == "user_annotation"]
        named = [event["name"] for event in ranges]
        assert named.count("mtrain.step") == 2
        # Forward (twice, since layers recompute) and backward of two layers in two steps.
        attention = [event for event in ranges if event["name"] == "mtrain.attention"]
        assert len(attention) == 12
        inside = [
            event
            for event in ranges
            if event["name"] == "mtrain.index"
            and any(a["ts"] <= event["ts"] < a["ts"] + a["dur"] for a in attention)
        ]
        assert len(inside) == 4, "one estimate a layer"
        assert named.count("mtrain.index") > 4, "and what it leaves is counted"
        assert named.count("mtrain.loss") == 4, "forward and backward"
        assert named.count("mtrain.optimizer") == 4, "gradient norm and update"
    assert not list(profile.glob(".trace*"))


def test_json_without_trace_records_a_sparse_step_after_dense_ones(tmp_path):
    words = [*SMALL, *SPARSE, "sparsity.dense_steps=2 topology.workers=1 model.num_layers=1"]
    result = run(tmp_path, "--json --no-trace", *words)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    (folder,) = (tmp_path / "measurements").iterdir()
    assert folder.name.startswith("step-")
    assert document == json.loads((folder / "summary.json").read_text())
    assert len(document["losses"]) == 5
    assert document["ranks"][0]["parts"]["index"] > 0
    # Of the four steps before, two are dense and the third is the first sparse one.
    assert (document["plain"]["first"], document["plain"]["steps"]) == (4, 1)
    assert document["plain"]["density"] < 1
    (rank,) = document["ranks"]
    assert document["plain"]["tokens_per_second_per_gpu"] == pytest.approx(
        512 / rank["plain_ms"] * 1e3
    )
    assert not list(folder.glob("*trace*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps 0"], "--steps 0: must be at least 1"),
        (["--warmup 0"], "--warmup 0: must be at least 1"),
        (["--warmup x"], "--warmup x: expected a whole number"),
        (["train.steps=2"], "--warmup 2 --steps 1: need 3 training steps, more than"),
        (
            ["--warmup 2 sparsity=vertical_slash sparsity.dense_steps=5"],
            "--warmup 2: with sparsity.dense_steps=5, steps 1 to 5 are dense; give --warmup 6 or "
            "more, or sparsity.dense_steps=0",
        ),
        (["topology.chunks=99"], "topology.chunks=99: does not divide the 2 key-value heads"),
        (["sequence=512"], "sequence"),
        (["--out x"], "--out"),
        (["topology.layout=zigzig"], "topology.layout=zigzig: expected one of auto, contiguous"),
    ],
)
def test_invalid_options_are_one_line(tmp_path, words, expected):
    result = run(tmp_path, *words, "topology.workers=2 topology.device=cpu")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert expected in line
    assert not (tmp_path / "measurements").exists()


def test_a_folder_with_files_is_left_unchanged(profile, summary):
    result = run(profile.parents[1], *SETTINGS, "run.name=one")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "already holds a measurement. Choose another run.name or run.dir" in line
    assert json.loads((profile / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_stopping_before_a_recorded_step_leaves_no_folder(tmp_path):
    words = split("profile step --warmup 2000 train.steps=3000", *SMALL, "run.name=one")
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, "-m", "mtrain_cli", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while (
        not (tmp_path / "measurements/one/plan.json").exists()
        and started.poll() is None
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    time.sleep(1)  # so that it is a launcher by now; with or without workers
    started.send_signal(signal.SIGINT)
    stderr = started.communicate(timeout=100)[1]
    assert started.returncode == 130, stderr
    assert stderr.splitlines()[-1] == "stopped before the recorded step ended: nothing was saved"
    assert not (tmp_path / "measurements").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop("ranks"), "ranks is missing"),
        (lambda s: s.pop("steps"), "steps is missing"),
        (lambda s: s["ranks"][1].pop("plain_ms"), "plain_ms is missing"),
        (lambda s: s.update(ranks=[]), "a value has the wrong type"),
        (lambda s: s["top"][0].update(ms="x"), "a value has the wrong type"),
    ],
)
def test_a_damaged_summary_is_one_line(summary, tmp_path, change, expected):
    damaged = copy.deepcopy(summary)
    change(damaged)
    (tmp_path / "summary.json").write_text(json.dumps(damaged))
    with pytest.raises(ConfigError, match=r"summary\.json: .*; measure again") as caught:
        open_source(tmp_path)
    assert expected in str(caught.value)


@pytest.mark.parametrize("degree", [pytest.param("tensor", marks=pytest.mark.slow), "pipeline"])
def test_messages_of_tensor_groups_and_hops_of_stages_are_links(tmp_path, degree):
    """The losses are those of one worker. The loss of a pipeline is on its last stage only."""
    alone = "seq=256 topology.device=cpu topology.block_size=32 model.num_layers=2 --no-trace"
    losses = []
    for name, words in {
        "one": "topology.workers=1",
        "two": f"topology.workers=2 topology.{degree}_parallel=2",
    }.items():
        result = run(tmp_path, alone, words, f"train.global_batch=2 run.name={name}")
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / "measurements" / name / "summary.json").read_text())
        losses.append(summary["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert summary["settings"][f"{degree[0]}p"] == 2
    first, last = (rank["parts"] for rank in summary["ranks"])
    assert min(first["links"], last["links"]) > 0
    assert (first["loss"] == 0) == (degree == "pipeline")
    assert last["loss"] > 0
