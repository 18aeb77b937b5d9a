"""How long the host takes to launch a step. With few tokens, the GPUs wait for it.

The host runs Python and autograd and launches kernels, which takes as long for few tokens as for
many, so this time is a lower bound of a step. It does not include what recomputation, small tiles,
offloading, a ring's steps, and tensor and pipeline parallelism add.

The constants are milliseconds on two H200s of one host with 32 CPU cores, torch 2.11.0+cu130,
2026-11-30: Qwen2.5-3B, 16K tokens, `sparsity=vertical_slash` with 12 slashes and 512 columns,
`train.memory=auto`, which recomputes nothing. The GPUs were busy for about 345 ms of a step of 527
ms in bfloat16, and for 360 of 518 ms with `train.fp8=all`. No dense step was measured: of what the
host did for a sparse layer in a recorded step, a dense layer needs 0.585.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from mtrain_cli.config.cluster import Constant
from mtrain_cli.config.schema import Config
from mtrain_cli.training.flops import layer_kinds

_STEP, _SPARSE_STEP, _DENSE_SHARE = 30.0, 527.0, 0.585

STEP_MS = Constant(
    _STEP, "guess", "ms of the host per step for loss, optimizer and weights outside the layers",
    10.0, 60.0,
)  # fmt: skip
LAYER_MS = Constant(
    _DENSE_SHARE * (_SPARSE_STEP - _STEP) / 36, "guess",
    "ms of the host for both passes of a dense layer; 0.585 (527 - step) / 36, of a sparse step",
    6.0, 11.0,
)  # fmt: skip
SPARSE_MS = Constant(
    (1 - _DENSE_SHARE) * (_SPARSE_STEP - _STEP) / 36, "guess",
    "ms of the host that a sparse layer takes longer, for its index and its lists of blocks",
    4.0, 8.0,
)  # fmt: skip
# 8 layers of Qwen3-30B-A3B at 16K launch 2,970 kernels. Dense layers would launch about 110 each,
# and a launch took 68 us. A step took 0.26 to 0.29 s, which gives the upper bound.
EXPERTS_MS = Constant(
    17.5, "guess", "ms of the host that both passes of a layer take longer with experts", 8.0, 21.0
)
CONSTANTS = "STEP_MS", "LAYER_MS", "SPARSE_MS", "EXPERTS_MS"


def host_ms(
    config: Config,
    numbers: Sequence[int],
    micro_batches: int,
    of: Callable[[Constant], float] = attrgetter("value"),
) -> float:
    """Return the milliseconds for which a worker's host is busy in a step.

    numbers: the worker's layers. of: returns the value of a constant.
    """
    model, sparsity = config.model, config.sparsity
    sparse = set(numbers) - sparsity.dense_of(model.num_layers)
    experts = sum(n for kind, n in layer_kinds(model, numbers).items() if kind)
    of_layers = len(numbers) * of(LAYER_MS) + experts * of(EXPERTS_MS)
    if sparsity.pattern not in ("dense", "fixed"):  # a layer draws its `fixed` index once
        of_layers += len(sparse) * of(SPARSE_MS)
    return of(STEP_MS) + micro_batches * of_layers
