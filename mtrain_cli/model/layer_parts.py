"""Tensor parallelism of a decoder's layers: how their parameters are cut, and the cut weights.

A parameter of a layer is a DTensor over the tensor group, which FSDP and checkpoints know how to
shard, gather and save. Computation takes the plain local weights.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from mtrain_cli.model.decoder import Decoder, ProjectionWeights
from mtrain_cli.model.experts import Experts
from mtrain_cli.model.feed_forward import FeedForwardWeights
from mtrain_cli.parallel.tensor_group import own_part

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def cut_layers(decoder: Decoder, mesh: DeviceMesh, *, experts: bool = True) -> None:
    """Cut the parameters of all layers over a tensor group, in place.

    q, k, v, gate and up keep a part of their output features, o and down a part of their input
    features. Every worker has the whole norms, routers and experts. The parameters keep their names
    and whole shapes.

    Args:
        decoder: a decoder on the meta device.
        mesh: the tensor group, one-dimensional.
        experts: whether experts belong to the tensor group; False leaves them as they are.
    """
    for layer in decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, Experts) and not experts:
                continue
            placement = _placement(name)
            for key, parameter in module.named_parameters(recurse=False):
                part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(part))


def _placement(module: str) -> Placement:
    """Return how to cut the parameters of the module with this name in its layer."""
    name = module.rpartition(".")[2]
    if module.startswith("mlp.shared."):  # it computes own tokens, as the experts do
        return Replicate()
    if name in _BY_OUTPUT:
        return Shard(0)
    return Shard(1) if name in _BY_INPUT else Replicate()


def own_projections(weights: ProjectionWeights) -> ProjectionWeights:
    """Return this worker's part of the projections before attention."""
    cut = {name: own_part(w) for name, w in weights._asdict().items() if w is not None}
    return weights._replace(**cut)


def own_feed_forward(weights: FeedForwardWeights) -> FeedForwardWeights:
    """Return this worker's part of the weights after attention."""
    return FeedForwardWeights(*map(own_part, weights))
