"""The banner says how a run differs from the folder of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.model.tokenizer_files import of_bytes
from mtrain_cli.training.initial_weights import remarks

QWEN = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 2048, "rope_theta": 1e6,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def banner_lines(folder: Path, *words: str, **changes: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    return remarks(compose([f"train.init_from={folder}", "seq=2k", *words]))


def test_a_setting_that_differs_is_shown_with_both_values(folder: Path) -> None:
    tokenizer = "the folder's tokenizer.json encodes the text"
    assert banner_lines(folder) == [tokenizer]
    line = "differs from its folder: model.rope.theta=2000000 (1000000 in the folder)"
    assert banner_lines(folder, "model.rope.theta=2e6") == [line, tokenizer]
    line = "differs from its folder: model.rope.scaling=yarn by 4 from 2k (none in the folder)"
    assert banner_lines(folder, "model.rope.scaling=yarn", "seq=8k") == [line, tokenizer]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert banner_lines(folder, rope_scaling=yarn) == [tokenizer]
    line = (
        "differs from its folder: model.rope.factor=8 (4 in the folder), "
        "model.rope.beta_fast=16 (32 in the folder)"
    )
    assert banner_lines(
        folder, "model.rope.factor=8", "model.rope.beta_fast=16", rope_scaling=yarn
    ) == [
        line,
        tokenizer,
    ]


def test_positions_beyond_the_folders_reach_are_reported(folder: Path) -> None:
    (line, _) = banner_lines(folder, "seq=8k")
    assert line.startswith(
        "seq=8k exceeds the 2k tokens that the model's rotary positions cover. "
        "Set model.rope.scaling=yarn or a larger model.rope.theta."
    )
    assert len(banner_lines(folder, "seq=8k", "model.rope.scaling=yarn")) == 2
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (line, _) = banner_lines(folder, "seq=8k", rope_scaling=yarn)
    assert line.startswith(
        "seq=8k exceeds the 2k tokens that the model's rotary positions cover. "
        "Set model.rope.factor=auto."
    )


def test_bytes_for_another_tokenizers_model_and_dropout_are_reported(folder: Path) -> None:
    lines = banner_lines(folder, "data.tokenizer=bytes", attention_dropout=0.1)
    assert lines[0].startswith(
        "text is encoded as bytes, but the weights expect the ids of their own tokenizer."
    )
    assert lines[1] == f"{folder}/config.json: attention_dropout=0.1: mtrain trains without dropout"
    (folder / "tokenizer.json").unlink()
    assert "since it has no tokenizer.json" in banner_lines(folder)[0]


def test_bytes_for_a_model_of_bytes_are_no_mistake(folder: Path) -> None:
    of_bytes(256, 257, 258).write(folder)
    (line,) = banner_lines(folder, "data.tokenizer=bytes", vocab_size=264)
    assert line == "text is encoded as bytes, as by the folder's tokenizer.json"


def test_a_resumed_run_does_not_need_the_folder_of_its_weights(folder: Path) -> None:
    banner_lines(folder)
    config = compose([f"train.init_from={folder}"])
    (folder / "config.json").unlink()
    assert remarks(config) == []
