"""Bad settings of pipeline parallelism end in one line that says what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands.typed_line import run

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.huggingface_config import config_json

MODEL = ("model.num_layers=6",)
TWO = "topology.pipeline_parallel=2"


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
