"""The masks of the configuration: keys, rules and slices of each. ``docs/masks.md`` shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mtrain_cli.attention.mask import IntArray, SliceKind
from mtrain_cli.config.mask_settings import MOST_INTERVALS, MaskSettings
from mtrain_cli.config.option import NOT_NEGATIVE, POSITIVE, TOKENS_OF_SEQ, Range, option

_SOME = POSITIVE.up_to(*TOKENS_OF_SEQ)
_SOME_OR_0 = NOT_NEGATIVE.up_to(*TOKENS_OF_SEQ)
_WINDOW = (
    "a number of tokens such as 4k with mask=sliding_window, or a list of frames, height and width "
    "such as [5,9,16] with mask=video"
)


@dataclass(frozen=True)
class Causal(MaskSettings):
    """Query q sees key k if k <= q."""

    kind: ClassVar[str] = "causal"
    keeps_causal_intervals: ClassVar[bool] = True
    caches_whole: ClassVar[float] = math.inf

    def slices(self, seq: int) -> IntArray:
        return _table((0, seq, 0, seq, SliceKind.CAUSAL))


CAUSAL = Causal()


@dataclass(frozen=True)
class SlidingWindow(MaskSettings):
    """Query q sees key k <= q if q - k < window or k < global_tokens.

    window: number of tokens that a query sees, itself included
    global_tokens: number of tokens at the start of the sequence that all later queries see, too
    full_every: every n-th layer sees all earlier tokens instead, the first is layer n; 0 = no
        layer. For dense attention only
    full_first: number of layers at the start of the model that see all earlier tokens instead. For
        dense attention only
    """

    kind: ClassVar[str] = "sliding_window"

    window: int = option(_SOME, tokens=True, expected=_WINDOW)
    global_tokens: int = option(_SOME_OR_0, tokens=True, default=0)
    full_every: int = option(
        Range("must be 0 or at least 2 (1 would be mask=causal)", lambda n: n == 0 or n >= 2),
        default=0,
    )
    full_first: int = option(NOT_NEGATIVE, default=0)

    def slices(self, seq: int) -> IntArray:
        begin, sinks = min(self.window, seq), min(self.global_tokens, seq)
        return _table(
            (0, begin, 0, begin, SliceKind.CAUSAL),
            (begin, seq, 1, seq, SliceKind.BICAUSAL),
            (0, sinks, 0, sinks, SliceKind.CAUSAL),
            (sinks, seq, 0, sinks, SliceKind.FULL),
        )

    @property
    def keeps_causal_intervals(self) -> bool:  # type: ignore[override]
        return not self.global_tokens

    @property
    def counts_from_start(self) -> bool:  # type: ignore[override]
        return bool(self.global_tokens)

    def intervals(self, seq: int) -> int:
        return 2 if self.global_tokens and self.window + self.global_tokens < seq else 1

    def problems(self, seq: int) -> Iterator[str]:
        if isinstance(self.window, tuple):
            yield (
                f"mask.window={_shown(self.window)}: mask.kind={self.kind} needs one number, such "
                "as 4k; three are for mask=video"
            )
        yield from _at_most(self, "global_tokens", seq)

    def for_dense_only(self) -> str | None:
        return f"mask.global_tokens={self.global_tokens}" if self.global_tokens else None

    @property
    def caches_whole(self) -> float:  # type: ignore[override]
        return self.window

    @property
    def plain_window(self) -> int | None:
        return None if self.global_tokens else self.window

    @property
    def of_window_layers(self) -> SlidingWindow:
        return replace(self, full_every=0, full_first=0)

    def is_full(self, layer: int) -> bool:
        is_nth = bool(self.full_every) and (layer + 1) % self.full_every == 0
        return is_nth or layer < self.full_first

    def describe(self) -> str:
        return ", ".join(part for part in super().describe().split(", ") if part[-2:] != " 0")


@dataclass(frozen=True)
class Full(MaskSettings):
    """Every query sees every key."""

    kind: ClassVar[str] = "full"
    shows_later_keys: ClassVar[bool] = True

    def slices(self, seq: int) -> IntArray:
        return _table((0, seq, 0, seq, SliceKind.FULL))


@dataclass(frozen=True)
class PrefixLm(MaskSettings):
    """Query q sees key k if k <= q or k < prefix.

    prefix: number of tokens at the start of the sequence that all queries see
    """

    kind: ClassVar[str] = "prefix_lm"
    shows_later_keys: ClassVar[bool] = True
    counts_from_start: ClassVar[bool] = True
    caches_whole: ClassVar[float] = math.inf  # for the queries after the prefix
    size_that_hides_labels: ClassVar[str] = "prefix"

    prefix: int = option(_SOME_OR_0, tokens=True)

    def slices(self, seq: int) -> IntArray:
        n = self.prefix
        return _table((0, n, 0, n, SliceKind.FULL), (n, seq, 0, seq, SliceKind.CAUSAL))

    def problems(self, seq: int) -> Iterator[str]:
        yield from _at_most(self, "prefix", seq)

    def of_prompt(self, tokens: int) -> PrefixLm:
        return replace(self, prefix=min(self.prefix, tokens))


@dataclass(frozen=True)
class _Blocks(MaskSettings):
    shows_later_keys: ClassVar[bool] = True
    size_that_hides_labels: ClassVar[str] = "block"

    block: int = option(_SOME, tokens=True)

    def _slices(self, seq: int, back: int) -> IntArray:
        start, stop = _blocks(seq, self.block)
        first = np.maximum(start - back * self.block, 0)
        return _columns(start, stop, first, stop, SliceKind.FULL)


@dataclass(frozen=True)
class BlockCausal(_Blocks):
    """Query q sees key k if k // block <= q // block.

    block: number of tokens per block, which sees itself and all earlier blocks
    """

    kind: ClassVar[str] = "block_causal"

    def slices(self, seq: int) -> IntArray:
        return self._slices(seq, back=seq)


@dataclass(frozen=True)
class BlockWindow(_Blocks):
    """Query q sees key k if 0 <= q // block - k // block <= back.

    block: number of tokens per block, which sees itself and some earlier blocks
    back: number of earlier blocks that a block sees
    """

    kind: ClassVar[str] = "block_window"

    back: int = option(_SOME_OR_0)

    def slices(self, seq: int) -> IntArray:
        return self._slices(seq, self.back)


@dataclass(frozen=True)
class Chunked(MaskSettings):
    """Query q sees key k <= q if q // chunk == k // chunk.

    chunk: number of tokens per chunk. A query sees the earlier tokens of its chunk. Chunks count
        from the start of the document, with data.document_mask=false of the sequence
    """

    kind: ClassVar[str] = "chunked"
    keeps_causal_intervals: ClassVar[bool] = True

    chunk: int = option(_SOME, tokens=True)

    def slices(self, seq: int) -> IntArray:
        start, stop = _blocks(seq, self.chunk)
        return _columns(start, stop, start, stop, SliceKind.CAUSAL)

    def first_keys(self, starts: IntArray) -> IntArray:
        place = np.arange(len(starts)) - starts
        return starts + place - place % self.chunk


@dataclass(frozen=True)
class Video(MaskSettings):
    """A query sees the window of tokens around its own, moved inward at the edges of the video.

    Along each axis of size n, the query at x sees ``first <= k < first + w``, with first =
    min(max(x - w // 2, 0), n - w): neighborhood attention (arXiv:2204.07143, eq. 4), also for even
    windows. Tokens are numbered frame by frame, and row by row in a frame. A causal window holds
    the last w frames, its own included, and of its own frame the tokens up to the query. In
    arXiv:2111.12417, the window has later frames, too, before the causal mask removes them.

    frames: number of frames; frames * height * width must be seq
    height: number of rows of tokens per frame
    width: number of tokens per row of a frame
    window: size of a query's neighborhood as [frames, height, width]
    causal: whether a query sees earlier tokens only. The window then holds the last frames, and of
        its own frame the tokens up to itself
    """

    kind: ClassVar[str] = "video"
    counts_from_start: ClassVar[bool] = True

    frames: int = option(_SOME)
    height: int = option(_SOME)
    width: int = option(_SOME)
    window: tuple[int, int, int] = option(_SOME, tokens=True, expected=_WINDOW)
    causal: bool = option(default=False)

    @property
    def shows_later_keys(self) -> bool:  # type: ignore[override]
        return not self.causal

    def slices(self, seq: int) -> IntArray:
        frames, height, width = self.frames, self.height, self.width
        assert seq == frames * height * width
        along, down, across = self.window
        own = np.arange(frames * height)[:, None]
        frame, row = np.divmod(own, height)
        last_first = np.maximum(frame - along + 1, 0)
        frame_first = last_first if self.causal else _first(frame, frames, along)
        # The key rows of each query row: all pairs of a visible frame and a visible row.
        t, y = np.divmod(np.arange(along * down), down)
        key_rows = (frame_first + t) * height + _first(row, height, down) + y
        if self.causal:
            earlier = key_rows < own
            queries, keys = np.broadcast_to(own, key_rows.shape)[earlier], key_rows[earlier]
            found = _along_rows(queries * width, keys * width, across, width)
            return np.concatenate([*found, *_along_own_rows(own.ravel() * width, across, width)])
        if across == width:  # whole rows are adjacent, so one slice covers all rows of a frame
            keys = key_rows[:, ::down]
            queries = np.broadcast_to(own, keys.shape).ravel() * width
            keys = keys.ravel() * width
            return _columns(queries, queries + width, keys, keys + down * width, SliceKind.FULL)
        queries = np.broadcast_to(own, key_rows.shape).ravel() * width
        return np.concatenate(_along_rows(queries, key_rows.ravel() * width, across, width))

    def intervals(self, seq: int) -> int:  # noqa: ARG002 - a rule of all masks
        along, down, across = self.window
        # Whole rows of a frame join, and so do whole frames.
        if across != self.width:
            return along * down
        return along if down != self.height else 1

    def problems(self, seq: int) -> Iterator[str]:
        tokens = self.frames * self.height * self.width
        if tokens != seq:
            yield (
                f"mask.frames={self.frames}, mask.height={self.height}, mask.width={self.width}: "
                f"give {tokens:,} tokens, but seq={seq}; set seq={tokens} or other sizes"
            )
        if not isinstance(self.window, tuple):
            yield (
                f"mask.window={self.window}: mask.kind={self.kind} needs three numbers, "
                "[frames, height, width], such as [3,9,16]"
            )
            return
        for name, reach in zip(("frames", "height", "width"), self.window, strict=True):
            if not 1 <= reach <= getattr(self, name):
                yield (
                    f"mask.window={_shown(self.window)}: {reach} must be between 1 and "
                    f"mask.{name}={getattr(self, name)}"
                )
                return
        along, down, across = self.window
        if (intervals := self.intervals(seq)) > MOST_INTERVALS:
            fewer = f"mask.window=[{along},{down},{self.width}]"
            yield (
                f"mask.window={_shown(self.window)}: a query sees {intervals} separate intervals "
                f"of keys; at most {MOST_INTERVALS} are allowed. Give a smaller window, or "
                f"{fewer if across < self.width else 'fewer frames'}"
            )

    def remedy_without_labels(self, seq: int) -> str:  # noqa: ARG002 - a rule of all masks
        return "Give mask.causal=true"


@dataclass(frozen=True)
class Dilated(MaskSettings):
    """Query q sees key k <= q if their blocks are i * stride apart, for an i below count.

    block: number of tokens per block
    stride: number of blocks from one visible block to the next
    count: number of blocks that a query sees, its own included
    """

    kind: ClassVar[str] = "dilated"

    block: int = option(_SOME, tokens=True)
    stride: int = option(_SOME)
    count: int = option(_SOME)

    def slices(self, seq: int) -> IntArray:
        start, stop = _blocks(seq, self.block)
        found = [_columns(start, stop, start, stop, SliceKind.CAUSAL)]
        for distance in range(self.stride, min(self.count * self.stride, len(start)), self.stride):
            later, keys = slice(distance, None), slice(len(start) - distance)
            found.append(
                _columns(start[later], stop[later], start[keys], stop[keys], SliceKind.FULL)
            )
        return np.concatenate(found)

    def intervals(self, seq: int) -> int:
        if self.stride == 1:
            return 1
        return min(self.count, -(-seq // (self.block * self.stride)))

    def problems(self, seq: int) -> Iterator[str]:
        if (intervals := self.intervals(seq)) > MOST_INTERVALS:
            yield (
                f"mask.count={self.count}: a query sees {intervals} separate blocks; at most "
                f"{MOST_INTERVALS} are allowed. Give mask.count={MOST_INTERVALS} or mask.stride=1"
            )


NAMED: dict[str, type[MaskSettings]] = {
    mask.kind: mask
    for mask in (
        *(Causal, SlidingWindow, Full, PrefixLm, BlockCausal, BlockWindow, Chunked, Video),
        Dilated,
    )
}


def _shown(window: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, window))}]"


def _at_most(mask: MaskSettings, name: str, seq: int) -> Iterator[str]:
    value = getattr(mask, name)
    if value > seq:
        yield f"mask.{name}={value}: must be at most seq={seq}"


def _blocks(seq: int, block: int) -> tuple[IntArray, IntArray]:
    start = np.arange(0, seq, block)
    return start, np.minimum(start + block, seq)


def _along_rows(queries: IntArray, keys: IntArray, across: int, width: int) -> list[IntArray]:
    """Return the slices between rows of ``width`` tokens in which queries see ``across`` keys."""
    # Along a row, the window stands still, moves with the query, and stands still again.
    first, moving = across // 2, width - across
    parts = (
        (0, first, 0, across, SliceKind.FULL),
        (first, first + moving, 0, across - 1 + moving, SliceKind.BICAUSAL),
        (first + moving, width, moving, width, SliceKind.FULL),
    )
    return [
        _columns(queries + q0, queries + q1, keys + k0, keys + k1, kind)
        for q0, q1, k0, k1, kind in parts
    ]


def _along_own_rows(rows: IntArray, across: int, width: int) -> list[IntArray]:
    """Return the slices of `_along_rows` between each row and itself, up to the query."""
    first, last = across // 2, across // 2 + width - across
    parts = (
        (0, first, 0, first, SliceKind.CAUSAL),
        (first, last, 0, last, SliceKind.BICAUSAL),
        (last, width, width - across, width, SliceKind.CAUSAL),
    )
    return [_columns(rows + q0, rows + q1, rows + k0, rows + k1, k) for q0, q1, k0, k1, k in parts]


def _first(place: IntArray, size: int, window: int) -> IntArray:
    return np.minimum(np.maximum(place - window // 2, 0), size - window)


def _table(*slices: tuple[int, int, int, int, SliceKind]) -> IntArray:
    """Return the slices that have queries as an array."""
    return np.array([s for s in slices if s[0] < s[1]], np.int64).reshape(-1, 5)


def _columns(
    q_start: IntArray, q_stop: IntArray, k_start: IntArray, k_stop: IntArray, kind: SliceKind
) -> IntArray:
    return np.stack([q_start, q_stop, k_start, k_stop, np.full(len(q_start), int(kind))], 1)
