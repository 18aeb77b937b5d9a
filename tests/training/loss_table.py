"""Print how much losses of several workers differ from those of one worker as a table.

`PYTHONPATH=tests python -m training.loss_table [WORKERS ...]`.

One row per mask: the largest difference of loss in ten steps of float32, and of the held-out loss
after them, over exchanges, layouts, stages, parts of the heads and nodes of two workers. A mask
under which no label counts, `full`, cannot be trained.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gloo
from training.masked_runs import Trained, trained
from training.test_data_masks import MASKED, documents
from training.test_masks import CASES, STEPS, words

NODES_OF_TWO = 2
EXCHANGES = {
    "ring": ["striped"],
    "hierarchical_ring": ["zigzag"],
    "all_gather": ["contiguous"],
    "hierarchical_all_gather": ["balanced"],
    "ulysses": ["striped"],
    "group_cast": ["zigzag", "balanced", "balanced topology.stages=1", "striped topology.chunks=2"],
    "hierarchical_group_cast": [
        "balanced",
        "contiguous topology.stages=2",
    ],
}


def ways(world: int) -> list[list[str]]:
    """The exchanges that ``world`` workers can choose, each with a layout and options."""
    found = []
    for exchange, layouts in EXCHANGES.items():
        nodes = exchange.startswith("hierarchical")
        if world == 1 or (nodes and world % NODES_OF_TWO) or (exchange == "ulysses" and world == 3):
            continue
        found += [
            [f"topology.exchange={exchange}", *f"topology.layout={layout}".split()]
            for layout in layouts
        ]
    return found


def difference(alone: Trained, runs: list[Trained]) -> float:
    return max(
        abs(one - other)
        for run in runs
        for one, other in zip(
            [*alone.losses, alone.held_out], [*run.losses, run.held_out], strict=True
        )
    )


def main(worlds: list[int]) -> None:
    print(f"| mask | first loss | last loss | {' | '.join(f'{w} workers' for w in worlds)} |")
    print("|---" * (len(worlds) + 3) + "|")
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: words(name) for name in CASES}
        cases["data"] = [*MASKED, f"data.path={documents(Path(folder))}"]
        for name, mask in cases.items():
            (alone,) = gloo.run(1, trained, mask, STEPS)
            cells = []
            for world in worlds:
                options = [["topology.exchange=all_gather"]] if world == 1 else ways(world)
                worst = 0.0
                for way in options:
                    per_node = NODES_OF_TWO if "hierarchical" in way[0] else None
                    runs = gloo.run(world, trained, [*mask, *way], STEPS, per_node)
                    worst = max(worst, difference(alone, runs))
                cells.append(f"{worst:.1e} ({len(options)})")
            first, last = alone.losses[0], alone.losses[-1]
            print(f"| {name} | {first:.5f} | {last:.5f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 2, 3, 4])
