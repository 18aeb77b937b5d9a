"""Tiles of the sequence fit their budget."""

from __future__ import annotations

from mtrain_cli.model.tiling import tile_rows


def test_tiles_fit_their_budget_and_are_equal_if_possible():
    row = 2 * (6 * 11008 + 4 * 2048)
    assert tile_rows(65536, 2048, 11008, 2, 0) == 65536
    assert tile_rows(65536, 2048, 11008, 2, 65536 * row) == 65536
    for budget, tokens in [
        (4 << 30, 65536),
        (1 << 30, 65536),
        (1 << 20, 1000),
        (1, 7),
        (3 * row, 7),
    ]:
        rows = tile_rows(tokens, 2048, 11008, 2, budget)
        assert rows * row <= max(budget, row)
        assert 2 * rows * row > budget or rows == tokens
    assert 65536 % tile_rows(65536, 2048, 11008, 2, 4 << 30) == 0
    # The budget needs 19 tiles; the next number that divides these tokens is 32.
    uneven = tile_rows(32768, 2048, 11008, 2, 256 << 20)
    assert (-(-32768 // uneven), uneven % 128) == (19, 0)
