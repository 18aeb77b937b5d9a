"""Masks of the caller: several on one layout, from arrays, files and ranges, of any shape."""

from __future__ import annotations

import enum
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
from library.test_context_parallel import (
    DIM,
    DOCUMENTS,
    SEQ,
    WAYS,
    assert_close,
    by_definition,
    made,
    results,
    seen_by_documents,
    whole_tensors,
)
from slow_cases import mostly_slow

from mtrain_cli import api
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.library.context_batch import ContextBatch
from mtrain_cli.library.context_parallel import ContextParallel
from mtrain_cli.library.settings import Processes, compose_settings
from mtrain_cli.library.slices import read_slices

# A frame of 50 tokens sees itself and the frame before, without causality.
VIDEO = np.array([(0, 50, 0, 50, 0), *((n, n + 50, n - 50, n + 50, 0) for n in range(50, SEQ, 50))])
# One slice of each kind, of which two share queries, and queries without keys.
KINDS = np.array(
    [(0, 60, 0, 90, 1), (60, 120, 30, 110, 3), (60, 120, 200, 250, 2), (150, 240, 10, 200, 0)]
)
EVEN_KEYS = np.array([(0, SEQ, key, key + 1, 0) for key in range(0, 80, 2)])  # 40 intervals


def seen_by(slices: IntArray) -> torch.Tensor:
    """The pairs by the rule of docs/masks.md, one slice and query at a time."""
    seen = torch.zeros(SEQ, SEQ, dtype=torch.bool)
    for q_start, q_stop, k_start, k_stop, kind in slices.tolist():
        for row in range(q_start, q_stop):
            low = k_start + (row - q_start) * (kind in (2, 3))
            high = k_stop - (q_stop - 1 - row) * (kind in (1, 3))
            seen[row, low : max(low, high)] = True
    return seen[None, None]


