"""Time tensor and pipeline parallelism on two GPUs: mtrain, and torch's own in the same call.

    python profiles/parallelism_speed.py tensor --seq 128k --cluster h200_1x8
    python profiles/parallelism_speed.py pipeline --seq 32k --cluster h200_1x8
    python profiles/parallelism_speed.py one --seq 64k --before OTHER_CHECKOUT
    python profiles/parallelism_speed.py tensor --toy

It first checks on a tiny model that all ways give the same loss, then times steps, then prints a
Markdown table:

- tensor: two workers share each layer, in mtrain and with torch's `parallelize_module`, compiled
  (`torch_peer.py`). The third row shares the sequence instead. All recompute whole layers.
- pipeline: two stages with 2, 4, 8 and 16 micro-batches, and context parallelism with the same
  batch. formula: (m + (p - 1) / v) (F + B), with the recorded times F and B of the slowest stage
- one: dense and sparse steps on one GPU, twice here and twice in another checkout of mtrain

Times are medians of the steps after the first two. predicted: `mtrain simulate run`, with its
bounds. `--toy` runs a tiny model on two CPU processes, to test the script.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch_peer
from measured_runs import (
    Measured,
    Pool,
    Prediction,
    RunFailed,
    train_elsewhere,
    write_ids,
    write_state,
)
from torch_peer import TENSOR, Peer
from worker_pool import LIMIT_S

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.config.sizes import parse_size

TINY = (
    "model.hidden_size=64", "model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=16", "model.intermediate_size=128", "model.vocab_size=300",
    "topology.block_size=64",
)  # fmt: skip
SPARSE = ("sparsity=vertical_slash", "sparsity.min_columns=64", "sparsity.max_columns=64")
# The optimizer of the peer: then losses after a step are equal, too.
SAME_STEPS = (
    "optim.lr=0.00001", "optim.warmup_steps=0", "optim.schedule=constant", "optim.clip_norm=0",
    "optim.weight_decay=0",
)  # fmt: skip
TENSOR_PARALLEL, PIPELINE = "topology.tensor_parallel=2", "topology.pipeline_parallel=2"
WHOLE_LAYERS = "train.activation_checkpoint=full"
CLOSE = {"cpu": 1e-5, "cuda": 5e-4}  # the peer computes in bfloat16 on GPUs
LAYOUT, EXCHANGE = "zigzag", "all_gather"


@dataclass(frozen=True)
class Bench:
    """What to measure with: the model's settings, the length, the device, and the files."""

    model: tuple[str, ...]
    seq: int
    steps: int
    device: str
    cluster: str
    folder: Path
    pool: Pool

    def words(self, *more: str, workers: int = 2) -> tuple[str, ...]:
        """Return the settings of a run on one document of random tokens."""
        return (
            *self.model, f"seq={self.seq}", "data=tokens", f"data.path={self.folder / 'ids.npy'}",
            "data.shuffle=false", "data.document_mask=false", f"topology.device={self.device}",
            f"topology.workers={workers}", f"topology.layout={LAYOUT}",
            f"topology.exchange={EXCHANGE}", f"train.steps={self.steps}", *more,
        )  # fmt: skip

    @property
    def shape(self) -> ModelConfig:
        return compose([*self.model, f"seq={self.seq}"]).model

    def peer(self, state: Path | None = None) -> Peer:
        """Return the peer of a run, and write its tokens."""
        data = write_ids(self.folder, self.shape.vocab_size, self.seq, [0])
        ids = torch.from_numpy(np.load(data)).long()
        return Peer(self.shape, ids, TENSOR, self.device, self.steps, state=state)

    def train(self, *words: str, record: bool = False, limit_s: float = LIMIT_S) -> Measured:
        """Train a run of mtrain."""
        return self.pool.train(*words, record=record, limit_s=limit_s)

    def train_peer(self, state: Path | None = None) -> torch_peer.PeerTimes:
        """Train the peer, in processes that run nothing else."""
        self.pool.restart()
        times = self.pool.call(torch_peer.train, self.peer(state))
        self.pool.restart()
        return times

    def predicted(self, *more: str) -> Prediction:
        """Start the prediction of a step."""
        words = (*self.model, f"seq={self.seq}", "data.document_mask=false", *more)
        return Prediction(self.cluster, 2, LAYOUT, EXCHANGE, *words)


def check(bench: Bench) -> None:
    """Compare the losses of two steps of a tiny model over all ways. Say so if they differ."""
    tiny = replace(bench, model=TINY, seq=512, steps=2)
    write_state(tiny.shape, compose(list(TINY)).seed, bench.device, bench.folder / "state")
    expected = tiny.train_peer(bench.folder / "state").losses
    ways = {
        "one worker": tiny.words(workers=1),
        "tensor": tiny.words(TENSOR_PARALLEL),
        "context": tiny.words(),
        "virtual stages": tiny.words(PIPELINE, "topology.virtual_stages=2", "train.global_batch=4"),
    }
    for name, words in ways.items():
        found = bench.train(*words, *SAME_STEPS).losses
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        print(f"check: {name}: losses {found}, {worst:.1e} from the peer's", flush=True)
        if not worst <= CLOSE[bench.device]:
            print(f"WRONG: {name}: losses {found} differ from the peer's {expected}", flush=True)


