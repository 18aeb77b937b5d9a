"""Calibration on GPUs: NCCL links by device times, and calls of every kernel."""

from __future__ import annotations

import json

import pytest
import torch
from command import mtrain

from mtrain_cli.config.cluster import load_cluster
from mtrain_extras.bench.kernels import KernelBench, KernelCase, profile_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_links_of_two_gpus(tmp_path):
    arguments = [
        "topology.workers=2",
        "--sizes",
        "64k,4m,64m",
        "--repeats",
        "3",
        "--cluster-out",
        "mine.yaml",
        "--json",
    ]
    result = mtrain(tmp_path, "profile", "links", *arguments)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["backend"] == "nccl"
    for t in document["times"]:
        assert t["us"] > 0
        assert t["loaded_us"] > 0
    # Both are device times. A link faster than memory, or a computation that messages speed up
    # twofold, would mean that nothing was measured.
    assert all(t["gbps"] < 2000 for t in document["times"])
    assert all(t["slowdown"] is None or t["slowdown"] > 0.5 for t in document["times"])
    cluster = load_cluster(str(tmp_path / "mine.yaml"))
    assert cluster.gpu.name == torch.cuda.get_device_name()
    assert cluster.gpus_per_node == torch.cuda.device_count()


def test_kernels_are_timed():
    case = KernelCase(
        seq=16384, heads=4, kv_heads=2, head_dim=128, block=128, density=0.1, columns=256
    )
    dense, *sparse = profile_kernels(KernelBench([], torch.bfloat16, "cuda", 3), [case])
    assert "triton" in {time.kernel for time in sparse}
    assert all(time.forward_ms > 0 < time.backward_ms for time in (dense, *sparse))
