"""Files of earlier versions."""

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.earlier_versions import (
    LATER,
    REMOVED,
    RENAMED,
    RENAMED_METRICS,
    completed,
    renamed,
)
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError


def test_former_names_get_the_current_ones():
    assert renamed({"sparsity.bars": 3, "seq": 4}) == {"sparsity.columns": 3, "seq": 4}
    assert renamed({"bars": 3}, RENAMED_METRICS) == {"columns": 3}
    assert not set(RENAMED) & set(keys.all_keys()), "an old name must not be in use again"


def test_missing_keys_get_the_behaviour_of_the_version_that_lacked_them():
    assert completed({"seq": 4096})["train.shard"] == "full"
    assert completed({"train.shard": "gradients"})["train.shard"] == "gradients"
    assert completed({"sparsity.pattern": "moba"})["sparsity.gate"] == "block"
    assert completed({"sparsity.pattern": "vertical_slash"})["sparsity.slash_unit"] == "block"
    assert completed({"sparsity.pattern": "vertical_slash"})["sparsity.p_of"] == "all"
    for name in ("sparsity.gate", "sparsity.slash_unit", "sparsity.p_of"):
        assert name not in completed({"sparsity.pattern": "dense"})
    for kind, full_first in (("sliding_window", 0), ("prefix_lm", None)):
        assert completed({"mask.kind": kind}).get("mask.full_first") == full_first


def test_events_of_tensorboard_are_a_tracker():
    assert completed({"run.tensorboard": True})["run.loggers"] == ["tensorboard"]
    assert completed({"run.tensorboard": False})["run.loggers"] == []
    assert completed({"run.loggers": ["wandb"]})["run.loggers"] == ["wandb"]


def test_a_mistake_with_a_replaced_key_names_what_to_write_now(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "old.yaml").write_text(
        "# @package _global_\nrun:\n  tensorboard: true\n"
    )
    for words in (["run.tensorboard=true"], ["recipe=old"]):
        with pytest.raises(ConfigError, match=r"did you mean run\.loggers=\[tensorboard\]\?"):
            compose(words, tmp_path)


def test_keys_without_effect_are_left_out():
    assert REMOVED[0] not in completed({REMOVED[0]: "python"})


def test_masks_of_earlier_versions_lack_keys():
    assert completed({"mask.kind": "video"})["mask.causal"] is None
    old = completed({"mask.kind": "sliding_window", "mask.window": 64})
    assert (old["mask.window"], old["mask.global_tokens"], old["mask.full_every"]) == (64, 0, 0)


def test_chunks_that_saw_earlier_chunks_are_called_block_window():
    old = completed({"mask.kind": "chunked", "mask.chunk": 64, "mask.back": 2})
    found = {key: old.get(f"mask.{key}") for key in ("kind", "block", "chunk", "back")}
    assert found == {"kind": "block_window", "block": 64, "chunk": None, "back": 2}
    new = completed({"mask.kind": "chunked", "mask.chunk": 64})
    assert (new["mask.kind"], new["mask.chunk"], new.get("mask.block")) == ("chunked", 64, None)


def test_only_existing_keys_have_a_value_for_older_files():
    assert set(LATER) <= set(keys.all_keys())
    assert set(RENAMED.values()) <= set(keys.all_keys())


def test_a_file_without_a_newer_key_loads_with_its_old_behavior(tmp_path):
    config = compose([])
    save(config, tmp_path / "resolved.yaml")
    kept = [
        line
        for line in (tmp_path / "resolved.yaml").read_text().splitlines()
        if "offload_gradients" not in line
    ]
    (tmp_path / "resolved.yaml").write_text("\n".join(kept))
    assert load(tmp_path / "resolved.yaml") == config


def test_a_file_with_a_removed_key_loads(tmp_path):
    config, file = compose([]), tmp_path / "resolved.yaml"
    save(config, file)
    file.write_text(file.read_text().replace("train:\n", "train:\n  expert_capacity: 1.0\n"))
    assert load(file) == config