def tensor(bench: Bench) -> Iterator[str]:
    """Yield the rows of tensor parallelism."""
    yield "| what | s / step | tokens/s/GPU | peak GiB | speed-up over torch | predicted s |"
    yield "|---|---|---|---|---|---|"
    peer = None

    def row(name: str, seconds: float, peak_gib: float, prediction: object) -> str:
        faster = f"{peer / seconds:.2f}x" if peer else ""
        return (
            f"| {name} | {seconds:.3f} | {bench.seq / 2 / seconds:,.0f} | {peak_gib:.1f} "
            f"| {faster} | {prediction} |"
        )

    try:
        times = bench.train_peer()
        peer = times.seconds
        yield row("torch, 2 tensor", times.seconds, times.peak_gib, "")
    except RunFailed as error:
        yield f"| torch, 2 tensor | failed: {error} |"
    for name, more in (("2 tensor", (TENSOR_PARALLEL,)), ("2 context", ())):
        prediction = bench.predicted(WHOLE_LAYERS, *more)
        try:
            run = bench.train(*bench.words(WHOLE_LAYERS, *more))
            yield row(f"mtrain, {name}", run.seconds, run.peak_gib, prediction)
        except RunFailed as error:
            yield f"| mtrain, {name} | failed: {error} |"


def pipeline(bench: Bench) -> Iterator[str]:
    """Yield the rows of pipelines."""
    bench.peer()
    columns = ["m", "v", "s / step", "passes s", "formula s", "passes / formula", "predicted s"]
    yield f"| {' | '.join(columns)} | 2 context s |"
    yield "|---" * (len(columns) + 1) + "|"
    batches = {
        count: (f"train.global_batch={count}", "train.shard=gradients") for count in (2, 4, 8, 16)
    }
    beside = {}
    for count, batch in batches.items():
        try:
            beside[count] = f"{bench.train(*bench.words(*batch)).seconds:.3f}"
        except RunFailed as error:
            beside[count] = f"failed: {error}"
    for count, batch in batches.items():
        for parts in (1, 2):
            more = (*batch, PIPELINE, f"topology.virtual_stages={parts}")
            prediction = bench.predicted(*more)
            try:
                run = bench.train(*bench.words(*more), record=True, limit_s=100)
            except RunFailed as error:
                yield f"| {count} | {parts} | failed: {error} |"
                continue
            assert run.pipeline is not None
            passes = np.add(run.pipeline["forward_ms"], run.pipeline["backward_ms"])
            slowest = max(passes[stage::2].sum() for stage in range(2)) / 1e3
            formula = (count + 1 / parts) * slowest
            makespan = run.pipeline["makespan_ms"] / 1e3
            yield (
                f"| {count} | {parts} | {run.seconds:.3f} | {makespan:.3f} | {formula:.3f} "
                f"| {makespan / formula:.3f} | {prediction} | {beside[count]} |"
            )


def one(bench: Bench, before: Path | None, attentions: list[str]) -> Iterator[str]:
    """Yield the rows of one GPU: two rounds, in which the checkouts take turns.

    Each run has new processes.
    """
    bench.peer()
    here = Path(__file__).parents[1]
    yield "| attention | s / step | in the other checkout | before / now |"
    yield "|---|---|---|---|"
    for number in range(2):
        for name in attentions:
            words = bench.words(*(SPARSE if name == "vertical_slash" else ()), workers=1)
            turns = [here, before or here]
            if number:  # what warms the GPU first changes
                turns.reverse()
            seconds = {turn: train_elsewhere(turn, *words).seconds for turn in turns}
            now, then = seconds[here], seconds[before or here]
            yield f"| {name} | {now:.3f} | {then:.3f} | {then / now:.3f} |"


def main() -> None:
    """Check, then print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["tensor", "pipeline", "one"])
    parser.add_argument("--model", default="qwen3b", help="a model of `mtrain config list`")
    parser.add_argument("--seq", default="128k", help="tokens of a sequence; an even number")
    parser.add_argument("--layers", type=int, help="number of layers, if not the model's")
    parser.add_argument("--steps", type=int, default=6, help="training steps of a run, at least 3")
    parser.add_argument("--cluster", default="h200_1x8", help="cluster of the predictions")
    parser.add_argument("--before", type=Path, help="with `one`: another checkout of mtrain")
    parser.add_argument("--attention", default="dense,vertical_slash", help="with `one`")
    parser.add_argument("--logs", type=Path, help="existing folder for what the workers print")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare losses first"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny model on two CPU processes")
    given = parser.parse_args()
    seq = 512 if given.toy else parse_size(given.seq)
    if seq % 2 or given.steps < 3:
        parser.error("--seq must be even, and --steps at least 3")
    device = "cpu" if given.toy else "cuda"
    workers = 1 if given.what == "one" else 2
    layers = (f"model.num_layers={given.layers}",) if given.layers else ()
    model = (*(TINY if given.toy else (f"model={given.model}",)), *layers)
    with tempfile.TemporaryDirectory() as folder, Pool(workers, device, given.logs) as pool:
        bench = Bench(model, seq, given.steps, device, given.cluster, Path(folder), pool)
        if given.check and given.what != "one":
            check(bench)
        tables = {"tensor": tensor, "pipeline": pipeline}
        rows = (
            one(bench, given.before, given.attention.split(","))
            if given.what == "one"
            else tables[given.what](bench)
        )
        for line in rows:
            print(line, flush=True)


if __name__ == "__main__":
    main()
