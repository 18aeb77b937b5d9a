"""Count how layouts balance eleven masks over workers, and how many rows they move.

    python profiles/dispatch_balance.py --seq 524288 --workers 8

The script prints a Markdown table. Each cell has three numbers:

- imbalance: the most pairs of a worker, divided by the mean
- share of rows moved: rows of keys and values that workers receive, divided by those of a ring
- cost: pairs plus priced rows of the most expensive worker, divided by the mean of the pairs. 1 is
  perfect. No communication is hidden.

The masks:

- documents: packed, causal; log-normal lengths with a mean of 8K (sigma 1.5), or of 2K with a heavy
  tail (sigma 2)
- window: causal, the last 4K or 32K keys; with global, also the first 1K keys
- prefix-LM: causal, but the first quarter sees all of itself
- block-causal: blocks of 2K in the documents of 2K, each sees itself and all blocks before
- video chunks: a chunk of 24K sees itself and 4 chunks before
- video window: frames of 64 x 64, 4 frames before and after, 12 lines up and down
- shared question: samples of a question of 4K and 8 answers of 2K, which do not see each other

Everything is counted from the masks. Only the last column is timed: milliseconds of one core for
the dispatch of one sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.parallel.dispatch import RowPrices, balance, chunk_tokens, seeds
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.traffic import ROW_BLOCK, Traffic, count_traffic, pairs_per_query

Shards = list[IntArray]


def masks(seq: int) -> Iterator[tuple[str, SequenceMask]]:
    """Yield the masks with their names. Draws have fixed seeds."""
    at = np.arange(seq)
    zero = np.zeros_like(at)
    yield "causal", _union((zero, at + 1))
    start, _ = _documents(seq, mean=8192, sigma=1.5, longest=seq, seed=1)
    yield "documents 8K", _union((start, at + 1))
    start, stop = _documents(seq, mean=2048, sigma=2.0, longest=seq // 4, seed=2)
    yield "documents 2K", _union((start, at + 1))
    yield "window 4K", _union((np.maximum(0, at - 4095), at + 1))
    yield "window 32K", _union((np.maximum(0, at - 32767), at + 1))
    window = np.maximum(0, at - 4095)
    first = np.minimum(1024, window)
    yield "window + global", _union((zero, first), (window, at + 1))
    yield "prefix-LM 25 %", _union((zero, np.maximum(seq // 4, at + 1)))
    block = start + ((at - start) // 2048 + 1) * 2048
    yield "block-causal 2K", _union((start, np.minimum(stop, block)))
    chunk = at // 24576 * 24576
    yield (
        "video chunks",
        _union((np.maximum(0, chunk - 4 * 24576), np.minimum(seq, chunk + 24576))),
    )
    yield "video window", _union(*_video(at, seq))
    sample = at // 20480 * 20480  # a question of 4K and 8 answers of 2K
    answer = sample + 4096 + (at - sample - 4096) // 2048 * 2048
    in_question = at - sample < 4096
    yield (
        "shared question",
        _union(
            (sample, np.where(in_question, at + 1, sample + 4096)),
            (np.where(in_question, at + 1, answer), at + 1),
        ),
    )


def _union(*intervals: tuple[IntArray, IntArray]) -> SequenceMask:
    low, high = (np.stack(bounds) for bounds in zip(*intervals, strict=True))
    return SequenceMask(low, high, low.shape[1])


def _documents(
    seq: int, mean: int, sigma: float, longest: int, seed: int
) -> tuple[IntArray, IntArray]:
    """Draw log-normal lengths. Return start and stop of the document at each position."""
    draw = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, seq // 16)
    stops = np.minimum(seq, np.cumsum(np.clip(draw.astype(np.int64), 16, longest)))
    document = np.searchsorted(stops, np.arange(seq), side="right")
    return np.append(0, stops)[document], stops[document]


def _video(at: IntArray, seq: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield one interval per frame: 4 frames back and ahead, 12 of 64 lines up and down."""
    frame, line = at // 4096, at % 4096 // 64
    for other in range(-4, 5):
        begin = (frame + other) * 4096
        low = begin + np.maximum(0, line - 12) * 64
        high = begin + np.minimum(64, line + 13) * 64
        inside = (begin >= 0) & (begin < seq)
        yield np.where(inside, low, 0), np.where(inside, high, 0)


