"""The rule of a run: mask, documents, slices from the data, and layers of two kinds."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.attention.mask import SequenceMask, SliceKind
from mtrain_cli.attention.mask_rule import FullLayers, MaskRule
from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.composition.compose import compose

DOCUMENTS = np.array([0] * 5 + [1] * 7)
WINDOW = ["mask=sliding_window", "mask.window=16", "mask.full_every=3"]


@pytest.mark.parametrize("separate", [False, True])
def test_documents_cut_the_mask_only_if_asked_for(separate):
    rule = MaskRule(separate)
    whole = SequenceMask.causal(12, 16)
    cut = SequenceMask.from_documents(DOCUMENTS, 16)
    assert rule(DOCUMENTS, 12, 16).same_as(cut if separate else whole)
    assert rule(None, 12, 16).same_as(whole)
    assert rule(np.zeros(12, int), 12, 16).same_as(whole)
    shorter = SequenceMask.causal(9, 16) if separate else whole
    assert rule(np.zeros(9, int), 12, 16).same_as(shorter)


def test_slices_from_the_data_stand_alone():
    slices = np.array([[2, 4, 0, 9, int(SliceKind.FULL)]])
    mask = MaskRule(True)(DOCUMENTS, 12, 16, slices)
    assert mask.same_as(SequenceMask.from_slices(slices, 12, 16))
    assert mask.pairs == 2 * 9


def test_a_rule_of_two_kinds_of_layers():
    config = compose(["model=tiny", *WINDOW])
    rule = MaskRule.of(config)
    (window, few), (full, many) = rule.by_layers(7)
    selected = sum(config.mask.is_full(layer) for layer in range(7))
    assert (few, many) == (7 - selected, selected)
    assert window.mask.full_every == 0
    assert full == MaskRule(config.data.document_mask, CAUSAL)
    assert MaskRule(True).by_layers(7) == ((MaskRule(True), 7),)
    kinds = config.mask.layer_kinds(7)
    assert {kind: len(layers) for kind, layers in kinds.items()} == {"window": few, "full": many}
    assert all(map(config.mask.is_full, kinds["full"]))
    assert CAUSAL.layer_kinds(2) == {"": [0, 1]}


def test_full_layers_are_counted_with_the_others():
    window, full = ([SequenceMask.causal(12, 16)] for _ in range(2))
    kinds = FullLayers(full, frozenset({2, 5}), 7).kinds(window)
    assert [(masks is window, layers) for masks, layers in kinds] == [(True, 5), (False, 2)]
