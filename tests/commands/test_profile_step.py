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
from mtrain_cli.records.step_breakdown import OF_GPU
from mtrain_cli.reporting.report_source import open_source
from mtrain_cli.reporting.step_tables import lines

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
        for name in (
            "attention",
            "index",
            "products",
            "element-wise",
            "loss",
            "weights",
            "optimizer",
            "links",
            "host",
        ):
            assert rank["parts"][name] > 0, name
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
    assert (summary["device"], summary["workers"], summary["warmup"], summary["steps"]) == (
        "CPU",
        2,
        4,
        2,
    )
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


def test_the_table_fits_80_columns_and_report_repeats_it(profile, monkeypatch):
    monkeypatch.chdir(profile.parents[1])
    text = shown("report", "one")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    assert "dropped to fit" not in text
    output = (profile.parents[1] / "stdout").read_text()
    for line in lines:
        if line.split()[:1] in (["attention"], ["step"], ["gloo"], ["links"], ["host"]):
            assert line.strip()[:40] in output
    for part in ("attention", "index", "loss", "host", "step"):
        assert any(line.split()[:1] == [part] for line in lines), part
    assert "step" in shown("report", "--json", "one")
    # The newest of the folder, too.
    assert "Breakdown of one training step" in shown("report")


def test_a_step_on_many_gpus_fits_80_columns(monkeypatch, tmp_path):
    """Invented figures as on GPUs: eight ranks, large numbers, long names."""
    monkeypatch.chdir(tmp_path)
    parts = dict.fromkeys(OF_GPU, 12345.678)
    rank = {
        **{
            "step_ms": sum(parts.values()),
            "plain_ms": 100000.2,
            "recorded_ms": 150001.8,
            "parts": parts,
            "links_hidden_ms": 10234.2,
        },
        **{
            "launches": 123456,
            "launching_ms": 1234.2,
            "syncs": 12,
            "syncing_ms": 1234.2,
            "ahead_us": 1234567.8,
        },
    }
    settings = {
        "model": "qwen3b",
        "seq": 1 << 20,
        "pattern": "vertical_slash",
        "layout": "striped",
        "kernel": "flash4",
    }
    document = {
        **{
            "schema": 2,
            "kind": "step",
            "gpu": True,
            "device": "NVIDIA H200",
            "workers": 8,
            "warmup": 2,
            "steps": 3,
        },
        "settings": settings | {"exchange": "hierarchical_all_gather"},
        "ranks": [{**rank, "rank": number} for number in range(8)],
        "top": [
            {
                "name": "void " + "long_name_" * 9,
                "part": "element-wise",
                "calls": 123456.0,
                "ms": 123456.7,
            }
        ],
    }
    (tmp_path / "summary.json").write_text(json.dumps(document))
    text = shown("report", ".")
    assert max(map(len, text.splitlines())) <= 80
    assert "dropped to fit" not in text
    # Files of before there was "plain" are shown without it.
    assert "speed" not in text
    plain = {
        "steps": 3,
        "tokens_per_second_per_gpu": 14337.4,
        "density": 0.052,
        "mfu_model": 3.63,
        "mfu_executed": 0.531,
    }
    plain["peak_memory_gib"] = 102.04
    (tmp_path / "summary.json").write_text(json.dumps(document | {"plain": plain}))
    now = " ".join(shown("report", ".").split())
    assert (
        "without recording 100,000 ms (median of 3 steps before): +50.0%, recording and noise"
        in now
    )
    assert (
        "speed 14,337 tokens/s/GPU, HFU 53.1%, density 5.2%, peak 102.0 GiB, without recording"
        in now
    )
    assert (
        "links: exposed NCCL communication; waits: exposed NCCL time beyond the shortest time"
        in now
    )
    without = [
        {**r, "parts": {name: ms for name, ms in parts.items() if name != "waits"}}
        for r in document["ranks"]
    ]
    (tmp_path / "summary.json").write_text(json.dumps(document | {"ranks": without}))
    old = " ".join(shown("report", ".").split())
    assert "links: exposed NCCL communication, including waits for other ranks; idle" in old
    assert "12,346 ms exposed launches" in old
    for name in OF_GPU:
        assert any(line.split()[:2] == [name, "12,346"] for line in text.splitlines()), name
    flat = " ".join(text.split())
    assert (
        "8 x NVIDIA H200: qwen3b, seq 1,048,576, vertical_slash, striped, hierarchical_all_gather, "
        "flash4; steps 3 to 5" in flat
    )
    assert (
        "step slowest rank 150,002 ms; without recording 100,000 ms (the step before): "
        "+50.0%, recording" in flat
    )
    assert (
        "NCCL 34,926 ms: 10,234 ms overlapped with computation or copies, 24,691 ms exposed "
        "(waiting for other ranks: 12,346 ms)" in flat
    )
    assert (
        "launches 123,456 kernels; launch overhead 1,234 ms on the host; "
        "kernels start 1,235 ms after launch (median)" in flat
    )
    assert "syncs 12 host waits for the GPU, 1,234 ms; GPU idle 12,346 ms" in flat
    assert "123,456 123,457 element-wise" in flat


