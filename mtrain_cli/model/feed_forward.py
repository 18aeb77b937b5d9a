"""The part of a layer after attention: output projection, norm and MLP, in tiles of the sequence.

Forward keeps only its inputs, and backward recomputes one tile at a time, so tensors of the MLP's
intermediate size exist for one tile only (TiledMLP in ALST, arXiv:2506.13996, section 3.1.1).
Backward is written by hand: autograd would allocate a weight gradient for each tile.

With tensor parallelism, a worker has its own rows of the residual stream, the attention output of
its heads for all rows, and the weights of these heads and of a part of the MLP. A tile has the same
rows of every worker: it gathers rows before the worker's matrices, and adds up results after them.

Shape suffixes: N tokens of all sequences, R own tokens of a tile, S tokens of a tile of all workers
    of a tensor group, C hidden size, A width of the attention output, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.launch.temporary_folders import compiled
from mtrain_cli.model.loss import add_matmul
from mtrain_cli.model.mlp_products import Fp8Products, MlpProducts
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel.layer_groups import Message, TensorGroup, staggered

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import DecoderLayer, SwiGLU


Products = tuple[Tensor, Any]  # h, and gate(n) and up(n) of a tile


class FeedForwardWeights(NamedTuple):
    """Weights of a layer's output projection, second norm and MLP."""

    o_CA: Tensor
    norm_C: Tensor
    gate_IC: Tensor
    up_IC: Tensor
    down_CI: Tensor

    @staticmethod
    def of(layer: DecoderLayer) -> FeedForwardWeights:
        norm, mlp = layer.post_attention_layernorm, cast("SwiGLU", layer.mlp)
        projections = layer.self_attn.o_proj, norm, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        return FeedForwardWeights(*(projection.weight for projection in projections))


@dataclass(frozen=True)
class FeedForwardOptions:
    """How to compute `feed_forward`.

    rows: own tokens per tile (`tiling.tile_rows`).
    inputs_only: only keep the inputs for backward, and return a placeholder not to be read, as the
        second forward pass of a checkpoint.
    keep_products: also keep h, gate(n) and up(n), so that backward repeats no matrix product.
    """

    execution: LayerExecution
    eps: float
    rows: int
    inputs_only: bool = False
    keep_products: bool = False

    @property
    def tensor(self) -> TensorGroup | None:
        return self.execution.tensor

    @property
    def elementwise(self) -> tuple[Callable[..., Any], ...]:
        return _elementwise(self.execution.compile, self.execution.any_length)

    def products(self, weights: FeedForwardWeights) -> MlpProducts:
        if self.execution.fp8 != "none":
            return Fp8Products(weights, of_output=self.execution.fp8 == "all")
        return MlpProducts(weights, self.elementwise[:3])

    def gather(self, own_RC: Tensor) -> Message:
        """Start to gather the rows of all workers that share the layer."""
        return Message(own_RC) if self.tensor is None else self.tensor.start_gather(own_RC)

    def scatter(self, parts_SC: Tensor) -> Message:
        """Start to sum over the workers that share the layer. Each gets its own rows."""
        return Message(parts_SC) if self.tensor is None else self.tensor.start_scatter(parts_SC)

    def run(self, tiles: Iterable[Iterator[None]]) -> None:
        """Compute all tiles. With tensor parallelism, messages overlap with other tiles."""
        if self.tensor is not None:
            staggered(tiles)
            return
        for tile in tiles:
            for _ in tile:
                pass


