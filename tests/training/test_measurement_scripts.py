"""The scripts that measure parallelism, masks and a whole run work at toy size on a CPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.fixture
def mask_speed(monkeypatch):
    monkeypatch.syspath_prepend(str(PROFILES))
    return importlib.import_module("mask_speed")


def test_long_tailed_documents_cover_the_sequence(mask_speed):
    starts = mask_speed.long_tailed(1 << 19, 8192)
    assert starts[0] == 0
    assert starts[-1] < 1 << 19
    lengths = [b - a for a, b in zip(starts, (*starts[1:], 1 << 19), strict=True)]
    assert min(lengths[:-1]) >= 16
    assert max(lengths) > 8 * sorted(lengths)[len(lengths) // 2]


def test_the_peer_ignores_the_label_of_the_last_token_of_a_document(mask_speed, tmp_path):
    tiny = mask_speed.TINY
    bench = mask_speed.Bench(tiny, 512, 2, "cpu", "h200_1x8", tmp_path, None, 0, (0, 100))
    peer = bench.peer()
    assert (peer.labels < 0).nonzero().flatten().tolist() == [99]
    assert peer.labels[100] == peer.ids[101]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "rows", "checked"),
    [
        ("parallelism_speed", ["tensor"], 3, True),
        ("parallelism_speed", ["pipeline"], 8, True),
        ("parallelism_speed", ["one"], 4, False),
        ("mask_speed", ["compare", "--mask", "documents"], 4, True),
        ("mask_speed", ["dense"], 3, True),
    ],
)
def test_a_script_checks_losses_and_prints_its_table(script, words, rows, checked):
    command = [sys.executable, PROFILES / f"{script}.py", *words, "--toy", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    checks = [line for line in done.stdout.splitlines() if line.startswith("check: ")]
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert (len(checks) >= 4) == checked
    assert len(table) == 1 + rows, done.stdout


@pytest.mark.slow
def test_the_peer_of_whole_steps_learns_alike_however_it_shares_and_recomputes():
    losses = []
    for workers, recompute in ((1, "layers"), (2, "layers"), (4, "mlp")):  # of two KV heads
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), str(PROFILES / "peer_steps.py")]
        command += ["--toy", "--recompute", recompute]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        row = done.stdout.splitlines()[-1].split("|")
        assert row[1:5] == [" 512 ", " ulysses ", f" {recompute} ", " none "]
        losses.append(float(row[-2]))
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=2e-4)
    assert 5 < losses[0] < 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "checks", "rows"),
    [
        (["products"], 0, 6),
        (["layer"], 4, 4),
        (["model"], 1, 2),
    ],
    ids=lambda value: str(value),
)
def test_the_script_of_experts_prints_its_table(words, checks, rows):
    command = [sys.executable, PROFILES / "expert_speed.py", *words, "--toy", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    lines = done.stdout.splitlines()
    checked = [line for line in lines if line.startswith("check: ")]
    table = [line for line in lines if line.startswith("| ")]
    assert len(checked) == checks, done.stdout
    assert len(table) == 1 + rows, done.stdout
    assert not [line for line in lines if "failed" in line or "WRONG" in line], done.stdout
    widths = {line.count("|") for line in table}
    assert len(widths) == 1, done.stdout


@pytest.mark.parametrize(
    ("other", "right"), [(2.0, True), (2.01, True), (2.1, False), (float("nan"), False)]
)
def test_losses_of_another_degree_that_differ_are_wrong(monkeypatch, other, right):
    monkeypatch.syspath_prepend(str(PROFILES))
    check = importlib.import_module("expert_speed").check
    found = check({1: [3.0, 2.0, 1.0], 2: [3.0, other, 1.0]})
    assert ("WRONG" not in found) == right
    assert "WRONG" in check({1: [3.0], 2: [None]})
    assert check({2: [3.0]}) == "no other degree to compare with"


@pytest.mark.slow
def test_the_run_end_to_end_leaves_text_tables_and_figures(tmp_path):
    command = [sys.executable, PROFILES / "end_to_end.py", "--toy", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()} - {"needles.png", "perplexity.png"}
    assert names == {"commands.log", "end_to_end.md", "report.html", "results.jsonl"}
    page = (tmp_path / "out" / "end_to_end.md").read_text()
    assert "| 512 to 1,024 |" in page
    assert "| depth | 512 dense | 1K dense | 512 vertical_slash | 1K vertical_slash |" in page
    assert "Code, sampled:" in page
    assert "R²" in done.stdout


def test_a_step_that_fails_or_lasts_too_long_does_not_end_the_script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PROFILES))
    steps = importlib.import_module("end_to_end").Steps(tmp_path, tmp_path, 60.0)
    steps.run("wrong", "no-such-command")
    assert [(name, end) for name, _, end in steps.rows] == [("wrong", "code 2")]
