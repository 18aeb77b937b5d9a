"""Time grouped products and one layer of experts on one GPU. Used by `expert_speed.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.expert_products import (
    ExpertExecution,
    grouped_rows,
    grouped_rows_back,
    grouped_sums,
)
from mtrain_cli.model.experts import MixtureOfExperts
from mtrain_cli.model.routing import RouterOptions, Routing

ZIPF = 0.5  # the expert of rank r gets a share proportional to 1 / r^ZIPF
ATTEMPTS, SECONDS = 10, 1.0  # of one timing
AHEAD = 8_000_000  # cycles of waiting on the GPU before a timing, a few milliseconds
CLOSE = 5e-2  # relative error of a layer in bfloat16

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """The model whose experts to time, and where: tensors are bfloat16 on a GPU.

    tile_bytes: maximum bytes of mtrain's temporary tensors (`train.tile_mib`).
    """

    model: ModelConfig
    device: str
    tile_bytes: int = 4 << 30

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        """Return normal random numbers."""
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(std=std)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights of a router, of all gates and ups, and of all down projections."""
        moe, hidden = self.model.moe, self.model.hidden_size
        shapes = (
            (moe.experts, hidden),
            (moe.experts, 2 * moe.expert_size, hidden),
            (moe.experts, hidden, moe.expert_size),
        )
        gate, gate_up, down = (self.random(*shape, std=0.02) for shape in shapes)
        return gate, gate_up, down

    def layer_flop(self, tokens: int) -> float:
        """Return the FLOP of a forward pass of the router and the experts."""
        moe, hidden = self.model.moe, self.model.hidden_size
        return 2.0 * tokens * hidden * (moe.experts + 3 * moe.top_k * moe.expert_size)


def seconds_of(runs: list[Callable[[], object]], device: str) -> float:
    """Return the median time of a call. Calls take turns, so that inputs leave the cache."""
    for run in runs:
        run()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < ATTEMPTS and time.perf_counter() - began < SECONDS):
        for run in runs:
            times.append(_timed(run, device))
    return statistics.median(times)


def _timed(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    # As in a training step, the host is ahead: it queues kernels while the GPU still waits.
    torch.cuda._sleep(AHEAD)
    events[0].record()
    run()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


def host_seconds_of(run: Callable[[], object], device: str) -> float:
    """Return the median time that the host takes to queue a call."""
    times = []
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# --- products ---


def products(sizes: Sizes, lengths: list[int]) -> Iterator[str]:
    """Yield the rows of grouped products against dense products of equal FLOP."""
    columns = ["tokens", "loads", "product", "grouped ms", "grouped TFLOP/s", "dense TFLOP/s"]
    yield f"| {' | '.join(columns)} | share of dense |"
    yield "|---" * (len(columns) + 1) + "|"
    for tokens in lengths:
        for loads in ("even", "zipf"):
            for kind in ("forward", "input gradient", "weight gradient"):
                name = f"| {tokens:,} | {loads} | {kind} |"
                yield guarded(name, partial(_product_row, sizes, tokens, loads, kind))


def guarded(name: str, row: Callable[[], str]) -> str:
    """Return a row of a table, with the reason in it if the measurement fails."""
    try:
        return f"{name} {row()}"
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0].replace("|", "/")
        reason = f"failed: {type(error).__name__}: {text[:200]}"
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return f"{name} {reason} |"


def ends_of(rows: int, experts: int, loads: str) -> np.ndarray:
    """Return the end of each expert's rows. zipf: the shares fall as 1 / rank^`ZIPF`."""
    draw = np.random.default_rng(0)
    share = 1.0 / np.arange(1, experts + 1) ** (ZIPF if loads == "zipf" else 0.0)
    return np.cumsum(draw.multinomial(rows, draw.permutation(share / share.sum())))


