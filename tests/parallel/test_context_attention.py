"""Attention over real processes equals the float64 oracle on one: output and all gradients."""

from __future__ import annotations

from itertools import product

import gloo
import numpy as np
import pytest
import torch
from attention.mask_definitions import by_slices, predicate, question
from attention.sparse_problems import held_rows, start_index
from parallel.ways import Way, group_of
from slow_cases import mostly_slow

from mtrain_cli.attention.index import BlockBitmap, Index, StartBitmap, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.kernel_registry import _KERNELS
from mtrain_cli.attention.mask import SequenceMask, causal_slices, cut_slices
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import NAMED
from mtrain_cli.parallel.context_attention import _Attend, gather_rows, make_index_group
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.exchange import Plan, ShardTiles, make_exchange
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.pattern import MaskedPositions

SEQ, BATCH, HEAD_DIM, BLOCK = 61, 2, 8, 4
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
HEADS = ((4, 4), (4, 2), (4, 1))
INDICES = ("dense", "vertical_slash", "diagonals", "bitmap", "starts", "nothing")


WAYS = (
    Way("all_gather"),
    Way("all_gather", chunks=2),
    Way("hierarchical_all_gather", per_node=2),
    Way("hierarchical_all_gather", per_node=2, chunks=2),
    Way("all_gather", chunks=4),
    Way("hierarchical_all_gather", per_node=2, chunks=4),
    Way("group_cast"),
    Way("group_cast", chunks=2),
    Way("group_cast", heads=2),
    Way("hierarchical_group_cast", per_node=2),
    Way("hierarchical_group_cast", per_node=2, chunks=2),
    Way("ring"),
    Way("ring", prefetch=2, shared_columns=False),
    Way("ring", circulates="queries"),
    Way("hierarchical_ring", per_node=2),
    Way("hierarchical_ring", per_node=1),
    Way("hierarchical_ring", per_node=3, prefetch=2),
    Way("hierarchical_ring", per_node=2, circulates="queries"),
    Way("all_gather", heads=2),
    Way("ring", heads=2),
    Way("all_gather", heads=4),
    Way("hierarchical_ring", heads=2, per_node=2, circulates="queries"),
)


# {name: (number of tokens, mask, its keys, whether it is cut at documents)}
MASKS: dict[str, tuple[int, str, dict, bool]] = {
    "causal": (SEQ, "causal", {}, False),
    "docs": (SEQ, "causal", {}, True),
    "window": (SEQ, "sliding_window", {"window": 9, "global_tokens": 0}, False),
    "window, docs": (SEQ, "sliding_window", {"window": 5, "global_tokens": 0}, True),
    "window, sinks": (SEQ, "sliding_window", {"window": 6, "global_tokens": 3}, False),
    "full, docs": (SEQ, "full", {}, True),
    "prefix": (SEQ, "prefix_lm", {"prefix": 22}, False),
    "blocks, docs": (SEQ, "block_causal", {"block": 7}, True),
    "block window": (SEQ, "block_window", {"block": 8, "back": 2}, False),
    "chunks, docs": (SEQ, "chunked", {"chunk": 5}, True),
    "video": (60, "video", {"frames": 5, "height": 3, "width": 4, "window": (3, 2, 3)}, False),
    "dilated": (SEQ, "dilated", {"block": 3, "stride": 4, "count": 4}, True),
    "data": (SEQ, "data", {}, True),
}
# Documents that bring their masks, for each sequence: (slices, or None; length; first token in the
# sequence). The last document of a sequence ends after it.
FROM_DATA: tuple[tuple[tuple[np.ndarray | None, int, int], ...], ...] = (
    (
        (question(9, 3, 7), 30, 5),
        (None, 8, 0),
        (np.array([[0, 40, 0, 40, 3], [4, 40, 0, 40, 2], [3, 9, 20, 39, 1]]), 40, 0),
    ),
    ((np.array([[2, 20, 0, 11, 2], [0, 30, 12, 31, 0]]), 33, 0), (question(6, 5, 6), 36, 0)),
)
CAUSAL_INTERVALS = ("causal", "docs", "window", "window, docs")