def test_shipped_steps_can_be_compared(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = shown("report", "step-128k-4xh200", "step-512k-4xh200")
    assert max(map(len, text.splitlines())) <= 80
    last = text[text.index("Side by side, ms") :].splitlines()
    rows = {line.split("  ")[0].strip(): line.split()[-3:] for line in last if line.strip()}
    assert rows["attention"] == ["447.3", "4,025", "8.998"]
    assert rows["step"] == ["1,631", "9,227", "5.656"]
    assert rows["without recording"] == ["1,595", "9,240", "5.792"]
    several = shown("report", "step-128k-4xh200", "step-512k-4xh200", "step-1m-4xh200")
    assert "ratio" not in several[several.index("Side by side") :]
    (waits,) = [
        line.split()
        for line in several[several.index("Side by side") :].splitlines()
        if line.strip().startswith("waits")
    ]
    assert waits == ["waits", "71.38", "140.9", "in", "links"], (
        "the last one is of a version that did not tell them apart"
    )
    two = shown("report", "step-128k-4xh200", "step-1m-4xh200")
    rows = [line.split() for line in two[two.index("Side by side") :].splitlines()]
    assert ["waits", "71.38", "in", "links", "-"] in rows
    assert ["links", "37.42", "415.2", "-"] in rows
    assert ["attention", "447.3", "14,693", "32.846"] in rows
    assert "Side by side" not in shown("report", "step-1m-4xh200")


def test_one_warmup_step_is_enough(tmp_path):
    words = [*SMALL, "topology.workers=1 model.num_layers=1 topology.exchange=auto"]
    found = run(tmp_path, "--warmup 1 --json --no-trace", *words)
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert "(the first step, which compiles and loads)" in lines(document)[0]
    plain = document["plain"]
    assert (plain["first"], plain["steps"], plain["density"]) == (1, 1, 1.0)


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
        (
            ["train.steps=2"],
            "--warmup 2 --steps 1: need 3 training steps, more than train.steps=2; give fewer, or "
            "train.steps=3",
        ),
        (
            ["--warmup 2 sparsity=vertical_slash sparsity.dense_steps=5"],
            "--warmup 2: with sparsity.dense_steps=5, steps 1 to 5 are dense; give --warmup 6 or "
            "more, or sparsity.dense_steps=0",
        ),
        (["topology.chunks=99"], "topology.chunks=99: does not divide the 2 key-value heads"),
        (["sequence=512"], "sequence"),
        (["--out x"], "--out"),
        (
            ["topology.layout=zigzig"],
            "topology.layout=zigzig: expected one of auto, contiguous, zigzag, striped, balanced "
            "(did you mean zigzag?)",
        ),
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
        (lambda s: s.update(ranks=[]), "ranks is empty"),
        (lambda s: s["top"][0].update(ms="x"), "not the summary of a recorded step"),
    ],
)
def test_a_damaged_summary_is_one_line(summary, tmp_path, change, expected):
    damaged = copy.deepcopy(summary)
    change(damaged)
    (tmp_path / "summary.json").write_text(json.dumps(damaged))
    with pytest.raises(ConfigError, match=r"summary\.json: .*; measure again") as caught:
        open_source(tmp_path)
    assert expected in str(caught.value)


def test_figures_over_ranks_are_means(summary, profile):
    rows = list(csv.DictReader((profile / "kernels.csv").open()))
    for top in summary["top"]:
        result = [row for row in rows if (row["name"], row["part"]) == (top["name"], top["part"])]
        assert top["ms"] == pytest.approx(
            sum(float(row["ms"]) for row in result) / len(summary["ranks"])
        )
        assert top["calls"] == pytest.approx(
            sum(float(row["calls"]) for row in result) / len(summary["ranks"])
        )


def test_a_report_of_a_step_has_a_page(profile, tmp_path, monkeypatch):
    monkeypatch.chdir(profile.parents[1])
    found = mtrain(profile.parents[1], "report", "one", "--out", str(tmp_path / "x"))
    assert found.returncode == 0, found.stderr
    assert "Breakdown of one training step" in (tmp_path / "x" / "report.html").read_text()


@pytest.mark.slow
def test_a_tensor_parallel_step_counts_its_messages_as_links(tmp_path):
    """Half of the heads on each of two workers: the losses are those of one worker."""
    alone = "seq=256 topology.device=cpu topology.block_size=32 model.num_layers=2 --no-trace"
    losses = []
    for name, words in {
        "one": "topology.workers=1",
        "two": "topology.workers=2 topology.tensor_parallel=2",
    }.items():
        result = run(tmp_path, alone, words, f"run.name={name}")
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / "measurements" / name / "summary.json").read_text())
        losses.append(summary["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (summary["settings"]["cp"], summary["settings"]["tp"]) == (1, 2)
    assert all(rank["parts"]["links"] > 0 for rank in summary["ranks"])


def test_a_step_of_a_pipeline_counts_hops_as_links(tmp_path):
    """The loss is on the last stage only, and losses are those of one worker."""
    alone = "seq=256 topology.device=cpu topology.block_size=32 model.num_layers=2 --no-trace"
    alone += " train.global_batch=2"
    losses = []
    for name, words in {
        "one": "topology.workers=1",
        "two": "topology.workers=2 topology.pipeline_parallel=2",
    }.items():
        result = run(tmp_path, alone, words, f"run.name={name}")
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / "measurements" / name / "summary.json").read_text())
        losses.append(summary["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert summary["settings"]["pp"] == 2
    first, last = (rank["parts"] for rank in summary["ranks"])
    assert first["loss"] == 0 < last["loss"]
    assert min(first["links"], last["links"]) > 0
