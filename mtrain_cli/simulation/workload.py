"""The attention to predict: its masks and indices, by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import FullLayers
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.config.mask_settings import LAYER_KINDS
from mtrain_cli.config.pattern_settings import SPARSE_KINDS
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.training.flops import causal_pairs


@dataclass(frozen=True)
class AttentionWorkload:
    """The attention to predict.

    made: shapes, as an index file records them.
    index: returns the index of a layer, or None for dense attention.
    columns: largest number of single columns per head, as in `what_if.make_case`.
    estimated: whether the time includes that of estimating indices.
    full: the layers of the second kind: without a window, or without an index under a pattern.
    drawn: number of sparse layers with an index of their own, which others repeat; None for all.
    remark: where the masks come from, for the user.
    """

    made: RecordedSetup
    masks: tuple[SequenceMask, ...]
    layers: tuple[int, ...]
    index: Callable[[int], Index | None]
    pattern: str
    columns: int | None = -1
    estimated: bool = True
    model: str = ""
    full: FullLayers | None = None
    drawn: int | None = None
    remark: str = ""

    def part(self, i: int, n: int) -> AttentionWorkload:
        """Return the attention of the i-th of n equal parts of the heads."""
        if n == 1:
            return self

        def index(layer: int) -> Index | None:
            whole = self.index(layer)
            return None if whole is None else whole.part(i, n)

        made = replace(self.made, heads=self.made.heads // n, kv_heads=self.made.kv_heads // n)
        return replace(self, made=made, index=index)

    @property
    def sparse(self) -> bool:
        return self.index(self.layers[0]) is not None

    @property
    def density(self) -> float:
        """Share of the causal pairs that attention computes, as a mean over layers."""
        index, causal = self.index(self.layers[0]), causal_pairs(self.made.seq)
        shares = [sum(mask.pairs for mask in masks) / len(masks) for masks, _ in self.kinds]
        weights = [len(layers) for _, layers in self.kinds]
        if index is not None:
            tables = MaskTables.make(self.masks, index.block)
            drawn = (self.index(layer) for layer in self.kinds[0][1][: self.drawn])
            found = [float(i.counts(tables).pairs.double().mean()) for i in drawn if i is not None]
            shares[0] = sum(found) / len(found)
        return sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights) / causal

    @property
    def kinds(self) -> list[tuple[tuple[SequenceMask, ...], list[int]]]:
        """The masks of each kind of layer, and the numbers of the layers to predict."""
        if self.full is None:
            return [(self.masks, list(self.layers))]
        first, second = self.layer_kinds.values()
        return [(self.masks, first), (tuple(self.full.masks), second)]

    @property
    def layer_kinds(self) -> dict[str, list[int]]:
        """The numbers of the layers to predict, by kind; empty if all are alike."""
        if self.full is None:
            return {}
        full = self.full.layers
        others = [layer for layer in self.layers if layer not in full]
        numbers = others, [layer for layer in self.layers if layer in full]
        return dict(zip(SPARSE_KINDS if self.sparse else LAYER_KINDS, numbers, strict=True))

    def with_dense(self, dense: frozenset[int], layers: int) -> AttentionWorkload:
        """Return the attention of a model whose layers in ``dense`` have no index.

        The other layers of ``self`` stand for all sparse layers of the model.
        """
        if not dense or not self.sparse:
            return self
        own, index = [layer for layer in self.layers if layer not in dense], self.index

        def of_layer(layer: int) -> Index | None:
            if layer in dense:
                return None
            return index(own[layer] if layer < len(own) else layer)

        full = FullLayers(self.masks, dense, layers)
        every = tuple(range(layers))
        return replace(self, layers=every, index=of_layer, full=full, drawn=len(own))
