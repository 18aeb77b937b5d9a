"""Processes that estimate an index together find what one process finds from the whole sequence."""

from __future__ import annotations

import copy
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from parallel.ways import group_of

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.parallel.context_attention import DynamicIndex, make_index_group
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.block_topk import BlockTopkPattern
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.index_maps import IndexMaps
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import MaskedPositions, Pattern
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.sparsity.xattention import XAttentionPattern

SEQ, BATCH, BLOCK, HEAD_DIM = 217, 2, 16, 16
LAYOUTS = ("contiguous", "zigzag", "striped")
HEADS = ((4, 4), (4, 2), (4, 1))


def vertical_slash(**changed) -> VerticalSlashPattern:
    default = {
        "block": BLOCK,
        "last_q": 20,
        "windows": 1,
        "p_v": 0.6,
        "p_s": 0.7,
        "joint": False,
        "sink_tokens": 2,
        "min_columns": 3,
        "max_columns": 40,
        "min_slashes": 1,
        "max_slashes": 0,
        "index_per": "query_head",
    }
    return VerticalSlashPattern(**{**default, **changed})


def block_topk(**changed) -> BlockTopkPattern:
    default = {
        "block": BLOCK, "density": 0.6, "threshold": 0.0, "row_cap": 1.5, "score": "exact",
        "rank": 8, "index_per": "query_head",
    }  # fmt: skip
    return BlockTopkPattern(**{**default, **changed})


PATTERNS: dict[str, Pattern] = {
    "block_topk": block_topk(),
    "block_topk of groups": block_topk(index_per="kv_group"),
    "block_topk above a threshold": block_topk(density=0.0, threshold=0.2),
    "block_topk of learned maps": block_topk(index_per="kv_group", score="learned"),
    "plain": vertical_slash(),
    "joint": vertical_slash(joint=True, p_v=0.8),
    "windows": vertical_slash(windows=3),
    "joint windows of groups": vertical_slash(windows=3, joint=True, index_per="kv_group", p_v=0.8),
    "per group": vertical_slash(index_per="kv_group"),
    "joint of the rest": vertical_slash(joint=True, p_v=0.8, p_of="rest", min_slashes=2),
    "token diagonals": vertical_slash(slash_unit="token"),
    "token diagonals of groups, joint": vertical_slash(
        slash_unit="token", joint=True, index_per="kv_group", p_v=0.8, max_slashes=30
    ),
    "any number of columns": vertical_slash(max_columns=0),
    # One worker cannot hold all the largest ones: candidates of all workers must be merged.
    "few columns": vertical_slash(max_columns=7, min_columns=7, max_slashes=3, sink_tokens=0),
    "moba": MobaPattern(BLOCK, 32, 3, "query"),
    "moba of blocks": MobaPattern(BLOCK, 32, 3, "block"),
    "xattention": XAttentionPattern(BLOCK, 4, 0.6),
    "fixed": FixedPattern(BLOCK, 4, 9, 0.0, 1),
}


