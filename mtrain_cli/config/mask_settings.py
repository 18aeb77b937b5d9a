"""The keys under ``mask``: which query-key pairs attention allows, whatever the data.

To add a mask, add its keys and its entry in `MASKS` here, its slices in
``mtrain_cli/attention/named_masks.py``, and ``conf/mask/NAME.yaml`` with its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from mtrain_cli.config.option import NOT_NEGATIVE, POSITIVE, TOKENS_OF_SEQ, Range, option

MOST_INTERVALS = 16  # of keys that one query may see; kernels and tables hold each for every query

_SOME = POSITIVE.up_to(*TOKENS_OF_SEQ)
_SOME_OR_0 = NOT_NEGATIVE.up_to(*TOKENS_OF_SEQ)

# {kind: names of the keys that it uses}
MASKS: dict[str, tuple[str, ...]] = {
    "causal": (),
    "sliding_window": ("window", "global_tokens", "full_every", "full_first"),
    "full": (),
    "prefix_lm": ("prefix",),
    "block_causal": ("block",),
    "block_window": ("block", "back"),
    "chunked": ("chunk",),
    "video": ("frames", "height", "width", "window", "causal"),
    "dilated": ("block", "stride", "count"),
}


# The kinds of layers under `full_every`: those with the window, and those that see all earlier
# tokens.
LAYER_KINDS = ("window", "full")
# Keys that select the layers that see all earlier tokens.
FULL_LAYERS = ("full_every", "full_first")
_OFF_AT_0 = ("global_tokens", *FULL_LAYERS, "causal")


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which earlier or later tokens a query may see, whatever the data.

    With data.document_mask, a query also sees only its own document. Positions count from the start
    of the sequence. A mask does not use the keys of other masks, which are null.

    kind: name of the mask; `docs/masks.md` shows each
    window: sliding_window: number of tokens that a query sees, itself included. video: size of a
        query's neighborhood as [frames, height, width]
    global_tokens: sliding_window: number of tokens at the start of the sequence that all later
        queries see, too
    full_every: sliding_window: every n-th layer sees all earlier tokens instead, the first is layer
        n; 0 = no layer. For dense attention only
    full_first: sliding_window: number of layers at the start of the model that see all earlier
        tokens instead. For dense attention only
    prefix: prefix_lm: number of tokens at the start of the sequence that all queries see
    block: block_causal: number of tokens per block, which sees itself and all earlier blocks.
        block_window: number of tokens per block, which sees itself and some earlier blocks.
        dilated: number of tokens per block
    chunk: chunked: number of tokens per chunk. A query sees the earlier tokens of its chunk. Chunks
        count from the start of the document, with data.document_mask=false of the sequence
    back: block_window: number of earlier blocks that a block sees
    frames: video: number of frames; frames * height * width must be seq
    height: video: number of rows of tokens per frame
    width: video: number of tokens per row of a frame
    causal: video: whether a query sees earlier tokens only. The window then holds the last frames,
        and of its own frame the tokens up to itself
    stride: dilated: number of blocks from one visible block to the next
    count: dilated: number of blocks that a query sees, its own included
    """

    kind: str = option(tuple(MASKS))
    window: int | tuple[int, int, int] | None = option(
        _SOME,
        tokens=True,
        expected="a number of tokens such as 4k with mask=sliding_window, or a list of frames, "
        "height and width such as [5,9,16] with mask=video",
        default=None,
    )
    global_tokens: int | None = option(_SOME_OR_0, tokens=True, default=None)
    full_every: int | None = option(
        Range("must be 0 or at least 2 (1 would be mask=causal)", lambda n: n == 0 or n >= 2),
        default=None,
    )
    full_first: int | None = option(NOT_NEGATIVE, default=None)
    prefix: int | None = option(_SOME_OR_0, tokens=True, default=None)
    block: int | None = option(_SOME, tokens=True, default=None)
    chunk: int | None = option(_SOME, tokens=True, default=None)
    back: int | None = option(_SOME_OR_0, default=None)
    frames: int | None = option(_SOME, default=None)
    height: int | None = option(_SOME, default=None)
    width: int | None = option(_SOME, default=None)
    causal: bool | None = option(default=None)
    stride: int | None = option(_SOME, default=None)
    count: int | None = option(_SOME, default=None)

    @property
    def keeps_causal_intervals(self) -> bool:
        """Whether each query sees one interval of keys that ends at itself and moves forward.

        Dynamic indices need this.
        """
        return self.kind == "causal" or (self.kind == "sliding_window" and not self.global_tokens)

    @property
    def shows_later_keys(self) -> bool:
        """Whether some query sees a later key, so that the model may see tokens that it predicts.

        A mask from sizes that hide all later keys, such as a prefix of 0 tokens, counts as one too.
        """
        if self.kind == "video":
            return not self.causal
        return self.kind in ("full", "prefix_lm", "block_causal", "block_window")

    def intervals(self, seq: int) -> int:
        """Return the most separate intervals of keys that a query sees in a sequence."""
        if self.kind == "sliding_window":
            assert isinstance(self.window, int)
            return 2 if self.global_tokens and self.window + self.global_tokens < seq else 1
        if self.kind == "dilated":
            return _dilated_intervals(self, seq)
        return _video_intervals(self) if self.kind == "video" else 1

    @staticmethod
    def sliding(window: int, full_every: int = 0, full_first: int = 0) -> MaskConfig:
        """Return the mask of a sliding window, without global tokens."""
        return MaskConfig(
            kind="sliding_window",
            window=window,
            global_tokens=0,
            full_every=full_every,
            full_first=full_first,
        )

    @property
    def is_mixed(self) -> bool:
        """Whether some layers see all earlier tokens instead of a window."""
        return any(getattr(self, name) for name in FULL_LAYERS)

    @property
    def of_window_layers(self) -> MaskConfig:
        """The mask of the layers that have the window."""
        return replace(self, full_every=0, full_first=0) if self.is_mixed else self

    def is_full(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, sees all earlier tokens instead of a window."""
        is_nth = bool(self.full_every) and (layer + 1) % (self.full_every or 1) == 0
        return is_nth or layer < (self.full_first or 0)

    def layer_kinds(self, layers: int) -> dict[str, list[int]]:
        """Return the numbers of the layers of each kind, for a model of ``layers``.

        The keys are `LAYER_KINDS`, or "" if all layers have the same mask.
        """
        full = [layer for layer in range(layers) if self.is_full(layer)]
        if not full:
            return {"": list(range(layers))}
        window = [layer for layer in range(layers) if layer not in full]
        return dict(zip(LAYER_KINDS, (window, full), strict=True))

    @property
    def counts_from_start(self) -> bool:
        """Whether the visible keys depend on the position of a token in the sequence."""
        return self.kind in ("prefix_lm", "video") or bool(self.global_tokens)

    @property
    def plain_window(self) -> int | None:
        """The window of a sliding window without global tokens; None for other masks."""
        is_plain = self.kind == "sliding_window" and not self.global_tokens
        return self.window if is_plain and isinstance(self.window, int) else None

    def describe(self) -> str:
        """Return kind and keys as a short text."""
        own = {name: getattr(self, name) for name in MASKS[self.kind]}
        shown = (
            _described(name, value)
            for name, value in own.items()
            if value is not None and not (value == 0 and name in _OFF_AT_0)
        )
        return ", ".join((self.kind, *shown))

    def problems(self, seq: int, pattern: str) -> Iterator[str]:
        """Yield a line ``key=value: reason`` for each conflict.

        pattern: value of ``sparsity.pattern``.
        """
        wrong = list(self._keys())
        yield from wrong
        if wrong:
            return
        if check := _CHECKS.get(self.kind):
            yield from check(self, seq)
        for name in FULL_LAYERS:
            if pattern != "dense" and (number := getattr(self, name)):
                yield (
                    f"mask.{name}={number}: with sparsity.pattern={pattern}, all layers share a "
                    f"mask; give mask.{name}=0 or sparsity=dense"
                )
        if pattern != "dense" and not self.keeps_causal_intervals:
            given = f"mask.kind={self.kind}"
            if self.kind == "sliding_window":
                given = f"mask.global_tokens={self.global_tokens}"
            yield (
                f"{given}: sparsity.pattern={pattern} needs a mask in which each query sees one "
                "interval of keys up to itself; give mask=causal, mask=sliding_window without "
                "global tokens, or sparsity=dense"
            )

    def _keys(self) -> Iterator[str]:
        """Yield a line for each null key that the mask needs, and each set key of other masks."""
        own = MASKS[self.kind]
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in own and value is None:
                yield (
                    f"mask.{item.name}=null: mask.kind={self.kind} needs a value; "
                    f"mask={self.kind} gives a default"
                )
            elif item.name not in own and item.name != "kind" and value is not None:
                users = (f"mask={kind}" for kind, keys in MASKS.items() if item.name in keys)
                yield (
                    f"mask.{item.name}={_shown(value)}: is not a key of mask.kind={self.kind}; "
                    f"allowed with {', '.join(users)}"
                )


CAUSAL = MaskConfig(kind="causal")


def _described(name: str, value: int | tuple[int, int, int] | bool) -> str:
    if value is True:
        return name
    return f"{name} {'x'.join(map(str, value)) if isinstance(value, tuple) else f'{value:,}'}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _sliding_window(mask: MaskConfig, seq: int) -> Iterator[str]:
    if isinstance(mask.window, tuple):
        yield (
            f"mask.window={_shown(mask.window)}: mask.kind=sliding_window needs one number, such "
            "as 4k; three are for mask=video"
        )
    yield from _at_most(mask, "global_tokens", seq)


def _prefix_lm(mask: MaskConfig, seq: int) -> Iterator[str]:
    yield from _at_most(mask, "prefix", seq)


def _at_most(mask: MaskConfig, name: str, seq: int) -> Iterator[str]:
    value = getattr(mask, name)
    if value > seq:
        yield f"mask.{name}={value}: must be at most seq={seq}"


def _video(mask: MaskConfig, seq: int) -> Iterator[str]:
    frames, height, width = mask.frames, mask.height, mask.width
    assert frames is not None
    assert height is not None
    assert width is not None
    tokens = frames * height * width
    if tokens != seq:
        yield (
            f"mask.frames={frames}, mask.height={height}, mask.width={width}: give {tokens:,} "
            f"tokens, but seq={seq}; set seq={tokens} or other sizes"
        )
    if not isinstance(mask.window, tuple):
        yield (
            f"mask.window={mask.window}: mask.kind=video needs three numbers, "
            "[frames, height, width], such as [3,9,16]"
        )
        return
    sizes = {"frames": frames, "height": height, "width": width}
    for (name, size), reach in zip(sizes.items(), mask.window, strict=True):
        if not 1 <= reach <= size:
            yield (
                f"mask.window={_shown(mask.window)}: {reach} must be between 1 and "
                f"mask.{name}={size}"
            )
            return
    along, down, across = mask.window
    intervals = _video_intervals(mask)
    if intervals > MOST_INTERVALS:
        fewer = f"mask.window=[{along},{down},{width}]" if across < width else "fewer frames"
        yield (
            f"mask.window={_shown(mask.window)}: a query sees {intervals} separate intervals of "
            f"keys; at most {MOST_INTERVALS} are allowed. Give a smaller window, or {fewer}"
        )


def _video_intervals(mask: MaskConfig) -> int:
    assert isinstance(mask.window, tuple)
    along, down, across = mask.window
    # Whole rows of a frame join, and so do whole frames.
    if across != mask.width:
        return along * down
    return along if down != mask.height else 1


def _dilated_intervals(mask: MaskConfig, seq: int) -> int:
    block, stride, count = mask.block, mask.stride, mask.count
    assert block is not None
    assert stride is not None
    assert count is not None
    return 1 if stride == 1 else min(count, -(-seq // (block * stride)))


def _dilated(mask: MaskConfig, seq: int) -> Iterator[str]:
    intervals = _dilated_intervals(mask, seq)
    if intervals > MOST_INTERVALS:
        yield (
            f"mask.count={mask.count}: a query sees {intervals} separate blocks; at most "
            f"{MOST_INTERVALS} are allowed. Give mask.count={MOST_INTERVALS} or mask.stride=1"
        )


_CHECKS: dict[str, Callable[[MaskConfig, int], Iterator[str]]] = {
    "sliding_window": _sliding_window,
    "prefix_lm": _prefix_lm,
    "video": _video,
    "dilated": _dilated,
}
