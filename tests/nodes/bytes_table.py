"""Count the bytes between nodes for each exchange, and print the table of docs.

    PYTHONPATH=. python -m nodes.bytes_table        in the folder tests/, as root on Linux
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
SETTINGS = (
    "topology.device=cpu seq=1536 mask=sliding_window mask.window=256 topology.layout=contiguous "
    "model.num_layers=2 model.num_heads=24 model.num_kv_heads=24 model.head_dim=8 "
    "train.checkpoint_at_end=false data=text data.document_mask=false run.name=run"
).split()


@dataclass(frozen=True)
class Counted:
    """What a run with an exchange sent.

    links: bytes per step that left and reached each node, [2, nodes].
    gloo, plan: the planned bytes, on the routes of gloo and on direct ones.
    losses: of all steps.
    """

    links: np.ndarray
    gloo: planned_links.Links
    plan: planned_links.Links
    losses: list[float]

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


def settings(exchange: str) -> list[str]:
    if exchange == "ulysses":
        return ["topology.exchange=ulysses"]
    return [f"topology.exchange={exchange}"]


def one_process(text: str, folder: Path) -> list[float]:
    """Return the losses of one worker on one node."""
    with Network(1) as network:
        words = [*SETTINGS, text, f"train.steps={STEPS + MORE}"]
        node_runs.train(network, words, folder)
    return node_runs.losses(folder / "runs/run")


def count(
    exchange: str, nodes: int, per_node: int, text: str, folder: Path, more: Sequence[str] = ()
) -> Counted:
    """Train twice, with `STEPS` steps and with `MORE` more: the start costs both the same."""
    words = [*SETTINGS, *settings(exchange), *more, text]
    totals, losses = [], []
    with Network(nodes) as network:
        for steps in (STEPS, STEPS + MORE):
            before, place = np.array(network.counted()), folder / f"{steps}"
            node_runs.train(network, [*words, f"train.steps={steps}"], place, per_node)
            totals.append(np.array(network.counted()) - before)
            losses = node_runs.losses(place / "runs/run")
    links = (totals[1] - totals[0]).T / MORE
    gloo, plan = (planned_links.planned(words, nodes, per_node, gloo=g) for g in (True, False))
    return Counted(links, gloo, plan, losses)


def main() -> None:
    if (reason := why_not()) is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder)
        alone = one_process(text, folder / "alone")
        print(
            "| exchange | nodes x workers | attention | weights | NCCL's routes | planned "
            "| counted | counted / planned | losses |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for exchange in EXCHANGES:
            for nodes, per_node in SHAPES:
                place = folder / f"{exchange}-{nodes}-{per_node}"
                print(row(exchange, nodes, per_node, count(exchange, nodes, per_node, text, place), alone), flush=True)


def row(exchange: str, nodes: int, per_node: int, counted: Counted, alone: list[float]) -> str:
    busiest = np.unravel_index(counted.gloo.total.argmax(), counted.gloo.total.shape)

    def mb(array: object) -> str:
        return f"{np.array(array)[busiest] / 1e6:.3f}"

    error = max(abs(a / b - 1) for a, b in zip(counted.losses, alone, strict=True))
    cells = [
        f"`{exchange}`",
        f"{nodes} x {per_node}",
        mb(counted.gloo.attention),
        mb(counted.gloo.weights),
        mb(counted.plan.total),
        mb(counted.gloo.total),
        mb(counted.links),
        f"{counted.ratio:.4f}",
        "equal" if error == 0 else f"{error:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
