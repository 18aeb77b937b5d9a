"""Layers are cut by heads and by the MLP's width; names and whole shapes stay."""

from __future__ import annotations

import gloo
import torch
from tiny_models import tiny_model
from torch.distributed.tensor import DTensor

from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.model.decoder import Decoder, ProjectionWeights
from mtrain_cli.model.feed_forward import FeedForwardWeights
from mtrain_cli.model.parallelize import cut_layers
from mtrain_cli.parallel.mesh import TENSOR, make_parameter_mesh
from mtrain_cli.parallel.tensor_group import own_part


def meta_decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(tiny_model())


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
