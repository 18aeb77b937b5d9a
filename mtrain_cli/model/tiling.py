"""How many tokens a tile of the sequence has, and which layers keep what its products give. Without PyTorch, for plans."""

from __future__ import annotations

_PRODUCT_ROWS = 128


def tile_rows(tokens: int, hidden: int, intermediate: int, itemsize: int, tile_bytes: int) -> int:
    """Tokens of a tile, so that no more than ``tile_bytes`` of temporaries exist (0: no bound, one tile of all tokens).

    At the gate of the MLP a token has six tensors of its width and four of the residual's. Tiles of one size are compiled once, so a
    number of them that divides the tokens is taken where there is one up to a quarter (or one) above the least number, but no more: tiles
    of 1,024 tokens cost half a millisecond each and pass on an H200 (profiles/notes.md). Otherwise only the last tile is smaller.
    """
    row = itemsize * (6 * intermediate + 4 * hidden)
    if not tile_bytes or tokens * row <= tile_bytes:
        return tokens
    least = min(tokens, -(-tokens * row // max(tile_bytes, row)))
    tiles = next(
        (n for n in range(least, least + max(1, least // 4) + 1) if tokens % n == 0), least
    )
    rows = min(-(-tokens // tiles), max(1, tile_bytes // row))
    # Matrix products are fastest with whole tiles of their own.
    whole = -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS
    return whole if whole * row <= tile_bytes else rows


def layers_with_products(keep: bool | int, layers: int) -> int:
    """Layers of a decoder whose MLP keeps the results of its first products for its backward pass, the last ones.

    keep: ``train.keep_mlp``.
    """
    return layers if keep is True else min(int(keep), layers)
