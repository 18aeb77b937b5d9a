"""Tiles of the sequence fit their budget."""

from __future__ import annotations

import pytest

from mtrain_cli.config.schema import MoeConfig
from mtrain_cli.model.tiling import expert_chunks, shared_tile_rows, tile_rows


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


QWEN = MoeConfig(experts=128, top_k=8, expert_size=768)
TOKEN = 2 * 8 * (2 * 2048 + 7 * 768)  # bytes


@pytest.mark.parametrize(
    ("tokens", "tile_bytes", "degree", "chunks", "number"),
    [
        (10**6, 0, 1, "auto", 1),  # no limit
        (10**6, 0, 2, "auto", 2),  # rows of one chunk travel while the other is computed
        (10**6, 0, 128, "auto", 2),
        (32_767, 0, 2, "auto", 1),  # adding up gradients would take longer
        (32_768, 0, 2, "auto", 2),
        (8_192, 0, 8, "auto", 2),
        (100, 100 * TOKEN, 1, "auto", 1),
        (101, 100 * TOKEN, 1, "auto", 2),
        (8192, 1024 * TOKEN, 128, "auto", 8),  # the limit needs more than the messages
        (7, 1, 1, "auto", 7),
        (100, 1, 2, 3, 3),
        (3, 0, 1, 7, 3),
    ],
)
def test_chunks_of_experts_fit_their_budget_and_let_messages_overlap(
    tokens, tile_bytes, degree, chunks, number
):
    found = expert_chunks(tokens, 2048, QWEN, 2, tile_bytes, degree=degree, chunks=chunks)
    assert found == number
