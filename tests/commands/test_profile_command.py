"""`mtrain profile`: output, files, and refused options."""

from __future__ import annotations

import gc
import io
import json
import threading

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from mtrain_cli.attention.index import MaskWork
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.commands.app import app
from mtrain_cli.commands.profile import _layers, _patterns
from mtrain_cli.profiling.pattern_quality import HeadRecord
from mtrain_cli.sparsity.fixed import fixed_index

SMALL = [
    "seq=256",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "sparsity.block=16",
    "sparsity.last_q=32",
    "sparsity.chunk=32",
    "sparsity.top_k=3",
]


def run(*words: str):
    return CliRunner().invoke(app, ["profile", *words])


def test_sparsity_measures_every_layer_and_head_of_the_given_steps(tmp_path):
    import pandas

    out = tmp_path / "found" / "sparsity.parquet"
    result = run(
        "sparsity",
        *SMALL,
        "--pattern",
        "vertical_slash,moba",
        "--steps",
        "3",
        "--every",
        "2",
        "--rows",
        "40",
        "--out",
        str(out),
    )
    assert result.exit_code == 0, result.output
    assert "step 3/3  loss" in result.output
    assert "vertical_slash, step 1" in result.output
    assert "moba, step 3" in result.output
    assert "recall: over sampled queries that the pattern does not probe" in " ".join(
        result.output.split()
    )
    again = run(
        "sparsity",
        *SMALL[:7],
        "--pattern",
        "fixed",
        "--steps",
        "1",
        "--rows",
        "4",
        "--out",
        str(tmp_path / "again.parquet"),
    )
    assert "fixed (SYNTHETIC), step 1" in again.output
    found = pandas.read_parquet(out)
    assert len(found) == 3 * 2 * 2 * 4
    assert set(found.step) == {1, 2, 3}
    assert found.recall.between(0.3, 1.0).all()
    assert (found.worst <= found.recall + 1e-6).all()
    assert found.density.between(0.05, 1.0).all()
    assert (found.of_mask >= found.density - 1e-9).all()
    assert (found[found.pattern == "moba"].slashes == 0).all()
    assert (found[found.pattern == "vertical_slash"].slashes >= 1).all()


def test_sparsity_leaves_no_thread_running(tmp_path):
    """Triton 3.9 prints 30 lines of leak warnings if a loader thread still runs at exit."""
    before = set(threading.enumerate())
    result = run(
        "sparsity",
        *SMALL[:7],
        "--pattern",
        "fixed",
        "--steps",
        "1",
        "--rows",
        "4",
        "--out",
        str(tmp_path / "s.parquet"),
    )
    assert result.exit_code == 0, result.output
    assert set(threading.enumerate()) <= before
    assert gc.get_freeze_count() == 0


def test_kernels_are_compared_with_dense_and_write_a_calibration(tmp_path):
    out = tmp_path / "calibration.json"
    result = run(
        "kernels", "--seq", "256", "--density", "0.5,0.2", "--columns", "8", "--heads", "4/2",
        "--head-dim", "16", "--block", "16", "--kernel", "sdpa", "--repeats", "1",
        "--out", str(out),
    )  # fmt: skip
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
    shape = {
        "seed": 0,
        "batch": 1,
        "heads": 4,
        "seq": 256,
        "block": 16,
        "slashes": None,
        "columns": 8,
    }
    counts = fixed_index(**shape, density=0.5).counts(
        MaskWork.make([SequenceMask.causal(256, 256)], 16)
    )
    assert [half[name] for name in ("pairs", "blocks", "column_pairs")] == [
        int(t.sum()) for t in (counts.pairs, counts.blocks, counts.column_pairs)
    ]
    # A CPU also computes the pairs that the index leaves out.
    assert "TF" not in result.output
    assert half["backward_tflops"] == pytest.approx(
        10 * 16 * half["pairs"] / half["backward_ms"] / 1e9
    )


def test_kernel_times_fit_80_columns():
    words = (
        "kernels",
        "--seq",
        "256",
        "--density",
        "0.2",
        "--heads",
        "2/1",
        "--head-dim",
        "16",
        "--block",
        "16",
        "--kernel",
        "sdpa",
    )
    shown = {
        width: CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(
            app, ["profile", *words, "--repeats", "1", "--workers", "2"]
        )
        for width in (80, 200)
    }
    assert [found.exit_code for found in shown.values()] == [0, 0]
    assert max(map(len, shown[80].stdout.splitlines())) <= 80
    # The same calls, with fewer columns each.
    lines_by_width = {
        width: [line for line in found.stdout.splitlines() if line.startswith("sdpa ")]
        for width, found in shown.items()
    }
    assert len(lines_by_width[80]) == len(lines_by_width[200]) > 10
    assert "TF" not in lines_by_width[80][0]
    assert "1/2 striped, ring step 0" in shown[80].stdout
    assert "A wider terminal also shows" in " ".join(shown[80].stdout.split())
    assert "A wider terminal" not in shown[200].stdout