STAGED = (
    Way("group_cast", stages=1),
    Way("group_cast", chunks=2, stages=1),
    Way("group_cast", heads=2, stages=1),
    Way("hierarchical_group_cast", per_node=2, stages=1),
    Way("hierarchical_group_cast", per_node=2, stages=2),
    Way("hierarchical_group_cast", per_node=2, chunks=2, stages=2),
    # Ulysses cuts each rank's share of the heads into parts.
    Way("group_cast", heads=2, chunks=2),
    Way("group_cast", heads=2, chunks=2, stages=1),
    # More stages than ranks mean a stage for each rank, and each pass has its own.
    Way("group_cast", stages=8),
    Way("group_cast", stages=2, stages_backward=0),
    Way("group_cast", chunks=2, stages=0, stages_backward=2),
    Way("hierarchical_group_cast", per_node=1, stages=2, stages_backward=3),
    Way("hierarchical_group_cast", per_node=2, stages=0, stages_backward=3),
    Way("hierarchical_group_cast", per_node=2, chunks=2, stages=3, stages_backward=1),
)


def document_ids(length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [np.sort(rng.integers(0, 5, length)) for _ in range(BATCH)]


def masks(name: str, padded: int) -> list[SequenceMask]:
    length, kind, keys, documents = MASKS[name]
    if kind == "data":
        rule, ids = MaskRule(True), document_ids(length)
        return [rule(i, length, padded, data_slices(n)) for n, i in enumerate(ids)]
    rule = MaskRule(documents, NAMED[kind](**keys))
    return [rule(ids, length, padded) for ids in document_ids(length)]


def data_slices(sequence: int) -> np.ndarray:
    """The slices of a sequence, in positions, cut at its ends as a dataset cuts them."""
    parts, place = [], 0
    for slices, length, first in FROM_DATA[sequence]:
        stop = min(length, first + SEQ - place)
        part = causal_slices(stop - first) if slices is None else cut_slices(slices, first, stop)
        part[:, :4] += place
        parts.append(part)
        place += stop - first
    assert place == SEQ
    return np.concatenate(parts)


def seen_by_documents(sequence: int) -> np.ndarray:
    """bool [SEQ, SEQ], from the whole documents."""
    seen, place = np.zeros((SEQ, SEQ), bool), 0
    for slices, length, first in FROM_DATA[sequence]:
        whole = np.tri(length, dtype=bool) if slices is None else by_slices(slices, length)
        part = whole[first:, first:][: SEQ - place, : SEQ - place]
        seen[place : place + len(part), place : place + len(part)] = part
        place += len(part)
    return seen


def inputs(heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout of whole sequences; the same on every process."""
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(BATCH, SEQ, h, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype)
        for h in shapes
    ]


def index_of(kind: str, heads: int, layout: Layout) -> Index | None:
    """The index of a case, the same on every process.

    One head of a sequence has nothing chosen; under `nothing` no head has anything chosen.
    """
    if kind == "dense":
        return None
    blocks = -(-layout.padded_seq // BLOCK)
    rng = np.random.default_rng(heads)
    slashes = torch.from_numpy(rng.random((BATCH, heads, blocks)) < 0.3)
    slashes[0, 1] = False
    columns = torch.full((BATCH, heads, 9), blocks * BLOCK, dtype=torch.int32)
    for b, h in product(range(BATCH), range(heads)):
        count = 7 if (b, h) != (0, 1) else 0
        columns[b, h, :count] = torch.from_numpy(np.sort(rng.choice(SEQ, count, replace=False)))
    if kind == "starts":
        return start_index(np.random.default_rng(heads), 2, heads, layout.padded_seq, BLOCK)
    if kind == "bitmap":
        bits = torch.from_numpy(rng.random((BATCH, heads, blocks, blocks)) < 0.3).tril()
        return BlockBitmap.whole(BLOCK, bits)
    if kind == "nothing":
        none = torch.full_like(columns[..., :3], blocks * BLOCK)
        return VerticalSlash(BLOCK, blocks, torch.zeros_like(slashes), none)
    return VerticalSlash(
        BLOCK, blocks, slashes, columns[..., : 0 if kind == "diagonals" else 9].contiguous()
    )


def seen_by_definition(name: str, index: Index | None) -> torch.Tensor:
    """bool [batch, heads or 1, SEQ, SEQ], computed from mask and index only."""
    length, kind, keys, documents = MASKS[name]
    seen, at = torch.zeros(BATCH, 1, SEQ, SEQ, dtype=torch.bool), torch.arange(SEQ)
    for row, ids in enumerate(document_ids(length)):
        own = ids if documents else None
        allowed = seen_by_documents(row) if kind == "data" else predicate(kind, length, own, **keys)
        allowed &= (ids[:, None] == ids) | (not documents) | (kind == "data")
        seen[row, 0, :length, :length] = torch.from_numpy(allowed)
    if isinstance(index, StartBitmap):
        index = index.per_head()
        starts = index.starts[:, :, at // BLOCK][..., at // BLOCK]
        seen = seen & (at[:, None] % BLOCK >= starts)
    if isinstance(index, BlockBitmap):
        return seen & index.bits[:, :, at // BLOCK][..., at // BLOCK]
    if isinstance(index, VerticalSlash):
        away = at[:, None] // BLOCK - at // BLOCK
        chosen = index.slashes[:, :, away.clamp(min=0)] & (away >= 0)
        single = (index.columns[..., None] == at).any(2)
        return seen & (chosen | single[:, :, None])
    return seen


def oracle(heads: int, kv_heads: int, mask: str, index: Index | None) -> list[torch.Tensor]:
    """out, dq, dk, dv by autograd from the definition, and lse [batch, heads, SEQ]."""
    q, k, v, dout = inputs(heads, kv_heads, torch.float64)
    for t in (q, k, v):
        t.requires_grad_()
    seen = seen_by_definition(mask, index)
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(heads // kv_heads, 2))
        / HEAD_DIM**0.5
    )
    # Rows that see nothing give 0.
    p = scores.masked_fill(~seen, -1e300).softmax(-1) * seen.any(-1, keepdim=True)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(heads // kv_heads, 2))
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout), lse.detach()]


class Given:
    """A stand-in for `ContextAttention` with a given index; keeps the lse of its forward pass."""

    def __init__(self, exchange, kernel) -> None:
        self.of, self.kernel = exchange, kernel
        self.exchange = self
        self.recorder = None
        self.kind = ""
        self.kept = {}
        self.lse = torch.empty(0)

    def forward(self, *args):
        out, self.lse, saved = self.of.forward(*args)
        return out, self.lse, saved

    def backward(self, *args):
        return self.of.backward(*args)

    @staticmethod
    def scale(head_dim: int) -> float:
        return head_dim**-0.5

    def release(self, layer: int) -> None:
        pass


def lse_difference(
    lse: torch.Tensor, expected: torch.Tensor, layout: Layout, rank: int, heads: int
) -> float:
    """The largest error of lse on this rank.

    The rank holds its own queries; if heads are shared, its group's queries for some heads.
    """
    first, place = rank - rank % heads, rank % heads
    positions = np.sort(np.concatenate([layout.positions(r) for r in range(first, first + heads)]))
    real = positions < SEQ
    part = expected.unflatten(1, (heads, -1))[:, place][:, :, positions[real]]
    got = lse[:, :, real].double()
    assert got.isneginf().equal(part.isneginf()), "-inf where nothing is seen, and only there"
    assert bool(lse[:, :, ~real].isneginf().all()), "nothing is seen by padding"
    seen = ~part.isneginf()
    return (got[seen] - part[seen]).abs().max().item() if seen.any() else 0.0


def cells(
    rank: int,
    world: int,
    kernel_name: str,
    dtype_name: str,
    kinds: tuple[str, ...],
    every: bool,
    names: tuple[str, ...] = ("causal", "docs"),
    head_counts: tuple[tuple[int, int], ...] = HEADS,
    ways: tuple[Way, ...] = WAYS,
    stride: int = 1,
) -> dict[str, float]:
    """The largest difference from the oracle on this rank, for every cell; or for one mask of each
    way, heads, layout and index, in turn, so that each mask still meets every two of these; even
    numbers of workers begin with the other one.

    stride: test every stride-th cell. A stride of 3 leaves every two of way, heads, layout and
        index together, and a stride of 2 leaves every two of way, layout and mask.
    """
    dtype, kernel = getattr(torch, dtype_name), _KERNELS[kernel_name]()
    groups: dict[tuple[int, int], ContextGroup] = {}
    worst, expected = {}, {}
    for way, (heads, kv_heads) in product(ways, head_counts):
        if not way.fits(world, kv_heads):
            continue
        shape = way.per_node, way.heads
        if shape not in groups:
            groups[shape] = group_of(
                rank,
                world,
                per_node=way.per_node,
                heads=way.heads,
            )
        group = groups[shape]
        for layout_name, kind in product(LAYOUTS, kinds):
            balancer = None
            if layout_name == "balanced":
                balancer = Balancer(world, SEQ, BLOCK, way.heads)
                layout: Layout = balancer.layout([masks("causal", balancer.padded_seq)])
            else:
                layout = make_layout(layout_name, world, SEQ, BLOCK, unit=BLOCK)
            exchange = make_exchange(way.exchange, layout, group, **way.options)
            index = index_of(kind, heads, layout)
            turn = world + ways.index(way) + HEADS.index((heads, kv_heads))
            turn += LAYOUTS.index(layout_name) + INDICES.index(kind)
            for mask_name in names if every else (names[turn % len(names)],):
                if (turn + (every and names.index(mask_name))) % stride:
                    continue
                name = (heads, kv_heads, mask_name, kind, layout.padded_seq)
                if name not in expected:
                    expected[name] = oracle(heads, kv_heads, mask_name, index)
                batch_masks = masks(mask_name, layout.padded_seq)
                if balancer is not None:
                    layout = balancer.layout([batch_masks])
                tiles = tiles_of(exchange, batch_masks, layout, index)
                key = f"{way}/{layout_name}/{heads}:{kv_heads}/{kind}/{mask_name}"
                own = inputs(heads, kv_heads, dtype)
                worst[key] = difference(exchange, kernel, tiles, layout, own, expected[name], key)
    return worst


def tiles_of(exchange, batch_masks, layout: Layout, index: Index | None) -> ShardTiles:
    """The tiles of this rank under the index. Ranks know only their own rows of a bitmap."""
    request = None if index is None else IndexRequest(BLOCK, bitmap=False)
    tiles = Plan.make(exchange, batch_masks, request, layout=layout).tiles
    if not isinstance(index, BlockBitmap):
        return tiles.under(index)
    rank, group = exchange.group.rank, exchange.group
    held = np.unique(layout.positions(rank) // BLOCK).astype(np.int32)
    own = held_rows(index, torch.from_numpy(held))
    if not exchange.foreign_queries:
        return tiles.under(own)
    shards = [layout.positions(r) for r in range(group.size)]
    masked = MaskedPositions.make(batch_masks, BLOCK, shards, rank)
    return tiles.under(gather_rows(own, masked.with_group(make_index_group(group))))


def difference(exchange, kernel, tiles, layout: Layout, whole, expected, key: str) -> float:
    """The largest difference of this rank's results from those of the oracle."""
    rank = exchange.group.rank
    positions = layout.positions(rank)
    real = positions < SEQ
    # Padding must not affect the result: fill it with a large number.
    q, k, v, dout = (t[:, torch.from_numpy(np.minimum(positions, SEQ - 1))] for t in whole)
    for t in (q, k, v):
        t[:, ~real] = 50.0
        t.requires_grad_()
    given = Given(exchange, kernel)
    out = _Attend.apply(q, k, v, given, tiles, 0)
    gradients = torch.autograd.grad(out, (q, k, v), dout.clone())
    assert all(bool(t[:, ~real].eq(0).all()) for t in (out, gradients[0])), f"padding: {key}"
    assert all(bool(t.isfinite().all()) for t in gradients), key
    found = [lse_difference(given.lse, expected[4], layout, rank, exchange.schedule.heads)]
    if real.any():
        for got, want in zip((out, *gradients), expected[:4], strict=True):
            found.append((got[:, real].double() - want[:, positions[real]]).abs().max().item())
    return max(found)


def assert_equal(world: int, tolerance: float, least: int, *given) -> list[dict[str, float]]:
    """Compare all cells with the oracle. least: number of cells on each rank."""
    found = gloo.run(world, cells, *given)
    for rank, worst in enumerate(found):
        assert len(worst) >= least
        bad = {cell: far for cell, far in worst.items() if not far <= tolerance}
        assert not bad, f"rank {rank}: {bad}"
    return found


CASES = [
    ("reference", "float64", ("dense", "vertical_slash", "nothing"), 1e-13),
    ("sdpa", "float32", INDICES, 1e-5),
]


# The float64 cases test the same exchanges more exactly, and take longer.
# A stride of 6 leaves heads, layouts and indices of every exchange.
USUAL = [
    pytest.param(("sdpa", "float32", INDICES[:2], 1e-5), 2, False, 6, id="sdpa-2"),
    pytest.param(CASES[1], 3, False, 6, id="sdpa-3"),
    # Four workers, for the exchanges over nodes.
    pytest.param(("sdpa", "float32", INDICES[:2], 1e-5), 4, False, 6, id="sdpa-4"),
    *(
        pytest.param(case, world, False, 3, id=f"{case[0]}-{world}-third", marks=pytest.mark.slow)
        for case, world in ((CASES[0], 2), (CASES[1], 3), (CASES[1], 4))
    ),
]
EVERY = [
    pytest.param(case, world, True, 1, id=f"{case[0]}-{world}-every", marks=pytest.mark.slow)
    for case in CASES
    for world in (1, 2, 3, 4, 6)
]


@pytest.mark.parametrize(("case", "world", "every", "stride"), [*USUAL, *EVERY])
def test_output_and_gradients_equal_the_oracle(case, world, every, stride):
    kernel, dtype, kinds, tolerance = case
    given = (kernel, dtype, kinds, every, ("causal", "docs"), HEADS, WAYS, stride)
    for worst in assert_equal(world, tolerance, 20, *given):
        fitting = (way for way in WAYS if any(way.fits(world, kv) for _, kv in HEADS))
        assert {way.exchange for way in fitting} == {cell.split()[0] for cell in worst}


OTHERS = tuple(name for name in MASKS if name not in ("causal", "docs"))


@pytest.mark.parametrize(
    ("kernel", "world", "stride"),
    [
        ("reference", 1, 7),
        ("sdpa", 3, 5),
        *(pytest.param("sdpa", world, 1, marks=pytest.mark.slow) for world in (2, 3)),
    ],
)
def test_every_mask_equals_the_oracle(kernel, world, stride):
    """Dense attention in every layout and exchange."""
    given = (kernel, "float64", ("dense",), True, OTHERS, ((4, 2),), WAYS, stride)
    assert_equal(world, 1e-12, 60, *given)


@pytest.mark.parametrize(
    ("world", "stride"),
    [(1, 7), (3, 5), *(pytest.param(world, 1, marks=pytest.mark.slow) for world in (2, 3))],
)
def test_indices_compose_with_sliding_windows(world, stride):
    names = tuple(name for name in CAUSAL_INTERVALS if name in OTHERS)
    kinds = ("vertical_slash", "bitmap")
    assert_equal(world, 1e-12, 1, "reference", "float64", kinds, False, names, HEADS, WAYS, stride)


TWO_LEVELS = tuple(
    Way("hierarchical_group_cast", per_node=2, chunks=chunks, stages=stages)
    for chunks, stages in ((1, 1), (2, 1), (1, 2), (1, 3))
)


@mostly_slow("kinds", [("dense",), ("vertical_slash", "bitmap")], keep=(1,))
def test_casts_over_nodes_compose_with_windows(kinds):
    names = tuple(name for name in MASKS if name.startswith("window") and name in CAUSAL_INTERVALS)
    cells_ = len(TWO_LEVELS) * len(kinds) * len(names) * len(LAYOUTS)
    assert_equal(4, 1e-12, cells_, "sdpa", "float64", kinds, True, names, ((4, 2),), TWO_LEVELS)


@pytest.mark.slow
def test_masks_on_five_workers_equal_the_oracle():
    """61 tokens on 5 workers: shards of different lengths before padding."""
    ways = (WAYS[0], Way("group_cast", chunks=2), STAGED[0], STAGED[1], Way("ring"))
    given = ("sdpa", "float64", ("dense",), False, OTHERS, HEADS, ways)
    for worst in assert_equal(5, 1e-12, 1, *given):
        assert len({cell.rpartition("/")[2] for cell in worst}) > len(OTHERS) // 2


@pytest.mark.parametrize(
    ("world", "stride"),
    [(2, 7), (4, 11), *(pytest.param(world, 1, marks=pytest.mark.slow) for world in (2, 4))],
)
def test_stages_of_group_casts_equal_the_oracle(world, stride):
    """Stages with parts of the heads, Ulysses, nodes, layouts, masks and indices."""
    kinds = ("dense", "vertical_slash", "nothing")
    given = ("sdpa", "float64", kinds, False, tuple(MASKS)[:4], ((4, 4), (4, 2)), STAGED, stride)
    assert_equal(world, 1e-12, 9, *given)


def test_stages_of_three_nodes_equal_the_oracle():
    """Two casts across nodes, each with a cast inside the node that forwards its rows."""
    ways = [
        Way("hierarchical_group_cast", per_node=2, stages=3),
        Way("hierarchical_group_cast", per_node=2, chunks=2, stages=2, stages_backward=8),
    ]
    given = ("sdpa", "float64", ("dense",), False, tuple(MASKS)[:2], ((4, 2),), tuple(ways))
    assert_equal(6, 1e-12, len(ways) * len(LAYOUTS), *given)


@mostly_slow(("world", "way"), [(4, STAGED[4]), (3, STAGED[0])], keep=(0,))
def test_stages_of_every_mask_equal_the_oracle(world, way):
    given = ("sdpa", "float64", ("dense",), True, OTHERS, ((4, 2),), (way,))
    assert_equal(world, 1e-12, len(OTHERS) * len(LAYOUTS), *given)
