"""Compile the Triton kernels of `spans` for a GPU that need not be here, with and without a cap."""

from __future__ import annotations

from mtrain_cli.kernels.triton import spans
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CONSTANTS = {
    "HEADS": 2, "GROUP": 2, "D": 16, "BLOCK": 16, "BLOCK_N": 16, "BLOCK_M": 16, "INTERVALS": 1,
    "EVEN": True,
}  # fmt: skip
TYPES = {"scale": "fp32", "width": "i32", "queries": "i32", "keys": "i32"}
FLOATS = ("LSE", "DELTA", "DK", "DV")

for kernel in (spans._forward, spans._backward_queries, spans._backward_keys):
    for cap in (0.0, 50.0):
        constants = {**CONSTANTS, "CAP": cap}
        constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        types = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(("Q", "K", "V"), "*bf16")
        types |= dict.fromkeys(("OUT", "DO", "DQ"), "*bf16") | dict.fromkeys(FLOATS, "*fp32")
        types |= dict.fromkeys((n for n in kernel.arg_names if n.startswith("stride")), "i32")
        types |= TYPES | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            fn=kernel,
            signature={name: types[name] for name in kernel.arg_names},
            constexprs=constants,
        )
        made = compiled(source, target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__, cap, made.asm["ptx"].count("ex2.approx"))