def definition(seen: torch.Tensor) -> list[torch.Tensor]:
    """As `by_definition`. A query without keys has the output 0 and no gradient."""
    some = seen.any(-1)
    ones = seen | ~some[..., None]
    *qkv, dout = whole_tensors()
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    k, v = (tensor.repeat_interleave(2, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    weights = scores.masked_fill(~ones, -torch.inf).softmax(-1) * some[..., None]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


NAMED = {"documents": None, "video": VIDEO, "kinds": KINDS}
Results = list[torch.Tensor]


def of_mask(batch: ContextBatch, mask: str | None, window: int | None = None) -> Results:
    """out, dq, dk and dv of whole sequences under one of the batch's masks."""
    *qkv, dout = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    for tensor in qkv:
        tensor.requires_grad_()
    out = batch.attention(*qkv, layer=0, mask=mask, window=window)
    out.backward(dout)
    return [batch.gather(tensor.detach()) for tensor in (out, *(t.grad for t in qkv))]


def several_masks(_rank: int, world: int) -> list[dict[str, Results]]:
    found = []
    for layout, exchange in WAYS:
        if exchange == "ulysses" and 4 % world:
            continue
        virtual = ("topology.gpus_per_node=1",) if "hierarchical" in exchange else ()
        cp = made("dense", *virtual, layout=layout, exchange=exchange)
        batch = cp.batch(DOCUMENTS, masks=NAMED)
        found.append({name: of_mask(batch, name) for name in NAMED})
        found[-1]["window"] = of_mask(batch, "documents", window=30)
        # The next batch has one of these masks and no documents, and the last one has neither.
        found[-1]["again"] = of_mask(cp.batch(masks={"video": VIDEO}), "video")
        found[-1]["whole"] = of_mask(cp.batch(masks={"whole": None, "video": VIDEO}), "whole")
        found[-1]["alone"] = results(cp.batch())
    return found


@mostly_slow("world", [1, 2, 3], keep=(1,))
def test_layers_of_a_batch_have_masks_by_name(world):
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()[None, None]
    seen = {
        "documents": seen_by_documents(), "video": seen_by(VIDEO), "kinds": seen_by(KINDS),
        "window": seen_by_documents(30), "again": seen_by(VIDEO), "whole": causal, "alone": causal,
    }  # fmt: skip
    expected = {name: definition(of_name) for name, of_name in seen.items()}
    assert_close(expected["video"], by_definition(seen["video"]))
    for ways in gloo.run(world, several_masks):
        assert len(ways) >= 5
        for found in ways:
            assert found.keys() == expected.keys()
            for name, tensors in found.items():
                assert_close(tensors, expected[name])


def test_a_balanced_layout_balances_the_sum_of_all_masks():
    """The first third of queries sees much under one mask, and the last under the other."""
    masks = {
        "first": np.array([(0, 512, 0, 2048, 0), (512, 2048, 0, 64, 0)]),
        "last": np.array([(0, 1536, 0, 64, 0), (1536, 2048, 0, 2048, 0)]),
    }
    settings = compose_settings(4, (), seq="2k", layout="balanced")
    cp = ContextParallel(settings, Processes(0, [(0, 1, 2, 3)]))

    def largest(batch: ContextBatch) -> float:
        """The largest sum of pairs of a worker under both masks, divided by the mean."""
        pairs = sum(mask.high[0] - mask.low[0] for (mask,) in both.by_name.values())
        work = [pairs[batch.layout.positions(worker)].sum() for worker in range(4)]
        return max(work) / np.mean(work)

    both = cp.batch(masks=masks)
    assert largest(both) < 1.03
    assert all(largest(cp.batch(slices=one)) > 1.1 for one in masks.values())


def test_batches_with_the_same_masks_share_layout_and_plans():
    settings = compose_settings(2, (), seq=str(SEQ), layout="balanced")
    cp = ContextParallel(settings, Processes(0, [(0, 1)]))
    named = {"all": None, "video": VIDEO}
    first, second, other, fourth = (
        cp.batch(masks=masks)
        for masks in (named, {**named, "video": VIDEO.copy()}, {**named, "video": KINDS}, named)
    )
    assert second.layout is first.layout
    assert other.layout is not first.layout
    assert np.array_equal(fourth.positions, first.positions)
    alone = made("vertical_slash")
    plans = []
    for _ in range(2):
        batch = alone.batch(masks={"documents": None, "chunks": CHUNKS})
        tensors = [*of_mask(batch, "documents"), *of_mask(batch, "chunks")]
        plans.append(([attend.plan for attend in batch._attention.values()], tensors))
    (one, found), (two, again) = plans
    assert len(one) == 2
    assert all(plan is same for plan, same in zip(one, two, strict=True))
    assert all(map(torch.equal, found, again))


CHUNKS = np.array([(n, min(n + 45, SEQ), n, min(n + 45, SEQ), 1) for n in range(0, SEQ, 45)])


def sparse_chunks(_rank: int, _world: int) -> list[Results]:
    cp = made("vertical_slash", layout="balanced", exchange="group_cast")
    batch = cp.batch(DOCUMENTS, masks={"documents": None, "chunks": CHUNKS})
    return [of_mask(batch, name) for name in ("documents", "chunks")]


def test_a_pattern_serves_masks_by_name():
    expected = [
        results(made("vertical_slash").batch(DOCUMENTS)),
        results(made("vertical_slash", "mask.chunk=45", mask="chunked").batch()),
    ]
    for both in gloo.run(2, sparse_chunks):
        for found, wanted in zip(both, expected, strict=True):
            assert_close(found, [tensor.double() for tensor in wanted])


def test_a_label_counts_if_no_mask_shows_it():
    batch = made().batch(
        DOCUMENTS, masks={"documents": None, "shown": np.array([(9, 20, 0, 31, 0)])}
    )
    labels = torch.arange(SEQ)[None]
    targets = batch.targets(labels)[0]
    ignored = (targets == IGNORED).nonzero().flatten().tolist()
    assert ignored == [*range(9, 30), 69, 179, SEQ - 1]


class Type(enum.Enum):
    """As MagiAttention names its types."""

    FULL = "full"
    CAUSAL = "causal"
    INVCAUSAL = "inv_causal"
    BICAUSAL = "bi_causal"


class Ranges:
    """As MagiAttention gives its ranges."""

    def __init__(self, ranges: IntArray) -> None:
        self.ranges = ranges

    def to_naive_ranges(self) -> list[tuple[int, int]]:
        return [(start, stop) for start, stop in self.ranges.tolist()]


def forms(folder: Path) -> dict[str, object]:
    np.save(folder / "one.npy", KINDS.astype(np.int32))
    np.savez(folder / "both.npz", first=KINDS, second=VIDEO)
    q, k, kinds = KINDS[:, :2], KINDS[:, 2:4], KINDS[:, 4]
    types = [Type.FULL, Type.CAUSAL, Type.INVCAUSAL, Type.BICAUSAL]
    named = [types[kind] for kind in kinds]
    tensors = [torch.from_numpy(part).int() for part in (q, k, kinds)]
    return {
        "array": KINDS,
        "tensor": torch.from_numpy(KINDS),
        "list": [KINDS],
        "nested list": [KINDS.tolist()],
        "file": folder / "one.npy",
        "list of files": [str(folder / "one.npy")],
        "ranges": dict(zip(("q_ranges", "k_ranges", "attn_type_map"), tensors, strict=True)),
        "classes": {"q_ranges": Ranges(q), "k_ranges": Ranges(k), "attn_type_map": named},
        "names": [
            {"q_ranges": q.tolist(), "k_ranges": k, "attn_type_map": [t.value for t in named]}
        ],
    }


def test_all_forms_give_the_same_mask(tmp_path):
    cp, wanted = made(), SequenceMask.from_slices(KINDS, SEQ, SEQ)
    for name, given in forms(tmp_path).items():
        (mask,) = cp.batch(slices=given).masks
        assert mask.same_as(wanted), name
    first, second = cp.batch(slices=tmp_path / "both.npz").masks
    assert first.same_as(wanted)
    assert second.same_as(SequenceMask.from_slices(VIDEO, SEQ, SEQ))
    (empty,) = cp.batch(slices=np.zeros((0, 5), int)).masks
    assert empty.pairs == 0


def other_keys(_rank: int, _world: int) -> list[Results]:
    """The first 90 tokens are keys from elsewhere, the others are queries without own keys."""
    return [
        results(made(layout=layout, exchange=exchange).batch(slices=CROSS))
        for layout, exchange in (("zigzag", "ring"), ("balanced", "group_cast"))
    ]


CROSS = np.array([(90, SEQ, 0, 90, 0)])


def test_queries_see_keys_from_elsewhere_through_a_joint_sequence():
    """Equal to attention of 160 queries to 90 keys."""
    q, k, v, dout = whole_tensors()
    q, k, v, dout = q[:, 90:], k[:, :90], v[:, :90], dout[:, 90:]
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    k, v = (tensor.repeat_interleave(2, 2) for tensor in (k, v))
    parts = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for both in gloo.run(2, other_keys):
        for out, dq, dk, dv in both:
            assert_close([out[:, 90:], dq[:, 90:], dk[:, :90], dv[:, :90]], wanted)
            assert not any(tensor[:, :90].any() for tensor in (out, dq))
            assert not any(tensor[:, 90:].any() for tensor in (dk, dv))


def many_intervals(_rank: int, _world: int) -> list[Results]:
    return [
        results(made(layout=layout, exchange=exchange, kernel=kernel).batch(slices=EVEN_KEYS))
        for layout, exchange in (("zigzag", "ring"), ("balanced", "group_cast"))
        for kernel in ("auto", "sdpa", "reference")
    ]


def test_some_kernels_serve_many_intervals():
    wanted = by_definition(seen_by(EVEN_KEYS))
    for ways in gloo.run(2, many_intervals):
        for found in ways:
            assert_close(found, wanted)


def test_a_window_cuts_many_intervals():
    causal = np.array([(key, SEQ, key, key + 1, 0) for key in range(0, SEQ, 4)])
    away = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    wanted = definition(seen_by(causal) & (away >= 0) & (away < 100))
    assert_close(of_mask(made().batch(slices=causal), None, window=100), wanted)


def test_a_batch_of_few_intervals_follows_one_of_many():
    cp = made()
    for slices in (EVEN_KEYS, KINDS, EVEN_KEYS):
        found = results(cp.batch(slices=slices))
        assert_close(found, definition(seen_by(slices)))
    assert "kernel sdpa" in cp.describe()


X = torch.zeros(1, SEQ, 2, DIM)
RANGES = {"q_ranges": [[0, 9]], "k_ranges": [[0, 9]], "attn_type_map": [0]}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda cp: cp.batch(masks={}), "masks: has no name; give a dict of names and slices"),
        (lambda cp: cp.batch(slices=KINDS, masks=NAMED),
         "slices, masks: each describes the masks; give one of them"),
        (lambda cp: cp.batch(masks={"a": KINDS, "b": [KINDS, VIDEO]}),
         "masks: are for 1 and 2 sequences; give all for the same number"),
        (lambda cp: cp.batch([DOCUMENTS, DOCUMENTS], masks={"a": KINDS, "b": None}),
         "masks: are for 1 and 2 sequences; give all for the same number"),
        (lambda cp: cp.batch(masks=NAMED).attention(X, X, X, 0),
         "mask=None: is not in the batch; give one of documents, video, kinds"),
        (lambda cp: cp.batch(masks=NAMED).attention(X, X, X, 0, mask="vido"),
         "mask=vido: is not in the batch; give one of documents, video, kinds"),
        (lambda cp: cp.batch().attention(X, X, X, 0, mask="video"),
         "mask=video: the batch has one mask; leave it out"),
        (lambda cp: cp.batch(masks=NAMED).attention(X, X, X, 0, mask="video", window=9),
         "window=9: must be at least 1 token, under a mask without later keys"),
        (lambda _: made("vertical_slash").batch(masks={"full": None, "video": VIDEO}),
         "masks['video']: sparsity=vertical_slash needs masks in which each query sees one range "
         "of keys that ends at the query; give sparsity=dense"),
        (lambda cp: cp.batch(masks={"a": np.array([(0, 9, 0, 300, 0)])}),
         "masks['a']: The slice [0, 9, 0, 300, 0] of (query start, query stop, key start, key st"),
        (lambda cp: cp.batch().attention(X, X[:, :90], X[:, :90], 0),
         "k, v: have 90 tokens, q has 250; put keys from elsewhere into the sequence and say by "
         "slices who sees them"),
        (lambda _: results(made(kernel="triton").batch(slices=EVEN_KEYS)),
         "kernel=triton: a query sees 40 separate intervals of keys; allowed: at most 16. Merge "
         "slices, or give kernel=auto or sdpa for up to 256"),
        (lambda _: api.context_parallel(seq=1000).batch(
            slices=np.array([(9, 11, key, key + 1, 0) for key in range(0, 1000, 3)])),
         "slices: The query at position 9 sees 334 separate intervals of keys; allowed: at most "
         "256. Merge slices into wider ones, or split the document"),
        (lambda cp: cp.batch(slices=np.tile([(0, SEQ, 0, SEQ, 0)], (70_000, 1))),
         "slices: name each query in 70000 slices on average; allowed: 64, and more in short seq"),
        (lambda cp: cp.batch(slices=3), "slices: give an int array [slices, 5], a .npy or .npz"),
        (lambda cp: cp.batch(slices=[]), "slices: give an int array [slices, 5], a .npy or .npz"),
        (lambda cp: cp.batch(slices=[(0, 9, 0, 9, 0)]),
         "slices: has the shape [5]; give [slices, 5]"),
        (lambda cp: cp.batch(slices=KINDS[:, :4]), "slices: has the shape [4, 4]; give [sl"),
        (lambda cp: cp.batch(slices=KINDS / 1), "slices: must be whole numbers, not float64"),
        (lambda cp: cp.batch(slices=[[(0, 9), (0, 9, 0)]]),
         "slices: has rows of different lengths; give [slices, 5]"),
        (lambda cp: cp.batch(slices={"q_ranges": [[0, 9]]}),
         "slices: has the keys q_ranges; give q_ranges, k_ranges, attn_type_map"),
        (lambda cp: cp.batch(slices=RANGES | {"attn_type_map": [0, 1]}),
         "slices: has 1 q_ranges, 1 k_ranges and 2 types; give equally many"),
        (lambda cp: cp.batch(slices=RANGES | {"attn_type_map": ["upper"]}),
         "slices: attn_type_map has 'upper'; allowed: full, causal, inv_causal, bi_causal, or 0"),
        (lambda cp: cp.batch(slices=RANGES | {"attn_type_map": [4]}),
         "slices: attn_type_map has 4; allowed: full, causal, inv_causal, bi_causal, or 0 to 3"),
        (lambda cp: cp.batch(slices=RANGES | {"k_ranges": [[0, 9, 1]]}),
         "slices: k_ranges: has the shape [1, 3]; give [ranges, 2]"),
    ],
)  # fmt: skip
def test_a_mistake_in_masks_is_one_line(call, problem):
    with pytest.raises(api.ConfigError) as raised:
        call(made(layout="contiguous"))
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)


