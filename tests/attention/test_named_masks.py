"""Each named mask equals its predicate, and its configuration refuses what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.mask_definitions import cells, predicate

from mtrain_cli.attention.mask import KeySlice, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.config.schema import ConfigError

CASES = [
    ("causal", 97, {}),
    ("full", 97, {}),
    *(
        (
            "sliding_window",
            seq,
            {"window": window, "global_tokens": sinks, "full_every": 0, "full_first": 0},
        )
        for seq in (1, 5, 96, 97)
        for window in (1, 2, 7, 96, 97, 500)
        for sinks in (0, 1, 10)
        if sinks <= seq
    ),
    *(("prefix_lm", seq, {"prefix": p}) for seq in (1, 97) for p in (0, 1, 40, 97) if p <= seq),
    *(("block_causal", seq, {"block": block}) for seq in (3, 97) for block in (1, 8, 97, 500)),
    *(
        ("block_window", 97, {"block": block, "back": back})
        for block in (1, 10, 97, 200)
        for back in (0, 1, 3, 1000)
    ),
    *(("chunked", seq, {"chunk": chunk}) for seq in (5, 97) for chunk in (1, 10, 97, 200)),
    *(
        ("dilated", 97, {"block": block, "stride": stride, "count": count})
        for block in (1, 4, 16, 200)
        for stride in (1, 2, 5)
        for count in (1, 2, 16)
    ),
    *(
        (
            "video",
            4 * 3 * 6,
            {"frames": 4, "height": 3, "width": 6, "window": window, "causal": causal},
        )
        for causal in (False, True)
        for window in ((1, 1, 1), (2, 2, 3), (3, 3, 6), (4, 1, 6), (3, 2, 6), (4, 3, 6), (2, 3, 5))
    ),
    *(
        ("video", 7, {"frames": 7, "height": 1, "width": 1, "window": (3, 1, 1), "causal": causal})
        for causal in (True, False)
    ),
]


@pytest.mark.parametrize(("kind", "seq", "keys"), CASES)
def test_a_named_mask_equals_its_predicate(kind, seq, keys):
    mask = MASKS[kind](**keys)
    assert list(mask.problems(seq)) == []
    table = mask.slices(seq)
    wanted = predicate(kind, seq, **keys)
    made = MaskRule(False, mask)(None, seq, seq + 3)
    everywhere = np.arange(seq)
    assert (made.spans(everywhere, everywhere).seen() == wanted).all()
    assert made.pairs == wanted.sum()
    assert ((cells((KeySlice(*s) for s in table.tolist()), seq, seq) > 0) == wanted).all()
    assert made.intervals == mask.intervals(seq)
    assert mask.shows_later_keys or not made.shows_later_keys().any()
    assert made.is_causal_interval or not mask.keeps_causal_intervals
    assert made.same_as(SequenceMask.from_slices(table, seq, seq + 3))


@pytest.mark.parametrize("document", [1, 10, 97])
@pytest.mark.parametrize("kind", [*MASKS])
def test_documents_cut_every_mask(kind, document):
    case = next((seq, keys) for name, seq, keys in CASES[::-1] if name == kind)
    seq, keys = case
    ids = np.arange(seq) // document
    rule = MaskRule(True, MASKS[kind](**keys))
    wanted = predicate(kind, seq, ids, **keys) & (ids[:, None] == ids)
    everywhere = np.arange(seq)
    made = rule(ids, seq, seq + 2)
    assert (made.spans(everywhere, everywhere).seen() == wanted).all()
    assert made.pairs == wanted.sum()
    assert rule(None, seq, seq).same_as(MaskRule(False, rule.mask)(ids, seq, seq))
    if kind == "causal":
        old = SequenceMask.from_documents(ids, seq + 2)
        assert np.array_equal((made.low, made.high), (old.low, old.high))


@pytest.mark.parametrize(("seq", "chunk"), [(40, 8), (33, 16), (7, 16)])
def test_chunked_is_the_mask_of_llama_4_in_transformers(seq, chunk):
    """Packed documents have the masks that they have alone."""
    masking_utils = pytest.importorskip("transformers.masking_utils")
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(attention_chunk_size=chunk, attn_implementation="eager")

    def theirs(length: int) -> np.ndarray:
        mask = masking_utils.create_chunked_causal_mask(
            config=config,
            inputs_embeds=torch.zeros(1, length, 1),
            attention_mask=None,
            past_key_values=None,
            position_ids=torch.arange(length)[None],
        )
        return (mask[0, 0] == 0).numpy()

    rule, everywhere = MaskRule(True, MASKS["chunked"](chunk=chunk)), np.arange(seq)
    found = rule(None, seq, seq).spans(everywhere, everywhere).seen()
    assert (found == theirs(seq)).all()
    ids = np.sort(np.arange(seq) % 3)
    found = rule(ids, seq, seq).spans(everywhere, everywhere).seen()
    lengths = np.bincount(ids)
    alone = [torch.from_numpy(theirs(length)) for length in lengths]
    assert (found == torch.block_diag(*alone).numpy()).all()


def test_a_sequence_of_one_document_has_the_same_mask_object():
    rule = MaskRule(True, MASKS["prefix_lm"](prefix=3))
    assert rule(np.zeros(9, int), 9, 12) is rule(None, 9, 12) is rule.undivided(9, 12)


def test_contexts_start_with_their_document():
    ids = np.array([0, 0, 3, 3, 3])
    window = MASKS["sliding_window"](window=1, global_tokens=0)
    assert MaskRule(True, window).starts(ids, 6).tolist() == [0, 0, 2, 2, 2, 2]
    assert MaskRule(False, window).starts(ids, 6).tolist() == [0] * 6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["mask=sliding_window", "mask.window=0"], r"mask.window=0: must be at least 1"),
        (["mask=nosuch"], r"mask=nosuch: .*sliding_window"),
        (["mask.kind=nosuch"], r"mask.kind=nosuch: expected one of causal, sliding_window"),
        (["mask.kind=prefix_lm"], r"mask.prefix=null: mask.kind=prefix_lm needs a value; mask=pre"),
        (["mask.window=4"], r"mask.window=4: is not a key of mask.kind=causal; allowed with mask="),
        (["mask=prefix_lm", "mask.prefix=5000"], r"mask.prefix=5000: must be at most seq=4096"),
        (["mask=video", "mask.frames=15"], r"mask.frames=15, .* give 3,840 tokens, but seq=4096"),
        (["mask=video", "mask.window=4"], r"mask.window=4: mask.kind=video needs three numbers"),
        (["mask=video", "mask.window=[5,17,16]"], r"17 must be between 1 and mask.height=16"),
        (["mask=video", "mask.window=[5,9,15]"], r"sees 45 separate intervals.*at most 16"),
        (["mask=dilated", "mask.count=32", "mask.stride=2", "mask.block=16"], r"sees 32 separate"),
        (["mask=sliding_window", "mask.window=[1,2,3]"], r"needs one number"),
        (["mask=sliding_window", "mask.full_every=1"], r"must be 0 or at least 2 .1 would be mask"),
        (["mask=sliding_window", "mask.full_every=9"], r"must be at most model.num_layers=4"),
        (["mask=sliding_window", "mask.full_first=4"], r"leaves no layer of model.num_layers=4"),
        (
            ["mask=sliding_window", "mask.full_first=3", "mask.full_every=4"],
            r"mask.full_first=3: leaves no layer",
        ),
        (
            ["mask=sliding_window", "mask.full_every=2", "sparsity=vertical_slash"],
            r"mask.full_every=2: with sparsity.pattern=vertical_slash, all layers share a mask",
        ),
        (["mask=full", "sparsity=vertical_slash"], r"mask.kind=full: sparsity.pattern=vertical_sl"),
        (
            ["mask=sliding_window", "mask.global_tokens=4", "sparsity=moba"],
            r"mask.global_tokens=4: sparsity.pattern=moba needs a mask",
        ),
    ],
)
def test_wrong_masks_are_refused_in_one_line(words, line):
    with pytest.raises(ConfigError, match=line) as caught:
        compose([*words, "seq=4k"])
    assert len(caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize("kind", [*MASKS])
def test_every_mask_has_defaults(kind):
    config = compose([f"mask={kind}", "seq=4k"])
    assert config.mask.kind == kind
    assert MaskRule.of(config)(None, 4096, 4096).intervals == config.mask.intervals(4096)


def test_a_causal_video_says_so():
    words = ["mask=video", "seq=4k"]
    assert compose(words).mask.describe().endswith("window 5x9x16")
    assert compose([*words, "mask.causal=true"]).mask.describe().endswith("window 5x9x16, causal")
    with pytest.raises(ConfigError, match=r"^mask.causal=true: is not a key of mask.kind=full"):
        compose(["mask=full", "mask.causal=true"])
