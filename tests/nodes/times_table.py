"""Compare attention over limited links with the simulator, and print the table of the documents.

Start it as root on Linux: ``PYTHONPATH=.:tests python -m nodes.times_table``, or with rates, such
as ``800mbit``, for 2 x 2 nodes.

The simulator gets what a user would give it: the cluster that `mtrain profile links` measures on
these nodes, and the times of kernels that `mtrain profile kernels` measures with one process on
each core at once: the ranks wait for links most of the time, so few more of them compute together.
Nothing is fitted to the times of attention.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from golden import reach

from mtrain_cli.launch.environment import cpu_cores
from nodes import node_runs
from nodes.bytes_table import EXCHANGES
from nodes.node_network import Network, why_not

# Rate of the links, nodes, and ranks of each.
COLUMNS = (("50mbit", 2, 2), ("100mbit", 2, 2), ("200mbit", 2, 2), ("200mbit", 4, 1))
SAMPLES = 4  # each once without and once with recording, which costs nothing here
HEADS, HEAD_DIM, SEQ, WINDOW = 32, 64, 512, 64
# Shards of 2 MiB and a narrow window, so that links take most of the time.
SETTINGS = [
    "topology.device=cpu",
    "topology.layout=contiguous",
    f"seq={SEQ}",
    "mask=sliding_window",
    f"mask.window={WINDOW}",
    "model.num_layers=1",
    f"model.num_heads={HEADS}",
    f"model.num_kv_heads={HEADS}",
    f"model.head_dim={HEAD_DIM}",
    "train.kernel=sdpa",
]
SIZES = "256k,1m,2m"  # of messages: those of attention, and smaller ones


@dataclass(frozen=True)
class Compared:
    """Times of both passes of attention in one layer, in ms.

    measured: of each sample, the slowest rank.
    predicted: low, expected and high.
    """

    measured: tuple[float, ...]
    predicted: tuple[float, float, float]

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def spread(self) -> float:
        """Difference between the slowest and the fastest sample / the median."""
        return (max(self.measured) - min(self.measured)) / self.median

    @property
    def error(self) -> float:
        """Relative error of the prediction; negative if it is too short."""
        return self.predicted[1] / self.median - 1


def measure_kernels(network: Network, per_node: int, folder: Path) -> Path:
    """Time the kernel in a process for each core or rank, all at once. Return a file of them."""
    folder.mkdir(parents=True)
    words = ["profile", "kernels", "--seq", f"{SEQ // 4},{SEQ // 2},{SEQ}", "--kernel", "sdpa"]
    words += ["--heads", f"{HEADS}/{HEADS}", "--head-dim", str(HEAD_DIM), "--density", "0.5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    running = []
    for rank in range(min(cpu_cores(), network.count * per_node)):
        command = [sys.executable, "-m", "mtrain_cli", *words, "--out", f"kernels-{rank}.json"]
        command = network.command(rank // per_node, command, folder)
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("mtrain profile kernels failed")
    return folder / "kernels-0.json"


def measure_links(network: Network, per_node: int, folder: Path, repeats: int = 3) -> Path:
    """Return the cluster file of `mtrain profile links` on the nodes."""
    words = ["topology.device=cpu", "--sizes", SIZES, "--repeats", str(repeats), "run.name=links"]
    node_runs.train(network, words, folder, per_node, command=("profile", "links"))
    return folder / "measurements/links/cluster.yaml"


def measure_attention(
    network: Network, per_node: int, exchanges: Sequence[str], samples: int, folder: Path
) -> dict[str, tuple[float, ...]]:
    """Return the ms of each sample of each exchange. The exchanges take turns."""
    words = [*SETTINGS, "--attention-only", "--exchange", ",".join(exchanges)]
    words += ["--steps", str(samples), "run.name=times"]
    node_runs.train(network, words, folder, per_node, command=("profile", "imbalance"))
    summary = json.loads((folder / "measurements/times/summary.json").read_text())
    return {
        case["exchange"].split()[0]: (*case["iteration_ms"], *case["recorded_ms"])
        for case in summary["cases"]
    }


def predict(
    cluster: Path, kernels: Path, exchanges: Sequence[str], folder: Path
) -> dict[str, tuple[float, float, float]]:
    """Return the predicted ms of each exchange: low, expected and high."""
    words = ["simulate", *SETTINGS[1:], "--cluster", str(cluster), "--calibration", str(kernels)]
    words += ["--attention-only", "--exchange", ",".join(exchanges), "--json", "--no-files"]
    found: dict[str, Any] = json.loads(reach.run(words, folder))
    return {
        facts["exchange"].split()[0]: tuple(entry["ms"][name] for name in ("low", "value", "high"))
        for entry, facts in zip(found["predicted"], found["cases"], strict=True)
    }


def compare(
    rate: str,
    nodes: int,
    per_node: int,
    folder: Path,
    exchanges: Sequence[str] = EXCHANGES,
    samples: int = SAMPLES,
) -> dict[str, Compared]:
    """Measure and predict all exchanges on links of one rate."""
    with Network(nodes, rate=rate) as network:
        kernels = measure_kernels(network, per_node, folder / "kernels")
        cluster = measure_links(network, per_node, folder / "links")
        times = measure_attention(network, per_node, exchanges, samples, folder / "times")
    predicted = predict(cluster, kernels, exchanges, folder)
    return {name: Compared(times[name], predicted[name]) for name in exchanges}


def main() -> None:
    if (reason := why_not()) is not None:
        sys.exit(reason)
    wanted = [(rate, 2, 2) for rate in sys.argv[1:]] or COLUMNS
    columns: list[dict[str, Compared]] = []
    with tempfile.TemporaryDirectory() as name:
        for number, (rate, nodes, per_node) in enumerate(wanted):
            began = time.monotonic()
            columns.append(compare(rate, nodes, per_node, Path(name) / str(number)))
            spread = statistics.median(c.spread for c in columns[-1].values())
            print(
                f"{rate}, {nodes} x {per_node}: {time.monotonic() - began:.0f} s, load "
                f"{os.getloadavg()[1]:.1f}, samples spread by {spread:.0%}",
                file=sys.stderr,
                flush=True,
            )
    heads = [
        f"{rate.removesuffix('mbit')}, {nodes} x {per_node}" for rate, nodes, per_node in wanted
    ]
    print(f"| exchange | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}")
    for exchange in EXCHANGES:
        cells = [
            f"{c.median:.0f}/{c.predicted[1]:.0f} ({100 * c.error:+.0f})"
            for c in (column[exchange] for column in columns)
        ]
        print(f"| `{exchange}` | {' | '.join(cells)} |")
    ratios = [f"{ring_ratio(c, True):.2f}/{ring_ratio(c, False):.2f}" for c in columns]
    print(f"| `ring` / `hierarchical_ring` | {' | '.join(ratios)} |")


def ring_ratio(column: dict[str, Compared], measured: bool) -> float:
    """Return the time of the flat ring / that of the hierarchical one."""
    flat, other = (
        c.median if measured else c.predicted[1]
        for c in (column["ring"], column["hierarchical_ring"])
    )
    return flat / other


if __name__ == "__main__":
    main()
