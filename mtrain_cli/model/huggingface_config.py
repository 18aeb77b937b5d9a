"""Read a Hugging Face config.json as a `ModelConfig`, and write a config.json.

transformers 5 keeps rotary settings under ``rope_parameters``, transformers 4 under ``rope_theta``
and ``rope_scaling``: both are read and written.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from mtrain_cli.attention.named_masks import CAUSAL, SlidingWindow
from mtrain_cli.config import documents, keys
from mtrain_cli.config.mask_settings import FULL_LAYERS, MaskSettings
from mtrain_cli.config.schema import DENSE, SOFTMAX, ConfigError, ModelConfig, MoeConfig, RopeConfig
from mtrain_cli.config.sizes import with_count
from mtrain_cli.config.suggest import adapter_hint


class _Family(NamedTuple):
    """Name in ``architectures``, and transformers' defaults for keys that a config.json lacks.

    kv_heads: None for the number of query heads.
    """

    architecture: str
    max_position: int
    kv_heads: int | None = None
    epsilon: float = 1e-6
    theta: float = 1e4
    experts: int = 0
    top_k: int = 0


_FAMILIES = {
    "qwen2": _Family("Qwen2ForCausalLM", 32768, 32),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, 32),
    "llama": _Family("LlamaForCausalLM", 2048),
    "mistral": _Family("MistralForCausalLM", 131072, 8),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", 32768, 4, experts=128, top_k=8),
    "mixtral": _Family("MixtralForCausalLM", 131072, 8, 1e-5, 1e6, experts=8, top_k=2),
}
_EXPERT_SIZE = 768
# Experts that the families lack: {key of model.moe: (its keys in config.json, the only value)}.
_SAME_EXPERTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "shared_size": (
        ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"), 0
    ),
    "score": (("scoring_func",), SOFTMAX),
    "scale": (("routed_scaling_factor",), 1.0),
}  # fmt: skip
_ONLY_EXPERTS = {
    "qwen3_moe": _SAME_EXPERTS,
    "mixtral": _SAME_EXPERTS | {"normalize": (("norm_topk_prob",), True), "dense_layers": ((), 0)},
}
# Rotary settings that may also be at the top level of config.json.
_OUTER_ROPE = ("rope_theta", "original_max_position_embeddings")
# Keys to write that only some architectures have.
_FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": False},
    "qwen3_moe": {"attention_bias": False},
    "llama": {"attention_bias": False, "mlp_bias": False},
}
_QK_NORM = ("qwen3", "qwen3_moe")
_ALIKE = ("mistral", "qwen3_moe", "mixtral")  # all their layers have the same window
# Sliding windows: defaults of transformers, and its names of layers without and with a window.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_LAYER_TYPES = _FULL, _SLIDING = "full_attention", "sliding_attention"
# The settings that say which frequencies are scaled, for each kind of scaling.
RAMP = {
    "none": (),
    "yarn": ("beta_fast", "beta_slow"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
# Defaults of YaRN (section 3.2) and of Llama 3.1.
_RAMP_DEFAULTS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip

# The configuration key whose value comes from each key of config.json. It also gives the range.
_SHAPE_KEYS = {
    **{name: f"model.{name}" for name in ("vocab_size", "hidden_size")},
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    **{name: f"model.{name}" for name in ("head_dim", "intermediate_size")},
}
_KEYS = {
    **_SHAPE_KEYS,
    **dict.fromkeys(("num_experts", "num_local_experts"), "model.moe.experts"),
    "num_experts_per_tok": "model.moe.top_k",
    "moe_intermediate_size": "model.moe.expert_size",
    "rms_norm_eps": "model.rms_norm_eps",
    "initializer_range": "model.init_std",
    "max_position_embeddings": "model.rope.original_max_position",
    "rope_theta": "model.rope.theta",
    "original_max_position_embeddings": "model.rope.original_max_position",
    **{name: f"model.rope.{name}" for names in RAMP.values() for name in ("factor", *names)},
}


def format_value(value: Any, quotes: bool = False) -> str:
    """Format a JSON value for a message, cut to 60 characters. quotes: those of a string."""
    try:
        text = value if isinstance(value, str) and not quotes else json.dumps(value)
    except (ValueError, RecursionError):  # such as an integer with too many digits for Python
        text = "..."
    return text if len(text) <= 60 else f"{text[:60]}..."


class ConfigFields:
    """The fields of a JSON object. Reading an invalid field adds a line to ``problems``."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path, self.raw, self.problems = path, raw, list[str]()

    def problem(self, text: str) -> None:
        if (line := f"{self.path}: {text}") not in self.problems:
            self.problems.append(line)

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the positive number under ``key``, or ``default`` for a missing or null value.

        Record a problem and return 1 if it is invalid, or if there is neither. kind: int or float.
        """
        value = self.raw.get(key)
        value = default if value is None else value
        text = f"{key}={format_value(value)}"
        if value is None:
            self.problem(f"{key} is missing")
            return kind(1)
        bounds, wrong = keys.all_keys().get(_KEYS.get(key, "")), None
        if not documents.is_number(value) or kind(value) != value or value <= 0:
            wrong = f"must be a positive {'integer' if kind is int else 'number'}"
        elif bounds is not None:
            wrong = bounds.out_of_range(kind(value))
        if wrong is None:
            return kind(value)
        self.problem(f"{text}: {wrong}")
        return kind(1)

    def flag(self, key: str) -> bool:
        """Return the boolean under ``key``; missing and null are false."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(f"{key}={format_value(value)}: must be true or false")
        return value is True

    def refuse(self, key: str, allowed: Any) -> None:
        """Record a problem if ``key`` has a value other than ``allowed`` or null."""
        value = self.raw.get(key)
        if value is not None and value != allowed:
            shown, only = format_value(value, quotes=True), json.dumps(allowed)
            self.problem(f"{key}={shown} is not supported; only {only} is")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a Hugging Face folder, or raise ConfigError."""
    try:
        raw = documents.read_json(path)
    except FileNotFoundError:
        usual = "; a Hugging Face folder has config.json and safetensors"
        hint = adapter_hint(path.parent) or usual
        raise ConfigError(f"{path}: no such file{hint}") from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent}: is a file; give a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({documents.reason(error)})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must contain a JSON object")
    return raw


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """Return the model that config.json describes, and its max_position_embeddings in tokens.

    Raises ConfigError if it is missing or invalid, or asks for what the decoder does not have.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ConfigError(
            f"{path}: model_type={format_value(family)}: must be one of {', '.join(_FAMILIES)}"
        )
    fields, usual = ConfigFields(path, raw), _FAMILIES[family]
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        fields.refuse(key, only)
    _window(fields, family)
    fields.refuse("quantization_config", None)
    hidden_size = fields.number("hidden_size", int)
    num_heads = fields.number("num_attention_heads", int)
    kv_heads = num_heads if "num_key_value_heads" in raw else usual.kv_heads or num_heads
    head_dim = 128 if family == "qwen3" else max(1, hidden_size // num_heads)
    num_layers = fields.number("num_hidden_layers", int)
    max_position = fields.number("max_position_embeddings", int, usual.max_position)
    model = ModelConfig(
        name=folder.resolve().name,
        family=family,
        vocab_size=fields.number("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.number("num_key_value_heads", int, kv_heads),
        head_dim=fields.number("head_dim", int, head_dim),
        intermediate_size=fields.number("intermediate_size", int),
        qkv_bias=family == "qwen2",
        qk_norm=family in _QK_NORM,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", float, usual.epsilon),
        init_std=fields.number("initializer_range", float, 0.02),
        rope=_read_rope(fields, max_position, usual.theta),
        moe=_read_experts(fields, family, num_layers),
    )
    if fields.problems:
        raise ConfigError(*fields.problems)
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads={model.num_kv_heads} does not divide "
            f"num_attention_heads={model.num_heads}"
        )
    if model.head_dim % 2:
        raise ConfigError(
            f"{path}: head_dim={model.head_dim}: must be even, because rotary embedding rotates "
            "pairs of dimensions"
        )
    return model, max_position


def _read_rope(outer: ConfigFields, max_position: int, theta: float) -> RopeConfig:
    parameters = _rope_parameters(outer)
    inner = ConfigFields(outer.path, parameters)
    inner.problems = outer.problems
    inner.refuse("partial_rotary_factor", 1.0)
    outer.refuse("partial_rotary_factor", 1.0)
    kind = parameters.get("rope_type", "default")
    scaling = kind if kind in ("yarn", "llama3") else "none"
    if kind not in ("default", "yarn", "llama3"):
        outer.problem(
            f"rope_type={format_value(kind)} is not supported; only default, yarn and llama3 are. "
            "Give a checkpoint with one of them, or remove it and train on"
        )
    original, factor = max_position, 1.0
    if scaling != "none":
        original = inner.number("original_max_position_embeddings", int, max_position)
        factor = inner.number("factor", float, max_position / original)
    ramp = {name: inner.number(name, float, usual) for name, usual in _RAMP_DEFAULTS.items()}
    rope = RopeConfig(
        theta=inner.number("rope_theta", float, theta), scaling=scaling, factor=factor,
        original_max_position=original, **ramp,
    )  # fmt: skip
    if rope.scaling == "yarn":
        _refuse_other_yarn(inner, rope)
    return rope


def _rope_parameters(outer: ConfigFields) -> dict[str, Any]:
    """Return the rotary settings by their names in transformers 5."""
    objects = {key: _rope_object(outer, key) for key in ("rope_scaling", "rope_parameters")}
    settings_by_name: dict[str, tuple[str, Any]] = {}
    objects[""] = {key: outer.raw.get(key) for key in _OUTER_ROPE}
    for place, settings in objects.items():
        for key, value in settings.items():
            name = f"{place}.{key}" if place else key
            key = "rope_type" if key == "type" else key
            first, known = settings_by_name.setdefault(key, (name, value))
            if known is None:
                settings_by_name[key] = (name, value)
            elif value not in (known, None):
                outer.problem(
                    f"{first}={known} and {name}={value} contradict each other; keep one of them"
                )
    return {key: value for key, (_, value) in settings_by_name.items() if value is not None}


def _rope_object(outer: ConfigFields, key: str) -> dict[str, Any]:
    settings = {} if outer.raw.get(key) is None else outer.raw[key]
    if not isinstance(settings, dict):
        outer.problem(f"{key} must be a JSON object")
        return {}
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        outer.problem(
            f"{key}.{nested[0]}: settings per layer type are not supported; give one set for all "
            "layers"
        )
        return {}
    return settings


def read_mask(folder: Path, completed: dict[str, Any] | None = None) -> MaskSettings | None:
    """Return the mask of layers with a window, or None. completed: config.json with defaults."""
    path = folder / "config.json"
    fields = ConfigFields(path, completed or read_json(path))
    mask = _window(fields, str(fields.raw.get("model_type")))
    if fields.problems:
        raise ConfigError(*fields.problems)
    return mask


def _window(fields: ConfigFields, family: str) -> MaskSettings | None:
    """Return the mask of the layers. Record a problem if no `MaskSettings` describes them."""
    known, kinds = len(fields.problems), fields.raw.get("layer_types")
    layers = fields.number("num_hidden_layers", int, 1)
    window, of_layers = _given_window(fields, family, layers)
    if isinstance(kinds, list):
        of_layers = [kind == _SLIDING for kind in kinds]
        if others := [kind for kind in kinds if kind not in _LAYER_TYPES]:
            fields.problem(
                f"layer_types has {json.dumps(others[0])}, which is not supported; only "
                f"{' and '.join(_LAYER_TYPES)} are"
            )
        elif len(kinds) != layers:
            fields.problem(
                f"layer_types has {with_count(len(kinds), 'value')}, but num_hidden_layers="
                f"{layers}; give one value for each layer"
            )
        elif window is None and any(of_layers):
            fields.problem(
                f'layer_types has "{_SLIDING}", but config.json has no sliding window for them; '
                "set use_sliding_window and sliding_window, or give full_attention"
            )
    if len(fields.problems) > known or window is None or not any(of_layers):
        return None
    first = of_layers.index(True)
    every = 0 if first or all(of_layers) else of_layers.index(False) + 1
    mask = SlidingWindow(window, full_every=every, full_first=first)
    if of_layers != [not mask.is_full(layer) for layer in range(len(of_layers))]:
        fields.problem(
            f"sliding_window={window}: is the window of {sum(of_layers)} of {len(of_layers)} "
            "layers; mtrain gives the window to all layers, to all but every n-th "
            "(mask.full_every), or to all but the first n (mask.full_first)"
        )
    return mask


def _given_window(fields: ConfigFields, family: str, layers: int) -> tuple[int | None, list[bool]]:
    """Return the window without regard to layer_types, and which layers have it."""
    if family not in _FAMILIES:
        window = fields.raw.get("sliding_window")
        return window, [window is not None] * layers
    if family in ("mistral", "mixtral"):
        is_null = fields.raw.get("sliding_window", 0 if family == "mistral" else None) is None
        window = None if is_null else fields.number("sliding_window", int, _WINDOW)
        return window, [True] * layers
    if family not in ("qwen2", "qwen3", "qwen3_moe") or not fields.flag("use_sliding_window"):
        return None, [False] * layers
    full = fields.raw.get("max_window_layers", _MAX_WINDOW_LAYERS)
    if family == "qwen3_moe":
        if fields.raw.get("max_window_layers") not in (None, 0):
            fields.problem(
                f"max_window_layers={format_value(full)}: releases of transformers disagree on "
                "which layers have the sliding window then; only 0 is supported"
            )
        full = 0
    elif not isinstance(full, int) or isinstance(full, bool) or full < 0:
        fields.problem(f"max_window_layers={format_value(full)}: must be an integer, 0 or more")
        full = 0
    window = fields.number("sliding_window", int, _WINDOW)
    return window, [layer >= full for layer in range(layers)]


def _read_experts(fields: ConfigFields, family: str, layers: int) -> MoeConfig:
    """Return the experts that config.json describes. Record a problem for each wrong key."""
    usual = _FAMILIES[family]
    if not usual.experts:
        return DENSE
    for names, allowed in _ONLY_EXPERTS[family].values():
        for key in names:
            fields.refuse(key, allowed)
    fields.refuse("router_jitter_noise", 0.0)
    if family == "qwen3_moe":
        fields.refuse("decoder_sparse_step", 1)
    # Releases of transformers store the number of experts under two names.
    given = {key: fields.raw.get(key) for key in ("num_experts", "num_local_experts")}
    known = {key: value for key, value in given.items() if value is not None}
    if len(set(map(str, known.values()))) > 1:
        pairs = " and ".join(f"{key}={value}" for key, value in known.items())
        fields.problem(f"{pairs} contradict each other; keep one of them")
    moe = MoeConfig(
        experts=fields.number(next(iter(known), "num_experts"), int, usual.experts),
        top_k=fields.number("num_experts_per_tok", int, usual.top_k),
        expert_size=fields.number("intermediate_size", int)
        if family == "mixtral"
        else fields.number("moe_intermediate_size", int, _EXPERT_SIZE),
        normalize=family == "mixtral" or fields.flag("norm_topk_prob"),
        dense_layers=_dense_layers(fields, layers) if family == "qwen3_moe" else 0,
    )
    if moe.top_k > moe.experts and not fields.problems:
        fields.problem(
            f"num_experts_per_tok={moe.top_k}: must be at most the number of experts, {moe.experts}"
        )
    return moe


def _dense_layers(fields: ConfigFields, layers: int) -> int:
    """Return the number of layers at the start that have no experts."""
    given = fields.raw.get("mlp_only_layers")
    given = [] if given is None else given
    is_list = isinstance(given, list) and all(type(layer) is int for layer in given)
    if is_list and sorted(given) == list(range(len(given))) and len(given) < layers:
        return len(given)
    fields.problem(
        f"mlp_only_layers={format_value(given)} is not supported; only a list of the first layers "
        f"(0, 1, ...), fewer than all {layers}, is"
    )
    return 0


def _refuse_other_yarn(fields: ConfigFields, rope: RopeConfig) -> None:
    """Record a problem for a variant of YaRN that `rope.py` does not have."""
    # `rope` imports torch, which takes seconds. Commands that only read settings should start fast.
    from mtrain_cli.model.rope import attention_factor

    assert isinstance(rope.factor, float)
    ours = attention_factor(rope, rope.factor)
    theirs = fields.raw.get("attention_factor")
    if theirs is not None and not (
        isinstance(theirs, (int, float)) and math.isclose(theirs, ours, rel_tol=1e-6)
    ):
        fields.problem(
            f"attention_factor={format_value(theirs)} is not supported; YaRN gives {ours:.6g} for "
            "this factor. Remove it to use that, and train on"
        )
    if fields.raw.get("mscale") and fields.raw.get("mscale_all_dim"):
        fields.problem("mscale and mscale_all_dim are not supported; remove them")
    if fields.raw.get("truncate") not in (None, True):
        value = format_value(fields.raw["truncate"])
        fields.problem(f"truncate={value} is not supported; only true is. Remove it, and train on")


def _window_keys(model: ModelConfig, mask: MaskSettings) -> dict[str, Any]:
    """Return the keys that say which layers have a sliding window. Ignore other masks."""
    window = mask.plain_window
    if model.family in _ALIKE:
        for name in FULL_LAYERS:
            if number := getattr(mask, name):
                raise ConfigError(
                    f"mask.{name}={number}: all layers of a {model.family} model of transformers "
                    "are alike. Use model.family=qwen2 or qwen3."
                )
        # Without this key, transformers would assume 4096 tokens for mistral.
        keys_of_all = {"sliding_window": window}
        if model.family == "qwen3_moe":
            keys_of_all |= {"use_sliding_window": window is not None}
        return keys_of_all
    if model.family == "llama":
        if window is not None:
            raise ConfigError(
                f"mask.window={window}: a llama model of transformers has no sliding window. Use "
                "model.family=mistral, which computes the same with one."
            )
        return {}
    if window is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": mask.full_first,
        "layer_types": [
            _FULL if mask.is_full(layer) else _SLIDING for layer in range(model.num_layers)
        ],
    }