def layout_of(name: str, world: int) -> Layout:
    """Layouts with whole blocks per worker; with 4 workers, the last contiguous part is padding."""
    unit = 2 * world * BLOCK
    return make_layout(name, world, SEQ if name == "striped" else -(-SEQ // unit) * unit, BLOCK)


def masked(
    pattern: Pattern, batch_masks: list[SequenceMask], layout: Layout, group: ContextGroup
) -> MaskedPositions:
    """Return the positions of one worker, whose estimates use the group."""
    shards, request = [layout.positions(r) for r in range(layout.workers)], pattern.request()
    mine = MaskedPositions.make(
        batch_masks, request.block, shards, group.rank, bitmap=request.bitmap
    )
    return mine.with_group(make_index_group(group))


def masks(documents: bool, padded: int) -> list[SequenceMask]:
    lengths = (SEQ, SEQ - 30)
    if not documents:
        return [SequenceMask.causal(n, padded) for n in lengths]
    rng = np.random.default_rng(7)
    return [SequenceMask.from_documents(np.sort(rng.integers(0, 4, n)), padded) for n in lengths]


def inputs(
    heads: int, kv_heads: int, dtype: torch.dtype, padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of whole sequences, the same on every process; a few keys get high scores."""
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    q, k = (
        torch.randn(BATCH, padded, h, HEAD_DIM, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads)
    )
    k[:, ::37] *= 3
    return q.to(dtype), k.to(dtype)


def estimates(
    rank: int,
    world: int,
    dtype_name: str,
    fused: bool = False,
    names: tuple[str, ...] = tuple(PATTERNS),
) -> dict[str, Any]:
    """By cell, this worker's index and counts; rank 0 also returns those of a single process."""
    dtype = getattr(torch, dtype_name)
    if fused:
        import mtrain_cli.sparsity.vertical_slash as module

        module.fused_probe_usable = lambda *_: True
    group = group_of(rank, world)
    found: dict[str, Any] = {}
    # The Triton interpreter takes seconds a cell.
    for heads, kv_heads in HEADS[1:2] if fused else HEADS:
        for documents in (True,) if fused else (False, True):
            for layout_name in LAYOUTS[1:] if fused else LAYOUTS:
                layout = layout_of(layout_name, world)
                padded = layout.padded_seq
                batch_masks = masks(documents, padded)
                q, k = inputs(heads, kv_heads, dtype, padded)
                own = torch.from_numpy(layout.positions(rank))
                my_q, my_k = q[:, own], k[:, own]
                for b, mask in enumerate(batch_masks):
                    # Padding must not affect the result.
                    my_q[b, own >= mask.length] = float("nan")
                    my_k[b, own >= mask.length] = 70.0
                for name in names:
                    pattern = copy.deepcopy(PATTERNS[name])  # maps have the shape of a model
                    dynamic = DynamicIndex(pattern, masked(pattern, batch_masks, layout, group))
                    index = dynamic.of(3, my_q, my_k)
                    mask_name = "docs" if documents else "causal"
                    cell = f"{layout_name}/{heads}:{kv_heads}/{mask_name}/{name}"
                    dynamic.count()
                    found[cell] = (index.tensors(), dynamic.records[0].counts.pairs)
                    if rank == 0:
                        bitmap = pattern.request().bitmap
                        positions = MaskedPositions.make(batch_masks, BLOCK, bitmap=bitmap)
                        alone = pattern.estimate(q, k, positions, 3)
                        work = MaskTables.make(
                            batch_masks, BLOCK, bitmap=isinstance(index, BlockBitmap)
                        )
                        found[cell] += (alone.tensors(), alone.counts(work).pairs)
    return found


def chosen_lines(tensors: dict[str, torch.Tensor]) -> set[tuple]:
    """Return everything that an index chooses, as (kind, sequence, head, ...)."""
    if "slashes" in tensors:
        columns = tensors["columns"]
        lines = {("slash", *at) for at in tensors["slashes"].nonzero().tolist()}
        unused = tensors["slashes"].shape[-1] * BLOCK
        return lines | {
            ("column", b, h, int(columns[b, h, i]))
            for b, h, i in (columns < unused).nonzero().tolist()
        }
    rows = tensors["rows"].tolist()
    return {("block", b, h, rows[i], j) for b, h, i, j in tensors["bits"].nonzero().tolist()}


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4))]
)
def test_in_float64_the_index_is_bitwise_equal(world):
    ranks = gloo.run(world, estimates, "float64")
    assert len(ranks[0]) == len(HEADS) * 2 * len(LAYOUTS) * len(PATTERNS)
    for cell, (_, _, alone, pairs) in ranks[0].items():
        found = [rank[cell][0] for rank in ranks]
        assert alone.keys() == found[0].keys()
        if "slashes" in alone:
            for rank, tensors in enumerate(found):
                assert all(torch.equal(tensors[name], alone[name]) for name in alone), (cell, rank)
                assert torch.equal(ranks[rank][cell][1], pairs), cell
            continue
        held = torch.cat([tensors["rows"] for tensors in found])
        assert sorted(held.tolist()) == alone["rows"].tolist(), cell
        bits = torch.cat([tensors["bits"] for tensors in found], 2)[:, :, held.argsort()]
        real = pairs_of_real_rows(bits, alone["bits"])
        assert torch.equal(bits[real], alone["bits"][real]), cell
        for name in {"gates", "starts"} & alone.keys():
            rows = [tensors[name].unflatten(2, (len(tensors["rows"]), -1)) for tensors in found]
            whole = torch.cat(rows, 2)[:, :, held.argsort()].flatten(2, 3)
            assert torch.equal(whole, alone[name]), cell
        assert torch.equal(sum(rank[cell][1] for rank in ranks), pairs), (
            f"{cell}: rows of all workers make the whole"
        )


