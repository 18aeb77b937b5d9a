"""Print the error of each exchange against the float64 oracle as a table.

`PYTHONPATH=tests python -m parallel.error_table [WORKERS ...]`.

One row per exchange and number of workers: the largest difference of output, lse and gradients over
layouts, heads 4/4, 4/2 and 4/1, indices, and causal and document masks.
"""

from __future__ import annotations

import sys

import gloo
from parallel.test_context_attention import CASES, cells


def main(worlds: list[int]) -> None:
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


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 2, 3, 4, 6])
