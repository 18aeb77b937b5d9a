"""`mtrain profile kernels --mask causal,video`: time kernels under masks, on whole sequences.

The masks are those that MagiAttention's paper measures, a video and answers that share a question.
Each mask comes with the predicate that FlexAttention needs, so both compute the same pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mtrain_cli.attention.kernel_registry import choose
from mtrain_cli.attention.mask import IntArray, KeySlice, SequenceMask, SliceKind
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL, BlockCausal, Full, SlidingWindow, Video
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.sizes import with_count
from mtrain_cli.profiling.kernel_benchmark import KernelBench, KernelCase
from mtrain_cli.profiling.peers import FlexAttention, Predicate
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD

FLEX = "flex"
_ANSWERS = 8
_LONGEST_MEAN = 8192  # of the documents' lengths
_FULL = Full()


@dataclass(frozen=True)
class TimedMask:
    """A mask of one sequence, and the predicate of the same pairs for FlexAttention.

    predicate: function of the device that returns the predicate.
    sizes: the numbers that describe the mask, as text; "" if there are none.
    """

    mask: SequenceMask
    predicate: Callable[[str], Predicate]
    sizes: str = ""


@dataclass(frozen=True, kw_only=True)
class MaskTime:
    """Median times of one kernel under one mask.

    kernel: name of the kernel; `flex` for FlexAttention.
    sizes: as in `TimedMask`.
    pairs: number of query-key pairs that the mask allows, summed over the heads.
    intervals: most intervals of keys that a query sees.
    forward_ms, backward_ms: median time of a call; None for a backward that the kernel lacks.
    forward_tflops, backward_tflops: throughput in TFLOP/s, from ``pairs``.
    forward_ratio, backward_ratio: time of FlexAttention in the same run, divided by this time; None
        without such a time.
    """

    mask: str
    kernel: str
    case: KernelCase
    pairs: int
    intervals: int
    forward_ms: float
    backward_ms: float | None
    forward_tflops: float
    backward_tflops: float | None
    sizes: str = ""
    forward_ratio: float | None = None
    backward_ratio: float | None = None


def documents(seq: int) -> IntArray:
    """Draw the document of each position, int64 [seq], the same for every call.

    The lengths follow a log-normal distribution (sigma 1) with a mean of 8K tokens, or a quarter of
    a shorter sequence, and are at most a quarter of the sequence.
    """
    rng, mean, longest = np.random.default_rng(0), min(_LONGEST_MEAN, seq / 4), max(1, seq // 4)
    lengths: list[int] = []
    while sum(lengths) < seq:
        drawn = rng.lognormal(math.log(mean) - 0.5)
        lengths.append(min(max(1, round(drawn)), longest))
    return np.repeat(np.arange(len(lengths)), lengths)[:seq]


def make_mask(name: str, seq: int) -> TimedMask:
    """Return the mask called ``name``, one of `MASKS`, over ``seq`` tokens."""
    return MASKS[name](seq)


def _full(seq: int) -> TimedMask:
    return TimedMask(_rule(_FULL, seq), lambda _: lambda b, h, q, k: k >= 0)  # noqa: ARG005


def _causal(seq: int) -> TimedMask:
    return TimedMask(_rule(CAUSAL, seq), lambda _: lambda b, h, q, k: q >= k)  # noqa: ARG005


def _documents_full(seq: int) -> TimedMask:
    def predicate(device: str) -> Predicate:
        ids = torch.from_numpy(documents(seq)).to(device)
        return lambda b, h, q, k: ids[q] == ids[k]  # noqa: ARG005

    return TimedMask(_rule(_FULL, seq, documents(seq)), predicate, _sizes_of_documents(seq))


def _documents(seq: int) -> TimedMask:
    def predicate(device: str) -> Predicate:
        ids = torch.from_numpy(documents(seq)).to(device)
        return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])  # noqa: ARG005

    return TimedMask(_rule(CAUSAL, seq, documents(seq)), predicate, _sizes_of_documents(seq))


def _sizes_of_documents(seq: int) -> str:
    lengths = np.bincount(documents(seq))
    return f"{with_count(len(lengths), 'document')} of up to {lengths.max():,} tokens"


def _window(seq: int) -> TimedMask:
    window = max(1, min(1024, seq // 4))
    mask = SlidingWindow(window)
    return TimedMask(
        _rule(mask, seq),
        lambda _: lambda b, h, q, k: (q >= k) & (q - k < window),  # noqa: ARG005
        f"{window:,} tokens",
    )


def _documents_block_causal(seq: int) -> TimedMask:
    block = max(1, min(2048, seq // 8))

    def predicate(device: str) -> Predicate:
        ids = torch.from_numpy(documents(seq)).to(device)
        return lambda b, h, q, k: (ids[q] == ids[k]) & (k // block <= q // block)  # noqa: ARG005

    mask = BlockCausal(block=block)
    sizes = f"{_sizes_of_documents(seq)}, in blocks of {block:,}"
    return TimedMask(_rule(mask, seq, documents(seq)), predicate, sizes)


def _video(seq: int) -> TimedMask:
    """Whole rows of half of a frame, in nine frames; frames are about as high, wide and many."""
    side = round(seq ** (1 / 3))
    width = _divisor(seq, side)
    height = _divisor(seq // width, side)
    frames = seq // width // height
    along, down = min(9, frames), -(-height // 2)
    mask = Video(frames=frames, height=height, width=width, window=(along, down, width))

    def near(q: torch.Tensor, k: torch.Tensor, size: int, window: int) -> torch.Tensor:
        first = (q - window // 2).clamp(0, size - window)
        return (k >= first) & (k < first + window)

    def seen(b, h, q, k):  # noqa: ARG001
        row, other = q // width, k // width
        return near(row // height, other // height, frames, along) & near(
            row % height, other % height, height, down
        )

    sizes = f"{frames}x{height}x{width} tokens, window {along}x{down}x{width}"
    return TimedMask(_rule(mask, seq), lambda _: seen, sizes)


def _shared_question(seq: int) -> TimedMask:
    """A question of a fifth of the sequence, and eight answers that do not see each other."""
    question = seq // 5
    starts = question + np.arange(_ANSWERS + 1) * (seq - question) // _ANSWERS
    slices = [KeySlice(0, question, 0, question, SliceKind.CAUSAL)]
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        slices.append(KeySlice(start, stop, 0, question, SliceKind.FULL))
        slices.append(KeySlice(start, stop, start, stop, SliceKind.CAUSAL))

    def predicate(device: str) -> Predicate:
        part = np.searchsorted(starts, np.arange(seq), side="right")
        answers = torch.from_numpy(part).to(device)

        def seen(b, h, q, k):  # noqa: ARG001
            return (q >= k) & ((k < question) | (answers[q] == answers[k]))

        return seen

    longest = int(np.diff(starts).max())
    sizes = f"question of {question:,} tokens, {_ANSWERS} answers of up to {longest:,}"
    return TimedMask(SequenceMask.from_slices(slices, seq, seq), predicate, sizes)


MASKS: dict[str, Callable[[int], TimedMask]] = {
    "full": _full,
    "causal": _causal,
    "documents_full": _documents_full,
    "documents": _documents,
    "window": _window,
    "documents_block_causal": _documents_block_causal,
    "video": _video,
    "shared_question": _shared_question,
}


def _rule(mask: MaskSettings, seq: int, documents: IntArray | None = None) -> SequenceMask:
    return MaskRule(document_mask=True, mask=mask)(documents, seq, seq)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to ``most``."""
    return next(d for d in range(max(1, min(most, number)), 0, -1) if number % d == 0)


