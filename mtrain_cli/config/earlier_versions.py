"""Read files of earlier versions of mtrain: add keys that the files lack, and rename old keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrain_cli.config.expert_settings import DENSE_KEYS
from mtrain_cli.config.mask_settings import MASKS

# Keys that earlier versions lacked, with the value that stands for the behaviour of those versions.
LATER: dict[str, Any] = {
    "profile.every": 0,
    "data.mix": None,
    "data.bos": "auto",
    "data.token_dtype": "auto",
    "data.eval_sequences": 0,
    "data.mask_key": None,
    "data.positions_key": None,
    "data.verify": "auto",
    "train.eval_every": 0,
    "train.eval_tasks": [],
    "train.callbacks": [],
    "eval.length": "auto",
    "eval.samples": 10,
    "eval.form": "sentences",
    "eval.haystack": "stdlib",
    "eval.needles": 10,
    "eval.chains": 0.0,
    "eval.seed": 1,
    "optim.skip_spikes": False,
    "optim.decay_steps": "auto",
    "optim.schedule_steps": "auto",
    "optim.rewarm": False,
    "run.restarts": 0,
    "run.spike_sigma": 0.0,
    "run.straggler": 0.0,
    "topology.cluster": "auto",
    "topology.stages": "auto",
    "topology.tensor_parallel": 1,
    "topology.tensor_chunks": "auto",
    "topology.expert_parallel": 1,
    "topology.expert_chunks": "auto",
    "topology.pipeline_parallel": 1,
    "topology.schedule": "auto",
    "topology.virtual_stages": 1,
    "topology.stage_layers": "auto",
    "topology.balanced_chunk": "auto",
    "topology.gpu_memory_gib": "auto",
    "topology.host_memory_gib": "auto",
    "optim.offload": False,
    "optim.offload_gradients": False,
    "train.memory": "manual",
    "train.shard": "full",
    "train.reduce_dtype": "float32",
    "train.checkpoint_keep": 0.5,
    "train.offload_activations": False,
    "train.keep_mlp": False,
    "train.tile_mib": 0,
    "train.loss_gradients": "forward",
    "train.z_loss": 0.0,
    "train.balance_loss": "auto",
    "train.router_z_loss": 0.0,
    "train.balance_bias": 0.0,
    "train.expert_capacity": 0.0,
    **DENSE_KEYS,
    "mask.kind": "causal",
}

# {old name: current name} in resolved.yaml.
RENAMED = {
    "sparsity.bars": "sparsity.columns",
    "sparsity.min_bars": "sparsity.min_columns",
    "sparsity.max_bars": "sparsity.max_columns",
}
# {old name: current name} in metrics.jsonl.
RENAMED_METRICS = {"bars": "columns"}


def renamed(values: Mapping[str, Any], names: Mapping[str, str] = RENAMED) -> dict[str, Any]:
    """Return ``values`` with current names as keys. names: {old name: current name}."""
    return {names.get(name, name): value for name, value in values.items()}


def completed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of a resolved.yaml, and add keys that earlier versions lacked.

    Args:
        flat: values by dotted name.
    """
    # Before `gate` existed, MoBA chose chunks for whole blocks of queries.
    gate = {"sparsity.gate": "block"} if flat.get("sparsity.pattern") == "moba" else {}
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
    found = {**LATER, **gate, **mask, **bos, **dense, **renamed(flat)}
    if found["mask.kind"] == "chunked" and found.get("mask.back") is not None:
        # Before `block_window` existed, this mask was called chunked, with the key `back`.
        block = {"mask.block": found["mask.chunk"], "mask.chunk": None}
        found |= {"mask.kind": "block_window", **block}
    return found
