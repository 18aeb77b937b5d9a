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


def test_the_last_layers_are_dense():
    sparsity = compose([*SPARSE, "sparsity.dense_layers=2"]).sparsity
    assert sparsity.dense_of(4) == {2, 3}
    assert compose(SPARSE).sparsity.dense_of(4) == frozenset()
    assert compose(["sparsity=dense"]).sparsity.dense_of(4) == frozenset()


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


@pytest.mark.parametrize(
    ("number", "text"), [(0, ""), (1, "the last layer"), (2, "the last 2 layers")]
)
def test_dense_layers_have_a_name_for_the_user(number, text):
    assert compose([*SPARSE, f"sparsity.dense_layers={number}"]).sparsity.last_layers == text
    assert compose(["sparsity=dense"]).sparsity.last_layers == ""


def test_all_layers_but_one_may_be_dense():
    assert compose([*SPARSE, "sparsity.dense_layers=3"]).sparsity.dense_of(4) == {1, 2, 3}
