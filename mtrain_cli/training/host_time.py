"""How long the host takes to launch a step. With few tokens, the GPUs wait for it.

The host runs Python and autograd and launches kernels, which takes as long for few tokens as for
many, so this time is a lower bound of a step. Plans (`planning.step_seconds`) and predictions
(`simulation.predicted_step`) both take it from here. It does not include what small tiles,
offloading, recomputed attention, and tensor and pipeline parallelism add.

The constants are milliseconds on two H200s of one host with 32 CPU cores, torch 2.11.0+cu130,
2026-11-30: `mtrain profile step` of Qwen2.5-3B, 16K tokens, `sparsity=vertical_slash` with 12
slashes and 512 columns, `train.memory=auto`, which recomputes nothing. A step took 514 ms with
7,070 launches in bfloat16, and 642 ms with 10,130 launches with `train.fp8=all`. The GPUs were busy
for about 345 and 360 ms of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from mtrain_cli.config.cluster import Constant
from mtrain_cli.config.schema import Config
from mtrain_cli.parallel.recording import FORWARD, RECOMPUTE
from mtrain_cli.step.program import Repeat, layers, work
from mtrain_cli.training.flops import in_fp8, layer_kinds, layer_shapes

STEP_MS = Constant(
    30.0, "guess", "ms of the host per step for loss, optimizer and weights outside the layers",
    10.0, 60.0,
)  # fmt: skip
INDEX_MS = Constant(
    1.3, "measured", "ms of the host for an index, which was launch-bound from 1K to 64K tokens",
    1.0, 1.8,
)  # fmt: skip
LAYER_MS = Constant(
    (514.0 - STEP_MS.value) / 36 - INDEX_MS.value, "measured",
    "ms of the host for both passes of a layer, recomputing nothing; (514 - step) / 36 - index",
    10.0, 18.0,
)  # fmt: skip
RECOMPUTED_MS = Constant(
    1.0, "measured", "ms of the host to repeat all products of a layer: its launch-bound forward "
    "pass without attention took 1.0 to 1.1 ms", 0.8, 3.0,
)  # fmt: skip
FP8_MS = Constant(
    (642.0 - 514.0) / 36 / 14, "measured",
    "ms of the host that a product takes longer in fp8; 14 of a layer's 21 products are",
    0.2, 0.4,
)  # fmt: skip
# 8 layers of Qwen3-30B-A3B launch 2,970 kernels at 16K, at 68 us each as in the two steps above.
# Their step took 289 ms, which gives the upper bound: how much of it the GPUs waited is unknown.
EXPERTS_MS = Constant(
    8.5, "guess", "ms of the host that both passes of a layer take longer with experts", 4.0, 19.0
)
CONSTANTS = "STEP_MS", "INDEX_MS", "LAYER_MS", "RECOMPUTED_MS", "FP8_MS", "EXPERTS_MS"


def host_ms(
    config: Config,
    numbers: Sequence[int],
    micro_batches: int,
    *,
    tiled: bool,
    of: Callable[[Constant], float] = attrgetter("value"),
) -> float:
    """Return the milliseconds for which a worker's host is busy in a step.

    numbers: the worker's layers. tiled: as in `step.program.layers`. of: returns the value of a
    constant.
    """
    model, train, sparsity = config.model, config.train, config.sparsity
    recomputes = train.activation_checkpoint != "none"
    kinds = layers(model, checkpointed=recomputes, tiled=tiled, keep_mlp=train.keep_mlp)
    ms = 0.0
    for experts, number in layer_kinds(model, numbers).items():
        alike = [(n, layer) for n, layer in kinds if layer.experts == experts]
        program = [Repeat(n, [*layer.forward(), *layer.backward()]) for n, layer in alike]
        parts = dict.fromkeys(layer_shapes(model, experts=experts), 1)
        products, fp8 = work(program, parts), sum(in_fp8(program, parts, train.fp8).values())
        again = products.get(RECOMPUTE, 0) / products[FORWARD]
        of_layer = of(LAYER_MS) + again * of(RECOMPUTED_MS) + experts * of(EXPERTS_MS)
        ms += number * (of_layer + fp8 / sum(n for n, _ in alike) * of(FP8_MS))
    if sparsity.pattern not in ("dense", "fixed"):  # a layer draws its `fixed` index once
        ms += of(INDEX_MS) * len(set(numbers) - sparsity.dense_of(model.num_layers))
    return of(STEP_MS) + micro_batches * ms
