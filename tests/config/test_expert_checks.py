"""Settings of experts: what contradicts them, and settings that need them."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.parallel_checks import balance_loss
from mtrain_cli.config.schema import ConfigError


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["model=tiny_moe", "model.moe.top_k=9"],
            ["model.moe.top_k=9: must be between 1 and model.moe.experts=8"],
        ),
        (["model=tiny_moe", "model.moe.top_k=0"], ["model.moe.top_k=0: must be between 1"]),
        (["model=tiny_moe", "model.moe.expert_size=0"], ["model.moe.expert_size=0: must be"]),
        (["model=tiny_moe", "model.moe.dense_layers=4"], ["model.moe.dense_layers=4: leaves no"]),
        (["model=tiny_moe", "train.expert_capacity=-1"], ["train.expert_capacity=-1: must be 0"]),
        (["model=tiny_moe", "train.balance_loss=-1"], ["train.balance_loss=-1: must be auto or"]),
        (["model=tiny_moe", "train.keep_mlp=2"], ["train.keep_mlp=2: does not support experts"]),
        (["model.moe.score=tanh"], ["model.moe.score=tanh: expected one of softmax, sigmoid"]),
        (
            ["model=tiny_moe", "model.moe.experts=0"],
            [
                "model.moe.experts=0: contradicts model.moe.top_k=2, model.moe.expert_size=192; "
                "give a number of experts, or choose a dense model, such as model=tiny\n"
            ],
        ),
        (["model.moe.top_k=2"], ["model.moe.top_k=2: a model with model.moe.experts=0 has no"]),
        (
            ["model.moe.expert_size=64"],
            ["model.moe.expert_size=64: a model with model.moe.experts=0 has no router"],
        ),
        (
            ["train.balance_loss=0.1", "train.router_z_loss=0.1", "train.balance_bias=0.1"],
            ["train.balance_loss=0.1: ", "train.router_z_loss=0.1: ", "train.balance_bias=0.1: "],
        ),
        (
            ["model=tiny_moe", "topology.expert_parallel=3", "topology.workers=2"],
            ["topology.expert_parallel=3: must divide model.moe.experts=8; allowed: auto, 1, 2\n"],
        ),
        (
            ["model=tiny_moe", "topology.expert_parallel=3"],
            [
                "topology.expert_parallel=3: must divide model.moe.experts=8; allowed: auto, 1, "
                "2, 4, 8, if it divides the workers\n"
            ],
        ),
        (
            [
                "model=tiny_moe",
                "topology.expert_parallel=3",
                "topology.workers=8",
                "topology.pipeline_parallel=2",
            ],
            [
                "topology.expert_parallel=3: must divide model.moe.experts=8; allowed: auto, 1, 2, "
                "4\n"
            ],
        ),
        (["train.expert_capacity=2"], ["train.expert_capacity=2: a model with model.moe.expe"]),
    ],
)
def test_each_contradiction_is_one_line(words, lines):
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert len(caught.value.problems) == len(lines), caught.value.problems
    for problem, line in zip(caught.value.problems, lines, strict=True):
        assert f"{problem}\n".startswith(line)


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
