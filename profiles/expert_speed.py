"""Time mixtures of experts: grouped products, one layer, and steps of training.

    python profiles/expert_speed.py products
    python profiles/expert_speed.py layer --seq 32k
    python profiles/expert_speed.py model --seq 32k,128k --layers 12
    python profiles/expert_speed.py model --toy

Each case prints a Markdown table row by row. A row that fails has its reason.

- products: grouped products of gate and up and of the down projection against dense products of
  equal FLOP. even: each row goes to a random expert. zipf: shares fall as 1 / rank^0.5.
- layer: router, dispatch, experts and their sum beside plain torch and transformers' Qwen3MoE,
  after the relative errors of each against float64.
- model: two GPUs. Steps of mtrain's trainer on one sequence that both share. EP 1 gathers the
  weights of all experts, EP 2 sends rows to them. The losses of both degrees must agree.
  `mtrain profile step` shows how much of the messages is exposed.

`--toy` runs tiny sizes on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured_runs import Measured, Pool, write_ids
from torch import Tensor, nn
from torch.nn import functional

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.config.sizes import format_size, parse_size
from mtrain_cli.model.expert_products import (
    grouped_rows,
    grouped_rows_back,
    grouped_sums,
)
from mtrain_cli.model.experts import MixtureOfExperts
from mtrain_cli.model.routing import RouterOptions, Routing
from mtrain_cli.model.tiling import LayerExecution
from mtrain_extras.bench.timing import median_ms

TINY = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=16", "model.intermediate_size=128", "model.vocab_size=300",
    "model.moe.experts=8", "model.moe.top_k=2", "model.moe.expert_size=32",
    "topology.block_size=128",
)  # fmt: skip
CHECKED = 512  # tokens of the comparison of layers
CLOSE = 5e-2  # relative error of a layer in bfloat16
MOST_DIFFERENCE = 0.01  # of the losses of two degrees: bfloat16 rounds sums in another order
REPEATS = 10


def header(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def guarded(name: str, row: Callable[[], str]) -> str:
    """Return a row of a table, with the reason in it if the measurement fails."""
    try:
        return f"{name} {row()}"
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0].replace("|", "/")
        return f"{name} failed: {type(error).__name__}: {text[:200]} |"


class Sizes:
    """Random tensors in the sizes of a model: bfloat16 on a GPU."""

    def __init__(self, model: ModelConfig, device: str) -> None:
        self.model, self.device = model, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(std=std)

    def weights(self, router: float = 0.02) -> list[Tensor]:
        """Return weights of a router, of all gates and ups, and of all down projections."""
        moe, hidden = self.model.moe, self.model.hidden_size
        shapes = (moe.experts, 2 * moe.expert_size, hidden), (moe.experts, hidden, moe.expert_size)
        matrices = [self.random(*shape, std=0.02) for shape in shapes]
        return [self.random(moe.experts, hidden, std=router), *matrices]


def products(sizes: Sizes, tokens: int) -> Iterator[str]:
    yield header("tokens", "loads", "product", "ms", "TFLOP/s", "dense TFLOP/s", "share of dense")
    moe, hidden = sizes.model.moe, sizes.model.hidden_size
    rows, draw = tokens * moe.top_k, np.random.default_rng(0)
    _, gate_up, down = sizes.weights()
    x, out = (sizes.random(rows, hidden) for _ in range(2))
    gates, inner = sizes.random(rows, 2 * moe.expert_size), sizes.random(rows, moe.expert_size)
    dense = {
        "forward": lambda: (x @ gate_up[0].t(), inner @ down[0].t()),
        "input gradient": lambda: (gates @ gate_up[0], out @ down[0]),
        "weight gradient": lambda: (gates.t() @ x, out.t() @ inner),
    }
    tera = 2.0 * rows * hidden * 3 * moe.expert_size / 1e9  # for milliseconds
    for loads, power in (("even", 0.0), ("zipf", 0.5)):
        share = 1.0 / np.arange(1, moe.experts + 1) ** power
        counts = draw.multinomial(rows, draw.permutation(share / share.sum()))
        ends = torch.from_numpy(np.cumsum(counts)).int().to(sizes.device)
        grouped = {
            "forward": (grouped_rows, (x, gate_up), (inner, down)),
            "input gradient": (grouped_rows_back, (gates, gate_up), (out, down)),
            "weight gradient": (grouped_sums, (gates, x), (out, inner)),
        }
        for kind, (product, *pairs) in grouped.items():
            call = partial(each_product, product, pairs, ends)

            def row(call: Any = call, plain: Any = dense[kind]) -> str:
                ms, dense_ms = (median_ms(c, sizes.device, REPEATS) for c in (call, plain))
                rates = f"{tera / ms:.0f} | {tera / dense_ms:.0f}"
                return f"{ms:.3f} | {rates} | {dense_ms / ms:.0%} |"

            yield guarded(f"| {tokens:,} | {loads} | {kind} |", row)


def each_product(product: Callable[..., Tensor], pairs: Any, ends: Tensor) -> None:
    for pair in pairs:
        product(*pair, ends)


class PlainExperts(nn.Module):
    """A mixture of experts in plain torch, with a softmax router in float32."""

    def __init__(self, model: ModelConfig, weights: list[Tensor]) -> None:
        super().__init__()
        self.moe = model.moe
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
        parts = []
        for expert, rows in enumerate(x.index_select(0, token).split(counts.tolist())):
            gate, up = (rows @ self.gate_up[expert].t()).chunk(2, -1)
            parts.append((functional.silu(gate) * up) @ self.down[expert].t())
        out = torch.cat(parts) * scores
        return torch.zeros_like(x).index_add_(0, token, out.to(x.dtype))


def mtrain_layer(sizes: Sizes, weights: list[Tensor], tokens: int, compile: bool) -> nn.Module:
    """Return mtrain's layer as the trainer runs it, with the balance loss."""
    module = MixtureOfExperts(sizes.model, 0, None).to(sizes.device, sizes.dtype)
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(weight)
    module.selection_bias = torch.zeros(sizes.model.moe.experts, device=sizes.device)
    module.execution = LayerExecution(tile_bytes=4 << 30, compile=compile)
    slots = torch.arange(tokens, device=sizes.device)[None]
    options = RouterOptions(1, balance_loss=0.001)
    routing = Routing(slots, [tokens], tokens, sizes.model.moe, 1, options)
    module.forward = partial(module.forward, routing=routing)  # type: ignore[method-assign]
    return module


