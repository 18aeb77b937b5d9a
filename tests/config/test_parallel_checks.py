"""Settings of experts, tensor and pipeline parallelism: what is allowed, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands.typed_line import run

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.parallel_checks import balance_loss, require_degree_1
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.huggingface_config import config_json

MODEL = ("model.num_layers=6",)
TWO = "topology.pipeline_parallel=2"
MOE = ("model=tiny_moe",)


@pytest.mark.parametrize(
    ("words", "allowed", "refused"),
    [
        (MODEL, "topology.pipeline_parallel=6", "topology.pipeline_parallel=7"),
        (
            [*MODEL, TWO, "topology.virtual_stages=3"],
            "train.global_batch=2 topology.workers=2",
            "train.global_batch=1 topology.workers=2",
        ),
        ([*MODEL, TWO], "topology.stage_layers=[1,5]", "topology.stage_layers=[0,6]"),
        (
            [*MODEL, TWO, "topology.virtual_stages=2", "topology.workers=2"],
            "train.global_batch=2",
            "train.global_batch=1",
        ),
        (
            [*MODEL, TWO, "topology.schedule=gpipe"],
            "topology.virtual_stages=1",
            "topology.virtual_stages=2",
        ),
        ([*MODEL, TWO], "topology.workers=2", "topology.workers=1"),
        ([*MODEL, TWO], "topology.workers=2", "topology.workers=3"),
        ([*MOE], "model.moe.top_k=1", "model.moe.top_k=0"),
        ([*MOE], "model.moe.top_k=8", "model.moe.top_k=9"),
        ([*MOE], "model.moe.expert_size=1", "model.moe.expert_size=0"),
        ([*MOE], "model.moe.dense_layers=3", "model.moe.dense_layers=4"),
        ([*MOE, "model.num_layers=1"], "model.moe.dense_layers=0", "model.moe.dense_layers=1"),
        (
            [*MOE, "model.moe.experts=1", "model.moe.top_k=1"],
            "topology.expert_parallel=1",
            "topology.expert_parallel=2",
        ),
        ([*MOE, "topology.workers=8"], "topology.expert_parallel=8", "topology.expert_parallel=16"),
    ],
)
def test_a_rule_ends_at_its_last_allowed_value(words, allowed, refused):
    compose([*words, *allowed.split()])
    with pytest.raises(ConfigError) as error:
        compose([*words, *refused.split()])
    assert len(error.value.problems) == 1


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


HEADS = ("model.num_heads=12", "model.num_kv_heads=6", "model.intermediate_size=384")


def test_one_worker_supports_what_two_do_not():
    assert compose([*HEADS, "topology.tensor_parallel=1", "optim.offload=true"]).optim.offload


@pytest.mark.parametrize(("heads", "allowed", "refused"), [(1, 1, 2), (2, 2, 3), (6, 6, 12)])
def test_the_largest_degree_is_the_common_divisor(heads, allowed, refused):
    words = [*HEADS, f"model.num_kv_heads={heads}"]
    compose([*words, f"topology.tensor_parallel={allowed}"])
    with pytest.raises(ConfigError, match=r"must divide model\.num_heads=12"):
        compose([*words, f"topology.tensor_parallel={refused}"])


def test_an_allowed_degree_gives_each_worker_a_part_of_the_model():
    config = compose([*HEADS, "topology.tensor_parallel=6"])
    part = config.of_worker.model
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 64)
    assert part.hidden_size == config.model.hidden_size
    assert config.of_worker.of_worker.topology.tensor_parallel == 6
    assert compose(list(HEADS)).of_worker == compose(list(HEADS))


def test_other_commands_refuse_it_by_name():
    require_degree_1(compose(list(HEADS)), "tensor_parallel", "mtrain simulate")
    config = compose([*HEADS, "topology.tensor_parallel=2"])
    with pytest.raises(ConfigError) as error:
        require_degree_1(config, "tensor_parallel", "mtrain simulate")
    assert error.value.problems == (
        "topology.tensor_parallel=2: not supported by `mtrain simulate`; leave this setting out",
    )


def test_allowed_settings_pass():
    config = compose([*MODEL, TWO, "topology.stage_layers=[2,4]"])
    assert config.topology.stage_layers == (2, 4)
    assert compose(list(MODEL)).topology.stage_layers == "auto"


def test_the_batch_is_split_over_the_groups_that_share_sequences():
    words = [*MODEL, "topology.workers=8", "topology.context_parallel=2"]
    compose([*words, TWO, "train.global_batch=2"])
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        compose([*words, "train.global_batch=2"])


@pytest.mark.parametrize(
    "command",
    [
        "profile imbalance --attention-only",
        "profile non-attention",
        "profile sparsity",
        "generate . --prompt a",
    ],
)
def test_a_command_that_does_not_support_it_ends_with_exit_code_2(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = compose(list(MODEL)).model
    described = config_json(model, rope_factor=1.0, seq=64, dtype="float32", mask=CAUSAL)
    Path("config.json").write_text(json.dumps(described))
    refused = run(f"{command} {TWO}")
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("mtrain: topology.pipeline_parallel=2: "), line
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "nothing is written"
