"""Train models of the learning study from scratch, with fp8 products of the MLP and without.

    python profiles/fp8_learning.py --out OUT --gpus 2 --each 2
    python profiles/fp8_learning.py --out OUT --toy

Each arm trains with three seeds on the standard library of Python, and measures its held-out loss
with the products that it trains with:

- bf16: dense attention, bfloat16 products.
- rounded: bf16 whose MLP runs in small tiles, which round sums in another order: the difference
  that rounding alone makes to one seed.
- fp8: dense attention, fp8 products of the MLP (train.fp8=mlp).
- sparse, sparse-fp8: vertical_slash with both kinds of products.

OUT gets the folders of the runs and fp8-learning.json. A second call goes on where the first one
stopped. --toy trains tiny models on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import Queue

from mtrain_extras.studies.t_interval import interval
from mtrain_extras.studies.tiers import TIERS

SEEDS = (0, 1, 2)
FP8 = ("train.fp8=mlp",)
SPARSE = ("sparsity=vertical_slash", "sparsity.p_v=0.6", "sparsity.p_s=0.6", "sparsity.last_q=64")
ARMS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "rounded": ("train.tile_mib=256",),
    "fp8": FP8,
    "sparse": SPARSE,
    "sparse-fp8": (*SPARSE, *FP8),
}
YARDSTICKS = {"rounded": "bf16", "fp8": "bf16", "sparse-fp8": "sparse"}
BYTES = ("model.vocab_size=264",)
SIZES = {
    "24M": (*TIERS["a"].model, *BYTES, "optim.lr=1e-3"),
    "88M": (*TIERS["b"].model, *BYTES, "optim.lr=6e-4"),
}
ON_GPU = (
    "seq=8k", "train.global_batch=4", "train.micro_batch=4", "train.steps=500",
    "train.eval_every=25", "data.eval_sequences=16", "optim.warmup_steps=50",
    "train.dtype=bfloat16", "topology.workers=1",
)  # fmt: skip
TOY = (
    "seq=512", "train.steps=6", "train.eval_every=2", "data.eval_sequences=2",
    "train.dtype=bfloat16", "topology.device=cpu", "topology.workers=1",
)  # fmt: skip


def train(folder: Path, words: Sequence[str], gpu: str) -> None:
    """Train a run, unless an earlier call has done so."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "mtrain_cli", "train", *words, f"run.dir={folder}"]
    command += ["train.checkpoint_every=0", "train.checkpoint_at_end=false"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{folder.parent.name} seed {folder.name}: {done.stderr[-400:]}", flush=True)
        return
    (folder / "done").touch()
    losses = held_out(folder)
    print(f"{folder.parent.parent.name} {folder.parent.name} seed {folder.name}: "
          f"{losses[max(losses)]:.4f}", flush=True)  # fmt: skip


def held_out(folder: Path) -> dict[int, float]:
    """Return the held-out loss by step."""
    rows = map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def summary(out: Path, size: str, arms: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return and print the losses of each arm, and how far they lie from those of its yardstick."""
    found = {}
    for arm in arms:
        curves = [held_out(out / size / arm / str(s)) for s in SEEDS if done(out, size, arm, s)]
        last = [curve[max(curve)] for curve in curves]
        if not curves:
            continue
        row: dict[str, object] = {"loss": last, "curves": curves}
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        line = f"{size} {arm:10} loss {statistics.mean(last):.4f}, spread of seeds {spread:.4f}"
        if (yardstick := YARDSTICKS.get(arm)) in found and len(last) > 1:
            pairs = list(zip(curves, found[yardstick]["curves"], strict=False))
            apart = [own[max(own)] - other[max(own)] for own, other in pairs]
            late = [s for s in curves[0] if s >= max(curves[0]) // 2]
            mean = [statistics.mean(own[s] - other[s] for s in late) for own, other in pairs]
            row |= {"difference": apart, "second half": mean}
            line += f"; {yardstick} + {_text(apart)} at the end, {_text(mean)} in the second half"
        found[arm] = row
        print(line, flush=True)
    return found


def _text(differences: Sequence[float]) -> str:
    found = interval(differences)
    assert found is not None
    assert found.high is not None
    return f"{found.mean:+.4f} +- {found.high - found.mean:.4f}"


def done(out: Path, size: str, arm: str, seed: int) -> bool:
    return (out / size / arm / str(seed) / "done").exists()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--each", type=int, default=1, help="runs at a time on one GPU")
    parser.add_argument("--sizes", default="24M,88M")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms, a yardstick before its own")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("words", nargs="*", help="such as train.steps=300")
    arguments = parser.parse_args()
    arms = arguments.arms.split(",")
    sizes = {name: SIZES[name] for name in arguments.sizes.split(",")}
    if arguments.toy:
        sizes = {"tiny": TIERS["tiny"].model}
    common = TOY if arguments.toy else ON_GPU
    places: Queue[str] = Queue()
    for number in range(arguments.gpus * arguments.each):
        places.put("" if arguments.toy else str(number % arguments.gpus))

    def run(case: tuple[str, int, str]) -> None:
        size, seed, arm = case
        place = places.get()
        try:
            words = [*common, *sizes[size], *ARMS[arm], f"seed={seed}", *arguments.words]
            train(arguments.out / size / arm / str(seed), words, place)
        finally:
            places.put(place)

    with ThreadPoolExecutor(places.qsize()) as pool:
        list(pool.map(run, product(sizes, SEEDS, arms)))
    found = {size: summary(arguments.out, size, arms) for size in sizes}
    (arguments.out / "fp8-learning.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
