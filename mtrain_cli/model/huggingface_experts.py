"""The keys of a Hugging Face config.json that describe experts, read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import DENSE, SOFTMAX, ConfigError, ModelConfig, MoeConfig

if TYPE_CHECKING:
    from mtrain_cli.model.huggingface_config import ConfigFields

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
# The configuration key whose range each key of config.json has.
KEYS = {
    "num_experts": "model.moe.experts",
    "num_local_experts": "model.moe.experts",
    "num_experts_per_tok": "model.moe.top_k",
    "moe_intermediate_size": "model.moe.expert_size",
}
# transformers' defaults, by family: experts, chosen experts.
_DEFAULTS = {"qwen3_moe": (128, 8), "mixtral": (8, 2)}
_EXPERT_SIZE = 768  # default of qwen3_moe
# Keys that ask for a shared expert, which the transformers models of these families lack.
_OF_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")


def read(fields: ConfigFields, family: str, layers: int) -> MoeConfig:
    """Return the experts that config.json describes. Record a problem for each wrong key."""
    if family not in ARCHITECTURES:
        return DENSE
    experts, top_k = _DEFAULTS[family]
    for key in _OF_SHARED:
        fields.refuse(key, 0)
    fields.refuse("scoring_func", SOFTMAX)
    fields.refuse("routed_scaling_factor", 1.0)
    moe = MoeConfig(
        experts=_experts(fields, experts),
        top_k=fields.number("num_experts_per_tok", int, top_k),
        expert_size=fields.number("intermediate_size", int)
        if family == "mixtral"
        else fields.number("moe_intermediate_size", int, _EXPERT_SIZE),
        normalize=family == "mixtral" or fields.flag("norm_topk_prob"),
        dense_layers=_dense_layers(fields, layers) if family == "qwen3_moe" else 0,
    )
    fields.refuse("router_jitter_noise", 0.0)
    if family == "mixtral":
        fields.refuse("norm_topk_prob", True)
    if moe.top_k > moe.experts and not fields.problems:
        fields.problem(
            f"num_experts_per_tok={moe.top_k}: must be at most the number of experts, {moe.experts}"
        )
    return moe


def _experts(fields: ConfigFields, default: int) -> int:
    # Releases of transformers store it under two names.
    given = {key: fields.raw.get(key) for key in ("num_experts", "num_local_experts")}
    known = {key: value for key, value in given.items() if value is not None}
    if len(set(map(str, known.values()))) > 1:
        pairs = " and ".join(f"{key}={value}" for key, value in known.items())
        fields.problem(f"{pairs} contradict each other; keep one of them")
    return fields.number(next(iter(known), "num_experts"), int, default)


def _dense_layers(fields: ConfigFields, layers: int) -> int:
    """Return the number of layers at the start that have no experts."""
    fields.refuse("decoder_sparse_step", 1)
    given = fields.raw.get("mlp_only_layers")
    if given is None:
        return 0
    text = f"mlp_only_layers={str(given)[:60]}"
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        fields.problem(f"{text}: must be a list of layer numbers")
    elif len(set(given)) < len(given) or not set(given) <= set(range(layers)):
        fields.problem(f"{text}: must be different layer numbers from 0 to {layers - 1}")
    elif sorted(given) != list(range(len(given))):
        fields.problem(
            f"{text} is not supported; only the first layers (0, 1, ...) may lack experts"
        )
    elif len(given) == layers:
        fields.problem(f"{text}: names all layers; a qwen3_moe model needs experts")
    else:
        return len(given)
    return 0


def window(fields: ConfigFields, default: int) -> int | None:
    """Return the sliding window of a qwen3_moe model, which all layers have; None without one."""
    if not fields.flag("use_sliding_window"):
        return None
    if fields.raw.get("max_window_layers") not in (None, 0):
        fields.problem(
            f"max_window_layers={fields.raw['max_window_layers']!r:.60}: releases of transformers "
            "disagree on which layers have the sliding window then; only 0 is supported"
        )
    return fields.number("sliding_window", int, default)


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe a model's experts.

    Raises:
        ConfigError: no Hugging Face model of this family has such experts.
    """
    moe, family = model.moe, model.family
    if (moe.experts > 0) != (family in ARCHITECTURES):
        others = "qwen3_moe or mixtral" if moe.experts else "qwen3, mistral or another dense family"
        raise ConfigError(
            f"model.moe.experts={moe.experts}: does not suit a Hugging Face {family} model; use "
            f"model.family={others}"
        )
    if moe.experts == 0:
        return {}
    needed: dict[str, Any] = {"shared_size": 0, "score": SOFTMAX, "scale": 1.0}
    if family == "mixtral":
        needed |= {"normalize": True, "dense_layers": 0}
    problems = [
        f"model.moe.{key}={show(given)}: a Hugging Face {family} model has no such experts, only "
        f"{key}={show(value)}"
        for key, value in needed.items()
        if (given := getattr(moe, key)) != value
    ]
    if problems:
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


def bias_problem(family: str) -> str:
    """Return the line that refuses the export of routers with a bias."""
    return (
        f"train.balance_bias: the routers of this checkpoint have a bias, which a Hugging Face "
        f"{family} model lacks; an export would choose other experts. Train without "
        "train.balance_bias to export the model"
    )
