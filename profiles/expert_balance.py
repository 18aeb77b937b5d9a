"""Train tiny_moe with and without what balances its experts, and keep the curves.

    python profiles/expert_balance.py --runs runs/expert-balance

The script trains three seeds of each kind in `KINDS` on the CPU, 60 steps of 1,024 tokens of
Python's standard library each, which takes about 20 to 40 seconds a run. Runs that are already in
the folder are not trained again. It writes `expert-balance-cpu.json`: for each kind and seed, the
loss, the mean entropy of the routers in nats, and the largest load of an expert over all layers,
divided by the mean load, at each step. `docs/figures.py` draws them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from mtrain_cli.records.metrics import METRICS_FILE, read_metrics

OUT = Path(__file__).parent / "expert-balance-cpu.json"
SEEDS = (0, 1, 2)
SETTINGS = (
    "model=tiny_moe", "seq=1k", "topology.workers=1", "train.steps=60",
    "train.checkpoint_at_end=false",
)  # fmt: skip
KINDS = {
    "none": ("train.balance_loss=0",),
    "loss": ("train.balance_loss=0.01",),
    "bias": ("train.balance_loss=0", "train.balance_bias=0.01"),
}


def train(folder: Path, kind: str, seed: int) -> Path:
    """Train one run, unless the folder has it. Return its folder."""
    run = folder / f"balance-{kind}-{seed}"
    if not (run / METRICS_FILE).is_file():
        words = [*SETTINGS, *KINDS[kind], f"seed={seed}", f"run.name={run.name}", f"run.dir={run}"]
        subprocess.run([sys.executable, "-m", "mtrain_cli", "train", *words], check=True)
    return run


def curves(run: Path) -> dict[str, list[float]]:
    """Return the values of each step."""
    steps = read_metrics(run)
    return {
        "loss": [round(step.loss, 4) for step in steps],
        "entropy": [round(step.router_entropy or 0.0, 4) for step in steps],
        "load": [round(step.expert_load or 0.0, 4) for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/expert-balance"))
    folder = parser.parse_args().runs
    found = {kind: [curves(train(folder, kind, seed)) for seed in SEEDS] for kind in KINDS}
    about = {"settings": SETTINGS, "kinds": KINDS, "seeds": SEEDS, "device": "CPU, float32"}
    OUT.write_text(json.dumps({"about": about, "curves": found}) + "\n", encoding="utf-8")
    print("Means of the last ten steps over seeds, and their range:")
    for kind, runs in found.items():
        last = {name: [statistics.mean(run[name][-10:]) for run in runs] for name in runs[0]}
        values = ", ".join(
            f"{name} {statistics.mean(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            for name, each in last.items()
        )
        print(f"{kind}: {values}")


if __name__ == "__main__":
    main()
