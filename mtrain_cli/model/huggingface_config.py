"""The config.json of a Hugging Face folder, read as a `ModelConfig` and written from one.

Both spellings are understood and written: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (transformers 4).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, validate
from mtrain_cli.config.schema import ConfigError, ModelConfig, RopeConfig

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
}  # fmt: skip
# What transformers takes where a config.json lacks the key.
_MAX_POSITION = {"qwen2": 32768, "qwen3": 32768, "llama": 2048, "mistral": 131072}
_KV_HEADS = {"qwen2": 32, "qwen3": 32, "mistral": 8}  # llama: as many as query heads
# Settings that may stand beside rope_parameters or rope_scaling instead of in them.
_OUTER_ROPE = ("rope_theta", "original_max_position_embeddings")
# Keys that one architecture has and another lacks. Without a window transformers would give Mistral one of 4096.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
}
_BETA_FAST, _BETA_SLOW = (
    32.0,
    1.0,
)  # what a config.json that leaves them out means (YaRN, section 3.2)
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0  # Llama 3.1


# The key of the configuration that takes the value, and bounds it.
_KEYS = {
    "vocab_size": "model.vocab_size", "hidden_size": "model.hidden_size", "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads", "num_key_value_heads": "model.num_kv_heads", "head_dim": "model.head_dim",
    "intermediate_size": "model.intermediate_size", "rms_norm_eps": "model.rms_norm_eps", "initializer_range": "model.init_std",
    "max_position_embeddings": "model.rope.original_max_position", "rope_theta": "model.rope.theta", "factor": "model.rope.factor",
    "original_max_position_embeddings": "model.rope.original_max_position", "beta_fast": "model.rope.beta_fast",
    "beta_slow": "model.rope.beta_slow", "low_freq_factor": "model.rope.low_freq_factor", "high_freq_factor": "model.rope.high_freq_factor",
}  # fmt: skip


def _shown(value: Any) -> str:
    """A value of JSON in a message; a word without quotes."""
    return (
        _as_json(value)
        if not isinstance(value, str)
        else value
        if len(value) <= 60
        else f"{value[:60]}..."
    )


def _as_json(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # more digits than Python writes
        text = "..."
    return text if len(text) <= 60 else f"{text[:60]}..."


class _ConfigFields:
    """Reads typed fields of a JSON object and collects what is wrong with them."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path, self.raw, self.problems = path, raw, list[str]()

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """The positive int or float under ``key``; a missing or null one is ``default``, or a problem if that is None."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            self.problems.append(f"{self.path}: {key} is missing")
            return kind(1)
        if not documents.is_number(value) or kind(value) != value or value <= 0:
            self.problems.append(
                f"{self.path}: {key}={_shown(value)}: must be a positive {'integer' if kind is int else 'number'}"
            )
            return kind(1)
        if key in _KEYS and (said := validate.out_of_range(_KEYS[key], kind(value))) is not None:
            self.problems.append(f"{self.path}: {key}={_shown(value)}: {said}")
            return kind(1)
        return kind(value)

    def flag(self, key: str) -> bool:
        """True or false; a missing or null one is false."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{self.path}: {key}={_shown(value)}: must be true or false")
        return value is True

    def refuse(self, key: str, allowed: Any) -> None:
        """A feature that the decoder does not have: anything but ``allowed``, null or nothing is a problem."""
        value = self.raw.get(key)
        if value is not None and value != allowed:
            self.problems.append(
                f"{self.path}: {key}={_as_json(value)} is not supported; only {json.dumps(allowed)} is"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError when there is none."""
    try:
        raw = documents.read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; a Hugging Face folder has config.json and safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({documents.reason(error)})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return raw


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """The model of ``folder``/config.json, and the longest sequence in tokens that it is meant for (max_position_embeddings).

    Raises ConfigError that lists every missing field and every feature that the decoder lacks.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: model_type={_shown(family)}: must be one of {', '.join(ARCHITECTURES)}"
        )
    fields = _ConfigFields(path, raw)
    fields.refuse("hidden_act", "silu")
    fields.refuse("attention_bias", False)
    fields.refuse("mlp_bias", False)
    _refuse_windows(fields, family)
    fields.refuse("quantization_config", None)
    hidden_size, num_heads = (
        fields.number("hidden_size", int),
        fields.number("num_attention_heads", int),
    )
    max_position = fields.number("max_position_embeddings", int, _MAX_POSITION[family])
    model = ModelConfig(
        name=folder.resolve().name,
        family=family,
        vocab_size=fields.number("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=fields.number("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=fields.number(
            "num_key_value_heads", int, _usual_kv_heads(fields, family, num_heads)
        ),
        head_dim=fields.number(
            "head_dim", int, 128 if family == "qwen3" else max(1, hidden_size // num_heads)
        ),
        intermediate_size=fields.number("intermediate_size", int),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", float, 1e-6),
        init_std=fields.number("initializer_range", float, 0.02),
        rope=_read_rope(fields, max_position),
    )
    if fields.problems:
        raise ConfigError(*fields.problems)
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads={model.num_kv_heads} does not divide num_attention_heads={model.num_heads}"
        )
    if model.head_dim % 2:
        raise ConfigError(
            f"{path}: head_dim={model.head_dim}: must be even, since rotary embedding turns pairs of dimensions"
        )
    return model, max_position


def _read_rope(outer: _ConfigFields, max_position: int) -> RopeConfig:
    parameters = _rope_parameters(outer)
    inner = _ConfigFields(outer.path, parameters)
    inner.problems = outer.problems
    inner.refuse("partial_rotary_factor", 1.0)
    outer.refuse("partial_rotary_factor", 1.0)
    kind = parameters.get("rope_type", "default")
    scaling = (
        {"default": "none", "yarn": "yarn", "llama3": "llama3"}.get(kind)
        if isinstance(kind, str)
        else None
    )
    if scaling is None:
        outer.problems.append(
            f"{outer.path}: rope_type={_shown(kind)} is not supported; only default, yarn and llama3 are"
        )
        scaling = "none"
    original = (
        inner.number("original_max_position_embeddings", int, max_position)
        if scaling != "none"
        else max_position
    )
    rope = RopeConfig(
        theta=inner.number("rope_theta", float, 10000.0),
        scaling=scaling,
        factor=inner.number("factor", float, max_position / original) if scaling != "none" else 1.0,
        original_max_position=original,
        beta_fast=inner.number("beta_fast", float, _BETA_FAST),
        beta_slow=inner.number("beta_slow", float, _BETA_SLOW),
        low_freq_factor=inner.number("low_freq_factor", float, _LOW_FREQ_FACTOR),
        high_freq_factor=inner.number("high_freq_factor", float, _HIGH_FREQ_FACTOR),
    )
    if rope.scaling == "yarn":
        _refuse_other_yarn(inner, rope)
    return rope


def _rope_parameters(outer: _ConfigFields) -> dict[str, Any]:
    """The rotary settings of a config.json by their names in transformers 5, wherever they stand.

    A setting that stands in two places with two values is a problem: which one counts depends on the version of transformers.
    """
    places = {key: _rope_object(outer, key) for key in ("rope_scaling", "rope_parameters")}
    found: dict[str, tuple[str, Any]] = {}
    for place, settings in {**places, "": {key: outer.raw.get(key) for key in _OUTER_ROPE}}.items():
        for key, value in settings.items():
            name = f"{place}.{key}" if place else key
            key = "rope_type" if key == "type" else key
            first, known = found.setdefault(key, (name, value))
            if known != value and value is not None:
                if known is None:
                    found[key] = (name, value)
                else:
                    outer.problems.append(
                        f"{outer.path}: {first}={known} and {name}={value} contradict each other; leave one value"
                    )
    return {key: value for key, (_, value) in found.items() if value is not None}


def _rope_object(outer: _ConfigFields, key: str) -> dict[str, Any]:
    settings = outer.raw.get(key)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        outer.problems.append(f"{outer.path}: {key} must be a JSON object")
        return {}
    nested = [name for name, value in settings.items() if isinstance(value, dict)]
    if nested:
        outer.problems.append(
            f"{outer.path}: {key}.{nested[0]}: settings by kind of layer are not supported; only one set for all layers is"
        )
        return {}
    return settings


def _refuse_windows(fields: _ConfigFields, family: str) -> None:
    """Attention is over the whole sequence in every layer."""
    fields.refuse("use_sliding_window", False)
    if family == "mistral":
        if "sliding_window" not in fields.raw:
            fields.problems.append(
                f"{fields.path}: sliding_window is missing, which means 4096 to transformers; only null is supported"
            )
        fields.refuse("sliding_window", None)
    kinds = fields.raw.get("layer_types")
    other = (
        next((kind for kind in kinds if kind != "full_attention"), None)
        if isinstance(kinds, list)
        else None
    )
    if other is not None:
        fields.problems.append(
            f"{fields.path}: layer_types has {json.dumps(other)}, which is not supported; only full_attention is"
        )


def _usual_kv_heads(fields: _ConfigFields, family: str, num_heads: int) -> int:
    """Key-value heads of a config.json that does not say."""
    return num_heads if "num_key_value_heads" in fields.raw else _KV_HEADS.get(family, num_heads)


def remarks(folder: Path) -> list[str]:
    """What a config.json asks of training or loading that mtrain leaves out, a line each. Raises ConfigError when it cannot be read."""
    path = folder / "config.json"
    raw = read_json(path)
    lines = [
        f"{path}: {key}={raw[key]}: mtrain trains without dropout"
        for key in raw
        if key.endswith(("dropout", "_pdrop")) and raw[key]
    ]
    if raw.get("auto_map"):
        lines.append(f"{path}: auto_map: the folder brings its own code, which mtrain does not run")
    return lines


def _refuse_other_yarn(fields: _ConfigFields, rope: RopeConfig) -> None:
    """Variants whose angles or temperature are not those of `rope.py`."""
    from mtrain_cli.model.rope import (
        attention_factor,
    )  # needs torch, which a command that only composes does not load

    assert isinstance(rope.factor, float)
    ours = attention_factor(rope, rope.factor)
    theirs = fields.raw.get("attention_factor")
    if theirs is not None and not (
        isinstance(theirs, (int, float)) and math.isclose(theirs, ours, rel_tol=1e-6)
    ):
        fields.problems.append(
            f"{fields.path}: attention_factor={_shown(theirs)} is not supported; YaRN's own for this factor is {ours:.6g}"
        )
    if fields.raw.get("mscale") and fields.raw.get("mscale_all_dim"):
        fields.problems.append(
            f"{fields.path}: mscale and mscale_all_dim are not supported; leave them out of rope_parameters"
        )
    fields.refuse("truncate", True)


def config_json(model: ModelConfig, *, rope_factor: float, seq: int, dtype: str) -> dict[str, Any]:
    """What transformers 4 and 5 need to rebuild ``model`` with its positions stretched by ``rope_factor``, trained on ``seq`` tokens.

    Raises ConfigError when no architecture of the family has this shape.
    """
    wanted = (model.family == "qwen2", model.family == "qwen3")
    if (model.qkv_bias, model.qk_norm) != wanted:
        raise ConfigError(
            f"model.qkv_bias={model.qkv_bias}, model.qk_norm={model.qk_norm}: a Hugging Face {model.family} model has "
            f"qkv_bias={wanted[0]}, qk_norm={wanted[1]}; choose the family that fits, or train with these values"
        )
    if model.family == "llama" and model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: transformers has no llama model whose model.hidden_size={model.hidden_size} they do not "
            "divide; model.family=mistral has the same mathematics without that condition"
        )
    rope = model.rope
    stretched = rope.scaling != "none" and rope_factor > 1.0
    scaling: dict[str, Any] | None = None
    if stretched:
        scaling = {
            "rope_type": rope.scaling,
            "factor": rope_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
        if rope.scaling == "yarn":
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        else:
            scaling |= {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
            }
    # transformers warns unless the ratio of the two lengths is YaRN's factor.
    max_position = (
        round(rope_factor * rope.original_max_position)
        if rope.scaling == "yarn"
        else max(seq, rope.original_max_position)
    )
    return {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "hidden_act": "silu",
        **_OF_FAMILY[model.family],
        "tie_word_embeddings": model.tie_word_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.init_std,
        "max_position_embeddings": max_position,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})},
        "use_cache": True,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
    }


def require_accepted(config: dict[str, Any]) -> None:
    """Build the configuration class of transformers from a config.json, where transformers is installed.

    Raises ConfigError when it refuses: an export that nothing opens is of no use.
    """
    try:
        import transformers
    except Exception:  # missing or broken: an export does not need it
        return
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        transformers.AutoConfig.for_model(**config)
    except Exception as error:  # whatever a version of it raises
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.family={config['model_type']}: transformers {transformers.__version__} refuses this shape ({reason})"
        ) from None
    finally:
        transformers.logging.set_verbosity(level)
