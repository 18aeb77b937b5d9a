"""`mtrain profile kernels`: shapes, masks, tables and calibration files."""

from __future__ import annotations

import json

import pytest
import torch
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.commands.app import app
from mtrain_cli.sparsity.fixed import fixed_index
from mtrain_extras.bench import masks as timed_masks


def run(*words: str):
    return CliRunner().invoke(app, ["profile", *split(*words)])


def _nothing_is_measured(*_):
    raise AssertionError("a mistake is found before anything is measured")


KERNELS = split("kernels --seq 64 --heads 2/1 --head-dim 16 --block 16 --repeats 1")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what cannot run differs")


def test_kernels_are_compared_with_dense_and_write_a_calibration(tmp_path):
    out = tmp_path / "calibration.json"
    result = run(
        "kernels --seq 256 --density 0.5,0.2 --columns 8 --heads 4/2 --head-dim 16",
        "--block 16 --kernel sdpa --repeats 1 --out",
        str(out),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (document["schema"], document["kind"]) == (1, "kernels")
    dense, half, fifth = document["times"]
    assert dense["case"]["density"] is None
    assert dense["pairs"] == 4 * 256 * 257 // 2
    assert [t["case"]["density"] for t in (half, fifth)] == [0.5, 0.2]
    assert dense["pairs"] > half["pairs"] > fifth["pairs"] > 0
    assert half["forward_ratio"] == pytest.approx(dense["forward_ms"] / half["forward_ms"])
    assert half["backward_ratio"] == pytest.approx(dense["backward_ms"] / half["backward_ms"])
    shape = {"seed": 0, "batch": 1, "heads": 4, "seq": 256, "block": 16, "slashes": None}
    shape["columns"] = 8
    counts = fixed_index(**shape, density=0.5).counts(
        MaskTables.make([SequenceMask.causal(256, 256)], 16)
    )
    assert [half[name] for name in ("pairs", "blocks", "column_pairs")] == [
        int(t.sum()) for t in (counts.pairs, counts.blocks, counts.column_pairs)
    ]
    # A CPU also computes the pairs that the index leaves out.
    assert "TF" not in result.output
    assert half["backward_tflops"] == pytest.approx(
        10 * 16 * half["pairs"] / half["backward_ms"] / 1e9
    )


def test_the_shipped_calibration_loads_and_names_its_hardware():
    from mtrain_cli import resource_dir

    document = json.loads((resource_dir("profiles") / "kernels-h200.json").read_text())
    assert document["device"] == "NVIDIA H200"
    assert document["command"].startswith("mtrain profile kernels")
    assert {t["kernel"] for t in document["times"]} == {"flash4", "triton"}


@without_gpu
def test_kernels_that_cannot_run_are_refused_in_one_line_each(monkeypatch):
    monkeypatch.setattr("mtrain_extras.bench.kernels.profile_kernels", _nothing_is_measured)
    monkeypatch.delenv(
        "TRITON_INTERPRET", raising=False
    )  # other tests of the same process run the kernel without a GPU
    result = run(*KERNELS, "--kernel flash4,triton")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"mtrain: --kernel {name}: needs a CUDA GPU" for name in ("flash4", "triton")
    ]


@without_gpu
def test_unsupported_kernels_are_listed_once_below_the_table():
    lines = run(*KERNELS, "--density 50%,0.2 --kernel sdpa,flash4").stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["kernel", "sdpa", "sdpa", "sdpa"]
    assert lines[-1] == "flash4: needs a CUDA GPU"
    assert sum("flash4" in line for line in lines) == 1


def test_used_columns_and_share_of_pairs_are_printed():
    lines = run(*KERNELS, "--density 50%,5% --columns 5000 --kernel sdpa").stdout.splitlines()
    for line, density in zip(lines[2:4], ("50.0%", "5.0%"), strict=True):
        assert line.split()[3:6] == [density, "64", "100.0%"]
    few = run(*KERNELS, "--density 5% --columns 2 --kernel sdpa").stdout.splitlines()[2].split()
    assert few[3:5] == ["5.0%", "2"]
    diagonal = 4 * 16 * 17 // 2 / (64 * 65 // 2)
    assert diagonal < float(few[5].rstrip("%")) / 100 < diagonal + 2 * 64 / (64 * 65 // 2)


def test_an_earlier_calibration_is_replaced(tmp_path):
    out = tmp_path / "deep" / "calibration.json"
    first, second = (
        run(*KERNELS, "--density", density, "--kernel sdpa --out", str(out))
        for density in ("0.5", "0.5,0.2")
    )
    assert first.stdout.endswith(f"2 measured times in {out}\n")
    assert second.stdout.endswith(f"3 measured times in {out}\n")
    assert len(json.loads(out.read_text())["times"]) == 3


@without_gpu
def test_shapes_that_exceed_memory_are_one_line():
    result = run("kernels --seq 4m --heads 1024/1024 --head-dim 4096 --kernel sdpa")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The next shape does not fit in memory")


SMALL = "kernels --seq 64 --heads 2/1 --head-dim 16 --repeats 1"


def run_small(*words: str):
    return run(SMALL, *words)


def flex(*_):
    return lambda q, k, v: q * 2 + k[:, :1] + v[:, :1]


def test_masks_are_timed_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(timed_masks, "flex_attention", flex)
    out = tmp_path / "masks.json"
    result = run_small("--mask documents,video --compare flex --kernel sdpa --out", str(out))
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["kind"] == "masks"
    assert document["times"][-1]["sizes"] == "4x4x4 tokens, window 4x2x4"
    assert [(t["mask"], t["kernel"]) for t in document["times"]] == [
        (mask, kernel) for mask in ("documents", "video") for kernel in ("flex", "sdpa")
    ]
    lines = result.stdout.splitlines()
    assert lines[0].split()[:4] == ["mask", "seq", "heads", "kernel"]
    assert lines[1].split()[:4] == ["documents", "64", "2/1", "flex"]
    assert "video, 64: 4x4x4 tokens, window 4x2x4" in lines
    assert "TF" not in result.stdout or torch.cuda.is_available()


def test_all_masks_are_described():
    lines = run_small("--kernel sdpa --mask all").stdout.splitlines()
    masks = list(timed_masks.MASKS)
    assert [line.split()[0] for line in lines[1 : len(masks) + 1]] == masks
    assert lines[-2].endswith("4x4x4 tokens, window 4x2x4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mask causl", "--mask causl: no such"),
        ("--mask causal --compare torch", "--compare torch: no such"),
        ("--compare flex", "--compare: needs --mask, such as --mask causal,documents"),
        ("--mask causal --density 5%", "--density: --mask times dense attention"),
        ("--mask causal --columns 8 --block 16", "--columns, --block: --mask times dense"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words, message, monkeypatch):
    monkeypatch.setattr(timed_masks, "profile_masks", lambda *_, **__: pytest.fail("measured"))
    result = run_small(words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line


@without_gpu
def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = run_small("--mask causal --kernel sdpa,flash4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "mtrain: --kernel flash4: needs a CUDA GPU\n"


def test_profile_lists_the_commands_of_packages_among_its_own():
    shown = CliRunner().invoke(app, ["profile", "--help"]).stdout
    names = ("imbalance", "kernels", "links", "non-attention", "sparsity", "step", "what-if")
    places = [shown.index(f"│ {name} ") for name in names]
    assert places == sorted(places)
