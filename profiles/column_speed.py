"""Columns in the same FlashAttention-4 call against columns in calls of their own, side by side.

`python profiles/column_speed.py` needs a Hopper GPU with FlashAttention-4. It checks that both give
the same result, then prints milliseconds in a busy stream: the host is ahead, as in training.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch

from mtrain_cli.attention import flash4
from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.sparsity.fixed import fixed_index
from mtrain_extras.bench.timing import busy_ms

HEADS, KV_HEADS, DIM, COLUMNS, DENSITY = 16, 2, 128, 2048, 0.05
CASES = ((131072, 1), (131072, 2), (524288, 4))  # tokens, and the ranks that share the queries
CALLS = 12  # in a row


def measure(seq: int, ranks: int) -> None:
    masks = [SequenceMask.causal(seq, seq)]
    keys = np.arange(seq)
    queries = keys[keys // 128 % ranks == ranks - 1]
    tables = MaskTables.make(masks, 128)
    index = fixed_index(
        seed=1, batch=1, heads=HEADS, seq=seq, block=128, slashes=None, columns=COLUMNS,
        density=DENSITY,
    ).to("cuda")  # fmt: skip
    whole = Tiles.between(masks, queries, keys, tables).to("cuda")
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q, dout = (torch.randn(1, len(queries), HEADS, DIM, **like) for _ in range(2))
    k, v = (torch.randn(1, seq, KV_HEADS, DIM, **like) for _ in range(2))
    kernel, scale, found = flash4.Flash4Kernel(), DIM**-0.5, {}
    for name in ("blocks alone", "calls of their own", "the same call"):
        tiles = whole.with_index(index.without_columns() if name == "blocks alone" else index)

        def forward(tiles: Tiles = tiles) -> tuple[torch.Tensor, torch.Tensor]:
            return kernel.forward(q, k, v, tiles, scale)

        takes = flash4._load_dense().takes_columns if name == "the same call" else None
        with patch.object(flash4._load_dense(), "takes_columns", takes or (lambda _: False)):
            out, lse = forward()

            def backward(tiles: Tiles = tiles, out=out, lse=lse) -> tuple[torch.Tensor, ...]:
                return kernel.backward(dout, Saved(q, k, v, out, lse, None), tiles, scale)

            results = [out, *backward()]
            times = busy_ms(forward, CALLS), busy_ms(backward, CALLS)
        line = f"{seq // 1024}K/{ranks}  {name:18}  {times[0]:6.2f}  {times[1]:6.2f} ms"
        if found:
            line += "  " + " ".join(
                f"{a / b:.3f}x" for a, b in zip(found["times"], times, strict=True)
            )
            if name == "the same call":
                apart = zip(found["results"], results, strict=True)
                errors = [float((a - b).norm() / a.norm()) for a, b in apart]
                line += f"  apart by {max(errors):.1e}"
                assert max(errors) < 6e-3, "both round to bfloat16"
        if name != "blocks alone":
            found = {"times": times, "results": results}
        print(line, flush=True)


if __name__ == "__main__":
    print(
        "queries of a rank  columns in        forward  backward  speed-up over calls of their own"
    )
    for case in CASES:
        measure(*case)
