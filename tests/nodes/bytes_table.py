"""Count the bytes between nodes for each exchange, and print the table of the documents.

Start it as root on Linux: ``PYTHONPATH=.:tests python -m nodes.bytes_table``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nodes import node_runs, planned_links
from nodes.node_network import Network, why_not

EXCHANGES = (
    "ring",
    "hierarchical_ring",
    "all_gather",
    "hierarchical_all_gather",
    "ulysses",
    "group_cast",
    "hierarchical_group_cast",
)
SHAPES = (2, 1), (2, 2), (3, 1), (4, 2)  # nodes, workers of each
STEPS, MORE = 1, 3  # of the shorter run, and how many more the longer has
# A window, so that `group_cast` sends less than everything. 24 heads for Ulysses of 2, 3, 4 and 8.
SETTINGS = [
    "topology.device=cpu",
    "seq=1536",
    "mask=sliding_window",
    "mask.window=256",
    "topology.layout=contiguous",
    "model.num_layers=2",
    "model.num_heads=24",
    "model.num_kv_heads=24",
    "model.head_dim=8",
    "train.checkpoint_at_end=false",
    "data=text",
    "data.document_mask=false",
    "run.name=run",
]


@dataclass(frozen=True)
class Counted:
    """What a run with an exchange sent.

    links: bytes per step that left and reached each node, [2, nodes].
    gloo: the planned bytes, on the routes of gloo.
    losses: of all steps.
    """

    links: np.ndarray
    gloo: planned_links.Links
    losses: list[float]

    def describe(self) -> str:
        """Return the planned and the counted megabytes of the busiest node and direction."""
        busiest = np.unravel_index(self.gloo.total.argmax(), self.gloo.total.shape)
        return f"{self.gloo.total[busiest] / 1e6:.2f} / {self.links[busiest] / 1e6:.2f}"

    @property
    def ratio(self) -> float:
        """The ratio that differs most from 1, of all nodes and directions."""
        ratios = (self.links / self.gloo.total).ravel()
        return float(ratios[np.abs(ratios - 1).argmax()])


def write_text(folder: Path) -> str:
    """Write a text to train on. Return the setting that names it."""
    words, rng = ("alpha", "beta", "gamma", "delta", "epsilon"), random.Random(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(20_000)))
    return f"data.path={folder / 'text.txt'}"


def settings(exchange: str, text: str) -> list[str]:
    return [*SETTINGS, text, f"topology.exchange={exchange}"]


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference between the losses of two runs."""
    return max(abs(one / other - 1) for one, other in zip(losses, others, strict=True))


def one_process(text: str, folder: Path) -> list[float]:
    """Return the losses of one worker on one node."""
    with Network(1) as network:
        words = [*SETTINGS, text, f"train.steps={STEPS + MORE}"]
        node_runs.train(network, words, folder)
    return node_runs.losses(folder / "runs/run")


def count(exchange: str, nodes: int, per_node: int, text: str, folder: Path) -> Counted:
    """Train twice, with `STEPS` steps and with `MORE` more: the start costs both the same."""
    words = settings(exchange, text)
    totals, losses = [], []
    with Network(nodes) as network:
        network.send_once()
        for steps in (STEPS, STEPS + MORE):
            before, place = np.array(network.counted()), folder / f"{steps}"
            node_runs.train(network, [*words, f"train.steps={steps}"], place, per_node)
            totals.append(np.array(network.counted()) - before)
            losses = node_runs.losses(place / "runs/run")
    links = (totals[1] - totals[0]).T / MORE
    planned = planned_links.planned(words, nodes, per_node, gloo=True)
    return Counted(links, planned, losses)


def main() -> None:
    if (reason := why_not()) is not None:
        sys.exit(reason)
    columns = [f"{nodes} x {per_node}" for nodes, per_node in SHAPES]
    print(f"| exchange | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    ratios, errors = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder)
        alone = one_process(text, folder / "alone")
        for exchange in EXCHANGES:
            cells = []
            for shape in SHAPES:
                counted = count(exchange, *shape, text, folder / f"{exchange}-{len(ratios)}")
                ratios.append(counted.ratio)
                errors.append(largest_difference(counted.losses, alone))
                cells.append(counted.describe())
            print(f"| `{exchange}` | {' | '.join(cells)} |", flush=True)
        words = settings("ring", text)
        plans = [planned_links.planned(words, *shape, gloo=True) for shape in SHAPES]
        weights = [f"{np.max(plan.weights) / 1e6:.2f}" for plan in plans]
    print(f"| weights and gradients in each | {' | '.join(weights)} |")
    print(f"\ncounted / planned: {min(ratios):.4f} to {max(ratios):.4f}")
    print(f"largest relative difference of a loss from one process: {max(errors):.0e}")


if __name__ == "__main__":
    main()
