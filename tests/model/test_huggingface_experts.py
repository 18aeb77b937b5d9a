"""Experts that mtrain would compute otherwise are neither read nor written."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import edit_config, export, tiny_model

from mtrain_cli.config.schema import ConfigError, MoeConfig
from mtrain_cli.model.huggingface_config import config_json, read_config


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; only 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "names all layers"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "must be a list of layer numbers"),
        (
            "qwen3_moe",
            {"mlp_only_layers": ["a"]},
            r"mlp_only_layers=\['a'\]: must be a list of layer numbers",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [-1]},
            r"mlp_only_layers=\[-1\]: must be different layer numbers from 0 to 2",
        ),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "must be different layer numbers from 0 to 2"),
        ("qwen3_moe", {"mlp_only_layers": [0, 0]}, "must be different layer numbers from 0 to 2"),
        ("qwen3_moe", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be at most .* 6"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_experts=6 and num_local_experts=8 contradict"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob=yes: must be true or false"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, 'only "softmax" is'),
        ("qwen3_moe", {"shared_expert_intermediate_size": 24}, "only 0 is"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "only 1.0 is"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            "max_window_layers=2: .*; only 0 is supported",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0: must be a positive integer"),
        ("mixtral", {"num_experts_per_tok": 2.5}, "num_experts_per_tok=2.5: must be a positive"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, family, changes, message):
    export(tmp_path / "hf", tiny_model(family))
    read_config(tmp_path / "hf")
    edit_config(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path / "hf")
    assert len(caught.value.problems) == 1


def test_the_first_layers_may_lack_experts(tmp_path):
    export(tmp_path / "hf", tiny_model("qwen3_moe"))
    edit_config(tmp_path / "hf", mlp_only_layers=[1, 0])
    assert read_config(tmp_path / "hf")[0].moe.dense_layers == 2
    edit_config(tmp_path / "hf", mlp_only_layers=None, num_experts=..., num_local_experts=6)
    assert read_config(tmp_path / "hf")[0].moe == MoeConfig(
        experts=6, top_k=2, expert_size=24, normalize=False
    )


@pytest.mark.parametrize(
    ("family", "moe", "message"),
    [
        ("qwen3_moe", {"score": "sigmoid"}, "model.moe.score=sigmoid: .* only score=softmax"),
        ("qwen3_moe", {"scale": 2.5}, "model.moe.scale=2.5: .* only scale=1"),
        ("qwen3_moe", {"shared_size": 8}, "model.moe.shared_size=8: .* only shared_size=0"),
        ("mixtral", {"dense_layers": 1}, "model.moe.dense_layers=1: .* mixtral"),
        ("mixtral", {"normalize": False}, "model.moe.normalize=false: .* only normalize=true"),
        ("qwen3", {}, "model.moe.experts=6: does not suit a Hugging Face qwen3 model"),
        ("mixtral", {"experts": 0}, "model.moe.experts=0: does not suit .*mixtral"),
    ],
)
def test_experts_that_a_family_lacks_are_not_written(family, moe, message):
    settings: dict[str, Any] = {"experts": 6, "top_k": 2, "expert_size": 24}
    model = tiny_model(family, moe=MoeConfig(**(settings | moe)))
    with pytest.raises(ConfigError, match=message):
        config_json(model, rope_factor=1.0, seq=64, dtype="float32")
