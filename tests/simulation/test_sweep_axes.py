"""Axes of a sweep: what is an axis, and which values are refused."""

from __future__ import annotations

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.sweep_axes import axes, is_axis


@pytest.mark.parametrize(
    ("word", "axis"),
    [
        ("seq=1k,2k", True),
        ("nodes=2", True),
        ("density=5%", True),
        ("seq=1k", False),
        ("model.name=", False),
        ("key=[1,2]", False),
    ],
)
def test_several_values_or_an_own_name_make_an_axis(word, axis):
    assert is_axis(word) == axis


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seq", "seq: expected NAME=VALUE"),
        ("seq=", "seq=: expected NAME=VALUE"),
        ("", "nothing to sweep: give NAME=VALUE"),
        ("nodes=0", "nodes=0: expected a whole number of at least 1"),
        ("workers=x", "workers=x: expected a whole number"),
        ("density=2", "density=2: must be above 0 and at most 1"),
        ("nods=1", "did you mean nodes?"),
        ("exchange=ring", "use --exchange ring to compare these"),
        ("seq=1k seq=2k", "seq is swept twice"),
        ("nodes=1 workers=2", "sweep one of them"),
    ],
)
def test_invalid_axes_are_refused(text, said):
    with pytest.raises(ConfigError) as error:
        axes(text.split())
    assert said in str(error.value)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=qwen3b seq=", "seq=: has no value; give several, as seq=64k,128k"),
        ("model=", "model=: has no value; give several, as model=VALUE,VALUE"),
        ("seq=64k seq=128k", "seq=64k seq=128k: give all values at once, as seq=64k,128k"),
        ("seq=64k seq=64k", "nothing to sweep: give NAME=VALUE"),
    ],
)
def test_settings_that_look_like_an_axis_are_named(text, said):
    with pytest.raises(ConfigError) as error:
        axes([], text.split())
    assert said in str(error.value)