def _layout(name: str, mask: SequenceMask, workers: int) -> Shards:
    layout = make_layout(name, workers, len(mask.low[0]), ROW_BLOCK)
    return [layout.positions(rank) for rank in range(workers)]


def _ptrr(mask: SequenceMask, workers: int) -> Shards:
    """Sort blocks of queries by their pairs and deal them to and fro, as torch's flex attention."""
    pairs = pairs_per_query([[mask]]).reshape(-1, ROW_BLOCK).sum(1)
    turn, place = np.divmod(np.arange(len(pairs)), workers)
    owner = np.empty_like(pairs)
    owner[np.argsort(-pairs, kind="stable")] = np.where(turn % 2, workers - 1 - place, place)
    return _shards(owner, ROW_BLOCK, workers)


def _longest_first(mask: SequenceMask, workers: int) -> Shards:
    chunk = len(mask.low[0]) // (8 * workers)
    pairs = pairs_per_query([[mask]]).reshape(-1, chunk).sum(1)
    return _shards(
        dict(seeds(pairs, workers))["longest first, 8 pieces per worker"], chunk, workers
    )


def _shards(owner: IntArray, chunk: int, workers: int) -> Shards:
    rank = np.repeat(owner, chunk)
    return [np.flatnonzero(rank == r) for r in range(workers)]


LAYOUTS: dict[str, Callable[[SequenceMask, int], Shards]] = {
    "zigzag": lambda mask, workers: _layout("zigzag", mask, workers),
    "striped": lambda mask, workers: _layout("striped", mask, workers),
    "PTRR": _ptrr,
    "longest first": _longest_first,
}


def _cell(traffic: Traffic, prices: RowPrices, rows: int) -> str:
    cost = traffic.cost(*prices).max() / traffic.pairs.mean()
    return f"{traffic.imbalance:.3f} / {traffic.share_moved(rows):.2f} / {cost:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seq", type=int, default=1 << 19, help="tokens; a multiple of 1024 x W")
    parser.add_argument("--workers", type=int, default=8, help="W, workers per context group")
    parser.add_argument("--per-node", type=int, help="workers per node; default: all")
    parser.add_argument("--inner-price", type=int, default=RowPrices().inner, help="pairs per row")
    parser.add_argument("--outer-price", type=int, default=RowPrices().outer, help="between nodes")
    args = parser.parse_args()
    if args.seq < 1 or args.workers < 1 or args.seq % (1024 * args.workers):
        parser.error(f"--seq {args.seq}: must be a multiple of 1024 x --workers {args.workers}")
    if args.per_node is not None and (args.per_node < 1 or args.workers % args.per_node):
        parser.error(f"--per-node {args.per_node}: must divide --workers {args.workers}")
    prices = RowPrices(args.inner_price, args.outer_price)
    print("| mask |", " | ".join(LAYOUTS), "| balanced | ms |")
    print("|---" * (len(LAYOUTS) + 3) + "|")
    for name, mask in masks(args.seq):
        cells = []
        for shards in LAYOUTS.values():
            held = shards(mask, args.workers)
            traffic = count_traffic([[mask]], held, per_node=args.per_node)
            cells.append(_cell(traffic, prices, args.seq))
        began = time.process_time()
        chunk = chunk_tokens(args.seq, args.workers)
        found = balance([[mask]], args.workers, chunk, per_node=args.per_node, prices=prices)
        took = f"{1e3 * (time.process_time() - began):.0f}"
        cells += [_cell(found.traffic, prices, args.seq), took]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
