"""Settings reach every layer and the loss; parameters and parts keep names, shapes and dtypes."""

from __future__ import annotations

import gloo
import pytest
import torch
from tiny_models import tiny_model
from torch.distributed.tensor import DTensor

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.model.decoder import Decoder, ProjectionWeights
from mtrain_cli.model.feed_forward import FeedForwardWeights
from mtrain_cli.model.parallelize import cut_layers, parallelize, set_execution
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.layer_groups import own_part
from mtrain_cli.parallel.mesh import TENSOR, make_parameter_mesh


def meta_decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(tiny_model())


@pytest.mark.parametrize(
    ("overrides", "recompute", "tile_mib", "kept"),
    [
        (["train.activation_checkpoint=none"], False, 4096, [False] * 3),
        (["train.keep_mlp=2", "train.tile_mib=7", "train.fp8=all"], True, 7, [False, True, True]),
        (["train.keep_mlp=true", "train.tile_mib=0"], True, 0, [True] * 3),
    ],
)
def test_each_layer_runs_as_the_settings_say(overrides, recompute, tile_mib, kept):
    decoder = meta_decoder()
    names = [name for name, _ in decoder.named_parameters()]
    offload = ActivationOffload(3, torch.device("cpu"), True) if recompute else None
    set_execution(decoder, compose(overrides), compile=True, offload=offload)
    executions = [layer.execution for layer in decoder.layers]
    assert [e.keep_products for e in executions] == kept
    assert {e.fp8 for e in executions} == {"all" if "train.fp8=all" in overrides else "none"}
    assert {(e.recompute, e.tile_bytes, e.compile, e.offload) for e in executions} == {
        (recompute, tile_mib << 20, True, offload)
    }
    assert [name for name, _ in decoder.named_parameters()] == names


def test_the_loss_gets_its_settings():
    decoder = meta_decoder()
    words = ["train.loss_chunk_mib=3", "train.z_loss=0.001", "train.loss_gradients=recompute"]
    set_execution(decoder, compose(words), compile=False)
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


def parts(_rank: int, world: int) -> tuple[dict[str, tuple[int, ...]], list, list, list[bool]]:
    decoder = meta_decoder()
    cut_layers(decoder, make_parameter_mesh(ParallelDims.of(world, cp=1, tp=2), "cpu")[TENSOR])
    layer = decoder.layers[0]
    whole = ProjectionWeights.of(layer.self_attn)
    projections = [None if weight is None else own_part(weight) for weight in whole]
    rest = map(own_part, FeedForwardWeights.of(layer))
    return (
        {name: tuple(p.shape) for name, p in decoder.named_parameters()},
        [None if weight is None else tuple(weight.shape) for weight in projections],
        [tuple(weight.shape) for weight in rest],
        [isinstance(p, DTensor) for p in (decoder.norm.weight, layer.mlp.up_proj.weight)],
    )


def test_a_worker_has_its_heads_and_its_part_of_the_mlp():
    model, whole = tiny_model(), meta_decoder()
    hidden, width = model.hidden_size, model.intermediate_size // 2
    q, kv = (n * model.head_dim // 2 for n in (model.num_heads, model.num_kv_heads))
    for shapes, projections, rest, cut in gloo.run(2, parts):
        assert shapes == {name: tuple(p.shape) for name, p in whole.named_parameters()}
        assert projections[:3] == [(q, hidden), (kv, hidden), (kv, hidden)]
        biases = [(q,), (kv,), (kv,)] if model.qkv_bias else [None] * 3
        assert projections[3:6] == biases
        assert rest == [(hidden, q), (hidden,), (width, hidden), (width, hidden), (hidden, width)]
        assert cut == [False, True], "only layers are cut"
