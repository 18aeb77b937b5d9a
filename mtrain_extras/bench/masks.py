"""`mtrain profile kernels --mask causal,video`: time kernels under masks, on whole sequences.

The masks are those of MagiAttention's paper, a video, and answers that share a question.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.kernel_registry import choose
from mtrain_cli.attention.mask import IntArray, KeySlice, SequenceMask, SliceKind
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL, BlockCausal, Full, SlidingWindow, Video
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.temporary_folders import compiled
from mtrain_extras.bench.kernels import CallTime, KernelBench, KernelCase

FLEX = "flex"
_ANSWERS = 8
_LONGEST_MEAN = 8192  # of the documents' lengths
_FULL = Full()
# Whether a query sees a key: of both positions in a document; of batch, head and both positions.
Seen = Callable[[Any, Any], Any]
Predicate = Callable[[Any, Any, Any, Any], torch.Tensor]


def flex_attention(predicate: Predicate, seq: int, device: str) -> Callable[..., torch.Tensor]:
    """Return compiled FlexAttention with its block mask built, so that timings leave that out.

    The call takes q [1, heads, tokens, head_dim], and k and v with kv_heads.
    """
    from torch.nn.attention import flex_attention as flex

    # Every mask and length compiles anew. Past a limit, Dynamo would stop to compile and compute
    # all pairs.
    torch._dynamo.reset()
    # Uncompiled, the lists of blocks take memory for every pair.
    compiled_lists = compiled(flex.create_block_mask, False) if device == "cuda" else None
    make_lists = compiled_lists or flex.create_block_mask
    block_mask = make_lists(predicate, None, None, seq, seq, device)
    return partial(compiled(flex.flex_attention, False), block_mask=block_mask, enable_gqa=True)


@dataclass(frozen=True)
class TimedMask:
    """A mask of one sequence, and by device FlexAttention's predicate of the same pairs.

    sizes: the numbers that describe the mask.
    """

    mask: SequenceMask
    predicate: Callable[[str], Predicate]
    sizes: str = ""


@dataclass(frozen=True, kw_only=True)
class MaskTime(CallTime):
    """Median times of a kernel or of `flex` under one mask. The ratios are to FlexAttention."""

    mask: str
    intervals: int
    sizes: str = ""


def documents(seq: int) -> IntArray:
    """Draw the document of each position, int64 [seq], the same for every call.

    Log-normal lengths (sigma 1), with a mean of 8K tokens and at most a quarter of the sequence.
    """
    rng, mean, longest = np.random.default_rng(0), min(_LONGEST_MEAN, seq / 4), max(1, seq // 4)
    lengths: list[int] = []
    while sum(lengths) < seq:
        drawn = rng.lognormal(math.log(mean) - 0.5)
        lengths.append(min(max(1, round(drawn)), longest))
    return np.repeat(np.arange(len(lengths)), lengths)[:seq]


def _everywhere(seq: int, mask: MaskSettings, seen: Seen) -> TimedMask:
    return TimedMask(_rule(mask, seq), lambda _: lambda b, h, q, k: seen(q, k))  # noqa: ARG005


def _all_pairs(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q >= 0) & (k >= 0)


def _window(seq: int) -> TimedMask:
    window = max(1, min(1024, seq // 4))
    mask = SlidingWindow(window)
    timed = _everywhere(seq, mask, lambda q, k: (q >= k) & (q - k < window))
    return replace(timed, sizes=f"{window:,} tokens")


def _documents_block_causal(seq: int) -> TimedMask:
    block = max(1, min(2048, seq // 8))
    mask = BlockCausal(block=block)
    timed = _in_documents(seq, mask, lambda q, k: k // block <= q // block)
    return replace(timed, sizes=f"{timed.sizes}, in blocks of {block:,}")


def _in_documents(seq: int, mask: MaskSettings, seen: Seen) -> TimedMask:
    ids = documents(seq)
    lengths = np.bincount(ids)

    def predicate(device: str) -> Predicate:
        on_device = torch.from_numpy(ids).to(device)
        return lambda b, h, q, k: seen(q, k) & (on_device[q] == on_device[k])  # noqa: ARG005

    sizes = f"{with_count(len(lengths), 'document')} of up to {lengths.max():,} tokens"
    return TimedMask(_rule(mask, seq, ids), predicate, sizes)


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
    "full": partial(_everywhere, mask=_FULL, seen=_all_pairs),
    "causal": partial(_everywhere, mask=CAUSAL, seen=operator.ge),
    "documents_full": partial(_in_documents, mask=_FULL, seen=_all_pairs),
    "documents": partial(_in_documents, mask=CAUSAL, seen=operator.ge),
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
    """Yield the time of each kernel under each mask, FlexAttention's first. cases: dense."""
    for name, case in itertools.product(names, cases):
        timed = MASKS[name](case.seq)
        time = partial(
            MaskTime, mask=name, case=case, pairs=timed.mask.pairs * case.heads,
            intervals=timed.mask.intervals, sizes=timed.sizes,
        )  # fmt: skip
        base = time(kernel=FLEX, **_time_flex(bench, timed, case)) if flex else None
        if base:
            yield base
        everywhere = np.arange(case.seq)
        tiles = Tiles.make([timed.mask.spans(everywhere, everywhere)], bench.device)
        for kernel_name in bench.names or ["auto"]:
            kernel, _ = choose(kernel_name, bench.request(case, tiles.intervals))
            measured = time(kernel=kernel.name, **bench.time_passes(kernel, case, tiles))
            yield measured.compared(base) if base else measured


def _time_flex(bench: KernelBench, timed: TimedMask, case: KernelCase) -> dict[str, Any]:
    """Return forward_ms and backward_ms of FlexAttention, which has no backward on a CPU."""
    q, k, v, dout = (t.transpose(1, 2).contiguous() for t in bench.inputs(case, case.seq, case.seq))
    call = flex_attention(timed.predicate(bench.device), case.seq, bench.device)
    if bench.device == "cpu":
        return bench.time_calls(lambda: call(q, k, v), None)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = call(*inputs)
    return bench.time_calls(
        lambda: call(*inputs), lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    )