def test_files_that_hold_no_slices_are_refused(tmp_path):
    rule = "give a .npy file of an int array [slices, 5], or an .npz file with one per sequence"
    pickled, cut, other = (tmp_path / name for name in ("pickled.npy", "cut.npz", "other.npz"))
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    np.savez(other, first=KINDS, second=KINDS / 1)
    cut.write_bytes(other.read_bytes()[:200])
    (tmp_path / "text.npy").write_text("0 9 0 9 0")
    np.savez(tmp_path / "both.npz", first=KINDS, second=VIDEO)
    problems = {
        pickled: f"slices={pickled}: cannot be read (no array of numbers);",
        cut: f"slices={cut}: cannot be read (File is not a zip file); {rule}",
        tmp_path / "text.npy": f"slices={tmp_path / 'text.npy'}: cannot be read (",
        tmp_path / "none.npy":
            f"slices={tmp_path / 'none.npy'}: cannot be read (No such file or directory); {rule}",
        other: f"slices={other}: second: must be whole numbers, not float64",
    }  # fmt: skip
    for path, problem in problems.items():
        with pytest.raises(api.ConfigError) as raised:
            read_slices("slices", path, SEQ)
        assert str(raised.value).startswith(problem)
        assert "\n" not in str(raised.value)
    with pytest.raises(api.ConfigError, match=r"both.npz: holds 2 sequences; give one per item"):
        read_slices("slices", [tmp_path / "both.npz"], SEQ)