def feed_forward(
    x_BNC: Tensor, out_BNHD: Tensor, weights: FeedForwardWeights, options: FeedForwardOptions
) -> Tensor:
    """Return h + down(silu(gate(n)) * up(n)), where h = x + o(out) and n = norm(h).

    With tensor parallelism, out has the tokens of all workers, in equal parts.
    """
    return _FeedForward.apply(x_BNC, out_BNHD, *weights, options)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BNC: Tensor, out_BNHD: Tensor, o_CA: Tensor, norm_C: Tensor,
        gate_IC: Tensor, up_IC: Tensor, down_CI: Tensor, options: FeedForwardOptions,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x_BNC, out_BNHD, o_CA, norm_C, gate_IC, up_IC, down_CI)
        ctx.options = options
        # One entry per tile. These are not saved tensors, because a checkpoint drops saved tensors
        # and recomputes them.
        ctx.products = []
        if options.inputs_only:
            return x_BNC.new_empty(()).expand_as(x_BNC)
        weights = FeedForwardWeights(o_CA, norm_C, gate_IC, up_IC, down_CI)
        mlp = options.products(weights)
        result_BNC = x_BNC.new_empty(x_BNC.shape)
        tiles = zip(*_tiles(options, x_BNC, out_BNHD, result_BNC), strict=True)
        options.run(
            _forward(x_RC, out, result_RC, mlp, options, ctx.products)
            for x_RC, out, result_RC in tiles
        )
        return result_BNC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNC: Tensor) -> tuple[Tensor | None, ...]:
        x_BNC, out_BNHD, *saved = ctx.saved_tensors
        weights, options = FeedForwardWeights(*saved), ctx.options
        mlp = options.products(weights)
        # new_empty gives contiguous tensors, even if the inputs are not. Their tiles are views.
        dx_BNC, dout_BNHD = x_BNC.new_empty(x_BNC.shape), out_BNHD.new_empty(out_BNHD.shape)
        sums = _GradientSums(options.rows < x_BNC.shape[0] * x_BNC.shape[1])
        # Take the products out of ctx: each is freed after its tile, and all if backward fails.
        products, ctx.products = ctx.products, []
        tensors = (x_BNC, out_BNHD, grad_BNC.contiguous(), dx_BNC, dout_BNHD)
        tiles = zip(*_tiles(options, *tensors), strict=True)
        options.run(
            _backward(x_RC, out, grad_RC, dx_RC, dout, mlp, options, products, sums)
            for x_RC, out, grad_RC, dx_RC, dout in tiles
        )
        gradients = (
            sums.take(name, weight)
            for name, weight in zip(("o", "norm", "gate", "up", "down"), weights, strict=True)
        )
        return dx_BNC, dout_BNHD, *gradients, None


def _forward(
    x_RC: Tensor, out: Tensor, result_RC: Tensor, mlp: MlpProducts,
    options: FeedForwardOptions, products: list[Products],
) -> Iterator[None]:  # fmt: skip
    """Compute one tile of the forward pass. Yield after each message that has started."""
    gate = _at_gate(x_RC, out.flatten(0, 1), mlp, options, needs_norm=False)
    h_RC, rows = (yield from gate)[::2]
    gate_up = mlp.gate_up(rows)
    del rows
    inner_SI, kept = mlp.gated(gate_up, options.keep_products)
    if kept is not None:
        products.append((h_RC, kept))
    del gate_up, kept
    if options.tensor is None:
        mlp.down(inner_SI, out=result_RC)
        del inner_SI
    else:
        message = options.scatter(mlp.down(inner_SI))
        del inner_SI
        yield
        result_RC.copy_(message.wait())
    result_RC += h_RC


def _at_gate(
    x_RC: Tensor, out_SA: Tensor, mlp: MlpProducts, options: FeedForwardOptions, *, needs_norm: bool
) -> Generator[None, None, tuple[Tensor, Any, Any]]:
    """Compute a tile up to the inputs of the MLP.

    Return h of own rows, n of all rows if needed, and n as the input of a product.
    """
    message = options.scatter(mlp.output(out_SA))
    del out_SA
    yield
    if options.tensor is None:
        return mlp.normed(x_RC, message.wait(), options.eps, needs_norm)
    join, norm_C = options.elementwise[0], mlp.weights.norm_C.detach()
    h_RC, n_RC = join(x_RC, message.wait(), norm_C, options.eps)
    message = options.gather(n_RC)
    del n_RC
    yield
    n_SC = message.wait()
    return h_RC, n_SC, mlp.rows(n_SC)


def _backward(
    x_RC: Tensor, out: Tensor, grad_RC: Tensor, dx_RC: Tensor, dout: Tensor,
    mlp: MlpProducts, options: FeedForwardOptions, products: list[Products], sums: _GradientSums,
) -> Iterator[None]:  # fmt: skip
    """Compute one tile of the backward pass. Yield after each message that has started."""
    norm_C = mlp.weights.norm_C
    *_, norm_backward, normed = options.elementwise
    out_SA = out.flatten(0, 1)
    kept = products.pop(0) if products else None
    if kept is not None:
        h_RC, gate_up = kept
        del kept
        message = options.gather(normed(h_RC, norm_C.detach(), options.eps))
        of_grad = options.gather(grad_RC)
        yield
        n_SC = message.wait()
        del message
    else:
        h_RC, n_SC, rows = yield from _at_gate(x_RC, out_SA, mlp, options, needs_norm=True)
        of_grad = options.gather(grad_RC)
        gate_up = mlp.gate_up(rows)
        del rows
    grad_SC = of_grad.wait()
    del of_grad
    gate_inputs = gate_up, mlp.down_back(mlp.rows(grad_SC))
    del gate_up
    inner_SI, dgate_SI, dup_SI, gradients = mlp.gate_backward(*gate_inputs)
    del gate_inputs
    sums.add("down", grad_SC.t(), inner_SI)
    del inner_SI, grad_SC
    sums.add("gate", dgate_SI.t(), n_SC)
    sums.add("up", dup_SI.t(), n_SC)
    del n_SC, dgate_SI, dup_SI
    message = options.scatter(mlp.gate_up_back(gradients))
    del gradients
    yield
    dh_RC, dnorm_C = norm_backward(h_RC, norm_C, message.wait(), grad_RC, options.eps)
    del h_RC, message
    sums.add_vector("norm", dnorm_C)
    dx_RC.copy_(dh_RC)
    message = options.gather(dh_RC)
    del dh_RC
    yield
    dh_SC = message.wait()
    if options.tensor is None:
        mlp.output_back(dh_SC, out=dout[0])
    else:
        dout.copy_(mlp.output_back(dh_SC).view_as(dout))
    sums.add("o", dh_SC.t(), out_SA)


