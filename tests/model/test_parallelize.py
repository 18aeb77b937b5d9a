"""Settings reach every layer and the loss, and parameters keep names, shapes and dtypes."""

from __future__ import annotations

import gloo
import pytest
import torch
from tiny_models import tiny_model
from torch.distributed.tensor import DTensor

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.parallelize import parallelize, set_execution
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.mesh import make_parameter_mesh


def meta_decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(tiny_model())


@pytest.mark.parametrize(
    ("overrides", "recompute", "tile_mib", "kept"),
    [
        (["train.activation_checkpoint=none"], False, 4096, [False] * 3),
        (["train.keep_mlp=2", "train.tile_mib=7"], True, 7, [False, True, True]),
        (["train.keep_mlp=true", "train.tile_mib=0"], True, 0, [True] * 3),
    ],
)
def test_each_layer_runs_as_the_settings_say(overrides, recompute, tile_mib, kept):
    decoder = meta_decoder()
    names = [name for name, _ in decoder.named_parameters()]
    offload = ActivationOffload(3, torch.device("cpu"), True) if recompute else None
    set_execution(decoder, compose(overrides).train, compile=True, offload=offload)
    executions = [layer.execution for layer in decoder.layers]
    assert [e.keep_products for e in executions] == kept
    assert {(e.recompute, e.tile_bytes, e.compile, e.offload) for e in executions} == {
        (recompute, tile_mib << 20, True, offload)
    }
    assert [name for name, _ in decoder.named_parameters()] == names


def test_the_loss_gets_its_settings():
    decoder = meta_decoder()
    train = compose(
        ["train.loss_chunk_mib=3", "train.z_loss=0.001", "train.loss_gradients=recompute"]
    ).train
    set_execution(decoder, train)
    loss = decoder.loss
    assert (loss.chunk_bytes, loss.z_loss, loss.recompute) == (3 << 20, 0.001, True)
    assert not loss.compile


def shard(_rank: int, world: int, overrides: list[str]) -> dict[str, tuple]:
    mesh = make_parameter_mesh(ParallelDims.of(world), "cpu")
    decoder = parallelize(
        meta_decoder(), compose(overrides), mesh, torch.bfloat16, compile=False, offload=None
    )
    assert all(p.is_meta and isinstance(p, DTensor) for p in decoder.parameters())
    return {name: (tuple(p.shape), p.dtype) for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("on_host", [False, True])
def test_parameters_are_sharded_and_keep_their_names(on_host):
    dtype = torch.bfloat16 if on_host else torch.float32
    expected = {name: (tuple(p.shape), dtype) for name, p in meta_decoder().named_parameters()}
    assert gloo.run(1, shard, [f"optim.offload={str(on_host).lower()}"]) == [expected]
