"""Tiles of the sequence fit their budget."""

from __future__ import annotations

from mtrain_cli.model.tiling import shared_tile_rows, tile_rows


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


def test_a_shared_layer_has_chunks_that_fit_the_budget_of_a_tile():
    sizes = 2048, 11008, 2
    assert shared_tile_rows(4096, *sizes, 0, 1, "auto") == 4096, "a whole layer sends no messages"
    assert shared_tile_rows(4096, *sizes, 0, 2, 3) == 1366
    assert shared_tile_rows(5, *sizes, 0, 2, 9) == 1
    assert shared_tile_rows(65536, *sizes, 0, 2, "auto") == 16384
    assert shared_tile_rows(2048, *sizes, 0, 2, "auto") == 1024, "2,048 rows of both workers"
    assert shared_tile_rows(512, *sizes, 0, 2, "auto") == 512
    budget = 100 * 2 * (6 * 11008 + 2 * 4 * 2048)
    assert shared_tile_rows(4096, *sizes, budget, 2, 1) <= 100, "a row of each worker"
