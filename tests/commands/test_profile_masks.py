"""`mtrain profile kernels --mask`: the table, the file and wrong options."""

from __future__ import annotations

import json

import pytest
import torch
from commands import typed_line
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.profiling import mask_benchmark

SMALL = "profile kernels --seq 64 --heads 2/1 --head-dim 16 --repeats 1"


def run(*words: str):
    return CliRunner().invoke(app, split(SMALL, *words))


class Flex:
    @staticmethod
    def make(*_):
        return lambda q, k, v: q * 2 + k[:, :1] + v[:, :1]


def test_masks_are_timed_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(mask_benchmark, "FlexAttention", Flex)
    out = tmp_path / "masks.json"
    result = run("--mask documents,video --compare flex --kernel sdpa --out", str(out))
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["kind"] == "masks"
    assert document["times"][-1]["sizes"] == "4x4x4 tokens, window 4x2x4"
    assert [(t["mask"], t["kernel"]) for t in document["times"]] == [
        (mask, kernel) for mask in ("documents", "video") for kernel in ("flex", "sdpa")
    ]
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["mask", "seq", "heads"]
    assert lines[1].split()[:4] == ["documents", "64", "2/1", "flex"]
    if not torch.cuda.is_available():
        assert lines[1].endswith("none on CPU")
        assert lines[2].endswith("x/-")
        assert "TF" not in result.stdout


def test_all_masks_fit_70_columns():
    found = typed_line.run(f"{SMALL} --kernel sdpa --mask all", columns=70)
    assert found.exit_code == 0, found.stderr
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 70
    assert "to flex" not in found.stdout, "nothing is compared"
    assert [line.split()[0] for line in lines[1:9]] == list(mask_benchmark.MASKS)
    assert "A wider terminal also shows heads" in lines[-1]
    assert "window: 16 tokens at seq 64" in lines
    assert "video: 4x4x4 tokens, window 4x2x4 at seq 64" in lines
    assert not [line for line in lines if line.startswith(("full:", "causal:"))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mask causl", "--mask causl: no such"),
        ("--mask causal --compare torch", "--compare torch: no such"),
        ("--compare flex", "--compare: needs --mask, such as --mask causal,documents"),
        ("--mask causal --density 5%", "--density: --mask times dense attention"),
        ("--mask causal --columns 8 --workers 2", "--columns, --workers: --mask times dense"),
        ("--mask causal --block 16 --no-whole", "--block, --no-whole: --mask times dense"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words, message, monkeypatch):
    monkeypatch.setattr(mask_benchmark, "profile_masks", lambda *_, **__: pytest.fail("measured"))
    result = run(words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="what cannot run differs")
def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = run("--mask causal --kernel sdpa,flash4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "mtrain: --kernel flash4: needs a CUDA GPU\n"