@pytest.mark.parametrize(("of_mask", "columns"), [(0.25, 6), (0.5, 7)])
def test_every_column_has_a_name_and_fits_60_columns(of_mask, columns):
    records = [
        HeadRecord(
            step=1,
            pattern="moba",
            layer=layer,
            head=0,
            density=0.25,
            of_mask=of_mask,
            recall=0.9,
            worst=worst,
            slashes=40000,
            columns=100000,
        )
        for layer, worst in enumerate((0.3, 0.1))
    ]
    console = Console(file=io.StringIO(), width=60, color_system=None)
    table = _layers(records, "moba, step 1")
    assert all(str(column.header) for column in table.columns)
    assert len(table.columns) == columns
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    cells = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["all"])]
    density = ["25.00%"] if columns == 6 else ["25.00%", "50.00%"]
    worst = (("0", "0.300"), ("1", "0.100"), ("all", "0.100"))
    assert cells == [
        [name, "0.9000", least, *density, "40000.0", "100000"] for name, least in worst
    ]


def test_a_key_goes_to_every_pattern_that_has_it():
    words = ["sparsity=moba", "sparsity.chunk=512", "sparsity.p_v=0.5", "sparsity.block=64"]
    config, (measured,) = _patterns(words, "vertical_slash")
    assert (config.sparsity.pattern, config.sparsity.chunk, config.sparsity.block) == (
        "moba",
        512,
        64,
    )
    assert (measured.name, measured.p_v, measured.block) == ("vertical_slash", 0.5, 64)


