"""The keys of experts in files of models."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.schema import DENSE, DENSE_KEYS


def test_the_keys_of_a_dense_model_are_those_of_the_schema():
    names = [name for name in keys.all_keys() if name.startswith("model.moe.")]
    assert list(DENSE_KEYS) == names
    assert compose().model.moe == DENSE


@pytest.mark.parametrize(
    ("name", "experts", "top_k", "size"),
    [("tiny_moe", 8, 2, 192), ("qwen3_30b_a3b", 128, 8, 768), ("mixtral_8x7b", 8, 2, 14336)],
)
def test_models_that_ship(name, experts, top_k, size):
    moe = compose([f"model={name}"]).model.moe
    assert (moe.experts, moe.top_k, moe.expert_size) == (experts, top_k, size)


def test_the_shape_of_weights_includes_their_experts():
    mine = compose(["model=tiny_moe"]).model
    other = compose(["model=tiny_moe", "model.moe.top_k=3"]).model
    assert mine.shape_differences(other) == [("model.moe.top_k", 2, 3)]
