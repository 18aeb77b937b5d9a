"""Prepare a decoder to run on many workers, which does not change the result; initialize it.

From the innermost to the outermost: tensor and expert parallelism, compilation, tiling after
attention, checkpointing, FSDP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from mtrain_cli.config.schema import Config
from mtrain_cli.launch.temporary_folders import compiled
from mtrain_cli.model.decoder import (
    Attend,
    Decoder,
    DecoderLayer,
    ProjectionWeights,
    of_products,
    projected,
)
from mtrain_cli.model.experts import Experts, MixtureOfExperts, expert_layers, reset_biases
from mtrain_cli.model.feed_forward import (
    FeedForwardOptions,
    FeedForwardWeights,
    feed_forward,
    normalized,
)
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.qkv_products import qkv_products
from mtrain_cli.model.rope import Rotation
from mtrain_cli.model.routing import Decision, Routing
from mtrain_cli.model.tiling import LayerExecution, layers_with_products, shared_tile_rows
from mtrain_cli.parallel.activation_offload import ActivationOffload, Kept
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.layer_groups import (
    EXPERTS,
    SHARD_OF_EXPERTS,
    ExpertGroup,
    TensorGroup,
    gather_rows,
    own_part,
    own_region,
    scatter_rows,
)
from mtrain_cli.parallel.mesh import TENSOR


class ExecutedLayer(DecoderLayer):
    """A decoder layer that runs as ``execution`` describes (`parallelize.execute_layers`)."""

    execution: LayerExecution

    def forward(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, routing: Routing | None = None
    ) -> Tensor:
        if isinstance(self.mlp, MixtureOfExperts) and self.mlp.sharing is not None:
            return self.mlp.experts(self._run, x_BNC, rope, attend, routing)
        return self._run(x_BNC, rope, attend, routing)

    def _run(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, routing: Routing | None
    ) -> Tensor:
        passes = _Passes()
        compute = partial(self._stages, rope=rope, attend=attend, passes=passes, routing=routing)
        if not self.execution.recompute:
            return compute(x_BNC)
        # FSDP gathers parameters in hooks around `forward`: the second pass does not gather again.
        offload = self.execution.offload
        with nullcontext() if offload is None else _input_offloaded(offload, self.index):
            # Saving the state of the random generators would synchronize with the GPU. Layers use
            # no random numbers.
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(compute, x_BNC, context_fn=passes.contexts, **options)

    def _stages(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, passes: _Passes,
        routing: Routing | None,
    ) -> Tensor:  # fmt: skip
        execution, mlp, tensor = self.execution, self.mlp, self.execution.tensor
        before: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
            staged(project, execution.compile, execution.any_length)
            if tensor is None and execution.fp8 != "all"
            else partial(project_apart, execution=execution)
        )
        # No variable refers to q, k and v, so their memory is free after attention.
        out_BNHD = attend(*before(self, x_BNC, rope.cos_BN1F, rope.sin_BN1F), self.index)
        if isinstance(mlp, MixtureOfExperts):
            h_BNC, n_BNC = before_experts(self, x_BNC, out_BNHD, tensor)
            return h_BNC + mlp(n_BNC, routing, passes.decisions)
        tokens = x_BNC.shape[0] * x_BNC.shape[1]
        hidden, intermediate = mlp.down_proj.out_features, mlp.down_proj.in_features
        itemsize = x_BNC.element_size()
        workers = 1 if tensor is None else tensor.size
        sizes = hidden, intermediate, itemsize, execution.tile_bytes
        rows = shared_tile_rows(tokens, *sizes, workers, execution.tensor_chunks)
        weights = FeedForwardWeights.of(self)
        if tensor is not None:
            weights = FeedForwardWeights(*map(own_part, weights))
            out_BNHD = tensor.padded(out_BNHD.flatten(0, 1).flatten(1)).view(
                1, -1, *out_BNHD.shape[2:]
            )
        elif not (execution.recompute or execution.fp8 != "none") and rows == tokens:
            after = staged(finish, execution.compile, execution.any_length)
            return after(self, x_BNC, out_BNHD)
        eps = self.post_attention_layernorm.eps
        keep = execution.keep_products and torch.is_grad_enabled()
        options = FeedForwardOptions(execution, eps, rows, passes.second, keep)
        return feed_forward(x_BNC, out_BNHD, weights, options)


def project(
    layer: DecoderLayer, x_BNC: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the part of a layer before attention. Return q, k and v."""
    return layer.self_attn.project(layer.input_layernorm(x_BNC), cos_BN1F, sin_BN1F)


