"""The keys of rotary positions."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.schema import ROPE_SCALINGS, ConfigError, RopeConfig


def test_every_model_has_the_keys_of_rotary_positions():
    names = [n.removeprefix("model.rope.") for n in keys.all_keys() if n.startswith("model.rope.")]
    rope = compose().model.rope
    assert isinstance(rope, RopeConfig)
    assert names == list(vars(rope))


@pytest.mark.parametrize(
    "word", ["scaling=linear", "theta=1", "factor=0.5", "beta_fast=0", "original_max_position=0"]
)
def test_a_value_that_is_not_allowed_is_refused_with_its_key(word):
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=f"model.rope.{key}=") as error:
        compose([f"model.rope.{word}"])
    assert (key != "scaling") or all(name in str(error.value) for name in ROPE_SCALINGS)
