"""How many tokens a tile of the sequence has, and how many layers keep their MLP products.

`feed_forward.py` computes the second half of a layer tile by tile. Planning reads the same numbers,
so this module does not import PyTorch.
"""

from __future__ import annotations

_PRODUCT_ROWS = 128


def tile_rows(tokens: int, hidden: int, intermediate: int, itemsize: int, tile_bytes: int) -> int:
    """Return the number of tokens per tile.

    Code is compiled once if all tiles have the same size. Therefore prefer a number of tiles that
    divides the tokens, if that number exceeds the smallest possible number by at most a quarter (or
    by 1). With more tiles, the layer would be too slow: each tile of 1,024 tokens adds half a
    millisecond per pass on an H200 (profiles/notes.md). If no such number exists, the last tile is
    smaller than the other tiles.

    Args:
        tokens: number of tokens in all sequences of a batch on this worker.
        hidden, intermediate: sizes of the model.
        itemsize: bytes per element.
        tile_bytes: maximum size of a tile's temporary tensors. 0 means no limit: one tile has all
            tokens.
    """
    # At the MLP's gate, a token has six tensors of the intermediate size and four of the hidden
    # size.
    row = itemsize * (6 * intermediate + 4 * hidden)
    if not tile_bytes or tokens * row <= tile_bytes:
        return tokens
    min_tiles = min(tokens, -(-tokens * row // max(tile_bytes, row)))
    tiles = next(
        (n for n in range(min_tiles, min_tiles + max(1, min_tiles // 4) + 1) if tokens % n == 0),
        min_tiles,
    )
    rows = min(-(-tokens // tiles), max(1, tile_bytes // row))
    # Matrix products are fastest if the rows are a multiple of their kernel's tile size.
    aligned_rows = -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS
    return aligned_rows if aligned_rows * row <= tile_bytes else rows


def layers_with_products(keep: bool | int, layers: int) -> int:
    """Return how many layers, counted from the last, keep their MLP's gate and up outputs.

    Args:
        keep: value of ``train.keep_mlp``: all layers (True), none (False), or the number of layers.
        layers: number of layers of the model.
    """
    return layers if keep is True else min(int(keep), layers)
