"""One layer's output projection, norm and MLP in bfloat16 and with fp8 products, side by side.

    python profiles/fp8_speed.py --tokens 128k

Needs a GPU with fp8 (compute capability 8.9). It prints the errors of both against float32, then
milliseconds of forward, of backward with recomputation and of backward with kept products, and of
the kernels and products of a tile. Shapes are those of Qwen2.5-3B.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from mtrain_cli.config.sizes import parse_size
from mtrain_cli.model.feed_forward import (
    FeedForwardOptions,
    FeedForwardWeights,
    _elementwise,
    feed_forward,
)
from mtrain_cli.model.mlp_products import Fp8Products, MlpProducts
from mtrain_cli.model.tiling import LayerExecution, tile_rows
from mtrain_extras.bench.timing import busy_ms

HIDDEN, WIDE, HEADS, HEAD_DIM, EPS = 2048, 11008, 16, 128, 1e-6
TILE_MIB, CHECKED = 4096, 2048


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Tensor]:
    """Return x, attention's output, the weights, and the gradient of the result."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (
        (1, tokens, HIDDEN), (1, tokens, HEADS, HEAD_DIM), (HIDDEN, HEADS * HEAD_DIM), (HIDDEN,),
        (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (1, tokens, HIDDEN),
    )  # fmt: skip
    normal = [torch.randn(s, device="cuda", generator=generator) for s in shapes]
    scaled = [t if t.ndim != 2 else t * t.shape[1] ** -0.5 for t in normal]
    *tensors, grad = [t.bfloat16().to(dtype) for t in scaled]
    return [t.requires_grad_() for t in tensors], grad


def options(tokens: int, *, fp8: bool, keep: bool = False, itemsize: int = 2) -> FeedForwardOptions:
    rows = tile_rows(tokens, HIDDEN, WIDE, itemsize, TILE_MIB << 20)
    execution = LayerExecution(compile=True, fp8=fp8, tile_bytes=TILE_MIB << 20)
    return FeedForwardOptions(execution, EPS, rows, keep_products=keep)


def errors() -> None:
    (exact, grad) = inputs(CHECKED, torch.float32)

    def results(tensors: list[Tensor], grad: Tensor, fp8: bool) -> list[Tensor]:
        x, out, *weights = tensors
        how = FeedForwardOptions(LayerExecution(fp8=fp8), EPS, CHECKED)
        result = feed_forward(x, out, FeedForwardWeights(*weights), how)
        return [(result - x).detach(), *torch.autograd.grad(result, tensors, grad)]

    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = results(exact, grad, fp8=False)
    names = ("result - x", "dx", "dout", "do", "dnorm", "dgate", "dup", "ddown")
    for fp8 in (False, True):
        found = results(*inputs(CHECKED), fp8)
        pairs = zip(names, found, wanted, strict=True)
        line = "  ".join(f"{n} {float((a - b).norm() / b.norm()):.2%}" for n, a, b in pairs)
        print(f"{'fp8' if fp8 else 'bf16':5} {line}", flush=True)


def layer(tokens: int) -> None:
    tensors, grad = inputs(tokens)
    x, out, *weights = tensors
    calls = max(2, (1 << 18) // tokens)
    found: dict[bool, list[float]] = {}
    for fp8 in (False, True):
        times = []
        for keep in (False, True):
            how = options(tokens, fp8=fp8, keep=keep)

            def forward(how: FeedForwardOptions = how) -> Tensor:
                return feed_forward(x, out, FeedForwardWeights(*weights), how)

            def both(forward: Callable[[], Tensor] = forward) -> object:
                return torch.autograd.grad(forward(), tensors, grad)

            with torch.no_grad():
                alone = busy_ms(forward, calls)
            times += [*([] if keep else [alone]), busy_ms(both, calls) - alone]
        found[fp8] = times
        line = "  ".join(f"{time:7.2f}" for time in times)
        ratio = "".join(f" {a / b:.2f}x" for a, b in zip(found[False], times, strict=True)) * fp8
        print(f"{tokens} tokens, {'fp8' if fp8 else 'bf16':4}: forward, backward, with kept "
              f"products {line} ms {ratio}", flush=True)  # fmt: skip


def pieces(tokens: int) -> None:
    """Time the kernels and products of one tile."""
    tensors, grad = inputs(tokens)
    weights = FeedForwardWeights(*(t.detach() for t in tensors[2:]))
    n, grad = tensors[0].detach()[0], grad[0]
    for mlp in (MlpProducts(weights, _elementwise(True, False)[1:3]), Fp8Products(weights)):
        rows, rows_of_grad = mlp.rows(n), mlp.rows(grad)
        gate, up = mlp.gate_up(rows)
        inner, dinner = mlp.gated(gate, up), mlp.down_back(rows_of_grad)
        back = mlp.gate_backward(gate.clone(), up.clone(), dinner.clone())[3]
        parts: dict[str, Callable[[], object]] = {
            "input": lambda mlp=mlp: mlp.rows(n),
            "gate and up": lambda mlp=mlp, rows=rows: mlp.gate_up(rows),
            "gated": lambda mlp=mlp, gate=gate, up=up: mlp.gated(gate, up),
            "down": lambda mlp=mlp, inner=inner: mlp.down(inner),
            "down back": lambda mlp=mlp, rows=rows_of_grad: mlp.down_back(rows),
            "gate backward": lambda mlp=mlp, t=(gate, up, dinner): mlp.gate_backward(*t),
            "gate and up back": lambda mlp=mlp, back=back: mlp.gate_up_back(back),
            "new weights": lambda mlp=mlp: Fp8Products(mlp.weights)._gate_up_CW,
        }
        times = ", ".join(f"{name} {busy_ms(call, 8):.2f}" for name, call in parts.items())
        print(f"{tokens} rows, {type(mlp).__name__}: {times} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=parse_size, default=parse_size("128k"))
    parser.add_argument("--rows", type=parse_size, default=parse_size("32k"), help="of a tile")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    errors()
    pieces(arguments.rows)
    layer(arguments.tokens)