def project_apart(
    layer: DecoderLayer,
    x_BNC: Tensor,
    cos_BN1F: Tensor,
    sin_BN1F: Tensor,
    *,
    execution: LayerExecution,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `project` does in fp8, or for the tokens of all workers of a tensor group."""
    norm, attention, tensor = layer.input_layernorm, layer.self_attn, execution.tensor
    how = execution.compile, execution.any_length and tensor is None
    weights = ProjectionWeights.of(attention)
    norm_C: Tensor | None = own_part(norm.weight)
    own = {name: own_part(w) for name, w in weights._asdict().items() if w is not None}
    weights = weights._replace(**own)
    of_norm = staged(normalized, *how)
    if tensor is not None:
        own_RC = of_norm(x_BNC[0], norm_C, norm.eps)
        batch, tokens = cos_BN1F.shape[:2]
        x_BNC = gather_rows(own_RC, tensor)[: batch * tokens].view(batch, tokens, -1)
        norm_C = None
    arguments = weights, attention.head_dim, attention.eps, cos_BN1F, sin_BN1F
    if execution.fp8 != "all":
        return staged(projected, *how)(x_BNC, *arguments)
    qkv_BNA = qkv_products(x_BNC, norm_C, norm.eps, weights[:3], of_norm)
    return staged(of_products, *how)(qkv_BNA, *arguments)


def before_experts(
    layer: DecoderLayer, x_BNC: Tensor, out_BNHD: Tensor, tensor: TensorGroup | None
) -> tuple[Tensor, Tensor]:
    """Compute a layer up to its experts. Return h = x + o(out) and norm(h) of own tokens."""
    norm, o_CA = layer.post_attention_layernorm, own_part(layer.self_attn.o_proj.weight)
    if tensor is None:
        sums_BNC = torch.nn.functional.linear(out_BNHD.flatten(-2), o_CA)
    else:
        rows_SA = tensor.padded(out_BNHD.flatten(0, 1).flatten(1))
        sums_BNC = scatter_rows(rows_SA @ o_CA.t(), tensor)
    h_BNC = x_BNC + sums_BNC
    return h_BNC, normalized(h_BNC, own_part(norm.weight), norm.eps)


def finish(layer: DecoderLayer, x_BNC: Tensor, out_BNHD: Tensor) -> Tensor:
    """Compute the part of a layer after attention, with autograd's own backward pass."""
    x_BNC = x_BNC + layer.self_attn.o_proj(out_BNHD.flatten(-2))
    return x_BNC + layer.mlp(layer.post_attention_layernorm(x_BNC))


@cache
def staged(
    stage: Callable[..., Any], compile: bool, any_length: bool = False
) -> Callable[..., Any]:
    """Return a function that all layers share, compiled once if ``compile``."""
    return compiled(stage, any_length) if compile else stage


def _input_offloaded(offload: ActivationOffload, layer: int) -> AbstractContextManager[None]:
    """Return a context in which `checkpoint` saves the layer's input to host memory."""

    def offload_input(saved: Tensor) -> Kept:
        # Some versions of `checkpoint` also save an empty tensor. Keep that on the device.
        return offload.put(layer, saved) if saved.numel() else saved

    return torch.autograd.graph.saved_tensors_hooks(
        offload_input, lambda kept: kept if isinstance(kept, Tensor) else kept.get()
    )


class _Passes:
    """The forward passes of one call of a layer.

    second: whether the forward pass that the backward pass starts is running.
    decisions: the decision of the layer's router, from the first pass.
    """

    def __init__(self) -> None:
        self.second = False
        self.decisions: list[Decision] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a context for each of the two forward passes, as `checkpoint` expects."""
        return nullcontext(), self._second_pass()

    @contextmanager
    def _second_pass(self) -> Iterator[None]:
        self.second = True
        try:
            yield
        finally:
            self.second = False


# Modules whose output or input features tensor parallelism cuts.
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def parallelize(
    decoder: Decoder,
    config: Config,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    compile: bool,
    offload: ActivationOffload | None,
    tensor: TensorGroup | None = None,
    experts: ExpertGroup | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Decoder:
    """Prepare a decoder on the meta device for training, in place, and return it.

    mesh: the workers that share the parameters (`make_parameter_mesh`).
    dtype: dtype in which the layers compute.
    offload: host memory for the inputs of checkpointed layers.
    tensor, experts: the workers that share each layer, and the experts; None for this one.
    expert_mesh: with ``experts``, the mesh that holds them (`make_expert_mesh`).
    """
    if tensor is not None:
        cut_layers(decoder, mesh[TENSOR], experts=experts is None)
    if experts is not None:
        assert expert_mesh is not None
        for mlp in expert_layers(decoder.layers):
            _cut(mlp.experts, expert_mesh[EXPERTS], Shard(0))
            mlp.sharing = experts
    set_execution(decoder, config, compile=compile, offload=offload, tensor=tensor)
    if config.optim.offload:
        decoder.to(dtype)  # the float32 weights are in host memory
    shard_parameters(
        decoder,
        mesh,
        dtype,
        shard=config.train.shard,
        reduce_dtype=getattr(torch, config.train.reduce_dtype),
        experts=[] if experts is None else [m.experts for m in expert_layers(decoder.layers)],
        expert_mesh=None if expert_mesh is None else expert_mesh[SHARD_OF_EXPERTS],
    )
    # Evaluation and pipelines call these methods. FSDP must gather weights for them, too.
    register_fsdp_forward_method(decoder, "token_losses")
    register_fsdp_forward_method(decoder, "run_stage")
    return decoder


def set_execution(
    decoder: Decoder,
    config: Config,
    *,
    compile: bool,
    offload: ActivationOffload | None = None,
    tensor: TensorGroup | None = None,
) -> None:
    """Set up compilation, tiling and checkpointing of the layers, and the options of the loss."""
    train = config.train
    execution = LayerExecution(
        compile=compile,
        tile_bytes=train.tile_mib << 20,
        recompute=train.activation_checkpoint != "none",
        fp8=train.fp8,
        offload=offload,
        tensor=tensor,
        tensor_chunks=config.topology.tensor_chunks,
        expert_chunks=config.topology.expert_chunks,
    )
    if not config.model.is_foreign:
        execute_layers(decoder, execution, keep_mlp=train.keep_mlp)
    decoder.loss = LossOptions(
        chunk_bytes=train.loss_chunk_mib << 20,
        z_loss=train.z_loss,
        recompute=train.loss_gradients == "recompute",
        compile=compile,
    )


def execute_layers(
    decoder: Decoder, execution: LayerExecution, *, keep_mlp: bool | int = False
) -> None:
    """Make all layers of a decoder run as ``execution`` describes.

    keep_mlp: value of ``train.keep_mlp``, which selects layers that keep their matrix products.
    """
    layers = decoder.model_config.num_layers
    first_kept = layers - layers_with_products(keep_mlp, layers)
    for layer in decoder.layers:
        # As FSDP2 does, change the class and not the module: parameters keep their names.
        layer.__class__ = ExecutedLayer
        keep_products = layer.index >= first_kept  # type: ignore
        layer.execution = replace(execution, keep_products=keep_products)  # type: ignore
    for mlp in expert_layers(decoder.layers):
        mlp.execution = execution


def cut_layers(decoder: Decoder, mesh: DeviceMesh, *, experts: bool = True) -> None:
    """Cut the parameters of all layers on the meta device over a tensor group, in place.

    Every worker has the whole norms, routers and experts. A cut parameter is a DTensor with its
    name and whole shape. mesh: the tensor group, one-dimensional. experts: False leaves experts
    alone.
    """
    for layer in decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, Experts) and not experts:
                continue
            _cut(module, mesh, _placement(name))


def _cut(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Keep this worker's part of a module's own parameters on the meta device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))


def _placement(module: str) -> Placement:
    name = module.rpartition(".")[2]
    if module.startswith("mlp.shared."):  # it computes own tokens, as the experts do
        return Replicate()
    if name in _BY_OUTPUT:
        return Shard(0)
    return Shard(1) if name in _BY_INPUT else Replicate()


def initialize(decoder: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Set norms to 1, biases to 0, and matrices to normal numbers, however they are sharded.

    Their standard deviation is ``init_std``, divided by sqrt(2 num_layers) for projections that add
    to the residual stream (GPT-2's report, section 2.3). Every worker draws whole matrices, seeded
    from ``seed`` and the parameter's name, and keeps its shard.

    device: draws the numbers, on which CPU and CUDA differ; by default the parameter's.
    """
    reset_biases(decoder)
    residual_std = decoder.model_config.init_std / math.sqrt(2 * decoder.model_config.num_layers)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down"))
            std = residual_std if residual else decoder.model_config.init_std
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            of_name = int.from_bytes(digest[:8], "little") >> 1
            _fill_normal(parameter, std, of_name, device or parameter.device)


@torch.no_grad()
def _fill_normal(parameter: Tensor, std: float, seed: int, device: torch.device) -> None:
    assert not parameter.is_meta, "call to_empty(device=...) before initialize"
    generator = torch.Generator(device).manual_seed(seed)
    matrix = (
        torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        .normal_(0.0, std, generator=generator)
        .to(parameter.device)
    )
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(matrix[own_region(parameter)])
    else:
        parameter.copy_(matrix)
