"""`mtrain profile sparsity`: records, tables and the keys of each pattern."""

from __future__ import annotations

import dataclasses
import gc
import io
import threading

import pytest
from commands.typed_line import split
from rich.console import Console
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.profile_sparsity import _patterns
from mtrain_cli.profiling.pattern_quality import HeadRecord
from mtrain_cli.reporting.tables import sparsity_table

SHAPE = (
    "seq=256 topology.block_size=16 model.hidden_size=32 model.num_layers=2 model.head_dim=8 "
    "model.intermediate_size=48 sparsity.block=16"
)
SMALL = f"{SHAPE} sparsity.last_q=32 sparsity.chunk=32 sparsity.top_k=3"


def run(*words: str):
    return CliRunner().invoke(app, ["profile", *split(*words)])


def test_sparsity_measures_every_layer_and_head_of_the_given_steps(tmp_path):
    import pandas

    out = tmp_path / "found" / "sparsity.parquet"
    result = run(
        "sparsity",
        SMALL,
        "--pattern vertical_slash,moba --steps 3 --every 2 --rows 40 --out",
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
        SHAPE,
        "--pattern fixed --steps 1 --rows 4 --out",
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
        SHAPE,
        "--pattern fixed --steps 1 --rows 4 --out",
        str(tmp_path / "s.parquet"),
    )
    assert result.exit_code == 0, result.output
    assert set(threading.enumerate()) <= before
    assert gc.get_freeze_count() == 0


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
    table = sparsity_table([dataclasses.asdict(r) for r in records], "moba, step 1")
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
    words = "sparsity=moba sparsity.chunk=512 sparsity.p_v=0.5 sparsity.block=64"
    config, (measured,) = _patterns(words.split(), "vertical_slash")
    assert (config.sparsity.pattern, config.sparsity.chunk, config.sparsity.block) == (
        "moba",
        512,
        64,
    )
    assert (measured.name, measured.p_v, measured.block) == ("vertical_slash", 0.5, 64)
