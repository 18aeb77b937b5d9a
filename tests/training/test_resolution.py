"""How a run resolves on a GPU that need not be here."""

from __future__ import annotations

from dataclasses import replace

import gloo
import pytest
import torch
from masked_documents import masked_store

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.resolution import ResolvedRun, kernel_request, resolve_run

AMPERE = Hardware(
    device="cuda", gpu="NVIDIA A100", capability=(8, 0), memory=80 << 30, host_memory=128 << 30
)


def choices(*overrides: str) -> ResolvedRun:
    alone = replace(gloo.environment(0, 1), device="cuda")
    return resolve_run(compose([*overrides, "topology.workers=1"]), alone, AMPERE)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_kernel_is_chosen_for_the_index_of_the_run(name):
    resolved = choices(f"sparsity={name}")
    assert resolved.kernel.name == ("sdpa" if name == "dense" else "triton"), (
        "an index is never computed densely on a GPU"
    )
    assert resolved.dense_kernel is None


def test_the_layout_is_the_one_that_auto_chooses():
    assert choices("data.document_mask=false").layout.name == "zigzag"
    assert choices().layout.name == "striped"


def test_dense_first_steps_get_a_dense_kernel_in_addition_to_the_sparse_one():
    resolved = choices("sparsity=moba", "sparsity.dense_steps=5", "train.kernel=triton")
    assert (resolved.kernel.name, resolved.dense_kernel[0].name) == ("triton", "sdpa")


def test_a_dense_kernel_is_refused_with_an_index():
    with pytest.raises(
        ConfigError,
        match=r"train\.kernel=sdpa: FlashAttention-2 in PyTorch computes dense attention only",
    ):
        choices("sparsity=vertical_slash", "train.kernel=sdpa")


def test_the_kernel_is_chosen_for_the_intervals_of_the_data(tmp_path):
    words = ["data=tokens", f"data.path={masked_store(tmp_path)}"]
    environment = gloo.environment(0, 1)
    for key, intervals in (("null", 1), ("mask", 2)):
        config = compose([*words, f"data.mask_key={key}"])
        request = kernel_request(config, environment.device, torch.float32, None)
        assert request.intervals == intervals


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("train.dtype=bfloat16", "needs GPUs of compute capability 8.9 or later, not 8.0"),
        ("train.dtype=auto", "needs bfloat16, not float32; give train.dtype=bfloat16"),
    ],
)
@pytest.mark.parametrize("kind", ["mlp", "all"])
def test_fp8_needs_a_gpu_that_has_it_and_bfloat16(kind, words, refusal):
    device = "cuda" if words == "train.dtype=bfloat16" else "cpu"
    environment = replace(gloo.environment(0, 1), device=device)
    config = compose([f"train.fp8={kind}", words, "topology.workers=1"])
    with pytest.raises(ConfigError, match=f"train.fp8={kind}: {refusal}"):
        resolve_run(config, environment, AMPERE)
    newer = replace(AMPERE, capability=(8, 9))
    if device == "cuda":
        resolve_run(config, environment, newer)
