"""Remarks in banner and dry run on runs that do not do what their settings suggest."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from mtrain_cli.composition.compose import compose
from mtrain_cli.sparsity.pattern import remarks
from mtrain_cli.training.banner import banner
from mtrain_cli.training.dry_run import render
from mtrain_cli.training.planning import make_plan

MOBA = "12 chunks of 4096 keys cover all of seq=4k: computes every pair, like sparsity=dense"
WINDOW = (
    "a single window at the end probes only the last packed document; sparsity.windows=4 probes "
    "more of them. Inside one long document, windows found fewer needles "
    "(docs/studies.md)"
)
ALL_LAYERS = (
    "every layer is sparse: such models found fewer needles than dense ones in `mtrain study "
    "learning` (docs/studies.md); sparsity.dense_layers={} keeps {} dense"
)
ONE_OF_FOUR = ALL_LAYERS.format(1, "the last layer")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", []),
        ("sparsity=moba", [MOBA]),
        ("sparsity=moba sparsity.chunk=256", [ONE_OF_FOUR]),
        ("sparsity=moba sparsity.chunk=256 model.num_layers=1", []),
        ("sparsity=fixed", []),
        (
            "sparsity=fixed sparsity.columns=5000",
            ["5000 columns cover all of seq=4k: computes every pair, like sparsity=dense"],
        ),
        ("sparsity=vertical_slash", [WINDOW, ONE_OF_FOUR]),
        ("sparsity=vertical_slash sparsity.dense_layers=1", [WINDOW]),
        ("sparsity=vertical_slash data.document_mask=false", [ONE_OF_FOUR]),
        (
            "sparsity=vertical_slash sparsity.windows=2 model.num_layers=36",
            [ALL_LAYERS.format(9, "the last 9 layers")],
        ),
        ("sparsity=vertical_slash sparsity.windows=2 sparsity.dense_layers=2", []),
        (
            "sparsity=vertical_slash sparsity.min_slashes=32",
            [
                "at least 32 block diagonals of 128 tokens cover all of seq=4k: computes every "
                "pair, like sparsity=dense"
            ],
        ),
        (
            "sparsity=xattention sparsity.dense_steps=60 train.steps=60",
            ["no step is sparse: sparsity.dense_steps=60 must be below train.steps=60"],
        ),
        ("sparsity=xattention sparsity.dense_steps=59 train.steps=60", [ONE_OF_FOUR]),
    ],
)
def test_each_surprising_setting_has_a_remark(overrides, expected):
    assert remarks(compose(overrides.split())) == expected


def test_banner_and_dry_run_show_remarks():
    config = compose(
        ["sparsity=moba", "topology.workers=1", "topology.device=cpu", "sparsity.dense_steps=100"]
    )
    run_plan = make_plan(config)
    for page in (render(run_plan), banner(run_plan, Path("runs/x"), "data")):
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(page)
        printed = console.file.getvalue()
        assert MOBA in printed
        assert "no step is sparse" in printed
        assert "executes less" not in printed


def test_synthetic_patterns_are_marked_wherever_their_name_shows():
    config = compose(["sparsity=fixed", "topology.workers=1", "topology.device=cpu"])
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(render(make_plan(config)))
    assert "fixed (SYNTHETIC): diagonals of 5.0%" in console.file.getvalue()
