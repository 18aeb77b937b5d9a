"""Time masks on two GPUs: mtrain's layouts and exchanges, and torch's context parallelism.

    python profiles/mask_speed.py compare --mask window --seq 256k
    python profiles/mask_speed.py compare --mask documents --seq 256k
    python profiles/mask_speed.py dense --seq 512k
    python profiles/mask_speed.py compare --mask documents --toy

It first checks on a tiny model that all ways give the same losses, then times steps, then prints a
Markdown table:

- compare: a causal window of 4K keys, or packed documents of log-normal lengths with a long tail
  (mean 8K, sigma 1.5). The peer is torch's context parallelism with FlexAttention, PTRR balance and
  FSDP2, compiled (`torch_peer.py`).
- dense: a window of 4K in every layer, in all but every sixth layer, and none, with
  `train.memory=auto`

Columns:

- s / step: median of the steps after the first two, with all layers and the LM head
- layer ms: difference from a step with 2 layers, divided by the number of other layers. A layer has
  attention, its matrix products, and its second forward pass, which recomputes it
- loader ms: median wait of a step for the loader, `data_seconds` in `metrics.jsonl`
- predicted s: `mtrain simulate run`, with its bounds; it assumes that a sequence is one document

`--toy` runs a tiny model on two CPU processes, to test the script.
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
from measured_runs import Pool, Prediction, RunFailed, write_ids, write_state
from parallelism_speed import CLOSE, SAME_STEPS, TINY, WHOLE_LAYERS
from torch_peer import CONTEXT, Peer

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.sizes import parse_size

# Of mtrain: layout and exchange.
WAYS = (("balanced", "group_cast"), ("striped", "all_gather"), ("zigzag", "ring"))
FEW = 2  # layers of the shorter run, whose difference from the other gives a layer


@dataclass(frozen=True)
class Bench:
    """What to measure with.

    model: settings of the model.
    window: number of keys that a query sees; 0 sees all before it.
    starts: first token of each document.
    """

    model: tuple[str, ...]
    seq: int
    steps: int
    device: str
    cluster: str
    folder: Path
    pool: Pool
    window: int
    starts: tuple[int, ...] = (0,)

    @property
    def mask(self) -> tuple[str, ...]:
        """Settings of the mask."""
        window = ("mask=sliding_window", f"mask.window={self.window}") if self.window else ()
        return (*window, f"data.document_mask={str(len(self.starts) > 1).lower()}")

    def words(self, layout: str, exchange: str, *more: str, workers: int = 2) -> tuple[str, ...]:
        """Return the settings of a run. Each step has the same sequence of random tokens."""
        return (
            *self.model, *self.mask, f"seq={self.seq}", "data=tokens",
            f"data.path={self.folder / 'ids.npy'}", "data.shuffle=false",
            f"topology.device={self.device}", f"topology.workers={workers}",
            f"topology.layout={layout}", f"topology.exchange={exchange}",
            f"train.steps={self.steps}", *more,
        )  # fmt: skip

    def peer(self, layers: int | None = None, state: Path | None = None) -> Peer:
        """Return the peer of a run, and write its tokens."""
        shape = compose([*self.model, f"seq={self.seq}"]).model
        if layers is not None:
            shape = replace(shape, num_layers=layers)
        data = write_ids(self.folder, shape.vocab_size, self.seq, list(self.starts))
        ids = torch.from_numpy(np.load(data)).long()
        document = np.searchsorted(self.starts, np.arange(self.seq + 1), side="right")
        documents = torch.from_numpy(document) if len(self.starts) > 1 else None
        return Peer(shape, ids, CONTEXT, self.device, self.steps, documents, self.window, state)

    def train_peer(
        self, layers: int | None = None, state: Path | None = None
    ) -> torch_peer.PeerTimes:
        """Train the peer, in processes that run nothing else."""
        self.pool.restart()
        times = self.pool.call(torch_peer.train, self.peer(layers, state))
        self.pool.restart()
        return times

    def predicted(self, layout: str, exchange: str, *more: str) -> Prediction | str:
        """Start the prediction of a step. The simulator takes a sequence for one document."""
        if len(self.starts) > 1:
            return ""
        words = (*self.model, *self.mask, f"seq={self.seq}", *more)
        return Prediction(self.cluster, 2, layout, exchange, *words)


def long_tailed(seq: int, mean: int) -> tuple[int, ...]:
    """Return the first token of each document."""
    draw = np.random.default_rng(1).lognormal(np.log(mean) - 1.5**2 / 2, 1.5, seq)
    stops = np.cumsum(np.clip(draw.astype(np.int64), 16, seq))
    return (0, *stops[stops < seq].tolist())


def check(bench: Bench) -> None:
    """Compare the losses of two steps of a tiny model over all ways. Say so if they differ."""
    window, starts = (50 if bench.window else 0), bench.starts
    if len(starts) > 1:
        starts = long_tailed(512, 60)
    tiny = replace(bench, model=TINY, seq=512, steps=2, window=window, starts=starts)
    tiny_run = compose(list(TINY))
    write_state(tiny_run.model, tiny_run.seed, bench.device, bench.folder / "state")
    expected = tiny.train_peer(state=bench.folder / "state").losses
    ways = {"one worker": tiny.words("contiguous", "all_gather", workers=1)}
    ways |= {f"{layout} + {exchange}": tiny.words(layout, exchange) for layout, exchange in WAYS}
    for name, words in ways.items():
        found = bench.pool.train(*words, *SAME_STEPS).losses
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        print(f"check: {name}: losses {found}, {worst:.1e} from the peer's", flush=True)
        if not worst <= CLOSE[bench.device]:
            print(f"WRONG: {name}: losses {found} differ from the peer's {expected}", flush=True)


def compare(bench: Bench, *, layer: bool) -> Iterator[str]:
    """Yield the rows of one mask. layer: whether to time a shorter run, too."""
    columns = ["what", "s / step", "layer ms", "peak GiB", "loader ms", "speed-up over torch"]
    yield f"| {' | '.join(columns)} | predicted s |"
    yield "|---" * (len(columns) + 1) + "|"
    others = bench.peer().model.num_layers - FEW
    peer = None

    def layer_ms(few: float, all_layers: float) -> str:
        return f"{1e3 * (all_layers - few) / others:.1f}" if layer else ""

    try:
        times = bench.train_peer()
        few = bench.train_peer(FEW).seconds if layer else 0.0
        peer = times.seconds
        yield (
            f"| torch, FlexAttention, PTRR | {peer:.3f} | {layer_ms(few, peer)} "
            f"| {times.peak_gib:.1f} | | 1.00x | |"
        )
    except RunFailed as error:
        yield f"| torch, FlexAttention, PTRR | failed: {error} |"
    for way in WAYS:
        prediction = bench.predicted(*way, WHOLE_LAYERS)
        try:
            run = bench.pool.train(*bench.words(*way, WHOLE_LAYERS))
            less = bench.words(*way, WHOLE_LAYERS, f"model.num_layers={FEW}")
            few = bench.pool.train(*less).seconds if layer else 0.0
        except RunFailed as error:
            yield f"| {' + '.join(way)} | failed: {error} |"
            continue
        faster = f"{peer / run.seconds:.2f}x" if peer else ""
        yield (
            f"| {' + '.join(way)} | {run.seconds:.3f} | {layer_ms(few, run.seconds)} "
            f"| {run.peak_gib:.1f} | {run.data_ms:.1f} | {faster} | {prediction} |"
        )


def dense(bench: Bench) -> Iterator[str]:
    """Yield the rows of a window, of windows with full layers between them, and of no window."""
    yield "| mask | s / step | speed-up over causal | peak GiB | loader ms | predicted s |"
    yield "|---|---|---|---|---|---|"
    memory = () if bench.device == "cpu" else ("train.memory=auto",)
    causal, every = None, min(6, bench.peer().model.num_layers)
    cases = (
        ("causal", replace(bench, window=0), ("zigzag", "ring"), ()),
        (f"window {bench.window}", bench, WAYS[0], ()),
        (f"window, full every {every}", bench, WAYS[0], (f"mask.full_every={every}",)),
    )
    for name, case, way, more in cases:
        prediction = case.predicted(*way, *memory, *more)
        try:
            run = bench.pool.train(*case.words(*way, *memory, *more))
        except RunFailed as error:
            yield f"| {name} | failed: {error} |"
            continue
        causal = causal or run.seconds
        yield (
            f"| {name} | {run.seconds:.3f} | {causal / run.seconds:.2f}x | {run.peak_gib:.1f} "
            f"| {run.data_ms:.1f} | {prediction} |"
        )


def main() -> None:
    """Check, then print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["compare", "dense"])
    parser.add_argument("--mask", choices=["window", "documents"], default="window")
    parser.add_argument("--model", default="qwen3b", help="a model of `mtrain config list`")
    parser.add_argument("--seq", default="256k", help="tokens of a sequence")
    parser.add_argument("--layers", type=int, help="number of layers, if not the model's")
    parser.add_argument("--steps", type=int, default=5, help="training steps of a run, at least 3")
    parser.add_argument("--cluster", default="h200_1x8", help="cluster of the predictions")
    parser.add_argument("--logs", type=Path, help="existing folder for what the workers print")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare losses first"
    )
    parser.add_argument(
        "--layer", action=argparse.BooleanOptionalAction, default=True, help="time one layer, too"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny model on two CPU processes")
    given = parser.parse_args()
    seq = 1024 if given.toy else parse_size(given.seq)
    if seq % 512 or given.steps < 3:
        parser.error("--seq must be a multiple of 512, and --steps at least 3")
    if given.what == "dense" and given.mask == "documents":
        parser.error("dense: compares windows; leave --mask out")
    documents = given.mask == "documents"
    device = "cpu" if given.toy else "cuda"
    layers = (f"model.num_layers={given.layers}",) if given.layers else ()
    with tempfile.TemporaryDirectory() as folder, Pool(2, device, given.logs) as pool:
        bench = Bench(
            (*(TINY if given.toy else (f"model={given.model}",)), *layers),
            seq,
            given.steps,
            device,
            given.cluster,
            Path(folder),
            pool,
            0 if documents else 100 if given.toy else 4096,
            long_tailed(seq, 100 if given.toy else 8192) if documents else (0,),
        )
        if given.check:
            check(bench)
        whole = given.what == "compare"
        for line in compare(bench, layer=given.layer) if whole else dense(bench):
            print(line, flush=True)


if __name__ == "__main__":
    main()