def max_position(rope: RopeConfig, rope_factor: float, seq: int) -> int:
    """Return the positions for which a model was trained on ``seq`` tokens or stretched."""
    # For YaRN, transformers warns unless this length is the original length times the factor.
    if rope.scaling == "yarn":
        return round(rope_factor * rope.original_max_position)
    return max(seq, rope.original_max_position)


def config_json(
    model: ModelConfig, *, rope_factor: float, seq: int, dtype: str, mask: MaskSettings = CAUSAL
) -> dict[str, Any]:
    """Return the content of a config.json that describes ``model`` to transformers 4 and 5.

    rope_factor: factor by which positions are stretched (`rope.rope_factor`).
    seq: tokens per sequence in training.
    mask: the mask of the run. Only sliding windows without global tokens have keys.

    Raises ConfigError if no Hugging Face model of this family has this shape or window.
    """
    expected = (model.family == "qwen2", model.family in _QK_NORM)
    if (model.qkv_bias, model.qk_norm) != expected:
        raise ConfigError(
            f"model.qkv_bias={model.qkv_bias}, model.qk_norm={model.qk_norm}: a Hugging Face "
            f"{model.family} model has qkv_bias={expected[0]}, qk_norm={expected[1]}. Choose a "
            "model.family that has your values, or train with the values of this family."
        )
    if model.family == "llama" and model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: must divide model.hidden_size={model.hidden_size} "
            "in a llama model of transformers. Use model.family=mistral, which computes the same "
            "without that condition."
        )
    of_experts = _expert_keys(model)
    rope = model.rope
    scaling: dict[str, Any] | None = None
    if rope.scaling != "none" and rope_factor > 1.0:
        scaling = {"rope_type": rope.scaling, "factor": rope_factor}
        scaling["original_max_position_embeddings"] = rope.original_max_position
        scaling |= {name: getattr(rope, name) for name in RAMP[rope.scaling]}
    return {
        "architectures": [_FAMILIES[model.family].architecture],
        "model_type": model.family,
        **{key: getattr(model, ours.removeprefix("model.")) for key, ours in _SHAPE_KEYS.items()},
        "hidden_act": "silu",
        **_FAMILY_KEYS.get(model.family, {}),
        **of_experts,
        **_window_keys(model, mask),
        "tie_word_embeddings": model.tie_word_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.init_std,
        "max_position_embeddings": max_position(rope, rope_factor, seq),
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})},
        "use_cache": True,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
    }


