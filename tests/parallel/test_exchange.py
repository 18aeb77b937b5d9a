"""Messages reuse memory, but none that is still needed; empty tiles are not computed."""

from __future__ import annotations

from dataclasses import replace

import gloo
import pytest
import torch
from parallel.free_buffers import free_tensors
from parallel.ways import group_of, make_attention

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel.exchange import make_chosen_exchange, make_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.schedule import make_schedule
from mtrain_cli.parallel.transport import Buffers

SEQ = 48


class Counting(SdpaKernel):
    calls = 0

    def forward(self, *arguments):
        Counting.calls += 1
        return super().forward(*arguments)


def passes(rank: int, world: int, circulates: str) -> dict[str, object]:
    group = group_of(rank, world)
    layout = make_layout("contiguous", world, SEQ, 4)
    exchange = make_exchange("ring", layout, group, circulates=circulates)
    attend = make_attention(exchange, Counting(), [SequenceMask.causal(SEQ, SEQ)], "cpu")
    torch.manual_seed(rank)
    tensors = [torch.randn(1, SEQ // world, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    free, made, gradients = [], [], []
    take = Buffers.take

    def counted(self, shape, dtype, device):
        if not self._free[shape, dtype, device]:
            made[-1] += 1
        return take(self, shape, dtype, device)

    Buffers.take = counted
    for _ in range(4):
        made.append(0)
        Counting.calls = 0
        gradients.append(torch.autograd.grad(attend(*tensors, 0).sum(), tensors))
        free.append(len(free_tensors(exchange.buffers)))
    first = [t.clone() for t in gradients[0]]
    return {
        "made": made,
        "free": free,
        "calls": Counting.calls,
        "kept": all(
            torch.equal(a, b) for later in gradients for a, b in zip(later, first, strict=True)
        ),
    }


@pytest.mark.parametrize("circulates", ["kv", "queries"])
def test_later_passes_allocate_almost_nothing_and_earlier_gradients_survive(circulates):
    for rank, found in enumerate(gloo.run(3, passes, circulates)):
        assert found["made"][0] > 2
        # Autograd holds the shard that waits for the backward pass.
        assert max(found["made"][1:]) <= 1, found
        assert found["free"][1] == found["free"][2] == found["free"][3]
        assert found["kept"], "memory of a gradient that was handed out is not used again"
        # Contiguous shards: a rank sees only its own and earlier ones.
        assert found["calls"] == rank + 1


@pytest.mark.parametrize(
    ("name", "heads", "circulates", "foreign"),
    [
        ("ring", 1, "kv", True),
        ("ring", 2, "kv", True),
        ("hierarchical_ring", 2, "kv", True),
        ("ring", 4, "kv", False),
        ("ring", 1, "queries", False),
        ("ring", 2, "queries", False),
        ("hierarchical_ring", 1, "queries", False),
        ("all_gather", 1, "kv", False),
    ],
)
def test_a_recomputation_without_queries_keeps_only_the_keys_of_another_rank(
    name, heads, circulates, foreign
):
    group = ContextGroup(1, tuple(range(4)), per_node=2, heads=heads)
    options = {"circulates": circulates}
    exchange = make_exchange(name, make_layout("striped", 4, 64, 4), group, **options)
    saved = _, keys, out, lse, columns = tuple(torch.rand(1, 6, 2, 8) for _ in range(5))
    kept = exchange.kept_for_recompute(saved, 0)
    more = (columns, keys) if foreign else (columns,)
    assert [id(tensor) for tensor in kept] == [id(tensor) for tensor in (out, lse, *more)]
    late_out, late_lse = exchange.kept_for_recompute(saved, 2)
    assert late_out.equal(out[:, 2:])
    assert late_lse.equal(lse[..., 2:])
    assert late_out.untyped_storage().nbytes() == late_out.nbytes, "no view of the whole tensor"


def gradients_of_padding(rank: int, world: int) -> list[list[bool]]:
    """Return for each exchange whether the gradients of q, k and v are all 0 on this rank.

    The last of four ranks holds only padding.
    """
    group = group_of(rank, world)
    layout = make_layout("contiguous", world, 40, 16, unit=16)
    found = []
    for name, options in (("all_gather", {}), ("all_gather", {"chunks": 2}), ("ring", {})):
        exchange = make_exchange(name, layout, group, **options)
        masks = [SequenceMask.causal(40, layout.padded_seq)]
        attend = make_attention(exchange, SdpaKernel(), masks, "cpu")
        tensors = [torch.randn(1, 16, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        gradients = torch.autograd.grad(attend(*tensors, 0).sum(), tensors)
        found.append([bool((gradient == 0).all()) for gradient in gradients])
    return found


def test_a_rank_that_holds_only_padding_takes_part():
    for rank, found in enumerate(gloo.run(4, gradients_of_padding)):
        assert found == [[rank == 3] * 3] * 3


GROUP = ContextGroup(2, tuple(range(8)), per_node=4, heads=2)


@pytest.mark.parametrize(
    ("name", "heads", "shared", "gathers"),
    [
        ("ring", 2, True, True),
        ("ring", 2, False, False),
        ("ring", 8, True, False),  # no shard circulates
        ("all_gather", 2, True, False),
    ],
)
def test_only_a_ring_gathers_columns_once_if_it_may(name, heads, shared, gathers):
    layout, group = make_layout("striped", 8, 256, 16), replace(GROUP, heads=heads)
    assert make_exchange(name, layout, group, shared_columns=shared).gathers_columns is gathers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ring", {"prefetch": 3}),
        ("ring", {"circulates": "queries", "shared_columns": False}),
        ("hierarchical_all_gather", {"chunks": 2}),
    ],
)
def test_a_chosen_exchange_has_every_option_of_the_choice(name, options):
    choice = ExchangeChoice(name, "a reason", per_node=4, heads=2, **options)
    made = make_chosen_exchange(choice, make_layout("striped", 8, 256, 16), GROUP)
    assert made.schedule == make_schedule(name, choice.options(8))
    assert made.name == name
    assert made.gathers_columns is (name == "ring" and choice.shared_columns)