def profile_masks(
    bench: KernelBench, names: Sequence[str], cases: Sequence[KernelCase], *, flex: bool
) -> Iterator[MaskTime]:
    """Yield the time of each kernel under each mask, FlexAttention's first."""
    for name in names:
        for case in cases:
            timed = make_mask(name, case.seq)
            base = _measure_flex(bench, name, timed, case) if flex else None
            if base is not None:
                yield base
            for kernel in bench.names or ["auto"]:
                yield _measure(bench, name, timed, case, kernel, base)


def _measure(
    bench: KernelBench,
    name: str,
    timed: TimedMask,
    case: KernelCase,
    kernel_name: str,
    base: MaskTime | None,
) -> MaskTime:
    everywhere = np.arange(case.seq)
    tiles = Tiles.make([timed.mask.spans(everywhere, everywhere)], bench.device)
    kernel, _ = choose(kernel_name, bench.request(case, tiles.intervals))
    inputs = bench.inputs(case, case.seq, case.seq)
    time = _time(name, kernel.name, timed, case, bench.time_passes(kernel, case, tiles, inputs))
    if base is None:
        return time
    backward = None
    if base.backward_ms and time.backward_ms:
        backward = base.backward_ms / time.backward_ms
    return replace(time, forward_ratio=base.forward_ms / time.forward_ms, backward_ratio=backward)


def _measure_flex(bench: KernelBench, name: str, timed: TimedMask, case: KernelCase) -> MaskTime:
    q, k, v, dout = (t.transpose(1, 2).contiguous() for t in bench.inputs(case, case.seq, case.seq))
    call = FlexAttention.make(timed.predicate(bench.device), case.seq, bench.device)
    with_backward = bench.device != "cpu"
    inputs = [t.requires_grad_(with_backward) for t in (q, k, v)]
    out = call(*inputs)
    forward, backward = bench.median_ms(lambda: call(*inputs)), None
    if with_backward:
        backward = bench.median_ms(
            lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
        )
    return _time(name, FLEX, timed, case, (forward, backward))


def _time(
    name: str, kernel: str, timed: TimedMask, case: KernelCase, ms: tuple[float, float | None]
) -> MaskTime:
    pairs, (forward, backward) = timed.mask.pairs * case.heads, ms
    products = case.head_dim * pairs
    return MaskTime(
        mask=name,
        kernel=kernel,
        case=case,
        pairs=pairs,
        intervals=timed.mask.intervals,
        forward_ms=forward,
        backward_ms=backward,
        forward_tflops=FLOP_PER_PAIR[FORWARD] * products / forward / 1e9,
        backward_tflops=FLOP_PER_PAIR[BACKWARD] * products / backward / 1e9 if backward else None,
        sizes=timed.sizes,
    )