class _GradientSums:
    """Weight gradients, summed over tiles in float32; in the compute dtype for a single tile."""

    def __init__(self, multiple_tiles: bool) -> None:
        self._multiple_tiles = multiple_tiles
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add a @ b to the gradient ``name``."""
        if not self._multiple_tiles:
            self._sums[name] = a @ b
            return
        if name not in self._sums:
            self._sums[name] = torch.zeros(
                a.shape[0], b.shape[1], dtype=accumulation_dtype(a.dtype), device=a.device
            )
        add_matmul(self._sums[name], a, b)

    def add_vector(self, name: str, vector: Tensor) -> None:
        self._sums[name] = self._sums[name] + vector if name in self._sums else vector

    def take(self, name: str, weight: Tensor) -> Tensor:
        """Remove the gradient ``name`` and return it in the dtype of its weight."""
        return self._sums.pop(name).to(weight.dtype)


def _tiles(options: FeedForwardOptions, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tiles of each contiguous tensor, as views."""
    # A tile of the heads ``[B, N, H, D]`` of all workers of a layer is ``[workers, R, H * D]``.
    workers = 1 if options.tensor is None else options.tensor.size
    for tensor in tensors:
        rows_and_width = tensor.flatten(0, 1).flatten(1)
        if tensor.ndim == 3:
            yield rows_and_width.split(options.rows)
        else:
            yield rows_and_width.unflatten(0, (workers, -1)).split(options.rows, 1)


def _join(x_RC: Tensor, projected_RC: Tensor, norm_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return h, the residual stream after attention, and n, the normalized h."""
    h_RC = x_RC + projected_RC
    return h_RC, normalized(h_RC, norm_C, eps)


def normalized(h_RC: Tensor, norm_C: Tensor, eps: float) -> Tensor:
    """Return the normalized rows, as `RMSNorm` does."""
    return functional.rms_norm(h_RC, norm_C.shape, norm_C, eps)


def _gated(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    return functional.silu(gate_RI) * up_RI


def _gate_backward(
    gate_RI: Tensor, up_RI: Tensor, dinner_RI: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return silu(gate) * up, the gradient of gate and the gradient of up."""
    # Overwrites ``dinner_RI``, the gradient of the product.
    silu_RI = functional.silu(gate_RI)
    inner_RI = silu_RI * up_RI
    dup_RI = silu_RI.mul_(dinner_RI)
    dgate_RI = torch.ops.aten.silu_backward(dinner_RI.mul_(up_RI), gate_RI)
    return inner_RI, dgate_RI, dup_RI


def _norm_backward(
    h_RC: Tensor, norm_C: Tensor, dn_RC: Tensor, grad_RC: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of h and the gradient of the norm's weight."""
    # Overwrites float32 h and dn. grad_RC is the gradient of the residual stream.
    high = accumulation_dtype(h_RC.dtype)
    unit_RC, dn_RC = h_RC.to(high), dn_RC.to(high)
    scale_R1 = torch.rsqrt(unit_RC.square().mean(-1, keepdim=True) + eps)
    unit_RC.mul_(scale_R1)
    dnorm_C = (dn_RC * unit_RC).sum(0)
    dn_RC.mul_(norm_C)
    projection_R1 = (dn_RC * unit_RC).mean(-1, keepdim=True)
    dn_RC.addcmul_(unit_RC, projection_R1, value=-1.0).mul_(scale_R1).add_(grad_RC)
    return dn_RC.to(h_RC.dtype), dnorm_C


@cache
def _elementwise(compile: bool, any_length: bool) -> tuple[Callable[..., Any], ...]:
    """Return the functions that run between the matrix products, the same for all layers."""
    functions = (_join, _gated, _gate_backward, _norm_backward, normalized)
    return tuple(compiled(f, any_length) for f in functions) if compile else functions
