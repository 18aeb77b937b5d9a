"""Tokens per tile of the sequence, and layers that keep their MLP products.

Does not import PyTorch, so that planning can use it.
"""

from __future__ import annotations

_PRODUCT_ROWS = 128


def tile_rows(tokens: int, hidden: int, intermediate: int, itemsize: int, tile_bytes: int) -> int:
    """Return the tokens per tile, so that temporaries take at most ``tile_bytes``.

    0 means no bound: one tile of all tokens. At the MLP's gate a token has six tensors of the
    intermediate width and four of the hidden width. Equal tiles are compiled once, so take a number
    of tiles that divides the tokens if one lies at most a quarter (or one) above the minimum. More
    tiles would cost: tiles of 1,024 tokens take an extra half millisecond each per pass on an H200
    (profiles/notes.md). Otherwise only the last tile is smaller.
    """
    row = itemsize * (6 * intermediate + 4 * hidden)
    if not tile_bytes or tokens * row <= tile_bytes:
        return tokens
    min_tiles = min(tokens, -(-tokens * row // max(tile_bytes, row)))
    tiles = next(
        (n for n in range(min_tiles, min_tiles + max(1, min_tiles // 4) + 1) if tokens % n == 0),
        min_tiles,
    )
    rows = min(-(-tokens // tiles), max(1, tile_bytes // row))
    # Matrix products are fastest with multiples of their own tile size.
    aligned_rows = -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS
    return aligned_rows if aligned_rows * row <= tile_bytes else rows


def layers_with_products(keep: bool | int, layers: int) -> int:
    """Return how many of the last layers keep their MLP's gate and up outputs for backward.

    keep: ``train.keep_mlp``.
    """
    return layers if keep is True else min(int(keep), layers)