def test_the_shipped_calibration_loads_and_names_its_hardware():
    from mtrain_cli import resource_dir

    document = json.loads((resource_dir("profiles") / "kernels-h200.json").read_text())
    assert document["device"] == "NVIDIA H200"
    assert document["command"].startswith("mtrain profile kernels")
    assert {t["kernel"] for t in document["times"]} == {"flash4", "triton"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["kernels", "--seq", "1k", "--workers", "1"],
            "--workers 1: each must be at least 2 workers",
        ),
        (
            ["kernels", "--seq", "1k", "--workers", "some"],
            "--workers some: some is not a number; give items such as 8,32",
        ),
        (
            ["kernels", "--seq", "1k", "--block", "16", "--workers", "7"],
            "--workers 7: none of --seq 1k divides into whole blocks for 7 workers",
        ),
        (
            ["kernels", "--seq", "1k", "--no-whole"],
            "--no-whole: leaves nothing to time; add --workers N",
        ),
        (["sparsity", "--pattern", "mobb"], "--pattern mobb: no such pattern; did you mean moba?"),
        (["sparsity", "--pattern", "dense"], "--pattern dense: no such pattern"),
        (["sparsity", "--pattern", ","], "names no pattern"),
        (
            ["sparsity", "sparsity.chunk=512"],
            "sparsity.chunk=512: none of the patterns vertical_slash has this key",
        ),
        (["sparsity", "--out", "x.csv"], "--out x.csv: give a file that ends in .parquet"),
        (
            ["sparsity", "sparsity.pattern=moba"],
            "sparsity.pattern=moba: give the patterns to measure as --pattern NAME,...",
        ),
        (["sparsity", "sparsity.p_v=2"], "sparsity.p_v=2: must be above 0 and at most 1"),
        (["kernels", "--seq", "12q"], "--seq 12q: 12q is not a number"),
        (["kernels", "--density", "0"], "--density 0: each must be above 0 and at most 1"),
        (
            ["kernels", "--heads", "16/3"],
            "--heads 16/3: expected QUERY/KV heads, where KV divides QUERY",
        ),
        (["kernels", "--block", "100"], "--block 100: must be 16, 32, 64 or 128"),
        (["kernels", "--kernel", "flash5"], "--kernel flash5: no such kernel"),
        (["kernels", "--seq", "0"], "--seq 0: each must be at least 2 tokens"),
        (["kernels", "--seq", "-5"], "--seq -5: each must be at least 2 tokens"),
        (
            ["kernels", "--density", "101%"],
            "--density 101%: each must be above 0 and at most 1, which is 100%",
        ),
        (
            ["kernels", "--density", "5%%"],
            "--density 5%%: 5%% is not a number; give items such as 0.05 or 5%",
        ),
        (["kernels", "--out", "folder"], "--out folder: is a folder; give a file"),
        (
            ["kernels", "--out", "file/x.json"],
            "--out file/x.json: a part of the path is a file, not a folder",
        ),
        (
            ["kernels", "--out", "file"],
            "--out file: exists and is not a calibration of mtrain; give another name, or remove "
            "it",
        ),
        (["kernels", "--out", "/proc/x/y.json"], "--out /proc/x/y.json: cannot be written: "),
        (["sparsity", "--out", "folder.parquet"], "--out folder.parquet: is a folder; give a file"),
        (
            ["sparsity", "--out", "other.parquet"],
            "--out other.parquet: exists and is not a sparsity profile of mtrain",
        ),
        (
            ["sparsity", "--out", "file/x.parquet"],
            "--out file/x.parquet: a part of the path is a file",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "mtrain_cli.profiling.kernel_benchmark.profile_kernels", _nothing_is_measured
    )
    monkeypatch.setattr(
        "mtrain_cli.profiling.pattern_quality.profile_sparsity", _nothing_is_measured
    )
    for folder in ("folder", "folder.parquet"):
        (tmp_path / folder).mkdir()
    for file in ("file", "other.parquet"):
        (tmp_path / file).write_text("a letter")
    result = run(*words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "a letter"


def _nothing_is_measured(*_):
    raise AssertionError("a mistake is found before anything is measured")


KERNELS = (
    "kernels",
    "--seq",
    "64",
    "--heads",
    "2/1",
    "--head-dim",
    "16",
    "--block",
    "16",
    "--repeats",
    "1",
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what cannot run differs")


@without_gpu
def test_kernels_that_cannot_run_are_refused_in_one_line_each(monkeypatch):
    monkeypatch.setattr(
        "mtrain_cli.profiling.kernel_benchmark.profile_kernels", _nothing_is_measured
    )
    monkeypatch.delenv(
        "TRITON_INTERPRET", raising=False
    )  # other tests of the same process run the kernel without a GPU
    result = run(*KERNELS, "--kernel", "flash4,triton")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"mtrain: --kernel {name}: needs a CUDA GPU" for name in ("flash4", "triton")
    ]


@without_gpu
def test_unsupported_kernels_are_listed_once_below_the_table():
    lines = run(*KERNELS, "--density", "50%,0.2", "--kernel", "sdpa,flash4").stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["kernel", "sdpa", "sdpa", "sdpa"]
    assert lines[-1] == "flash4: needs a CUDA GPU"
    assert sum("flash4" in line for line in lines) == 1


def test_used_columns_and_share_of_pairs_are_printed():
    lines = run(
        *KERNELS, "--density", "50%,5%", "--columns", "5000", "--kernel", "sdpa"
    ).stdout.splitlines()
    for line, density in zip(lines[2:4], ("50.0%", "5.0%"), strict=True):
        assert line.split()[3:7] == [density, "all", "64", "100.0%"]
    few = (
        run(*KERNELS, "--density", "5%", "--columns", "2", "--kernel", "sdpa")
        .stdout.splitlines()[2]
        .split()
    )
    assert few[3:5] == ["5.0%", "2"]
    diagonal = 4 * 16 * 17 // 2 / (64 * 65 // 2)
    assert diagonal < float(few[5].rstrip("%")) / 100 < diagonal + 2 * 64 / (64 * 65 // 2)


def test_replacing_an_earlier_calibration_is_reported(tmp_path):
    out = tmp_path / "deep" / "calibration.json"
    first, second = (
        run(*KERNELS, "--density", density, "--kernel", "sdpa", "--out", str(out))
        for density in ("0.5", "0.5,0.2")
    )
    assert first.stdout.endswith(f"2 times in {out}\n")
    assert second.stdout.endswith(f"3 times in {out}, in place of the calibration that was there\n")
    assert len(json.loads(out.read_text())["times"]) == 3


@without_gpu
def test_shapes_that_exceed_memory_are_one_line():
    result = run(
        "kernels", "--seq", "4m", "--heads", "1024/1024", "--head-dim", "4096", "--kernel", "sdpa"
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The next of these shapes does not fit in memory")
