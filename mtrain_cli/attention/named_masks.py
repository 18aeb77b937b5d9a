"""The masks of the configuration, each as a pure function from its keys to slices.

A function takes the number of tokens and the keys of its mask, and returns an array int64
[slices, 5]: query start and stop, key start and stop, and `SliceKind`, in positions. Slices may
overlap; `SequenceMask.from_slices` joins them. ``docs/masks.md`` shows each mask.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mtrain_cli.attention.mask import IntArray, SliceKind
from mtrain_cli.config.mask_settings import FULL_LAYERS, MASKS, MaskConfig


def slices_of(mask: MaskConfig, seq: int) -> IntArray:
    """Return the slices of a configured mask over ``seq`` tokens, int64 [slices, 5].

    If layers have different masks, the slices are those of the layers with the window.
    """
    own = (name for name in MASKS[mask.kind] if name not in FULL_LAYERS)
    keys = {name: getattr(mask, name) for name in own}
    return _NAMED[mask.kind](seq, **keys)


def causal(seq: int) -> IntArray:
    """Query q sees key k if k <= q."""
    return _table((0, seq, 0, seq, SliceKind.CAUSAL))


def full(seq: int) -> IntArray:
    """Every query sees every key."""
    return _table((0, seq, 0, seq, SliceKind.FULL))


def sliding_window(seq: int, window: int, global_tokens: int = 0) -> IntArray:
    """Query q sees key k <= q if q - k < window or k < global_tokens."""
    begin, sinks = min(window, seq), min(global_tokens, seq)
    return _table(
        (0, begin, 0, begin, SliceKind.CAUSAL),
        (begin, seq, 1, seq, SliceKind.BICAUSAL),
        (0, sinks, 0, sinks, SliceKind.CAUSAL),
        (sinks, seq, 0, sinks, SliceKind.FULL),
    )


def prefix_lm(seq: int, prefix: int) -> IntArray:
    """Query q sees key k if k <= q or k < prefix."""
    return _table((0, prefix, 0, prefix, SliceKind.FULL), (prefix, seq, 0, seq, SliceKind.CAUSAL))


def block_causal(seq: int, block: int) -> IntArray:
    """Query q sees key k if k // block <= q // block."""
    return block_window(seq, block, back=seq)


def block_window(seq: int, block: int, back: int) -> IntArray:
    """Query q sees key k if 0 <= q // block - k // block <= back."""
    start = np.arange(0, seq, block)
    stop = np.minimum(start + block, seq)
    return _columns(start, stop, np.maximum(start - back * block, 0), stop, SliceKind.FULL)


def chunked(seq: int, chunk: int) -> IntArray:
    """Query q sees key k <= q if q // chunk == k // chunk."""
    start = np.arange(0, seq, chunk)
    stop = np.minimum(start + chunk, seq)
    return _columns(start, stop, start, stop, SliceKind.CAUSAL)


def dilated(seq: int, block: int, stride: int, count: int) -> IntArray:
    """Query q sees key k <= q if their blocks are i * stride apart, for an i below count."""
    start = np.arange(0, seq, block)
    stop = np.minimum(start + block, seq)
    found = [_columns(start, stop, start, stop, SliceKind.CAUSAL)]
    for distance in range(stride, min(count * stride, len(start)), stride):
        later, keys = slice(distance, None), slice(len(start) - distance)
        found.append(_columns(start[later], stop[later], start[keys], stop[keys], SliceKind.FULL))
    return np.concatenate(found)


def video(
    seq: int,
    frames: int,
    height: int,
    width: int,
    window: tuple[int, int, int],
    causal: bool | None = False,
) -> IntArray:
    """A query sees the window of tokens around its own, moved inward at the edges of the video.

    Along each axis of size n, the query at x sees ``first <= k < first + w``, with first =
    min(max(x - w // 2, 0), n - w): neighborhood attention (arXiv:2204.07143, eq. 4), also for even
    windows. Tokens are numbered frame by frame, and row by row in a frame.

    causal: whether a query sees earlier tokens only: the last w frames, its own included, and of
        its own frame the tokens up to itself. In arXiv:2111.12417, the window has later frames,
        too, before the causal mask removes them.
    """
    assert seq == frames * height * width
    along, down, across = window
    own = np.arange(frames * height)[:, None]
    frame, row = np.divmod(own, height)
    last_first = np.maximum(frame - along + 1, 0)
    frame_first = last_first if causal else _first(frame, frames, along)
    # The key rows of each query row: all pairs of a visible frame and a visible row.
    t, y = np.divmod(np.arange(along * down), down)
    key_rows = (frame_first + t) * height + _first(row, height, down) + y
    if causal:
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


def _along_rows(queries: IntArray, keys: IntArray, across: int, width: int) -> list[IntArray]:
    """Return the slices between rows of ``width`` tokens; each query sees ``across`` keys of a row.

    queries, keys: where each row of queries and its row of keys start.
    """
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


_NAMED: dict[str, Callable[..., IntArray]] = {
    "causal": causal,
    "full": full,
    "sliding_window": sliding_window,
    "prefix_lm": prefix_lm,
    "block_causal": block_causal,
    "block_window": block_window,
    "chunked": chunked,
    "video": video,
    "dilated": dilated,
}
