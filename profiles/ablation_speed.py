"""Time steps on two GPUs with the optimizations of two papers added one by one.

    python profiles/ablation_speed.py --seq 128k --layers 6
    python profiles/ablation_speed.py --toy

- BurstEngine: the rows of `published/burst-table2.yaml` (arXiv:2509.19836, table 2), with dense
  attention over a zigzag ring
- MTraining (arXiv:2510.18830, figure 6b): dense attention over a zigzag ring, vertical_slash over
  it, then over a striped ring, then with the keys of columns gathered once

Each row has all settings of the row above and its own. Rows of a ring between nodes are left out:
two GPUs of one host have one ring. Times are medians of the steps after the first two. predicted:
`mtrain simulate run`, with its bounds. `--toy` runs a tiny model on two CPU processes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from measured_runs import Pool, Prediction, RunFailed, write_ids
from parallelism_speed import TINY

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.sizes import parse_size

BURST = Path(__file__).parent / "published" / "burst-table2.yaml"
Row = tuple[str, str, str, tuple[str, ...]]  # name, layout, exchange, settings


def burst_rows() -> Iterator[Row]:
    """Yield the rows of BurstEngine's table 2 that differ on one host."""
    for row in yaml.safe_load(BURST.read_text())["rows"]:
        if row["row"] != "+ topology-aware ring":
            yield row["row"], "zigzag", "ring", tuple(row["words"])


def mtraining_rows(sparse: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of MTraining's optimizations."""
    every = ("train.activation_checkpoint=full",)
    in_steps = (*every, *sparse, "topology.columns=in_steps")
    yield "dense, zigzag", "zigzag", "ring", every
    yield "+ vertical_slash", "zigzag", "ring", in_steps
    yield "+ striped", "striped", "ring", in_steps
    yield "+ columns once", "striped", "ring", (*every, *sparse, "topology.columns=once")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3b", help="a model of `mtrain config list`")
    parser.add_argument("--layers", type=int, default=6, help="number of layers")
    parser.add_argument("--seq", default="128k", help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=4, help="training steps of a run, at least 3")
    parser.add_argument("--cluster", default="h200_1x8", help="cluster of the predictions")
    parser.add_argument("--logs", type=Path, help="existing folder for what the workers print")
    parser.add_argument("--toy", action="store_true", help="a tiny model on two CPU processes")
    given = parser.parse_args()
    seq = 1024 if given.toy else parse_size(given.seq)
    device = "cpu" if given.toy else "cuda"
    model = (f"model={given.model}", f"model.num_layers={given.layers}")
    if given.toy:
        model = (*TINY, "topology.block_size=128")
    columns, slashes = (64, 2) if given.toy else (2048, round(0.05 * seq / 128))
    sparse = (
        "sparsity=vertical_slash",
        *(f"sparsity.{end}_columns={columns}" for end in ("min", "max")),
        *(f"sparsity.{end}_slashes={slashes}" for end in ("min", "max")),
    )
    with tempfile.TemporaryDirectory() as folder, Pool(2, device, given.logs) as pool:
        shape = compose([*model, f"seq={seq}"]).model
        data = write_ids(Path(folder), shape.vocab_size, seq, [0])
        for paper, rows in (("BurstEngine", burst_rows()), ("MTraining", mtraining_rows(sparse))):
            print(
                f"| {paper} | s / step | tokens/s/GPU | over the first | peak GiB | predicted s |"
            )
            print("|---|---|---|---|---|---|")
            first = None
            for name, layout, exchange, own in rows:
                words = (*model, f"seq={seq}", "data.document_mask=false", *own)
                prediction = Prediction(given.cluster, 2, layout, exchange, *words)
                try:
                    run = pool.train(
                        *words, "data=tokens", f"data.path={data}", "data.shuffle=false",
                        f"topology.device={device}", "topology.workers=2",
                        f"topology.layout={layout}", f"topology.exchange={exchange}",
                        f"train.steps={given.steps}",
                    )  # fmt: skip
                except RunFailed as error:
                    print(f"| {name} | failed: {error} |", flush=True)
                    continue
                first = first or run.seconds
                print(
                    f"| {name} | {run.seconds:.3f} | {seq / 2 / run.seconds:,.0f} "
                    f"| {first / run.seconds:.2f}x | {run.peak_gib:.1f} | {prediction} |",
                    flush=True,
                )
            print(flush=True)


if __name__ == "__main__":
    main()
