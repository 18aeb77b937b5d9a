"""transformers and mtrain read the same model from a config.json, and none that differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import LLAMA3, PLAIN, SEQ, YARN, edit_config, export, tiny_model

from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.config.schema import FAMILIES, ConfigError, MoeConfig
from mtrain_cli.model.huggingface_config import config_json, read_config, read_mask


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rope", [PLAIN, YARN, LLAMA3], ids=["plain", "yarn", "llama3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_mtrains_writer_and_that_of_transformers(tmp_path, family, rope, tied):
    transformers = pytest.importorskip("transformers")
    model = tiny_model(family, tied=tied, rope=rope)
    export(tmp_path / "hf", model)
    expected = dataclasses.replace(
        model, rope=dataclasses.replace(rope, original_max_position=SEQ if rope is PLAIN else 64)
    )
    got, max_position = read_config(tmp_path / "hf")
    assert max_position == SEQ
    assert dataclasses.replace(got, name="tiny") == expected
    transformers.AutoConfig.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "theirs")
    got, _ = read_config(tmp_path / "theirs")
    assert dataclasses.replace(got, name="tiny") == expected


QWEN25_3B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 32768, "max_window_layers": 36,
    "model_type": "qwen2", "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


LLAMA31_8B = {
    "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336,
    "mlp_bias": False, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip


LLAMA32 = LLAMA31_8B | {
    "rope_scaling": dict(LLAMA31_8B["rope_scaling"], factor=32.0),
    "tie_word_embeddings": True,
}


QWEN25_14B = QWEN25_3B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
    "num_hidden_layers": 48, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip


QWEN3_14B = {
    "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 17408, "max_position_embeddings": 32768, "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


MISTRAL_7B = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
}  # fmt: skip


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 32768, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


MIXTRAL_8X7B = MISTRAL_7B | {
    "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
    "output_router_logits": False, "router_aux_loss_coef": 0.02, "vocab_size": 32000,
}  # fmt: skip


def sizes(hidden: int, intermediate: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"
    return dict(zip(names, (hidden, intermediate, heads, layers), strict=True)) | more


PUBLISHED = {
    "qwen3b": QWEN25_3B,
    "qwen1.5b": QWEN25_3B | sizes(1536, 8960, 12, 28),
    "qwen14b": QWEN25_14B,
    "qwen32b": QWEN25_14B | sizes(5120, 27648, 40, 64),
    "qwen3_14b": QWEN3_14B,
    "qwen3_32b": QWEN3_14B | sizes(5120, 25600, 64, 64),
    "qwen3_4b": QWEN3_14B | sizes(2560, 9728, 32, 36, tie_word_embeddings=True),
    "llama8b": LLAMA31_8B,
    "llama1b": LLAMA32 | sizes(2048, 8192, 32, 16),
    "llama3b": LLAMA32 | sizes(3072, 8192, 24, 28),
    "mistral7b": MISTRAL_7B,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "mixtral_8x7b": MIXTRAL_8X7B,
}


@pytest.mark.parametrize("shape", PUBLISHED)
def test_published_configs_equal_the_shipped_shapes(tmp_path, shape):
    shipped = Path(__file__).parents[2] / "conf" / "model" / f"{shape}.yaml"
    ships = yaml.safe_load(shipped.read_text())
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[shape]))
    read = dataclasses.asdict(read_config(tmp_path)[0])
    ships_rope, read_rope = ships.pop("rope"), read.pop("rope")
    assert read.pop("moe") == dataclasses.asdict(MoeConfig(**ships.pop("moe", {})))
    assert read | {"name": shape} == ships
    assert read_rope["theta"] == ships_rope["theta"]
    assert read_rope["original_max_position"] == ships_rope["original_max_position"]
    assert read_rope["scaling"] == ("llama3" if shape.startswith("llama") else "none")
    assert shape.startswith("llama") is (read_rope["factor"] == ships_rope["factor"])


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_theta": 5e5}, {"theta": 5e5, "scaling": "none"}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            {"theta": 5e5, "scaling": "none"}),
        ({}, {"theta": 10000.0}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 64},
            {"theta": 5e5, "scaling": "yarn", "factor": 4.0, "original_max_position": 64}),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5},
            "original_max_position_embeddings": 32},
            {"theta": 5e5, "scaling": "llama3", "factor": 8.0, "original_max_position": 32}),
    ],
)  # fmt: skip
def test_rotary_settings_are_read_from_every_place(tmp_path, given, rope):
    export(tmp_path / "hf", tiny_model("llama"))
    edit_config(
        tmp_path / "hf",
        **({"rope_theta": ..., "rope_scaling": ..., "rope_parameters": ...} | given),
    )
    read_rope = read_config(tmp_path / "hf")[0].rope
    assert {name: getattr(read_rope, name) for name in rope} == rope


def test_missing_kv_heads_default_to_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 97, **sizes(64, 96, 32, 1)}
    for family in FAMILIES:
        for given in (
            ({}, {"num_key_value_heads": None}) if family in ("qwen2", "qwen3", "llama") else ({},)
        ):  # transformers does not allow null for the others
            raw = {"model_type": family, "sliding_window": None, **shape, **given}
            (tmp_path / "config.json").write_text(json.dumps(raw))
            model, max_position = read_config(tmp_path)
            theirs = transformers.AutoConfig.from_pretrained(tmp_path)
            assert (model.num_kv_heads, max_position) == (
                theirs.num_key_value_heads,
                theirs.max_position_embeddings,
            ), (family, given)
            assert model.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
            assert model.rope.theta == theirs.rope_parameters["rope_theta"]
            assert model.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(
    ("family", "full"),
    [
        ("qwen2", {}),
        ("qwen2", {"full_every": 2}),
        ("qwen2", {"full_first": 1}),
        ("qwen3", {"full_every": 3}),
        ("qwen3", {"full_first": 2}),
        ("mistral", {}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
    ],
)
def test_a_sliding_window_is_written_and_read(tmp_path, family, full):
    transformers = pytest.importorskip("transformers")
    export(tmp_path / "hf", tiny_model(family))
    assert read_mask(tmp_path / "hf") is None
    mask = SlidingWindow(9, **full)
    export(tmp_path / "windowed", tiny_model(family), mask=mask)
    assert read_mask(tmp_path / "windowed") == mask
    read_config(tmp_path / "windowed")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "windowed")
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_mask(tmp_path / "theirs") == mask
    if family == "mixtral":  # transformers' default is no window
        return
    edit_config(tmp_path / "windowed", sliding_window=...)
    of_transformers = SlidingWindow(4096, **full)
    assert read_mask(tmp_path / "windowed") == of_transformers, "the default of transformers"


@pytest.mark.parametrize("first", [1, 2])
def test_layers_below_max_window_layers_are_full_in_transformers_too(tmp_path, first):
    transformers = pytest.importorskip("transformers")
    mask = SlidingWindow(9, full_first=first)
    export(tmp_path / "hf", tiny_model("qwen2"), mask=mask)
    types = transformers.AutoConfig.from_pretrained(tmp_path / "hf").layer_types
    # Versions of transformers without layer_types read max_window_layers alone.
    edit_config(tmp_path / "hf", layer_types=...)
    assert read_mask(tmp_path / "hf") == mask
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert theirs.max_window_layers == first
    assert theirs.layer_types == types
    assert [kind == "full_attention" for kind in types] == list(map(mask.is_full, range(3)))


def test_a_window_of_no_layer_is_no_window(tmp_path):
    export(tmp_path / "hf", tiny_model("qwen2"), mask=SlidingWindow(9))
    edit_config(tmp_path / "hf", layer_types=..., max_window_layers=3)
    assert read_mask(tmp_path / "hf") is None


def test_a_wrong_window_or_layer_type_is_one_line(tmp_path):
    export(tmp_path / "hf", tiny_model("qwen2"), mask=SlidingWindow(9, full_every=2))
    types = ["sliding_attention", "full_attention", "full_attention"]
    edit_config(tmp_path / "hf", sliding_window=0, layer_types=types)
    with pytest.raises(ConfigError, match=r"sliding_window=0: must be a positive integer$"):
        read_mask(tmp_path / "hf")
    edit_config(tmp_path / "hf", sliding_window=9, layer_types=[None, None, None])
    with pytest.raises(ConfigError, match=r"layer_types has null, which is not supported"):
        read_mask(tmp_path / "hf")


def test_windows_that_a_family_lacks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"mask.window=9: a llama model .*family=mistral"):
        export(tmp_path / "hf", tiny_model("llama"), mask=SlidingWindow(9))
    with pytest.raises(ConfigError, match=r"mask.full_every=2: all layers of a mistral model"):
        export(tmp_path / "hf", tiny_model("mistral"), mask=SlidingWindow(9, full_every=2))
    with pytest.raises(ConfigError, match=r"mask.full_first=1: all layers of a mistral model"):
        export(tmp_path / "hf", tiny_model("mistral"), mask=SlidingWindow(9, full_first=1))
    export(tmp_path / "hf", tiny_model("llama"), mask=MASKS["full"]())


def test_a_shape_that_transformers_refuses_is_not_written(tmp_path):
    with pytest.raises(
        ConfigError, match=r"model.num_heads=3: must divide model.hidden_size=40 in a llama model"
    ):
        export(tmp_path / "hf", tiny_model("llama", num_heads=3, num_kv_heads=1))
    assert not list(tmp_path.iterdir())
    export(tmp_path / "hf", tiny_model("mistral", num_heads=3, num_kv_heads=1))


def test_a_shape_without_a_family_is_not_written(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"model.qkv_bias=False, model.qk_norm=True: a Hugging Face llama model has "
        "qkv_bias=False, qk_norm=False",
    ):
        export(tmp_path / "hf", tiny_model("llama", qk_norm=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; only 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        *(
            ("qwen3_moe", {"mlp_only_layers": layers}, "only a list of the first layers")
            for layers in ([0, 1, 2], "0", ["a"], [-1], [3], [0, 0])
        ),
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
        ("mixtral", {"num_hidden_layers": -1}, "num_hidden_layers=-1: must be a positive integer"),
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
