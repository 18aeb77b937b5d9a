"""`mtrain profile step` on GPUs: the parts add up, and ranges attribute every kind of launch."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import mtrain

from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.kernel_registry import survey
from mtrain_extras.bench.step_breakdown import (
    StepBreakdown,
    find_parts,
    kernel_part,
    messages,
    shortest,
)

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a GPU")]
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 128, 3
SMALL = [
    *(
        "topology.device=cuda",
        "seq=8k",
        "model.hidden_size=512",
        "model.intermediate_size=1024",
        f"model.head_dim={HEAD_DIM}",
    ),
    *(
        f"model.num_heads={HEADS}",
        f"model.num_kv_heads={KV_HEADS}",
        f"model.num_layers={LAYERS}",
        "train.steps=4",
        "run.name=one",
    ),
]
SPARSE = [
    "sparsity=vertical_slash",
    "sparsity.min_slashes=8",
    "sparsity.max_slashes=8",
    "sparsity.max_columns=256",
]


def profile_step(folder: Path, *arguments: str) -> dict[str, Any]:
    result = mtrain(folder, "profile", "step", "--warmup", "3", *SMALL, *arguments)
    assert result.returncode == 0, result.stderr
    assert "attention" in result.stdout
    summary = json.loads((folder / "measurements/one/summary.json").read_text())
    for rank in summary["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["step_ms"], rel=1e-9)
        assert all(ms >= 0 for ms in rank["parts"].values())
        for part in ("attention", "products", "element-wise", "loss", "optimizer"):
            assert rank["parts"][part] > 0, part
        assert rank["launches"] > 20 * LAYERS
        assert 0 < rank["launching_ms"] < rank["step_ms"]
        assert rank["syncs"] >= 1  # loss and gradient norm
        assert rank["ahead_us"] is not None
        # The host's clock and that of the records.
        assert rank["step_ms"] == pytest.approx(rank["recorded_ms"], rel=0.05)
    assert (summary["plain"]["first"], summary["plain"]["steps"]) == (2, 2)
    assert summary["plain"]["peak_memory_gib"] > 0
    assert 0 < summary["plain"]["mfu_executed"] < 1
    return summary


def events(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    with gzip.open(folder / f"measurements/one/trace-rank-{rank}.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def parts_without_named_kernels(folder: Path) -> StepBreakdown:
    """Return the parts that only ranges can identify, since no kernel name does."""
    result = events(folder)
    kernels = [e for e in result if e.get("cat") == "kernel" and not e["name"].startswith("nccl")]
    for e in kernels:
        e["name"] = "x"
    return find_parts(result, gpu=True)


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "measurements/one/kernels.csv").open()))


def skip_without(name: str, index: IndexRequest | None) -> None:
    request = KernelRequest(
        "cuda",
        torch.cuda.get_device_capability(),
        "bfloat16",
        HEAD_DIM,
        HEADS,
        KV_HEADS,
        index=index,
    )
    missing = dict(survey(request))[name]
    if missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", ["sdpa", "flash4"])
def test_dense_attention_is_attributed_by_its_launch_range(name, tmp_path):
    skip_without(name, None)
    summary = profile_step(tmp_path, "topology.workers=1", f"train.kernel={name}")
    (rank,) = summary["ranks"]
    assert rank["parts"]["index"] == 0
    alone = parts_without_named_kernels(tmp_path)
    for part in ("attention", "loss", "optimizer"):
        assert alone.parts[part] / 1e6 == pytest.approx(rank["parts"][part], rel=1e-6), part
    flash = [row for row in rows(tmp_path) if kernel_part(row["name"]) == "attention"]
    assert {row["part"] for row in flash} == {"attention"}
    # Forward and backward of every layer, from any thread.
    assert sum(float(row["calls"]) for row in flash) >= 2 * LAYERS


@pytest.mark.parametrize("name", ["triton", "flash4"])
def test_sparse_attention_and_its_index_are_attributed_by_launch_range(name, tmp_path):
    skip_without(name, IndexRequest(128, bitmap=False))
    summary = profile_step(tmp_path, "topology.workers=1", f"train.kernel={name}", *SPARSE)
    (rank,) = summary["ranks"]
    assert rank["parts"]["index"] > 0
    alone = parts_without_named_kernels(tmp_path)
    for part in ("attention", "index", "loss", "optimizer"):
        assert alone.parts[part] / 1e6 == pytest.approx(rank["parts"][part], rel=1e-6), part
    if name == "triton":
        for kernel in ("_backward_keys", "_backward_queries"):
            assert {row["part"] for row in rows(tmp_path) if row["name"].startswith(kernel)} == {
                "attention"
            }


def test_parts_are_the_same_without_compilation(tmp_path):
    profile_step(tmp_path, "topology.workers=1", "train.kernel=sdpa", "train.compile=false")
    assert not any(row["name"].startswith("triton_") for row in rows(tmp_path))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more")
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_nccl_time_is_overlapped_or_exposed_and_in_no_other_part(exchange, tmp_path):
    summary = profile_step(
        tmp_path, "topology.workers=2", f"topology.exchange={exchange}", "train.kernel=sdpa"
    )
    assert len(summary["ranks"]) == 2
    for rank in summary["ranks"]:
        assert rank["parts"]["links"] + rank["links_hidden_ms"] > 0
        assert rank["parts"]["weights"] > 0  # FSDP's copies
    nccl = [row for row in rows(tmp_path) if row["name"].lower().startswith("nccl")]
    assert {row["rank"] for row in nccl} == {"0", "1"}
    assert {row["part"] for row in nccl} == {"links"}
    # The trace tells them apart, and every one is on both ranks.
    first, second = (messages(events(tmp_path, rank)) for rank in (0, 1))
    assert len(shortest([first, second])) == len(first) == len(second) > 2 * LAYERS


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more")
def test_the_worker_with_less_work_waits(tmp_path):
    # The first half of the tokens has a third of the second half's pairs.
    arguments = [
        "topology.workers=2",
        "topology.layout=contiguous",
        "topology.exchange=all_gather",
        "train.kernel=sdpa",
        "seq=64k",
    ]
    first, second = profile_step(tmp_path, *arguments)["ranks"]
    assert first["parts"]["attention"] < second["parts"]["attention"] / 2
    assert (
        first["parts"]["waits"]
        > second["parts"]["waits"]
        + (second["parts"]["attention"] - first["parts"]["attention"]) / 2
    )
