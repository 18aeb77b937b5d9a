"""Bad settings of pipeline parallelism end in one line that says what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands.typed_line import run

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.parallel_checks import require_degree_1
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.huggingface_config import config_json

MODEL = ("model.num_layers=6",)
TWO = "topology.pipeline_parallel=2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["topology.pipeline_parallel=0"], "topology.pipeline_parallel=0: must be at least 1"),
        (
            ["topology.pipeline_parallel=auto"],
            "topology.pipeline_parallel=auto: expected a whole number; allowed: 1 to 6",
        ),
        (
            ["topology.pipeline_parallel=auto", "topology.workers=8"],
            "topology.pipeline_parallel=auto: expected a whole number; allowed: 1, 2, 4",
        ),
        (
            [
                *("topology.pipeline_parallel=auto", "topology.workers=8"),
                *("topology.tensor_parallel=2", "topology.context_parallel=2"),
                "train.global_batch=2",
            ],
            "topology.pipeline_parallel=auto: expected a whole number; allowed: 1, 2",
        ),
        (
            ["topology.pipeline_parallel=7"],
            "topology.pipeline_parallel=7: 7 stages for model.num_layers=6; each needs a layer",
        ),
        (
            [TWO, "topology.virtual_stages=4", "train.global_batch=2"],
            "topology.pipeline_parallel=2: 2 stages x 4 virtual stages for model.num_layers=6; "
            "each needs a layer",
        ),
        (
            [TWO, "topology.stage_layers=[3,2]"],
            "topology.stage_layers=[3,2]: adds up to 5; must be model.num_layers=6",
        ),
        (
            [TWO, "topology.stage_layers=[6,0]"],
            "topology.stage_layers=[6,0]: each stage needs at least 1 layer",
        ),
        (
            [TWO, "topology.stage_layers=[2,2,2]"],
            "topology.stage_layers=[2,2,2]: has 3 numbers; must have 2 "
            "(topology.pipeline_parallel=2)",
        ),
        (
            [TWO, "topology.stage_layers=three"],
            "topology.stage_layers=three: expected auto, or a list of whole numbers such as "
            "[9,9,9,8]",
        ),
        (
            ["topology.schedule=gpipe"],
            "topology.schedule=gpipe: needs topology.pipeline_parallel of at least 2",
        ),
        (
            ["topology.virtual_stages=2"],
            "topology.virtual_stages=2: needs topology.pipeline_parallel of at least 2",
        ),
        (
            ["topology.stage_layers=[6]"],
            "topology.stage_layers=[6]: needs topology.pipeline_parallel of at least 2",
        ),
        (
            [TWO, "topology.schedule=interleaved"],
            "topology.schedule=interleaved: needs topology.virtual_stages of at least 2",
        ),
        (
            [TWO, "topology.schedule=1f1b", "topology.virtual_stages=2"],
            "topology.virtual_stages=2: topology.schedule=1f1b has one per worker; give "
            "topology.schedule=interleaved, or topology.virtual_stages=1",
        ),
        (
            [TWO, "topology.virtual_stages=2", "topology.workers=2", "train.global_batch=3"],
            "train.global_batch=3: gives each stage 3 micro-batches; topology.schedule=interleaved "
            "needs a multiple of topology.pipeline_parallel=2, so a multiple of 2 sequences",
        ),
        (
            [TWO, "topology.workers=5"],
            "topology.pipeline_parallel=2: does not divide topology.workers=5; allowed: 1, 5",
        ),
        (
            [TWO, "topology.tensor_parallel=2", "topology.workers=6"],
            "topology.pipeline_parallel=2 x topology.tensor_parallel=2 = 4: does not divide "
            "topology.workers=6",
        ),
        (
            [TWO, "topology.workers=8", "topology.context_parallel=8"],
            "topology.pipeline_parallel=2 x topology.context_parallel=8 = 16: does not divide "
            "topology.workers=8",
        ),
        (
            [TWO, "train.offload_activations=3"],
            "topology.pipeline_parallel=2: does not support train.offload_activations=3; give "
            "train.offload_activations=false",
        ),
        (
            [TWO, "optim.offload=true"],
            "topology.pipeline_parallel=2: does not support optim.offload=true; give "
            "optim.offload=false",
        ),
    ],
)
def test_each_conflict_has_one_line(words, line):
    with pytest.raises(ConfigError) as error:
        compose([*MODEL, *words])
    assert error.value.problems == (line,)


@pytest.mark.parametrize(
    ("words", "allowed", "refused"),
    [
        ([], "topology.pipeline_parallel=6", "topology.pipeline_parallel=7"),
        (
            [TWO, "topology.virtual_stages=3"],
            "train.global_batch=2 topology.workers=2",
            "train.global_batch=1 topology.workers=2",
        ),
        ([TWO], "topology.stage_layers=[1,5]", "topology.stage_layers=[0,6]"),
        (
            [TWO, "topology.virtual_stages=2", "topology.workers=2"],
            "train.global_batch=2",
            "train.global_batch=1",
        ),
        (
            [TWO, "topology.schedule=gpipe"],
            "topology.virtual_stages=1",
            "topology.virtual_stages=2",
        ),
        ([TWO], "topology.workers=2", "topology.workers=1"),
        ([TWO], "topology.workers=2", "topology.workers=3"),
    ],
)
def test_a_rule_ends_at_its_last_allowed_value(words, allowed, refused):
    compose([*MODEL, *words, *allowed.split()])
    with pytest.raises(ConfigError) as error:
        compose([*MODEL, *words, *refused.split()])
    assert len(error.value.problems) == 1


def test_a_list_of_virtual_stages_names_both_degrees():
    words = [TWO, "topology.virtual_stages=2", "train.global_batch=2"]
    with pytest.raises(ConfigError) as error:
        compose([*MODEL, *words, "topology.stage_layers=[6]"])
    assert error.value.problems == (
        "topology.stage_layers=[6]: has 1 number; must have 4 (topology.pipeline_parallel=2 x "
        "topology.virtual_stages=2)",
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


def test_other_commands_refuse_it_by_name():
    require_degree_1(compose(list(MODEL)), "pipeline_parallel", "mtrain simulate")
    with pytest.raises(ConfigError) as error:
        require_degree_1(compose([*MODEL, TWO]), "pipeline_parallel", "mtrain simulate")
    assert error.value.problems == (
        "topology.pipeline_parallel=2: not supported by `mtrain simulate`; leave this setting out",
    )


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
