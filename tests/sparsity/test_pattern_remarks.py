"""What is said of a run that does not do what its line seems to ask for, in banner and dry run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from mtrain_cli.config.compose import compose
from mtrain_cli.sparsity.pattern_remarks import remarks
from mtrain_cli.training.banner import banner
from mtrain_cli.training.dry_run import render
from mtrain_cli.training.run_plan import make_plan

MOBA = "12 chunks of 4096 keys cover all of seq=4k: computes every pair, as dense does"
WINDOW = "one window at the end probes only the last document of packed ones; sparsity.windows=4 probes several"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("", []),
        ("sparsity=moba", [MOBA]),
        ("sparsity=moba sparsity.chunk=256", []),
        ("sparsity=fixed", []),
        (
            "sparsity=fixed sparsity.columns=5000",
            ["5000 columns cover all of seq=4k: computes every pair, as dense does"],
        ),
        ("sparsity=vertical_slash", [WINDOW]),
        ("sparsity=vertical_slash data.document_mask=false", []),
        ("sparsity=vertical_slash sparsity.windows=2", []),
        (
            "sparsity=vertical_slash sparsity.min_slashes=32",
            [
                "at least 32 block diagonals of 128 tokens cover all of seq=4k: computes every pair, as dense does"
            ],
        ),
        (
            "sparsity=xattention sparsity.dense_steps=60 train.steps=60",
            ["no step is sparse: sparsity.dense_steps=60 is not below train.steps=60"],
        ),
        ("sparsity=xattention sparsity.dense_steps=59 train.steps=60", []),
    ],
)
def test_what_is_remarked(words, lines):
    assert remarks(compose(words.split())) == lines


def test_banner_and_dry_run_say_it():
    config = compose(
        ["sparsity=moba", "topology.workers=1", "topology.device=cpu", "sparsity.dense_steps=100"]
    )
    found = make_plan(config)
    for page in (render(found), banner(found, Path("runs/x"), "data")):
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(page)
        printed = console.file.getvalue()
        assert MOBA in printed
        assert "no step is sparse" in printed
        assert "executes less" not in printed


def test_synthetic_is_said_wherever_the_name_shows():
    config = compose(["sparsity=fixed", "topology.workers=1", "topology.device=cpu"])
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(render(make_plan(config)))
    assert "fixed (SYNTHETIC): diagonals of 5.0%" in console.file.getvalue()
