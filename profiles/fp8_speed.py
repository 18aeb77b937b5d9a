"""One layer without attention in bfloat16 and with fp8 products, side by side.

    python profiles/fp8_speed.py --tokens 128k

Needs a GPU with fp8 (compute capability 8.9). It prints errors against float32, then milliseconds
of the kernels and products of a tile, and of a layer's parts before and after attention: forward,
backward with recomputation, and backward with kept products. Shapes are those of Qwen2.5-3B.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.sizes import parse_size
from mtrain_cli.model.decoder import DecoderLayer
from mtrain_cli.model.feed_forward import (
    FeedForwardOptions,
    FeedForwardWeights,
    _elementwise,
    feed_forward,
)
from mtrain_cli.model.mlp_products import Fp8Products, Fp8Weight, MlpProducts, kernels_of
from mtrain_cli.model.parallelize import project, project_apart, staged
from mtrain_cli.model.rope import inverse_frequencies, rotation
from mtrain_cli.model.tiling import LayerExecution, tile_rows
from mtrain_extras.bench.timing import busy_ms

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, EPS = 2048, 11008, 16, 2, 128, 1e-6
KINDS = {"none": "bf16", "mlp": "fp8 mlp", "all": "fp8 all"}
TILE_MIB, CHECKED, CALLS = 4096, 2048, 4


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


def options(tokens: int, *, fp8: str, keep: bool = False) -> FeedForwardOptions:
    rows = tile_rows(tokens, HIDDEN, WIDE, 2, TILE_MIB << 20)
    execution = LayerExecution(compile=True, fp8=fp8, tile_bytes=TILE_MIB << 20)
    return FeedForwardOptions(execution, EPS, rows, keep_products=keep)


def errors() -> None:
    (exact, grad) = inputs(CHECKED, torch.float32)

    def results(tensors: list[Tensor], grad: Tensor, fp8: str, keep: bool) -> list[Tensor]:
        x, out, *weights = tensors
        how = FeedForwardOptions(LayerExecution(fp8=fp8), EPS, CHECKED, keep_products=keep)
        result = feed_forward(x, out, FeedForwardWeights(*weights), how)
        return [(result - x).detach(), *torch.autograd.grad(result, tensors, grad)]

    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = results(exact, grad, "none", False)
    names = ("result - x", "dx", "dout", "do", "dnorm", "dgate", "dup", "ddown")
    for fp8, keep in (("none", False), ("mlp", False), ("mlp", True), ("all", False)):
        found = results(*inputs(CHECKED), fp8, keep)
        pairs = zip(names, found, wanted, strict=True)
        line = "  ".join(f"{n} {float((a - b).norm() / b.norm()):.2%}" for n, a, b in pairs)
        print(f"{KINDS[fp8] + ' kept' * keep:12} {line}", flush=True)


def both_passes(forward: Callable[[], object], backward: Callable[[], object]) -> list[float]:
    """Return the milliseconds of forward and of backward. backward: both passes."""
    with torch.no_grad():
        alone = busy_ms(forward, CALLS)
    return [alone, busy_ms(backward, CALLS) - alone]


def report(name: str, times: list[float], plain: list[float]) -> None:
    ratios = "".join(f"  {a / b:.2f}x" for a, b in zip(plain, times, strict=True))
    line = "".join(f"{time:9.2f}" for time in times)
    print(f"{name:34}{line}{ratios * (times is not plain)}", flush=True)


def after_attention(tokens: int) -> None:
    tensors, grad = inputs(tokens)
    x, out, *weights = tensors
    print(f"\n{tokens} tokens after attention, ms: forward, backward, backward with kept products")
    plain: list[float] = []
    for fp8 in KINDS:
        times = []
        for keep in (False, True):
            how = options(tokens, fp8=fp8, keep=keep)

            def forward(how: FeedForwardOptions = how) -> Tensor:
                return feed_forward(x, out, FeedForwardWeights(*weights), how)

            def both(forward: Callable[[], Tensor] = forward) -> object:
                return torch.autograd.grad(forward(), tensors, grad)

            times += both_passes(forward, both)[keep:]
        plain = plain or times
        report(KINDS[fp8], times, plain)


def before_attention(tokens: int) -> None:
    """Time norm, products of q, k and v, and rotation."""
    model = compose(["model=qwen3b"]).model
    with torch.device("meta"):
        layer = DecoderLayer(model, 0)
    layer = layer.to(torch.bfloat16).to_empty(device="cuda")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = inputs(tokens)[0][0]
    positions = torch.arange(tokens, device="cuda")[None]
    frequencies = inverse_frequencies(model.rope, HEAD_DIM, 1.0).to("cuda")
    rope = rotation(positions, frequencies, 1.0)
    used = layer.input_layernorm, *(getattr(layer.self_attn, f"{n}_proj") for n in "qkv")
    leaves = [x, *(parameter for module in used for parameter in module.parameters())]
    print(f"\n{tokens} tokens before attention, ms: forward, backward without recomputation")
    plain: list[float] = []
    how = LayerExecution(compile=True, fp8="all")
    for fp8 in ("none", "all"):

        def forward(fp8: str = fp8) -> tuple[Tensor, ...]:
            arguments = layer, x, rope.cos_BN1F, rope.sin_BN1F
            if fp8 == "none":
                return staged(project, True)(*arguments)
            return project_apart(*arguments, execution=how)

        grads = [torch.randn_like(each) for each in forward()]

        def both(
            forward: Callable[[], tuple[Tensor, ...]] = forward, grads: list[Tensor] = grads
        ) -> object:
            return torch.autograd.grad(forward(), leaves, grads)

        times = both_passes(forward, both)
        plain = plain or times
        report(KINDS[fp8], times, plain)


def pieces(tokens: int) -> None:
    """Time the kernels and products of one tile."""
    tensors, grad = inputs(tokens)
    x, out, *of_layer = (t.detach() for t in tensors)
    weights = FeedForwardWeights(*of_layer)
    x, out, grad = x[0], out[0].flatten(1), grad[0]
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv_WC = torch.randn(width, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
    dqkv = torch.randn(tokens, width, device="cuda").bfloat16()
    elementwise, kernels = _elementwise(True, False), kernels_of(x)
    low, high = MlpProducts(weights, elementwise[:3]), Fp8Products(weights, of_output=True)
    qkv, join, norm = Fp8Weight(qkv_WC), elementwise[0], elementwise[4]
    rows, rows_of_grad, of_dqkv = high.rows(x), high.rows(grad), high.rows(dqkv)
    gate_up = high.gate_up(rows)
    inner, dinner = high.gated(gate_up, False)[0], high.down_back(rows_of_grad)
    kept = high.gated(gate_up, True)[1]
    back = high.gate_backward(tuple(t.clone() for t in gate_up), dinner.clone())[3]
    in_low, dlow = low.gate_up(x), dinner.clone()
    w = weights.norm_C

    def cast_apart(n: Tensor) -> object:
        return kernels.cast_rows(n)

    table: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "gate and up": (lambda: low.gate_up(x), lambda: high.gate_up(rows)),
        "down": (lambda: low.down(dlow), lambda: high.down(inner)),
        "down back": (lambda: low.down_back(grad), lambda: high.down_back(rows_of_grad)),
        "gate and up back": (lambda: low.gate_up_back(in_low), lambda: high.gate_up_back(back)),
        "gated": (lambda: low.gated(in_low, False), lambda: high.gated(gate_up, False)),
        "gated, and kept": (lambda: low.gated(in_low, True), lambda: high.gated(gate_up, True)),
        "gate backward": (
            lambda: low.gate_backward(in_low, dlow), lambda: high.gate_backward(gate_up, dinner)
        ),
        "gate backward, kept": (
            lambda: low.gate_backward(in_low, dlow), lambda: high.gate_backward(kept, dinner)
        ),
        "q, k and v": (lambda: x @ qkv_WC.t(), lambda: qkv.product(rows)),
        "q, k and v back, cast": (
            lambda: dqkv @ qkv_WC, lambda: qkv.product_back(high.rows(dqkv))
        ),
        "q, k and v back": (lambda: dqkv @ qkv_WC, lambda: qkv.product_back(of_dqkv)),
        "o, cast": (lambda: low.output(out), lambda: high.output(out)),
        "o back, cast": (lambda: low.output_back(grad), lambda: high.output_back(grad)),
    }  # fmt: skip
    print(f"\n{tokens} rows, ms: bfloat16, fp8")
    for name, (in_bf16, in_fp8) in table.items():
        times = [busy_ms(call, 8) for call in (in_bf16, in_fp8)]
        print(f"{name:34}{times[0]:9.2f}{times[1]:9.2f}  {times[0] / times[1]:.2f}x", flush=True)
    casts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "norm": (
            lambda: cast_apart(norm(x, w, EPS)),
            lambda: kernels.normed_rows(x, w, EPS, None, False),
        ),
        "sum and norm": (
            lambda: cast_apart(join(x, grad, w, EPS)[1]),
            lambda: kernels.normed_rows(x, w, EPS, grad, False),
        ),
        "sum and norm, n also in bfloat16": (
            lambda: cast_apart(join(x, grad, w, EPS)[1]),
            lambda: kernels.normed_rows(x, w, EPS, grad, True),
        ),
    }
    print(f"\n{tokens} rows, ms: norm and cast apart, in one kernel")
    for name, (apart, together) in casts.items():
        times = [busy_ms(call, 8) for call in (apart, together)]
        print(f"{name:34}{times[0]:9.2f}{times[1]:9.2f}  {times[0] / times[1]:.2f}x", flush=True)
    new: dict[str, Callable[[], object]] = {
        "cast of a row's gradient": lambda: high.rows(grad),
        "weights of gate and up": lambda: Fp8Weight(*weights[2:4])._beside,
        "weights of q, k and v": lambda: Fp8Weight(qkv_WC)._below,
        "largest number of gate and up": lambda: kernels.largest_of(weights[2:4]),
    }
    for name, call in new.items():
        print(f"{name:34}{'':9}{busy_ms(call, 8):9.2f}", flush=True)


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
    before_attention(arguments.tokens)
    after_attention(arguments.tokens)
