"""Memory estimates of dry runs: bytes of every part at every moment, and other counts of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

from golden import reach

# Settings that `auto` would take from the machine are fixed, so that every machine plans alike.
_GPUS = "topology.device=cuda topology.gpu_memory_gib=79.2 topology.host_memory_gib=128"
_MODELS = ("qwen0.5b", "qwen3b", "llama8b", "qwen3_14b", "mistral7b", "qwen32b")
_EXCHANGES = {
    "auto": "",
    "all_gather": "topology.exchange=all_gather",
    "all_gather, 1 part": "topology.exchange=all_gather topology.chunks=1",
    "hierarchical_all_gather": "topology.exchange=hierarchical_all_gather topology.gpus_per_node=4",
    "ring": "topology.exchange=ring topology.circulates=kv",
    "ring, 2 ahead": "topology.exchange=ring topology.circulates=kv topology.prefetch=2",
    "ring of queries": "topology.exchange=ring topology.circulates=queries",
    "hierarchical_ring": "topology.exchange=hierarchical_ring topology.gpus_per_node=4",
    "ulysses": "topology.exchange=ulysses",
    "ulysses in a ring": "topology.ulysses=2 topology.exchange=ring",
    "ulysses in an all-gather": "topology.ulysses=2 topology.exchange=all_gather",
}
_PATTERNS = {
    "dense": "",
    "vertical_slash": "sparsity=vertical_slash",
    "vertical_slash, no bounds": "sparsity=vertical_slash sparsity.max_columns=0 "
    "sparsity.max_slashes=64 sparsity.index_per=kv_group",
    "xattention": "sparsity=xattention",
    "moba": "sparsity=moba",
    "moba by blocks": "sparsity=moba sparsity.gate=block",
    "fixed": "sparsity=fixed sparsity.columns=1024",
}
_MEMORY = {
    "none": "train.activation_checkpoint=none",
    "full": "train.activation_checkpoint=full",
    "a part": "train.activation_checkpoint=sequence_selective train.checkpoint_keep=0.25",
    "offloaded": "train.offload_activations=true",
    "some offloaded": "train.offload_activations=7 train.activation_checkpoint=full",
    "products": "train.keep_mlp=true",
    "some products": "train.keep_mlp=5 train.activation_checkpoint=none",
    "no tiles": "train.tile_mib=0 train.loss_chunk_mib=16384",
    "small tiles": "train.tile_mib=256 train.loss_chunk_mib=256 train.loss_gradients=recompute",
    "bfloat16 sums": "train.reduce_dtype=bfloat16",
    "zero-2": "train.shard=gradients train.global_batch=4",
    "zero-1": "train.shard=optimizer train.global_batch=4",
    "zero-1, one batch": "train.shard=optimizer",
    "offloaded optimizer": "optim.offload=true",
    "offloaded gradients": "optim.offload=true optim.offload_gradients=true",
    "offloaded gradients, several": "optim.offload=true optim.offload_gradients=true "
    "train.global_batch=8 train.shard=gradients",
    "micro-batches": "train.micro_batch=2 train.global_batch=4",
    "float32": "train.dtype=float32 train.kernel=reference seq=16k",
    "auto": "train.memory=auto",
}


def _cases() -> dict[str, str]:
    cases: dict[str, str] = {}
    for model, seq, workers in product(_MODELS, ("32k", "512k"), (1, 8)):
        cases[f"{model} {seq} {workers}"] = (
            f"model={model} seq={seq} topology.workers={workers} {_GPUS}"
        )
    base = f"model=qwen3b seq=256k topology.workers=8 {_GPUS}"
    for (exchange, words), (pattern, more) in product(_EXCHANGES.items(), _PATTERNS.items()):
        cases[f"{exchange}; {pattern}"] = f"{base} {words} {more}"
    for (memory, words), (pattern, more) in product(_MEMORY.items(), list(_PATTERNS.items())[:2]):
        cases[f"memory {memory}; {pattern}"] = f"{base} {words} {more}"
        cases[f"memory {memory}; {pattern}, llama8b on 32"] = (
            f"{base} {words} {more} model=llama8b seq=1m topology.workers=32"
        )
    for layout, documents, exchange in product(
        ("contiguous", "zigzag", "striped"), ("true", "false"), ("all_gather", "ring", "ulysses")
    ):
        name = f"{layout} {exchange}, documents {documents}"
        cases[name] = (
            f"{base} topology.layout={layout} topology.exchange={exchange} "
            f"data.document_mask={documents}"
        )
        cases[f"{name}, sparse"] = f"{cases[name]} sparsity=vertical_slash sparsity.windows=4"
    for kernel, pattern in product(
        ("triton", "sdpa", "flash4", "reference"), ("dense", "vertical_slash", "xattention")
    ):
        if (kernel, pattern == "dense") in (("triton", True), ("sdpa", False)):
            continue  # triton computes only sparse attention, sdpa only dense attention
        cases[f"kernel {kernel}; {pattern}"] = (
            f"{base} seq=32k train.kernel={kernel} sparsity={pattern} topology.exchange=ring"
        )
    for workers, context in ((16, 4), (16, 16), (64, 8), (64, 64), (6, 3)):
        for exchange in ("ring", "all_gather"):
            batch = workers // context
            cases[f"{workers} workers, {context} share; {exchange}"] = (
                f"model=llama8b seq=300000 topology.workers={workers} "
                f"topology.context_parallel={context} train.global_batch={batch} "
                f"{_GPUS} topology.exchange={exchange}"
            )
    own = "data=stdlib data.path=null data.mix=null train.init_from=null"  # no files needed
    for recipe, more in (
        ("mtraining_qwen3b_512k", own),
        ("mtraining_llama8b_512k", own),
        ("prolong_llama8b_512k", own),
        ("qwen3b_512k", own),
        ("stdlib_64k", ""),
        ("stdlib_8k", ""),
    ):
        where = (
            "topology.device=cpu topology.workers=2 train.kernel=sdpa"
            if recipe == "stdlib_8k"
            else f"{_GPUS} topology.workers=32 topology.gpus_per_node=8"
        )
        cases[f"recipe {recipe}"] = f"recipe={recipe} {where} {more}"
    for workers, more in product(
        (1, 2, 4),
        (
            "topology.exchange=all_gather",
            "train.dtype=bfloat16",
            "sparsity=vertical_slash topology.exchange=ring",
        ),
    ):
        cases[f"cpu {workers} {more}".strip()] = (
            f"topology.device=cpu train.kernel=sdpa topology.workers={workers} {more}"
        )
    return cases


CASES = _cases()


def compute(only: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Estimate the named cases."""
    for name in only:
        yield name, reach.memory(CASES[name].split())
