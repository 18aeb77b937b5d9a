"""Every pattern of the settings has a module of its name that makes it."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.sparsity.pattern import make_pattern


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