def pairs_of_real_rows(bits: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """bool, like bits: query blocks that hold a token; choices for padding do not matter."""
    assert bits.shape == alone.shape
    real = torch.zeros_like(bits)
    for b, mask in enumerate(masks(False, bits.shape[-1] * BLOCK)):
        real[b, :, : -(-mask.length // BLOCK)] = True
    return real


# The Triton interpreter runs the fused probe.
KINDS = [
    ("float32", False),
    pytest.param("bfloat16", False, marks=pytest.mark.slow),
    pytest.param("float32", True, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "fused"), KINDS)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_in_lower_precision_only_ties_differ(world, dtype, fused):
    ranks = gloo.run(
        world, estimates, dtype, fused, ("joint windows of groups",) if fused else tuple(PATTERNS)
    )
    differing, lines = 0, 0
    for cell, (_, _, alone, _) in ranks[0].items():
        found = [rank[cell][0] for rank in ranks]
        if "slashes" in alone:
            assert all(
                torch.equal(tensors[name], found[0][name]) for tensors in found for name in alone
            ), f"{cell}: one for all workers"
            got = chosen_lines(found[0])
        else:
            got = set().union(*map(chosen_lines, found))
        differing += len(got ^ chosen_lines(alone))
        lines += len(got)
        assert len(got ^ chosen_lines(alone)) <= 2, cell
    assert lines > 30 * len(ranks[0]), "two sequences of at least two heads choose some lines"
    # The fused probe sums in the same order wherever the keys are.
    assert differing <= (0 if fused else lines / 5000), (differing, lines)


def scattered(rank: int, world: int) -> list[bool]:
    """Whether each worker holds a probed row of each sequence, under a contiguous layout."""
    group = group_of(rank, world)
    layout = layout_of("contiguous", world)
    mine = masked(PATTERNS["plain"], masks(False, layout.padded_seq), layout, group)
    return [len(probe.local) > 0 for probe in vertical_slash().probes(mine)]


def test_some_workers_hold_no_probed_query_and_some_only_padding():
    assert gloo.run(4, scattered) == [[False, False], [False, False], [True, True], [True, False]]


def test_shards_that_are_not_whole_blocks_are_refused():
    layout = make_layout("zigzag", 2, 72, BLOCK)
    with pytest.raises(ValueError, match="whole blocks"):
        MaskedPositions.make(
            [SequenceMask.causal(72, 72)], BLOCK, [layout.positions(r) for r in range(2)]
        )


def maps_after_updates(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return the maps of two layouts after updates; rank 0 also those of a single worker."""
    group, found = group_of(rank, world), {}
    q, k = inputs(4, 2, torch.float32, layout_of("zigzag", world).padded_seq)
    for name in ("zigzag", "striped"):
        layout = layout_of(name, world)
        whole = make_layout("striped", 1, layout.padded_seq, BLOCK)
        for workers in (group, *([ContextGroup()] if rank == 0 else [])):
            parts = whole if workers is not group else layout
            pattern = block_topk(index_per="kv_group", score="learned")
            positions = masked(pattern, masks(True, layout.padded_seq), parts, workers)
            own = torch.from_numpy(parts.positions(workers.rank))
            maps = IndexMaps.make(4, 2, HEAD_DIM, 8, 0, torch.device("cpu"))
            for turn in range(4):
                b = turn % BATCH
                at = [positions.in_blocks(t[b, own], b) for t in (q, k)]
                maps.learn(*at, positions, b, 7)
            found[f"{name} {'alone' if workers is not group else 'together'}"] = maps.query_mean
    return found


def test_workers_learn_the_maps_of_one_worker():
    first, *others = gloo.run(3, maps_after_updates)
    for name in ("zigzag", "striped"):
        alone = first[f"{name} alone"]
        torch.testing.assert_close(first[f"{name} together"], alone, rtol=1e-3, atol=1e-6)
        assert all(
            torch.equal(other[f"{name} together"], first[f"{name} together"]) for other in others
        )
