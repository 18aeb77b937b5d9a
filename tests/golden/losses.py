"""Losses and gradient norms of tiny trainings on CPU workers, step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from golden import corpus, reach, workers

_COMMON = (
    "data=text data.path=corpus/text.jsonl seq=512 topology.device=cpu topology.block_size=32 "
    "model.num_layers=2 "
    "train.steps=3 optim.warmup_steps=1 train.checkpoint_at_end=false train.checkpoint_every=0"
)
_WHOLE = "data.document_mask=false"  # one document per sequence; otherwise several are packed
_VERTICAL_SLASH = (
    "sparsity=vertical_slash sparsity.block=32 sparsity.last_q=32 "
    "sparsity.p_v=0.6 sparsity.p_s=0.6 sparsity.min_columns=8 sparsity.max_columns=64"
)
_XATTENTION = "sparsity=xattention sparsity.block=32 sparsity.stride=8 sparsity.threshold=0.7"
_MOBA = "sparsity=moba sparsity.block=32 sparsity.chunk=64 sparsity.top_k=3"
_FIXED = "sparsity=fixed sparsity.block=32 sparsity.slashes=4 sparsity.columns=24"


@dataclass(frozen=True)
class Case:
    """A training.

    workers: number of CPU workers.
    words: its settings.
    then: settings of a second command that resumes it, if there is one.
    """

    workers: int
    words: str
    then: str | None = None
    common: str = _COMMON


CASES: dict[str, Case] = {
    "default model": Case(
        1, "data=text data.path=corpus/text.jsonl topology.device=cpu train.steps=2", common=""
    ),
    "default model, 2 workers": Case(
        2,
        "data=text data.path=corpus/text.jsonl topology.device=cpu train.steps=2 seq=1k",
        common="",
    ),
    # Dense, every layout and exchange. Documents are packed unless a case says otherwise.
    "dense": Case(1, ""),
    "dense, whole": Case(1, _WHOLE),
    "zigzag ring 2": Case(2, f"topology.layout=zigzag topology.exchange=ring {_WHOLE}"),
    "striped ring 2": Case(2, "topology.layout=striped topology.exchange=ring"),
    "zigzag ring 4": Case(4, "topology.layout=zigzag topology.exchange=ring topology.prefetch=2"),
    "striped ring 4": Case(4, "topology.layout=striped topology.exchange=ring"),
    "contiguous ring 4": Case(4, "topology.layout=contiguous topology.exchange=ring"),
    "odd length ring 3": Case(3, "topology.layout=striped topology.exchange=ring seq=500"),
    "queries circulate 4": Case(
        4, f"topology.layout=zigzag topology.exchange=ring topology.circulates=queries {_WHOLE}"
    ),
    "hierarchical ring 4": Case(
        4, "topology.layout=striped topology.exchange=hierarchical_ring topology.gpus_per_node=2"
    ),
    "hierarchical ring 4, queries": Case(
        4,
        "topology.layout=zigzag topology.exchange=hierarchical_ring topology.gpus_per_node=2 "
        "topology.circulates=queries",
    ),
    "hierarchical all-gather 4": Case(
        4, "topology.exchange=hierarchical_all_gather topology.gpus_per_node=2"
    ),
    "all-gather 2": Case(2, f"topology.layout=zigzag topology.exchange=all_gather {_WHOLE}"),
    "all-gather 4, in parts": Case(4, "topology.exchange=all_gather topology.chunks=2"),
    "ulysses 2": Case(2, "topology.exchange=ulysses"),
    "ulysses 2 in a ring": Case(
        4, "topology.ulysses=2 topology.exchange=ring topology.layout=striped"
    ),
    "ulysses 2 in an all-gather": Case(
        4, f"topology.ulysses=2 topology.exchange=all_gather topology.layout=zigzag {_WHOLE}"
    ),
    "data 2 x context 2": Case(
        4, "topology.context_parallel=2 train.global_batch=2 topology.exchange=ring"
    ),
    "data 2": Case(2, "topology.context_parallel=1 train.global_batch=4 train.micro_batch=2"),
    "accumulation": Case(1, "train.global_batch=4 train.micro_batch=2"),
    "accumulation, data 2 x context 2": Case(
        4,
        "topology.context_parallel=2 train.global_batch=4 topology.exchange=all_gather "
        "train.shard=optimizer",
    ),
    # Dynamic indices.
    "vertical-slash": Case(1, _VERTICAL_SLASH),
    "vertical-slash after a dense step": Case(
        1, f"{_VERTICAL_SLASH} sparsity.dense_steps=1 {_WHOLE}"
    ),
    "vertical-slash ring 2": Case(
        2, f"{_VERTICAL_SLASH} topology.exchange=ring sparsity.windows=2"
    ),
    "vertical-slash ring 4, in steps": Case(
        4, f"{_VERTICAL_SLASH} topology.exchange=ring topology.columns=in_steps {_WHOLE}"
    ),
    "vertical-slash ring 4, once": Case(
        4, f"{_VERTICAL_SLASH} topology.exchange=ring topology.columns=once sparsity.dense_steps=1"
    ),
    "vertical-slash ring 4, queries": Case(
        4, f"{_VERTICAL_SLASH} topology.exchange=ring topology.circulates=queries"
    ),
    "vertical-slash hierarchical ring 4": Case(
        4,
        f"{_VERTICAL_SLASH} topology.exchange=hierarchical_ring topology.gpus_per_node=2 "
        "sparsity.joint=true",
    ),
    "vertical-slash all-gather 2": Case(
        2, f"{_VERTICAL_SLASH} topology.exchange=all_gather topology.layout=zigzag {_WHOLE}"
    ),
    "vertical-slash ulysses 2": Case(
        2, f"{_VERTICAL_SLASH} topology.exchange=ulysses sparsity.index_per=kv_group"
    ),
    "xattention": Case(1, _XATTENTION),
    "xattention ring 2": Case(2, f"{_XATTENTION} topology.exchange=ring {_WHOLE}"),
    "xattention all-gather 4": Case(4, f"{_XATTENTION} topology.exchange=all_gather"),
    "moba": Case(1, _MOBA),
    "moba by blocks": Case(1, f"{_MOBA} sparsity.gate=block {_WHOLE}"),
    "moba ring 4": Case(4, f"{_MOBA} topology.exchange=ring"),
    "moba by blocks ring 2": Case(
        2, f"{_MOBA} sparsity.gate=block topology.exchange=ring topology.circulates=queries"
    ),
    "fixed": Case(1, _FIXED),
    "fixed ring 4": Case(4, f"{_FIXED} topology.exchange=ring {_WHOLE}"),
    # Recomputation, sharding and offload.
    "recompute nothing": Case(1, "train.activation_checkpoint=none"),
    "recompute all": Case(
        2, f"train.activation_checkpoint=full topology.exchange=ring {_VERTICAL_SLASH}"
    ),
    "recompute a part": Case(
        2,
        "train.activation_checkpoint=sequence_selective train.checkpoint_keep=0.5 "
        "topology.exchange=all_gather topology.layout=zigzag",
    ),
    "tiles, chunked loss": Case(
        1,
        "train.tile_mib=1 train.loss_chunk_mib=1 train.loss_gradients=recompute "
        "train.z_loss=0.0001",
    ),
    "keep products": Case(1, "train.keep_mlp=1"),
    "offload activations": Case(1, "train.offload_activations=true"),
    "offload optimizer": Case(
        2, "optim.offload=true optim.offload_gradients=true topology.exchange=ring"
    ),
    "shard gradients, bfloat16 sums": Case(
        2,
        "train.shard=gradients train.reduce_dtype=bfloat16 train.global_batch=2 "
        "topology.exchange=ring",
    ),
    "bfloat16": Case(2, "train.dtype=bfloat16 topology.exchange=ring topology.layout=zigzag"),
    "reference kernel": Case(1, f"train.kernel=reference seq=256 {_VERTICAL_SLASH}"),
    # Models and optimizer.
    "qwen3-like": Case(
        1,
        "model.family=qwen3 model.qkv_bias=false model.qk_norm=true "
        "model.tie_word_embeddings=false",
    ),
    "yarn": Case(
        2, "model.rope.scaling=yarn model.rope.original_max_position=128 topology.exchange=ring"
    ),
    "linear decay, no clipping": Case(
        1, "optim.schedule=linear optim.clip_norm=0 optim.weight_decay=0 train.steps=4"
    ),
    "held-out losses": Case(2, "data.eval_sequences=2 train.eval_every=2 topology.exchange=ring"),
    # Four steps at once, and the same four with a stop after the second.
    "unbroken": Case(
        2,
        f"train.steps=4 optim.schedule_steps=4 topology.exchange=ring {_VERTICAL_SLASH} "
        "sparsity.dense_steps=3",
    ),
    "resumed": Case(
        2,
        f"train.steps=2 optim.schedule_steps=4 topology.exchange=ring {_VERTICAL_SLASH} "
        "sparsity.dense_steps=3 "
        "train.checkpoint_at_end=true",
        then="train.steps=4",
    ),
}
QUICK = (
    "default model",
    "striped ring 4",
    "vertical-slash hierarchical ring 4",
    "unbroken",
    "resumed",
)


def compute(only: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train the named cases."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus.write(folder / "corpus")
        for number, case in enumerate(only):
            yield case, _trained(workers.server(), CASES[case], folder, folder / f"run-{number}")


def _trained(server: workers.Server, case: Case, folder: Path, run_dir: Path) -> dict[str, Any]:
    server.run(
        ["train", *case.common.split(), *case.words.split(), f"run.dir={run_dir}"],
        case.workers,
        folder,
    )
    if case.then is not None:
        server.run(["train", "--resume", str(run_dir), *case.then.split()], case.workers, folder)
    held_out = {"evaluations": reach.evaluations(run_dir)} if "eval_sequences" in case.words else {}
    return {**reach.steps(run_dir), **held_out}