def transformers_layer(sizes: Sizes, weights: list[Tensor]) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    model, moe = sizes.model, sizes.model.moe
    config = Qwen3MoeConfig(
        hidden_size=model.hidden_size, num_experts=moe.experts, num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.expert_size, norm_topk_prob=moe.normalize,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeSparseMoeBlock(config).to(sizes.device, sizes.dtype)
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    with torch.no_grad():
        for name, weight in zip(names, weights, strict=True):
            module.get_parameter(name).copy_(weight)
    return module


def layer(sizes: Sizes, tokens: int) -> Iterator[str]:
    ways: dict[str, Callable[[list[Tensor], int], nn.Module]] = {
        "plain torch": lambda weights, _: PlainExperts(sizes.model, weights),
        "mtrain": lambda weights, count: mtrain_layer(sizes, weights, count, True),
        "mtrain, not compiled": lambda weights, count: mtrain_layer(sizes, weights, count, False),
        "transformers": lambda weights, _: transformers_layer(sizes, weights),
    }
    # A larger router than that of training: then the choice of experts does not hang on rounding.
    weights, x, grad = (
        sizes.weights(0.2),
        *(sizes.random(CHECKED, sizes.model.hidden_size) for _ in range(2)),
    )
    doubles = [weight.double() for weight in weights]
    exact = results(PlainExperts(sizes.model, doubles), x.double(), grad.double())
    for name, make in ways.items():

        def check(make: Any = make) -> str:
            found = results(make(weights, CHECKED), x, grad)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
            shown = ", ".join(f"{error:.1e}" for error in errors)
            return f"errors of output and x: {shown}{'' if max(errors) < CLOSE else ' WRONG'}"

        yield guarded(f"check: {name}:", check)
    moe, hidden = sizes.model.moe, sizes.model.hidden_size
    tera = 2.0 * tokens * hidden * (moe.experts + 3 * moe.top_k * moe.expert_size) / 1e9
    yield header("what", "forward ms", "TFLOP/s", "forward + backward ms", "TFLOP/s")
    for name, make in ways.items():

        def row(make: Any = make) -> str:
            module, inputs = make(sizes.weights(), tokens), sizes.random(tokens, hidden)
            grad = sizes.random(tokens, hidden)
            forward = torch.no_grad()(partial(called, module, inputs))
            times = [
                median_ms(call, sizes.device, REPEATS)
                for call in (forward, partial(results, module, inputs, grad))
            ]
            rates = tera / times[0], 3 * tera / times[1]
            return f"{times[0]:.2f} | {rates[0]:.0f} | {times[1]:.2f} | {rates[1]:.0f} |"

        yield guarded(f"| {name} |", row)


def called(module: nn.Module, x: Tensor) -> Tensor:
    return module(x[None])[0] if "Qwen" in type(module).__name__ else module(x)


def results(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return output and gradient of the input in float64."""
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = called(module, x)
    out.backward(grad)
    assert x.grad is not None
    return [out.detach().double(), x.grad.double()]


def model(words: tuple[str, ...], seq: int, pool: Pool, given: argparse.Namespace) -> Iterator[str]:
    yield header("seq", "experts", "s / step", "tokens/s", "peak GiB")
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = compose([*words, f"seq={seq}"]).model.vocab_size
        data = f"data.path={write_ids(Path(folder), vocabulary, seq, [0])}"
        for degree in map(int, given.degrees.split(",")):

            def row(degree: int = degree) -> str:
                run: Measured = pool.train(
                    *words, f"seq={seq}", "data=tokens", data, "data.document_mask=false",
                    "topology.workers=2", f"topology.device={pool.device}",
                    f"topology.expert_parallel={degree}", f"train.steps={given.steps}", *given.set,
                )  # fmt: skip
                losses[degree] = run.losses
                rate = seq / run.seconds
                return f"{run.seconds:.3f} | {rate:,.0f} | {run.peak_gib:.2f} |"

            yield guarded(f"| {format_size(seq)} | EP {degree} |", row)
    yield f"check: {check(losses)}"


def check(losses: dict[int, list[float | None]] | dict[int, list[float]]) -> str:
    """Return how far the losses of the degrees are apart in a step, and WRONG if too far."""
    if len(losses) < 2:
        return "no other degree to compare with"
    steps = [
        [nan if loss is None else loss for loss in step]
        for step in zip(*losses.values(), strict=True)
    ]
    gaps = [(max(step) - min(step)) / abs(step[0]) for step in steps]
    gap = max(gaps) if all(isfinite(loss) for step in steps for loss in step) else nan
    return f"losses at most {gap:.2%} apart{'' if gap <= MOST_DIFFERENCE else ' WRONG'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["products", "layer", "model"])
    parser.add_argument("--model", default="qwen3_30b_a3b", help="a model of `mtrain config list`")
    parser.add_argument("--seq", default="32k", help="tokens, or several numbers with commas")
    parser.add_argument("--layers", type=int, default=8, help="of steps")
    parser.add_argument("--degrees", default="1,2", help="of steps: expert-parallel degrees")
    parser.add_argument("--set", action="append", default=[], help="of `model`: KEY=VALUE")
    parser.add_argument("--steps", type=int, default=5, help="training steps of a run")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU")
    given = parser.parse_args()
    device = "cpu" if given.toy else "cuda"
    words = (
        f"model={given.model}",
        *(TINY if given.toy else (f"model.num_layers={given.layers}",)),
    )
    torch.manual_seed(0)
    with Pool(2, device) as pool:
        for tokens in map(parse_size, ("512" if given.toy else given.seq).split(",")):
            if given.what == "model":
                lines = model(words, tokens, pool, given)
            else:
                sizes = Sizes(compose([*words, f"seq={tokens}"]).model, device)
                lines = {"products": products, "layer": layer}[given.what](sizes, tokens)
            for line in lines:
                print(line, flush=True)


if __name__ == "__main__":
    main()
