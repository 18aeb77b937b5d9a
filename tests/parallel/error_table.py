"""Print the error of each exchange against the float64 oracle as a table.

`PYTHONPATH=tests python -m parallel.error_table [masks] [WORKERS ...]`.

One row per exchange and number of workers: the largest difference of output, lse and gradients over
layouts, heads 4/4, 4/2 and 4/1, indices, and causal and document masks.

With `masks`, three tables in float64, over all masks: one row per mask, exchange and layout, and
one column per number of workers. Attention is dense. Masks of one causal interval per query also
have the indices `vertical_slash` and `bitmap`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gloo
from parallel.test_context_attention import (
    CASES,
    CAUSAL_INTERVALS,
    HEADS,
    MASKS,
    STAGED,
    WAYS,
    cells,
)


def exchanges(worlds: list[int]) -> None:
    names = [f"{kernel}, {dtype}" for kernel, dtype, _, _ in CASES]
    print(
        f"| workers | exchange | cells | {' | '.join(names)} |\n|---|---|---|{'---|' * len(names)}"
    )
    for world in worlds:
        table: dict[str, list[float]] = {}
        counts: dict[str, int] = {}
        for column, (kernel, dtype, kinds, _) in enumerate(CASES):
            for worst in gloo.run(world, cells, kernel, dtype, kinds, True):
                for cell, difference in worst.items():
                    way = cell.partition("/")[0]
                    row = table.setdefault(way, [0.0] * len(CASES))
                    row[column] = max(row[column], difference)
                    counts[way] = counts.get(way, 0) + 1
        for way, row in table.items():
            print(
                f"| {world} | {way} | {counts[way] // world} | "
                f"{' | '.join(f'{d:.1e}' for d in row)} |",
                flush=True,
            )


def errors_of_masks(world: int) -> Iterator[tuple[str, float]]:
    """Yield the difference of each cell on each rank."""
    ways = (*WAYS, *STAGED)
    runs = (
        ("sdpa", "float64", ("dense",), True, tuple(MASKS), HEADS, ways),
        ("reference", "float64", ("vertical_slash", "bitmap"), True, CAUSAL_INTERVALS, HEADS, ways),
    )
    for given in runs:
        for worst in gloo.run(world, cells, *given):
            yield from worst.items()


def masks(worlds: list[int]) -> None:
    tables: dict[str, dict[str, dict[int, float]]] = {"mask": {}, "exchange": {}, "layout": {}}
    counts = dict.fromkeys(worlds, 0)
    for world in worlds:
        for cell, difference in errors_of_masks(world):
            way, layout, _, index, mask = cell.split("/")
            mask += "" if index == "dense" else f", {index}"
            rows = {"mask": mask, "exchange": way.partition(" ")[0], "layout": layout}
            counts[world] += 1
            for name, row in rows.items():
                of = tables[name].setdefault(row, {})
                of[world] = max(of.get(world, 0.0), difference)
    heading = " | ".join(f"{w} workers, {counts[w] // w} cells" for w in worlds)
    for name, table in tables.items():
        print(f"| {name} | {heading} |\n{'|---' * (len(worlds) + 1)}|")
        for row, of in table.items():
            print(f"| {row} | {' | '.join(f'{of[w]:.1e}' if w in of else '' for w in worlds)} |")
        print(flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["masks"]:
        masks([int(word) for word in sys.argv[2:]] or [1, 2, 3, 5])
    else:
        exchanges([int(word) for word in sys.argv[1:]] or [1, 2, 3, 4, 6])