def _product_row(sizes: Sizes, tokens: int, loads: str, kind: str) -> str:
    """Time one product of gate and up, and one of the down projection."""
    moe, hidden = sizes.model.moe, sizes.model.hidden_size
    rows, wide = tokens * moe.top_k, 2 * moe.expert_size
    ends = torch.from_numpy(ends_of(rows, moe.experts, loads)).int().to(sizes.device)
    _, gate_up, down = sizes.weights()
    x, out = (sizes.random(rows, hidden) for _ in range(2))
    gates, inner = sizes.random(rows, wide), sizes.random(rows, moe.expert_size)
    grouped: dict[str, Callable[[], object]] = {
        "forward": lambda: (grouped_rows(x, gate_up, ends), grouped_rows(inner, down, ends)),
        "input gradient": lambda: (
            grouped_rows_back(gates, gate_up, ends),
            grouped_rows_back(out, down, ends),
        ),
        "weight gradient": lambda: (
            grouped_sums(gates, x, ends),
            grouped_sums(out, inner, ends),
        ),
    }
    dense: dict[str, Callable[[], object]] = {
        "forward": lambda: (x @ gate_up[0].t(), inner @ down[0].t()),
        "input gradient": lambda: (gates @ gate_up[0], out @ down[0]),
        "weight gradient": lambda: (gates.t() @ x, out.t() @ inner),
    }
    found, beside = (seconds_of([each[kind]], sizes.device) for each in (grouped, dense))
    tera = 2.0 * rows * hidden * 3 * moe.expert_size / 1e12
    return f"{1e3 * found:.3f} | {tera / found:.0f} | {tera / beside:.0f} | {beside / found:.0%} |"


# --- a layer ---


