"""The CUDA sources, run on a CPU (`emulated.py`), compute what PyTorch computes in their place."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.sparse_problems import Problem, column_problem, make_problem
from kernels.emulated import COMPILER, Emulator, use_emulator

from mtrain_cli.attention import block_lists, packed_columns, partials
from mtrain_cli.attention.column_blocks import Front
from mtrain_cli.attention.index import VerticalSlash

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


def problem(
    kind: str, where: str, documents: bool | None, seed: int = 0, seq: int = 109
) -> Problem:
    return make_problem(seed, kind, seq=seq, documents=documents, where=where)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["slashes", "both", "all", "none", "bitmap", "local bitmap"])
@pytest.mark.parametrize("documents", [False, True, None])
def test_block_lists_equal_pytorch(kind, documents, transposed, emulator, monkeypatch):
    for where in ("whole", "striped queries", "striped", "later queries"):
        # The last one has more blocks than a warp handles at a time.
        for seed, seq in ((0, 109), (1, 33), (2, 700)):
            p = problem(kind, where, documents, seed, seq)
            expected = block_lists.index_lists(p.tiles, transposed)
            with monkeypatch.context() as patch:
                use_emulator(emulator, patch, block_lists)
                actual = block_lists.index_lists(p.tiles, transposed)
            assert_equal_lists(actual, expected)
    assert emulator.launched[-1] == "block_lists"


FRONTS = [
    {},
    {"width": 128, "batch": 1, "kv_heads": 1},
    {"width": 500, "where": "striped queries", "blocks": 8},
    {"width": 77, "heads": 3, "kv_heads": 3, "tail": 50},
    {"width": 20, "batch": 1, "blocks": 1},
    # More tiles, and more blocks, than a warp has lanes.
    {"width": 4400, "batch": 1, "blocks": 41, "kv_heads": 1},
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", FRONTS)
@pytest.mark.parametrize("used", [True, False])
def test_lists_with_columns_in_front_equal_pytorch(shape, transposed, used, emulator, monkeypatch):
    p = column_problem(1, **shape)
    index = p.tiles.index
    assert isinstance(index, VerticalSlash)
    if not used:
        none = torch.full_like(index.columns, index.blocks * index.block)
        p = dataclasses.replace(
            p, tiles=p.tiles.with_index(dataclasses.replace(index, columns=none))
        )
    front = Front.of(p.tiles, shape.get("kv_heads", 2), backward=transposed)
    assert front is not None
    for parts in (front.parts, 3, 8) if transposed else (front.parts,):
        some = dataclasses.replace(front, parts=parts)
        expected = block_lists.index_lists(p.tiles, transposed, some)
        with monkeypatch.context() as patch:
            use_emulator(emulator, patch, block_lists)
            actual = block_lists.index_lists(p.tiles, transposed, some)
        assert_equal_lists(actual, expected)
        alone = block_lists.index_lists(p.tiles, transposed)
        more = expected["partial_count"].sum() > alone["partial_count"].sum()
        assert more == (used and index.blocks > 1)


def assert_equal_lists(actual: block_lists.Lists, expected: block_lists.Lists) -> None:
    for name in ("partial", "full"):
        count = expected[f"{name}_count"]
        assert torch.equal(actual[f"{name}_count"], count)
        assert actual[name].shape == expected[name].shape
        listed = torch.arange(actual[name].shape[-1], device=count.device) < count[..., None]
        assert torch.equal(actual[name][listed], expected[name][listed])


@pytest.mark.parametrize(("documents", "name"), [(None, "full"), (False, "partial")])
def test_more_blocks_than_the_index_allows_trap(documents, name, emulator, monkeypatch):
    p = problem("all", "whole", documents)
    assert isinstance(p.tiles.index, VerticalSlash)
    use_emulator(emulator, monkeypatch, block_lists)
    # Without padding a row sees all blocks but its own in full; a padded block sees all of them in
    # part.
    most = int(block_lists.index_lists(p.tiles, False)[f"{name}_count"].max())
    block_lists.index_lists(
        p.tiles.with_index(dataclasses.replace(p.tiles.index, max_slashes=most)), False
    )
    with pytest.raises(RuntimeError, match="trap"):
        block_lists.index_lists(
            p.tiles.with_index(dataclasses.replace(p.tiles.index, max_slashes=most - 1)), False
        )


def test_more_blocks_than_a_list_of_the_front_holds_trap(emulator, monkeypatch):
    tiles = column_problem(1, width=128, batch=1, kv_heads=1).tiles
    front = Front(group=4, parts=1, tiles=1)
    use_emulator(emulator, monkeypatch, block_lists)
    count = block_lists.index_lists(tiles, True, front)["partial_count"]
    most = int(count.max())
    assert most == count[:, :, : front.blocks].max() > 2
    monkeypatch.setattr(Front, "list_width", lambda *_: most)
    assert torch.equal(block_lists.index_lists(tiles, True, front)["partial_count"], count)
    monkeypatch.setattr(Front, "list_width", lambda *_: most - 1)
    with pytest.raises(RuntimeError, match="trap"):
        block_lists.index_lists(tiles, True, front)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["whole", "striped"])
def test_packing_columns_and_adding_gradients_equal_pytorch(dtype, where, emulator, monkeypatch):
    p = problem("both", where, True)
    k, v = p.k.to(dtype), p.v.to(dtype)
    expected = packed_columns.pack_columns(k, v, p.tiles)
    assert expected is not None
    columns = [torch.randn(3, *t.shape) for t in expected]
    sums = [t.clone() for t in (k, v)]
    slots = packed_columns.local_columns(p.tiles)[1]
    packed_columns.add_column_gradients(*sums, *columns, slots)
    use_emulator(emulator, monkeypatch, packed_columns)
    packed = packed_columns.pack_columns(k, v, p.tiles)
    assert packed is not None
    assert all(torch.equal(a, b) for a, b in zip(packed, expected, strict=True))
    actual, backwards = ([t.clone() for t in (k, v)] for _ in range(2))
    packed_columns.add_column_gradients(*actual, *columns, slots)
    # The bits do not depend on which program runs first: each row of dk and dv has one.
    monkeypatch.setattr(emulator, "backwards", True)
    packed_columns.add_column_gradients(*backwards, *columns, slots)
    assert all(map(torch.equal, actual, backwards))
    # Columns that heads of a group share are added one head at a time, rounded each time in
    # bfloat16.
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(actual, sums, strict=True)
    )
    assert not torch.equal(actual[0], k)
    assert {"pack_columns", f"add_column_gradients_{str(dtype).removeprefix('torch.')}"} <= set(
        emulator.launched
    )


def test_a_column_after_all_of_the_other_heads_keeps_its_gradient(emulator, monkeypatch):
    """The search for it ends behind that head's columns, where those of the next head begin."""
    slots = torch.tensor([[[0, 1, 2], [3, 4, 5]]], dtype=torch.int32)
    columns = torch.randn(2, 1, 1, 2, 3, 8)
    use_emulator(emulator, monkeypatch, packed_columns)
    dk, dv = torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8)
    packed_columns.add_column_gradients(dk, dv, *columns, slots)
    for target, source in zip((dk, dv), columns, strict=True):
        assert torch.equal(target.flatten(), source.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_equals_pytorch(dtype, emulator, monkeypatch):
    torch.manual_seed(0)
    out, part = torch.randn(2, 21, 6, 40), torch.randn(2, 21, 6, 40).to(dtype)
    lse, part_lse = (30 * torch.randn(2, 6, 21) for _ in range(2))
    lse[0, 0, :9], part_lse[0, 0, 5:12] = float("-inf"), float("-inf")
    out[0, :9, 0], part[0, 5:12, 0] = 0.0, 0.0
    expected, expected_lse = out.clone(), lse.clone()
    partials.merge(expected, expected_lse, part, part_lse)
    use_emulator(emulator, monkeypatch, partials)
    partials.merge(out, lse, part, part_lse)
    assert emulator.launched[-1] == f"merge_{str(dtype).removeprefix('torch.')}"
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
