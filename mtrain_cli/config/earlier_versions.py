"""Read files of earlier versions of mtrain: add keys that the files lack, and rename old keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.config.schema import DENSE_KEYS

# Keys that earlier versions lacked, with the value that stands for the behaviour of those versions.
LATER: dict[str, Any] = {
    **dict.fromkeys((
        "data.mix", "data.mask_key", "data.positions_key", "train.epochs", "run.remote",
    )),
    **dict.fromkeys((
        "data.bos", "data.token_dtype", "data.verify", "eval.length", "optim.decay_steps",
        "optim.schedule_steps", "topology.cluster", "topology.stages", "topology.tensor_chunks",
        "topology.expert_chunks", "topology.schedule", "topology.stage_layers",
        "topology.balanced_chunk", "topology.gpu_memory_gib", "topology.host_memory_gib",
        "train.balance_loss", "data.chat_template", "topology.stages_backward",
    ), "auto"),
    **dict.fromkeys((
        "profile.every", "data.eval_sequences", "train.eval_every", "run.restarts",
        "train.tile_mib", "run.spike_sigma", "run.straggler", "train.z_loss",
        "train.router_z_loss", "train.balance_bias",
        "train.lora.rank", "train.keep_every", "train.skip_nonfinite", "train.rollback.limit",
    ), 0),
    **dict.fromkeys((
        "optim.skip_spikes", "optim.rewarm", "optim.offload", "optim.offload_gradients",
        "train.offload_activations", "train.keep_mlp", "run.leave_out_stragglers",
    ), False),
    **dict.fromkeys((
        "topology.tensor_parallel", "topology.expert_parallel",
        "topology.pipeline_parallel", "topology.virtual_stages",
    ), 1),
    "data.messages_key": "messages", "data.tools_key": "tools", "data.train_on": "assistant",
    "data.train_on_end": True, "data.too_long": "error", "data.on_error": "stop",
    "train.eval_tasks": [],
    "train.callbacks": [],
    "train.rollback.sigma": 12.0,
    "train.lora.alpha": 32.0,
    "train.lora.targets": "auto",
    "train.lora.quantize": "none",
    "train.fp8": "none",
    "run.project": "mtrain",
    "eval.samples": 10,
    "train.memory": "manual",
    "train.shard": "full",
    "train.reduce_dtype": "float32",
    "topology.gradient_dtype": "float32",
    "train.checkpoint_keep": 0.5,
    "train.loss_gradients": "forward",
    **DENSE_KEYS,
    "mask.kind": "causal",
}  # fmt: skip

# {old name: current name} in resolved.yaml.
RENAMED = {
    "sparsity.bars": "sparsity.columns",
    "sparsity.min_bars": "sparsity.min_columns",
    "sparsity.max_bars": "sparsity.max_columns",
}
# Keys of earlier versions that have no effect any more.
REMOVED = (
    "eval.form", "eval.haystack", "eval.needles", "eval.chains", "eval.seed",
    "train.expert_capacity", "run.tensorboard",
)  # fmt: skip
# {old name: what a user writes now}.
REPLACED = {"run.tensorboard": "run.loggers=[tensorboard]"}
# {old name: current name} in metrics.jsonl.
RENAMED_METRICS = {"bars": "columns"}


def renamed(values: Mapping[str, Any], names: Mapping[str, str] = RENAMED) -> dict[str, Any]:
    """Return ``values`` with current names as keys. names: {old name: current name}."""
    return {names.get(name, name): value for name, value in values.items()}


def completed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of a resolved.yaml, {dotted name: value}, and add those that it lacks."""
    # Before `gate` existed, MoBA chose chunks for whole blocks of queries.
    gate = {"sparsity.gate": "block"} if flat.get("sparsity.pattern") == "moba" else {}
    slashes = flat.get("sparsity.pattern") == "vertical_slash"
    budgets = {"sparsity.slash_unit": "block", "sparsity.p_of": "all"} if slashes else {}
    kind = str(flat.get("mask.kind"))
    own = MASKS[kind].own_keys() if kind in MASKS else ()
    mask: dict[str, Any] = {f"mask.{key}": None for key in own}
    if kind == "sliding_window":
        mask |= dict.fromkeys(("mask.global_tokens", "mask.full_every", "mask.full_first"), 0)
    sparse = {"sparsity.dense_layers": 0} if flat.get("sparsity.dense_steps") is not None else {}
    # Documents of text had no begin token. Token ids may well have had one, and bytes have none.
    either = flat.get("data.kind") in ("tokens", "mds") or flat.get("data.tokenizer") == "bytes"
    bos = {} if either else {"data.bos": False}
    dense = {"sparsity.dense_layers": None, **sparse}
    loggers = {"run.loggers": ["tensorboard"] if flat.get("run.tensorboard") else []}
    kept = {name: value for name, value in renamed(flat).items() if name not in REMOVED}
    found = {**LATER, **loggers, **gate, **budgets, **mask, **bos, **dense, **kept}
    if found["mask.kind"] == "chunked" and found.get("mask.back") is not None:
        # Before `block_window` existed, this mask was called chunked, with the key `back`.
        block = {"mask.block": found["mask.chunk"], "mask.chunk": None}
        found |= {"mask.kind": "block_window", **block}
    return found
