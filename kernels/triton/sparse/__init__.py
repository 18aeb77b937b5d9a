"""Triton kernels for attention over block diagonals (or listed blocks) and packed single columns.

No kernel uses atomics. A single program computes each result and adds in a fixed order, so results
are bitwise repeatable. One program computes

- out and lse, or dq, of a query block;
- dk and dv of a key block, summed over the query heads that share a KV head;
- dk and dv of a tile of packed columns, over a part of the queries.

Positions are global: query slot ``i * block + r`` has position ``query_blocks[i] * block + r``, so
a shard need not be contiguous. Block diagonal d pairs query block q with key block q - d. The
kernels loop over the chosen diagonals, without a block list per row.

Shapes: q, out, dout [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim];
lse, delta float32 [batch, heads, queries], lse a natural logarithm; packed columns [batch, heads,
width, head_dim] with ascending global positions [batch, heads, width]. `TilePlan` has the shapes of
the other tensors.
"""

from mtrain_cli.kernels.triton.sparse.key_gradient import backward_columns, backward_keys
from mtrain_cli.kernels.triton.sparse.output import forward
from mtrain_cli.kernels.triton.sparse.query_gradient import backward_queries, row_delta
from mtrain_cli.kernels.triton.sparse.tile_plan import TilePlan, covered_columns, list_blocks

__all__ = [
    "TilePlan",
    "backward_columns",
    "backward_keys",
    "backward_queries",
    "covered_columns",
    "forward",
    "list_blocks",
    "row_delta",
]
