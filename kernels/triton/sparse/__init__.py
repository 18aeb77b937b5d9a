"""Sparse attention on plain tensors: block diagonals (or listed blocks) plus packed single columns, forward and backward, in Triton.

No kernel uses atomics, so results are bitwise repeatable: the forward pass, the gradient of queries (a program owns a block of queries),
the gradient of keys and values (a program owns a block of keys and sums over the query heads of its group), and the gradient of packed
columns (a program owns a tile of columns and a part of the queries). Two small ones prepare them: which columns lie on a diagonal of which
query block, and rowsum(out * dout).

Positions are global: query slot ``i * block + r`` stands at position ``query_blocks[i] * block + r``, so shards need not be contiguous.
Which blocks a program visits follows from the index alone: key block = query block - diagonal going forward, query block = key block +
diagonal going back. No list of blocks per row is ever stored for diagonals.

Shapes: q, out, dout [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim]; lse, delta float32 [batch, heads, queries],
natural logarithm; columns [batch, heads, width, head_dim] with ascending global positions [batch, heads, width]. `Plan` holds the rest.
"""

from mtrain_cli.kernels.triton.sparse.key_gradient import backward_columns, backward_keys
from mtrain_cli.kernels.triton.sparse.output import forward
from mtrain_cli.kernels.triton.sparse.plan import Plan, covered_columns, list_blocks
from mtrain_cli.kernels.triton.sparse.query_gradient import backward_queries, row_delta

__all__ = [
    "Plan",
    "backward_columns",
    "backward_keys",
    "backward_queries",
    "covered_columns",
    "forward",
    "list_blocks",
    "row_delta",
]