def _expert_keys(model: ModelConfig) -> dict[str, Any]:
    moe, family = model.moe, model.family
    if (moe.experts > 0) != (_FAMILIES[family].experts > 0):
        others = "qwen3_moe or mixtral" if moe.experts else "qwen3, mistral or another dense family"
        raise ConfigError(
            f"model.moe.experts={moe.experts}: does not suit a Hugging Face {family} model; use "
            f"model.family={others}"
        )
    if moe.experts == 0:
        return {}
    if problems := [
        f"model.moe.{key}={keys.show(given)}: a Hugging Face {family} model has no such experts, "
        f"only {key}={keys.show(value)}"
        for key, (_, value) in _ONLY_EXPERTS[family].items()
        if (given := getattr(moe, key)) != value
    ]:
        raise ConfigError(*problems)
    chosen = {"num_experts_per_tok": moe.top_k, "output_router_logits": False}
    if family == "mixtral":
        sizes = {"num_local_experts": moe.experts, "intermediate_size": moe.expert_size}
        return chosen | sizes | {"router_jitter_noise": 0.0}
    return chosen | {
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.normalize,
        "mlp_only_layers": list(range(moe.dense_layers)),
        "decoder_sparse_step": 1,
    }


def require_new_folder(path: Path) -> None:
    """Raise ConfigError if ``path`` is a file, or a folder that is not empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path}: already exists. Give a new or empty folder.")
