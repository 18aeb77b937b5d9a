"""The keys under ``mask``: which query-key pairs attention allows, whatever the data.

Each mask is a class that extends `MaskSettings`. mtrain's own are in
``mtrain_cli/attention/named_masks.py``, with their defaults in ``conf/mask/NAME.yaml``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain_cli.config.option import Variant, fits_variants
from mtrain_cli.config.plugins import Plugins

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_INTERVALS = 16  # of keys that one query may see; kernels and tables hold each for every query

LAYER_KINDS = ("window", "full")  # of layers under `full_every`
# Keys that select the layers that see all earlier tokens.
FULL_LAYERS = ("full_every", "full_first")


@dataclass(frozen=True)
class MaskSettings(Variant):
    """Which earlier or later tokens a query may see, whatever the data.

    With data.document_mask, a query also sees only its own document. Positions count from the start
    of the sequence. A mask does not use the keys of other masks, which are null.
    """

    kind: ClassVar[str]  # name of the mask, as in ``mask=NAME``
    # Whether each query sees one interval of keys that ends at itself and moves forward. Dynamic
    # indices need this.
    keeps_causal_intervals: ClassVar[bool] = False
    # Whether some query may see a later key, so that the model may see tokens that it predicts.
    shows_later_keys: ClassVar[bool] = False
    # Whether the visible keys depend on the position of a token in the sequence.
    counts_from_start: ClassVar[bool] = False
    # Most tokens of a prompt with its new tokens for which the queries after the prompt see all
    # earlier keys, and no later ones; 0 if they never do.
    caches_whole: ClassVar[float] = 0
    # Key with a size; if it is smaller, more labels count toward the loss.
    size_that_hides_labels: ClassVar[str] = ""
    # Keys of a mask that only some layers have, see `is_full`; 0 = all layers have it.
    full_every = 0
    full_first = 0

    def slices(self, seq: int) -> NDArray[Any]:
        """Return the visible pairs of a sequence of ``seq`` tokens, int64 [slices, 5].

        A row is query start and stop, key start and stop, and `SliceKind`, in positions. Slices may
        overlap; `SequenceMask.from_slices` joins them. If layers have different masks, the slices
        are those of the layers with the window.
        """
        raise NotImplementedError

    def first_keys(self, starts: NDArray[Any]) -> NDArray[Any] | None:
        """Return the first key that each query sees, if it depends on where its document starts.

        starts: position at which the document of each query starts, int64 [seq].
        """
        del starts
        return None

    def intervals(self, seq: int) -> int:
        """Return the most separate intervals of keys that a query sees in a sequence."""
        del seq
        return 1

    def problems(self, seq: int) -> Iterator[str]:
        """Yield a line ``key=value: reason`` for each conflict among the settings."""
        del seq
        yield from ()

    def for_dense_only(self) -> str | None:
        """Return why dynamic indices cannot use the mask, as ``key=value``; None if they can."""
        return None if self.keeps_causal_intervals else f"mask.kind={self.kind}"

    def remedy_without_labels(self, seq: int) -> str:
        """Return a sentence with the setting under which some labels count toward the loss."""
        if (key := self.size_that_hides_labels) == "":
            return "Choose a mask that hides later tokens, such as mask=causal"
        return f"mask.{key}={getattr(self, key)} must be below seq={seq}"

    def of_prompt(self, tokens: int) -> MaskSettings:
        """Return the mask of a prompt of this length, which may be shorter than the sizes here."""
        del tokens
        return self

    @property
    def plain_window(self) -> int | None:
        """The window of a sliding window without global tokens; None for other masks."""
        return None

    @property
    def is_mixed(self) -> bool:
        """Whether some layers see all earlier tokens instead of a window."""
        return any(getattr(self, name) for name in FULL_LAYERS)

    @property
    def of_window_layers(self) -> MaskSettings:
        """The mask of the layers that have the window."""
        return self

    def is_full(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, sees all earlier tokens instead of a window."""
        del layer
        return False

    def layer_kinds(self, layers: int) -> dict[str, list[int]]:
        """Return the numbers of the layers by `LAYER_KINDS`; by "" if all have the same mask."""
        full = [layer for layer in range(layers) if self.is_full(layer)]
        if not full:
            return {"": list(range(layers))}
        window = [layer for layer in range(layers) if layer not in full]
        return dict(zip(LAYER_KINDS, (window, full), strict=True))

    def describe(self) -> str:
        """Return kind and keys as a short text."""
        shown = (self._described(name, getattr(self, name)) for name in self.own_keys())
        return ", ".join((self.kind, *filter(None, shown)))

    def _described(self, name: str, value: Any) -> str:
        if isinstance(value, bool):
            return name * value
        return f"{name} {'x'.join(map(str, value)) if isinstance(value, tuple) else f'{value:,}'}"


MASKS: Plugins[type[MaskSettings]] = Plugins(
    "mtrain.masks",
    "mtrain_cli.attention.named_masks:NAMED",
    functools.partial(fits_variants, MaskSettings, "kind"),
)


def mask_problems(mask: MaskSettings, seq: int, pattern: str) -> Iterator[str]:
    """Yield a line ``key=value: reason`` for each conflict of a mask, also with the pattern.

    pattern: value of ``sparsity.pattern``.
    """
    yield from mask.problems(seq)
    if pattern == "dense":
        return
    for name in FULL_LAYERS:
        if number := getattr(mask, name):
            yield (
                f"mask.{name}={number}: with sparsity.pattern={pattern}, all layers share a mask; "
                f"give mask.{name}=0 or sparsity=dense"
            )
    if (given := mask.for_dense_only()) is not None:
        yield (
            f"{given}: sparsity.pattern={pattern} needs a mask in which each query sees one "
            "contiguous range of keys that ends at the query; give mask=causal, mask=chunked, "
            "mask=sliding_window without global tokens, or sparsity=dense"
        )
