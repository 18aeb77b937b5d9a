from __future__ import annotations

import math

import gloo
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.parallelize import initialize

# 97 embedding rows on 3 workers: unequal shards, and an empty one for the smallest norms.
MODEL = tiny_model("qwen3", tied=False, qkv_bias=True, head_dim=2, init_std=0.02)


def initialized(seed: int, mesh=None) -> dict[str, Tensor]:
    with torch.device("meta"):
        decoder = Decoder(MODEL)
    if mesh is not None:
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
    decoder.to_empty(device="cpu")
    initialize(decoder, seed)
    parameters = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    return {
        name: value.full_tensor() if mesh is not None else value
        for name, value in parameters.items()
    }


def initialized_by_workers(rank: int, world: int) -> dict[str, Tensor]:  # noqa: ARG001
    return initialized(3, init_device_mesh("cpu", (world,)))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_initialisation_is_bitwise_that_of_one_worker(world):
    alone = initialized(3)
    for together in gloo.run(world, initialized_by_workers):
        assert together.keys() == alone.keys()
        assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_matrices_norms_and_biases_have_their_distributions():
    residual = 0.02 / math.sqrt(2 * MODEL.num_layers)
    for name, value in initialized(0).items():
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones_like(value)), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            expected = residual if "o_proj" in name or "down_proj" in name else 0.02
            tolerance = 5 / math.sqrt(2 * value.numel())  # five standard errors
            assert value.std().item() == pytest.approx(expected, rel=tolerance), name
            assert value.mean().abs().item() < 5 * expected / math.sqrt(value.numel()), name


def test_values_depend_on_seed_and_name():
    first, again, other = initialized(0), initialized(0), initialized(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert not torch.equal(
        first["layers.0.mlp.gate_proj.weight"], first["layers.1.mlp.gate_proj.weight"]
    )
    assert not torch.equal(
        first["layers.0.mlp.gate_proj.weight"], first["layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU draws them")
def test_numbers_are_drawn_on_the_given_device():
    decoder = Decoder(MODEL)
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        initialize(decoder, 0, torch.device("cuda"))
