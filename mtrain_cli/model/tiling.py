"""How many tokens a tile of the sequence has, and which layers keep what its products give. Without PyTorch, for plans."""

from __future__ import annotations


def tile_rows(tokens: int, hidden: int, intermediate: int, itemsize: int, tile_bytes: int) -> int:
    """Tokens of a tile, so that no more than ``tile_bytes`` of temporaries exist (0: no bound, one tile of all tokens).

    At the gate of the MLP a token has six tensors of its width and four of the residual's. Tiles of one size are compiled once, so a
    number of them that divides the tokens is taken where there is one up to twice the least number.
    """
    row = itemsize * (6 * intermediate + 4 * hidden)
    if not tile_bytes or tokens * row <= tile_bytes:
        return tokens
    least = min(tokens, -(-tokens * row // max(tile_bytes, row)))
    tiles = next((n for n in range(least, 2 * least) if tokens % n == 0), least)
    return -(-tokens // tiles)


def layers_with_products(keep: bool | int, layers: int) -> int:
    """Layers of a decoder whose MLP keeps the results of its first products for its backward pass, the last ones.

    keep: ``train.keep_mlp``.
    """
    return layers if keep is True else min(int(keep), layers)
