"""Predicted times, exact work and exact bytes of attention, steps, sweeps and recommendations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from golden import reach

_RINGS = "ring,hierarchical_ring,all_gather,hierarchical_all_gather"


@dataclass(frozen=True)
class Case:
    """A simulation of several layouts and exchanges."""

    words: str
    layouts: str = "zigzag,striped"
    exchanges: str = "ring,all_gather"

    @property
    def names(self) -> list[str]:
        """Names of its predictions, in order."""
        return [
            f"{layout} {exchange}"
            for layout, exchange in product(self.layouts.split(","), self.exchanges.split(","))
        ]


CASES: dict[str, Case] = {
    # Attention alone, with each pattern.
    "clustered on 8": Case("model=qwen3b seq=64k --attention-only --density 8% --columns 512"),
    "clustered on 2 x 4": Case(
        "model=llama8b seq=64k --attention-only --density 5% --cluster a100_4x8 --workers 8 "
        "topology.gpus_per_node=4",
        "striped",
        _RINGS,
    ),
    "dense on 8": Case(
        "model=qwen3b seq=128k --attention-only", "contiguous,zigzag,striped", "ring,all_gather"
    ),
    "dense ulysses": Case(
        "model=llama8b seq=128k --attention-only", "contiguous,striped", "ulysses"
    ),
    "dense on 2 x 8": Case(
        "model=qwen3b seq=128k --attention-only --cluster h100_4x8 --nodes 2",
        "zigzag,striped",
        _RINGS,
    ),
    "sparse on 4 x 8": Case(
        "model=qwen3b seq=256k --attention-only --cluster a100_4x8 --density 5%",
        "zigzag,striped",
        _RINGS,
    ),
    "sparse ulysses in 2 x 4": Case(
        "model=llama8b seq=128k --attention-only --cluster b200_4x8 --workers 8 "
        "topology.gpus_per_node=4 --density 5% topology.ulysses=2",
        "striped",
        "ring,all_gather,hierarchical_ring",
    ),
    "fixed": Case(
        "model=qwen3b seq=64k --attention-only sparsity=fixed sparsity.columns=256",
        "zigzag,striped",
        "ring,all_gather",
    ),
    "dense queries": Case(
        "model=llama8b seq=64k --attention-only topology.circulates=queries",
        "zigzag,striped",
        "ring",
    ),
    "sparse queries": Case(
        "model=qwen3b seq=64k --attention-only topology.circulates=queries --density 10% "
        "--cluster a100_4x8 --nodes 1",
        "striped",
        "ring",
    ),
    "hierarchical queries": Case(
        "model=qwen3b seq=64k --attention-only topology.circulates=queries --density 10% "
        "--cluster h100_4x8 --nodes 2",
        "zigzag",
        "ring,hierarchical_ring",
    ),
    "2 hops ahead": Case(
        "model=qwen3b seq=64k --attention-only topology.prefetch=2", "zigzag", "ring"
    ),
    "columns in steps": Case(
        "model=qwen3b seq=64k --attention-only topology.columns=in_steps --density 5%",
        "striped",
        "ring",
    ),
    "columns once": Case(
        "model=qwen3b seq=64k --attention-only topology.columns=once --density 5%",
        "striped",
        "ring",
    ),
    "parts of heads": Case(
        "model=llama8b seq=64k --attention-only topology.chunks=4", "zigzag,striped", "all_gather"
    ),
    "slow rank": Case(
        "model=qwen3b seq=64k --attention-only --slow 3=1.5", "zigzag,striped", "ring,all_gather"
    ),
    "slow ranks, sparse": Case(
        "model=qwen3b seq=64k --attention-only --slow 0=1.2,5=2 --density 5% --cluster h100_4x8 "
        "--nodes 1",
        "striped",
        "ring,ulysses",
    ),
    "recompute": Case(
        "model=qwen3b seq=64k --attention-only --recompute --density 5%",
        "striped",
        "ring,all_gather",
    ),
    "blocks of 64": Case(
        "model=qwen3b seq=64k --attention-only topology.block_size=64 sparsity=vertical_slash "
        "sparsity.block=64 --density 5%",
        "striped",
        "ring",
    ),
    "odd length": Case(
        "model=qwen3b seq=100000 --attention-only --density 5%", "zigzag,striped", "ring,all_gather"
    ),
    "kernel triton": Case(
        "model=qwen3b seq=64k --attention-only train.kernel=triton --density 5%", "striped", "ring"
    ),
    "several layers": Case(
        "model=qwen3b seq=64k --attention-only --density 5% --layers 3", "striped", "ring"
    ),
    "two sequences": Case(
        "model=qwen3b seq=32k --attention-only train.micro_batch=2 train.global_batch=2",
        "zigzag",
        "ring,all_gather",
    ),
    # Whole steps.
    **{
        f"step of {model} on {cluster}": Case(
            f"model={model} seq=128k --cluster {cluster} --nodes 1"
        )
        for model, cluster in product(
            ("qwen3b", "llama8b"), ("h200_1x8", "h100_4x8", "b200_4x8", "a100_4x8", "a800_4x8")
        )
    },
    **{
        f"sparse step on {cluster}": Case(
            f"model=qwen3b seq=256k --cluster {cluster} --nodes 2 --density 5%", "striped", _RINGS
        )
        for cluster in ("h100_4x8", "b200_4x8", "a100_4x8", "a800_4x8")
    },
    **{
        f"step, {name}": Case(
            f"model=qwen3b seq=64k {words}",
            "zigzag",
            "ring,all_gather,ulysses" if "llama" in words else "ring,all_gather",
        )
        for name, words in {
            "full recomputation": "train.activation_checkpoint=full",
            "no recomputation": "train.activation_checkpoint=none",
            "part of recomputation": "train.activation_checkpoint=sequence_selective",
            "offloaded": "train.offload_activations=true",
            "products kept": "train.keep_mlp=true",
            "offloaded optimizer": "optim.offload=true optim.offload_gradients=true",
            "zero-2": "train.shard=gradients train.global_batch=4",
            "zero-1": "train.shard=optimizer train.global_batch=4",
            "data x context": "train.global_batch=4 topology.context_parallel=2",
            "uncompiled": "train.compile=false",
            "automatic memory": "train.memory=auto",
            "llama8b": "model=llama8b",
            "slow rank": "--slow 1=1.3",
        }.items()
    },
    **{
        f"step, {pattern}": Case(
            f"model=qwen3b seq=128k sparsity={pattern}", "striped", "ring,all_gather"
        )
        for pattern in ("vertical_slash", "fixed")
    },
    **{
        f"step of {n} nodes": Case(
            f"model=qwen3b seq=256k --cluster h100_4x8 --nodes {n}", "zigzag", _RINGS
        )
        for n in (2, 3, 4)
    },
    # Attention recorded on GPUs, predicted on other machines.
    **{
        f"recorded {name} on {workers}": Case(
            f"--index PROFILES/{name} --cluster h100_4x8 --workers {workers}",
            "zigzag,striped",
            "ring,all_gather",
        )
        for name, workers in product(("real-512k-4xh200", "fixed-512k-4xh200"), (8,))
    },
    "recorded where it was": Case(
        "--index PROFILES/real-512k-4xh200 --workers 4", "contiguous,zigzag,striped", "ring"
    ),
    "recorded in a model": Case(
        "model=qwen3b seq=512k --index PROFILES/real-512k-4xh200 --workers 4",
        "striped",
        "ring,all_gather",
    ),
}
_SWEEP, _RECOMMEND = "sweep", "recommend"
TABLES: dict[str, str] = {
    f"{_SWEEP} of lengths and nodes": "model=qwen3b seq=64k,256k nodes=1,2,4 "
    "--cluster a100_4x8 --layout striped",
    f"{_SWEEP} of workers and density": (
        "model=llama8b seq=64k workers=2,4,8 density=2%,20% --exchange ring,ulysses "
        "--layout striped --columns 512"
    ),
    f"{_RECOMMEND} dense": "recommend model=qwen3b seq=128k --cluster h100_4x8 --nodes 1",
    f"{_RECOMMEND} sparse": "recommend model=llama8b seq=512k --cluster a100_4x8 --nodes 2 "
    "--density 5% --exchange ring,hierarchical_ring",
}
NAMES: dict[str, str] = {
    f"{case}: {name}": case for case, made in CASES.items() for name in made.names
} | {name: name for name in TABLES}


def compute(only: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Predict the named cases; the predictions of one simulation are computed together."""
    wanted = set(only)
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(dict.fromkeys(NAMES[name] for name in only)):
            if case in TABLES:
                yield from _table(case, Path(name))
            else:
                yield from (
                    (one, row)
                    for one, row in _predicted(
                        case, Path(name), Path(name) / f"simulation-{number}"
                    )
                    if one in wanted
                )


def _table(case: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import shlex

    document = json.loads(
        reach.run(["simulate", *shlex.split(TABLES[case]), "--json", "--no-files"], folder)
    )
    yield (
        case,
        {
            "rows": reach.recommended(document)
            if case.startswith(_RECOMMEND)
            else reach.swept(document)
        },
    )


def _predicted(case: str, folder: Path, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    asked = CASES[case]
    words = asked.words.replace("PROFILES", str(reach.PROFILES)).split()
    output = reach.run(
        [
            "simulate",
            *words,
            "--layout",
            asked.layouts,
            "--exchange",
            asked.exchanges,
            "--json",
            "--out",
            str(out),
        ],
        folder,
    )
    rows = reach.records(out)
    for number, (name, row) in enumerate(
        zip(asked.names, reach.predicted(json.loads(output)), strict=True)
    ):
        row |= {
            "spent": reach.spent(rows, number),
            "counts": reach.work(rows, number),
            "bytes": reach.traffic(rows, number),
        }
        yield f"{case}: {name}", row
