"""Settings of experts: what contradicts them, and settings that need them."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.parallel_checks import balance_loss
from mtrain_cli.config.schema import ConfigError


def test_a_model_that_says_nothing_of_experts_is_dense(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny]\nmoe: null\nname: mine\n")
    config = compose(["model=mine"], tmp_path)
    assert config.model.moe.experts == 0 == config.model.expert_layers
    assert not config.model.has_experts(0)
    assert balance_loss(config) == 0.0


@pytest.mark.parametrize(("word", "value"), [("auto", 0.001), ("0", 0.0), ("0.5", 0.5)])
def test_the_balance_loss_is_on_by_default(word, value):
    assert balance_loss(compose(["model=tiny_moe", f"train.balance_loss={word}"])) == value


def test_the_first_layers_may_be_dense():
    model = compose(["model=tiny_moe", "model.moe.dense_layers=1"]).model
    assert [model.has_experts(layer) for layer in range(4)] == [False, True, True, True]
    assert model.expert_layers == 3


@pytest.mark.parametrize("memory", ["auto", "manual"])
@pytest.mark.parametrize("degree", ["auto", "2"])
def test_degree_and_memory_may_both_be_automatic(memory, degree):
    words = [f"train.memory={memory}", f"topology.expert_parallel={degree}"]
    assert compose(["model=tiny_moe", *words]).train.memory == memory


@pytest.mark.parametrize(
    ("words", "allowed", "refused"),
    [
        ([], "model.moe.top_k=1", "model.moe.top_k=0"),
        ([], "model.moe.top_k=8", "model.moe.top_k=9"),
        ([], "model.moe.expert_size=1", "model.moe.expert_size=0"),
        ([], "model.moe.dense_layers=3", "model.moe.dense_layers=4"),
        (["model.num_layers=1"], "model.moe.dense_layers=0", "model.moe.dense_layers=1"),
        (["model.moe.experts=1", "model.moe.top_k=1"], "topology.expert_parallel=1",
         "topology.expert_parallel=2"),
        (["topology.workers=8"], "topology.expert_parallel=8", "topology.expert_parallel=16"),
    ],
)  # fmt: skip
def test_a_rule_ends_at_its_last_allowed_value(words, allowed, refused):
    compose(["model=tiny_moe", *words, allowed])
    with pytest.raises(ConfigError) as caught:
        compose(["model=tiny_moe", *words, refused])
    assert len(caught.value.problems) == 1
