"""The typed configuration."""

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys


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