class PlainExperts(nn.Module):
    """A mixture of experts in plain torch, with a softmax router in float32.

    grouped: one grouped product for all experts, instead of a loop over them.
    """

    def __init__(self, model: ModelConfig, weights: tuple[Tensor, ...], *, grouped: bool) -> None:
        super().__init__()
        self.moe, self.grouped = model.moe, grouped
        self.gate, self.gate_up, self.down = (nn.Parameter(each.clone()) for each in weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for tokens ``[T, C]``."""
        high = torch.promote_types(x.dtype, torch.float32)
        scores = functional.linear(x.to(high), self.gate.to(high)).softmax(-1)
        scores, chosen = scores.topk(self.moe.top_k)
        if self.moe.normalize:
            scores = scores / scores.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token, scores = order // self.moe.top_k, scores.flatten()[order][:, None]
        counts = chosen.flatten().bincount(minlength=self.moe.experts)
        rows = x.index_select(0, token)
        compute = self._grouped if self.grouped else self._looped
        out = compute(rows, counts) * scores
        return torch.zeros_like(x).index_add_(0, token, out.to(x.dtype))

    def _looped(self, rows: Tensor, counts: Tensor) -> Tensor:
        bounds = [0, *counts.cumsum(0).tolist()]
        parts = []
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            gate, up = (rows[begin:end] @ self.gate_up[expert].t()).chunk(2, -1)
            parts.append((functional.silu(gate) * up) @ self.down[expert].t())
        return torch.cat(parts)

    def _grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()
        both = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, -1)
        inner = functional.silu(gate) * up
        return torch._grouped_mm(inner, self.down.transpose(1, 2), offs=ends)


def mtrain_layer(
    sizes: Sizes, weights: tuple[Tensor, ...], tokens: int, *, compile: bool
) -> tuple[Layer, nn.Module]:
    """Return mtrain's layer as the trainer runs it, with the balance loss, and its module."""
    model = sizes.model
    module = MixtureOfExperts(model, 0, None).to(sizes.device, sizes.dtype)
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(weight)
    module.selection_bias = torch.zeros(model.moe.experts, device=sizes.device)
    module.execution = ExpertExecution(tile_bytes=sizes.tile_bytes, compile=compile)
    given = routing(sizes, tokens)  # one for all layers of a micro-batch, as in training
    return lambda x: module(x, given), module


def routing(sizes: Sizes, tokens: int) -> Routing:
    """Return the routing of one sequence, with a balance loss."""
    slots = torch.arange(tokens, device=sizes.device)[None]
    options = RouterOptions(1, balance_loss=0.001)
    return Routing(slots, [tokens], tokens, sizes.model.moe, 1, options)


def transformers_layer(
    sizes: Sizes, weights: tuple[Tensor, ...], implementation: str
) -> tuple[Layer, nn.Module]:
    """Return the block of transformers' Qwen3MoE, and its module."""
    from expert_peer import qwen3_moe_config
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = qwen3_moe_config(sizes.model, 4096)
    config._experts_implementation = implementation
    module = Qwen3MoeSparseMoeBlock(config).to(sizes.device, sizes.dtype)
    named = dict(module.named_parameters())
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    with torch.no_grad():
        for name, weight in zip(names, weights, strict=True):
            named[name].copy_(weight)
    return lambda x: module(x[None])[0], module


def ways(sizes: Sizes, tokens: int) -> dict[str, Callable[[tuple[Tensor, ...]], Any]]:
    """Return a function for each way to compute a layer, which makes it from weights."""

    def plain(weights: tuple[Tensor, ...], grouped: bool) -> tuple[Layer, nn.Module]:
        module = PlainExperts(sizes.model, weights, grouped=grouped)
        return module, module

    return {
        "plain torch, grouped products": partial(plain, grouped=True),
        "plain torch, loop": partial(plain, grouped=False),
        "mtrain": lambda weights: mtrain_layer(sizes, weights, tokens, compile=True),
        "mtrain, not compiled": lambda weights: mtrain_layer(sizes, weights, tokens, compile=False),
        "transformers, grouped_mm": lambda weights: transformers_layer(
            sizes, weights, "grouped_mm"
        ),
        "transformers, eager": lambda weights: transformers_layer(sizes, weights, "eager"),
    }


def check_layers(sizes: Sizes, tokens: int) -> Iterator[str]:
    """Yield the relative error of each way's output and gradients against float64."""
    torch.manual_seed(0)
    weights, x = sizes.weights(), sizes.random(tokens, sizes.model.hidden_size)
    # Larger than random weights of training: then the choice of experts does not hang on rounding.
    weights = (weights[0] * 10, *weights[1:])
    grad = sizes.random(tokens, sizes.model.hidden_size)
    exact = PlainExperts(sizes.model, tuple(w.double() for w in weights), grouped=False)
    wanted = _results(exact, exact, x.double(), grad.double())
    for name, make in ways(sizes, tokens).items():
        try:
            found = _results(*make(weights), x, grad)
        except Exception as error:
            yield f"check: {name}: failed: {type(error).__name__}: {str(error).splitlines()[:1]}"
            continue
        errors = [_error(a, b) for a, b in zip(found, wanted, strict=True)]
        text = ", ".join(f"{error:.1e}" for error in errors)
        verdict = "" if max(errors) < CLOSE else " WRONG"
        yield f"check: {name}: errors of output, x, gate, gate_up, down: {text}{verdict}"


def _results(layer: Layer, module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    gradients = [parameter.grad for parameter in module.parameters()]
    sizes = [(each.ndim, each.shape[1], each) for each in gradients if each is not None]
    # The router first, then gate and up, then down, whatever the order in the module.
    matrices = [each for _, _, each in sizes if each.ndim == 3]
    router = next(each for dims, _, each in sizes if dims == 2)
    hidden = x.shape[-1]
    gate_up = next(each for each in matrices if each.shape[-1] == hidden)
    down = next(each for each in matrices if each is not gate_up)
    assert x.grad is not None
    return [out.detach(), x.grad, router, gate_up, down]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def layer(sizes: Sizes, tokens: int) -> Iterator[str]:
    """Yield the rows of a whole layer: router, dispatch, experts and their sum."""
    torch.compiler.reset()  # code for this number of tokens only, as in training
    columns = ["what", "forward ms", "TFLOP/s", "host ms", "forward + backward ms", "TFLOP/s"]
    columns += ["speed-up over grouped plain torch", "over the loop"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    plain: dict[str, float] = {}
    for name, make in ways(sizes, tokens).items():
        yield guarded(f"| {name} |", partial(_layer_row, sizes, tokens, name, make, plain))
        if sizes.device == "cuda":
            torch.cuda.empty_cache()


def _layer_row(
    sizes: Sizes,
    tokens: int,
    name: str,
    make: Callable[[tuple[Tensor, ...]], Any],
    plain: dict[str, float],
) -> str:
    torch.manual_seed(0)
    run, module = make(sizes.weights())
    hidden = sizes.model.hidden_size
    inputs = [sizes.random(tokens, hidden).requires_grad_() for _ in range(2)]
    grad = sizes.random(tokens, hidden)

    def both(x: Tensor) -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        run(x).backward(grad)

    def forward(x: Tensor) -> None:
        with torch.no_grad():
            run(x)

    times = [
        seconds_of([partial(each, x) for x in inputs], sizes.device) for each in (forward, both)
    ]
    host = host_seconds_of(partial(forward, inputs[0]), sizes.device)
    plain[name] = times[1]
    tera = sizes.layer_flop(tokens) / 1e12
    faster = [
        f"{plain[each] / times[1]:.2f}x" if each in plain else ""
        for each in ("plain torch, grouped products", "plain torch, loop")
    ]
    return (
        f"{1e3 * times[0]:.2f} | {tera / times[0]:.0f} | {1e3 * host:.2f} | {1e3 * times[1]:.2f} "
        f"| {3 * tera / times[1]:.0f} | {' | '.join(faster)} |"
    )
