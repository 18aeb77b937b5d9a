"""The Jaccard index of keys and of lines equals Python's sets."""

from __future__ import annotations

import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_studies.attention.overlap import key_overlap, line_overlap

BLOCK, BLOCKS = 4, 6
UNUSED = BLOCK * BLOCKS


def jaccard(one, other) -> float:
    return len(set(one) & set(other)) / len(set(one) | set(other)) if {*one, *other} else 1.0


def test_key_overlap_equals_sets_of_the_first_keys():
    generator = torch.Generator().manual_seed(0)
    one, other = (
        torch.stack([torch.randperm(30, generator=generator)[:10] for _ in range(6)])
        .view(2, 3, 10)
        .int()
        for _ in range(2)
    )
    for count in (1, 4, 10):
        found = key_overlap(one, other, count)
        for head in range(2):
            for row in range(3):
                sets = (t[head, row, :count].tolist() for t in (one, other))
                assert float(found[head, row]) == torch.tensor(jaccard(*sets))
    assert key_overlap(one, one, 10).eq(1).all()
    assert key_overlap(one, one + 30, 10).eq(0).all()


def lines(slashes: list[list[int]], columns: list[list[int]]) -> VerticalSlash:
    chosen = torch.zeros(1, len(slashes), BLOCKS, dtype=torch.bool)
    width = max(map(len, columns)) + 1
    places = torch.full((1, len(columns), width), UNUSED, dtype=torch.int32)
    for head, (diagonals, keys) in enumerate(zip(slashes, columns, strict=True)):
        chosen[0, head, diagonals] = True
        places[0, head, : len(keys)] = torch.tensor(keys, dtype=torch.int32)
    return VerticalSlash(BLOCK, BLOCKS, chosen, places)


def test_line_overlap_equals_sets_of_lines():
    mine = [[0, 2, 5], [0], [0, 1]], [[1, 9, 23], [], [4]]
    theirs = [[0, 3], [0], [0, 1, 2, 3]], [[9, 20, 21, 22, 23], [], []]
    slashes, columns = line_overlap(lines(*mine), lines(*theirs))
    for found, one, other in ((slashes, mine[0], theirs[0]), (columns, mine[1], theirs[1])):
        expected = [jaccard(a, b) for a, b in zip(one, other, strict=True)]
        torch.testing.assert_close(found, torch.tensor([expected]))
