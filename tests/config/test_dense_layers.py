"""Dense layers at the end of a sparse model: what they allow, and which commands refuse them."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.dense_layers import require_sparse_layers
from mtrain_cli.config.schema import ConfigError

SPARSE = ["sparsity=vertical_slash", "model.num_layers=4"]


def test_the_last_layers_are_dense():
    sparsity = compose([*SPARSE, "sparsity.dense_layers=2"]).sparsity
    assert sparsity.dense_of(4) == {2, 3}
    assert compose(SPARSE).sparsity.dense_of(4) == frozenset()
    assert compose(["sparsity=dense"]).sparsity.dense_of(4) == frozenset()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("sparsity.dense_layers=4", "=4: leaves no sparse layer of model.num_layers=4; give at"),
        ("sparsity.dense_layers=-1", "=-1: must be 0 or more"),
        ("profile.every=5", "=1: is not supported with profile.every=5; give 0"),
        ("topology.pipeline_parallel=2", "=1: is not supported with topology.pipeline_parallel"),
    ],
)
def test_a_contradiction_is_one_line(word, line):
    with pytest.raises(ConfigError) as caught:
        compose([*SPARSE, "sparsity.dense_layers=1", "topology.workers=2", word])
    assert caught.value.problems[0].startswith(f"sparsity.dense_layers{line}")


def test_dense_attention_has_no_such_key():
    with pytest.raises(ConfigError, match=r"sparsity.dense_layers=1: is not a key of"):
        compose(["sparsity=dense", "sparsity.dense_layers=1"])


def test_a_command_that_takes_layers_to_be_alike_refuses():
    require_sparse_layers(compose(SPARSE), "mtrain simulate")
    require_sparse_layers(compose(["sparsity=dense"]), "mtrain simulate")
    with pytest.raises(ConfigError, match=r"dense_layers=1: not supported by `mtrain simulate`"):
        require_sparse_layers(compose([*SPARSE, "sparsity.dense_layers=1"]), "mtrain simulate")
