"""The typed configuration."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.schema import ConfigError


@pytest.fixture(scope="module")
def defaults():
    return compose()


def test_a_model_of_another_shape_lists_what_differs(defaults):
    other = dataclasses.replace(defaults.model, hidden_size=64, name="other", init_std=1.0)
    [(key, ours, theirs)] = defaults.model.shape_differences(other)
    assert (key, ours, theirs) == ("model.hidden_size", defaults.model.hidden_size, 64)


def test_every_number_in_the_schema_has_a_range():
    """Without a range, a bad number fails only in the trainer."""
    numbers = {key.name for key in keys.all_keys().values() if {int, float} & set(key.types)}
    assert numbers == {key.name for key in keys.all_keys().values() if key.range is not None}


def test_the_configuration_is_frozen(defaults):
    with pytest.raises(dataclasses.FrozenInstanceError):
        defaults.optim.lr = 1.0


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ([], "striped"),
        (["data.document_mask=false"], "zigzag"),
        (["data.document_mask=false", "sparsity=vertical_slash"], "striped"),
        (["data.document_mask=false", "topology.layout=striped"], "striped"),
        (["topology.layout=contiguous"], "contiguous"),
    ],
)
def test_auto_layout_is_striped_for_uneven_work(words, layout):
    assert compose(words).layout == layout


@pytest.mark.parametrize("degree", [-1, 0])
def test_a_wrong_degree_leaves_the_number_of_context_workers_open(defaults, degree):
    topology = dataclasses.replace(
        defaults.topology, workers=4, tensor_parallel=degree, context_parallel="auto"
    )
    assert topology.context_workers == "auto"


SPARSE = ["sparsity=vertical_slash", "model.num_layers=4"]


@pytest.mark.parametrize(
    ("value", "layers", "numbers", "text"),
    [
        ("0", 8, set(), ""),
        ("[]", 8, set(), ""),
        ("1", 8, {7}, "the last layer"),
        ("2", 8, {6, 7}, "the last 2 layers"),
        ("last:2", 8, {6, 7}, "the last 2 layers"),
        ("first:2", 8, {0, 1}, "the first 2 layers"),
        ("middle:2", 8, {3, 4}, "the middle 2 layers"),
        ("middle:1", 4, {1}, "the middle layer"),
        ("middle:3", 8, {2, 3, 4}, "the middle 3 layers"),
        ("every:3", 8, {2, 5}, "one layer in 3"),
        ("every:8", 8, {7}, "one layer in 8"),
        ("[5,0,2]", 8, {0, 2, 5}, "layers 0, 2, 5"),
        ("[3]", 8, {3}, "layer 3"),
        ("[0,2,1]", 8, {0, 1, 2}, "layers 0-2"),
        ("7", 8, {1, 2, 3, 4, 5, 6, 7}, "the last 7 layers"),
    ],
)
def test_dense_layers_are_a_number_a_list_or_a_rule(value, layers, numbers, text):
    words = ["sparsity=vertical_slash", f"model.num_layers={layers}"]
    config = compose([*words, f"sparsity.dense_layers={value}"])
    assert config.sparsity.dense_of(layers) == numbers
    assert config.pattern_layers == [layer for layer in range(layers) if layer not in numbers]
    assert config.sparsity.dense_text == text


def test_dense_attention_has_no_dense_layers_among_sparse_ones():
    sparsity = compose(["sparsity=dense"]).sparsity
    assert sparsity.dense_of(4) == frozenset()
    assert sparsity.dense_text == ""


def test_a_model_of_one_layer_can_have_no_dense_layer():
    with pytest.raises(ConfigError, match=r"num_layers=1; give fewer, or sparsity=dense"):
        compose(["sparsity=vertical_slash", "model.num_layers=1", "sparsity.dense_layers=1"])


def test_dense_attention_has_no_such_key():
    with pytest.raises(ConfigError, match=r"sparsity.dense_layers=1: is not a key of"):
        compose(["sparsity=dense", "sparsity.dense_layers=1"])


def test_layers_have_the_kinds_of_the_mask_or_of_the_pattern():
    sparse = compose([*SPARSE, "sparsity.dense_layers=1"])
    assert sparse.layer_kinds == {"sparse": [0, 1, 2], "dense": [3]}
    assert compose(SPARSE).layer_kinds == {"": [0, 1, 2, 3]}
    window = ["mask=sliding_window", "mask.window=8", "mask.full_every=4", "model.num_layers=4"]
    assert compose(window).layer_kinds == {"window": [0, 1, 2], "full": [3]}
