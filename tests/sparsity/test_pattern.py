"""Budgets keep the fewest candidates that reach a share, and patterns say what they cover."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.sparsity.pattern import make_pattern, remarks, select_by_mass
from mtrain_cli.training.dry_run import banner, render
from mtrain_cli.training.planning import make_plan


def kept(
    mass: list[float],
    share: float,
    forced: tuple[int, ...] = (),
    least: int = 0,
    most: int | None = None,
) -> list[int]:
    values = torch.tensor(mass, dtype=torch.float32)
    mask = torch.zeros(len(mass), dtype=torch.bool)
    mask[list(forced)] = True
    candidates, keep = select_by_mass(values[None], share, mask, least, most or len(mass))
    return candidates[keep].tolist()


MASS = [0.125, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("mass", "share", "bounds", "expected"),
    [
        (MASS, 0.5, {}, [1]),  # the candidate that crosses the share is kept
        (MASS, 0.51, {}, [1, 2]),
        (MASS, 0.75, {}, [1, 2]),
        (MASS, 0.76, {}, [1, 2, 0]),
        (MASS, 1.0, {}, [1, 2, 0, 3]),
        ([0.25] * 4, 0.6, {}, [0, 1, 2]),  # ties go to the lower number
        (MASS, 0.55, {"forced": (0,)}, [0, 1]),  # forced candidates come first and count
        (MASS, 0.05, {"forced": (3, 0)}, [0, 3]),
        (MASS, 0.1, {"least": 3}, [1, 2, 0]),
        (MASS, 1.0, {"most": 2}, [1, 2]),
        ([0.0] * 3, 0.9, {"least": 1}, [0]),
        ([float("nan"), 0.5, 0.5, float("inf")], 0.9, {}, [1, 2]),  # NaN has no mass
    ],
)
def test_the_fewest_candidates_that_hold_the_share_are_kept(mass, share, bounds, expected):
    assert kept(mass, share, **bounds) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_no_smaller_set_reaches_the_share(values, share):
    total = sum(values) or 1.0
    mass = [float(np.float32(v / total)) for v in values]
    selected = kept(mass, share)
    units = [round(m * 2.0**38) for m in mass]
    held = sum(units[line] for line in selected)
    assert held >= share * sum(units)
    if selected:
        assert held - units[selected[-1]] < share * sum(units), (
            "without its last candidate it misses the share"
        )
        assert all(
            units[a] >= units[b] for a in selected for b in range(len(mass)) if b not in selected
        ), "it holds the largest candidates"


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_selected_independently(seed):
    rng = np.random.default_rng(seed)
    mass = torch.from_numpy(rng.dirichlet(np.full(40, 0.3), (2, 3)).astype(np.float32))
    none = torch.zeros(40, dtype=torch.bool)
    candidates, keep = select_by_mass(mass, 0.7, none, 0, 40)
    for b in range(2):
        for h in range(3):
            assert candidates[b, h][keep[b, h]].tolist() == kept(mass[b, h].tolist(), 0.7)


def test_dense_attention_has_no_pattern():
    assert make_pattern(compose(["sparsity=dense"]).sparsity, seed=0) is None


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "dense"])
def test_the_pattern_has_the_settings_of_the_run(name):
    settings = compose([f"sparsity={name}"]).sparsity
    pattern = make_pattern(settings, seed=3)
    assert pattern is not None
    assert pattern.name == name
    assert {key: getattr(pattern, key) for key in vars(settings)} == vars(settings)
    assert pattern.request().block == settings.block
    assert pattern.describe()
    if name == "fixed":
        assert pattern.seed == 3


ALL_LAYERS = (
    "every layer is sparse: such models found fewer needles than dense ones in `mtrain study "
    "learning` (docs/studies.md); sparsity.dense_layers={} keeps {} dense"
)
ONE_OF_FOUR = ALL_LAYERS.format(1, "the last layer")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", []),
        ("sparsity=moba sparsity.chunk=256", [ONE_OF_FOUR]),
        ("sparsity=moba sparsity.chunk=256 model.num_layers=1", []),
        ("sparsity=fixed", []),
        ("sparsity=vertical_slash", [ONE_OF_FOUR]),
        (
            "sparsity=vertical_slash model.num_layers=36",
            [ALL_LAYERS.format(9, "the last 9 layers")],
        ),
        ("sparsity=vertical_slash sparsity.dense_layers=2", []),
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
        assert "no step is sparse" in printed


def test_synthetic_patterns_are_marked_wherever_their_name_shows():
    config = compose(["sparsity=fixed", "topology.workers=1", "topology.device=cpu"])
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(render(make_plan(config)))
    assert "fixed (SYNTHETIC): diagonals of 5.0%" in console.file.getvalue()
