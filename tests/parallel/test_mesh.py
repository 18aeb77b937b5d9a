"""Context groups consist of consecutive ranks, with separate communicators for KV and gradients."""

from __future__ import annotations

from datetime import timedelta

import gloo
import pytest
import torch
import torch.distributed as dist
from parallel.ways import group_of, make_attention

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel import transport
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroups, make_context_group
from mtrain_cli.parallel.schedule import INNER


def groups(rank: int, world: int, cp: int) -> tuple[int, tuple[int, ...], list[list[int]], bool]:
    group = make_context_group(rank, ParallelDims.of(world, cp=cp), torch.device("cpu"))
    pair = [group.channel("context", payload) for payload in ("kv", "dkv")]
    return (
        group.rank,
        group.ranks,
        [dist.get_process_group_ranks(g) for g in pair],
        pair[0] is pair[1],
    )


def test_consecutive_ranks_share_a_sequence():
    found = gloo.run(4, groups, 2)
    assert [rank for rank, *_ in found] == [0, 1, 0, 1]
    for rank, (_, ranks, members, same) in enumerate(found):
        assert ranks == ((0, 1) if rank < 2 else (2, 3))
        assert members == [list(ranks), list(ranks)]
        assert not same


def timeouts(rank: int, world: int, seconds: float | None) -> list[timedelta]:
    timeout = None if seconds is None else timedelta(seconds=seconds)
    group = group_of(rank, world, timeout=timeout)
    return [g._get_backend(torch.device("cpu")).options._timeout for g in group.channels.values()]


def test_a_context_group_uses_the_given_timeout():
    assert gloo.run(2, timeouts, 45.0) == [[timedelta(seconds=45)] * 5] * 2


def users(rank: int, world: int, name: str) -> set[tuple[str, str]]:
    """Return the communicators that carry messages in forward and in backward."""
    group = group_of(rank, world)
    seen: set[tuple[str, str]] = set()
    phase = "forward"

    def spy(function, used):
        def call(*args):
            names = {group.channel("context", payload): payload for payload in ("kv", "dkv")}
            seen.add((phase, names.get(used(args), "another")))
            return function(*args)

        return call

    transport.start_all_gather = spy(transport.start_all_gather, lambda args: args[-1])
    transport.start_reduce_scatter = spy(transport.start_reduce_scatter, lambda args: args[-1])
    dist.batch_isend_irecv = spy(dist.batch_isend_irecv, lambda args: args[0][0].group)
    layout = make_layout("striped", world, 24, 4)
    attend = make_attention(
        make_exchange(name, layout, group),
        ReferenceKernel(),
        [SequenceMask.causal(24, layout.padded_seq)],
        "cpu",
    )
    q, k, v = (
        torch.randn(1, layout.padded_seq // world, 2, 4, requires_grad=True) for _ in range(3)
    )
    out = attend(q, k, v, 0)
    phase = "backward"
    out.sum().backward()
    return seen


@pytest.mark.parametrize("name", ["all_gather", "ring"])
def test_gradients_never_queue_behind_kv(name):
    for seen in gloo.run(2, users, name):
        assert seen == {("forward", "kv"), ("backward", "kv"), ("backward", "dkv")}


def subgroups(rank: int, world: int, cp: int, per_node: int, heads: int) -> dict[str, list[int]]:
    group = make_context_group(
        rank, ParallelDims.of(world, cp=cp), torch.device("cpu"), per_node=per_node, heads=heads
    )
    found = {"whole": dist.get_process_group_ranks(group.whole)}
    inside = group.exchange or group
    if group.exchange is not None:
        found["heads"] = dist.get_process_group_ranks(group.channel("heads", "heads"))
        found["exchange"] = list(group.exchange.ranks)
    for (name, gradients), members in inside.channels.items():
        if name != "whole" and not gradients:
            found[name] = dist.get_process_group_ranks(members)
    return found


def test_nodes_and_counterparts_of_every_context_group():
    found = gloo.run(8, subgroups, 4, 2, 1)
    assert found[5] == {
        "whole": [4, 5, 6, 7],
        "context": [4, 5, 6, 7],
        "inner": [4, 5],
        "outer": [5, 7],
    }
    assert found[2] == {
        "whole": [0, 1, 2, 3],
        "context": [0, 1, 2, 3],
        "inner": [2, 3],
        "outer": [0, 2],
    }


def test_neighbours_share_heads_and_their_counterparts_exchange_keys():
    found = gloo.run(4, subgroups, 4, 4, 2)
    assert found[3] == {
        "whole": [0, 1, 2, 3],
        "heads": [2, 3],
        "exchange": [1, 3],
        "context": [1, 3],
        "inner": [1, 3],
    }


def shared(rank: int, world: int) -> list[int]:
    """Return the number of the context group of each choice, in the order in which it was made."""
    made = ContextGroups(rank, ParallelDims.of(world, cp=world), timedelta(seconds=30))
    choices = [
        ExchangeChoice("ring", "", per_node=2),
        ExchangeChoice("all_gather", "", per_node=2),
        ExchangeChoice("ring", "", per_node=2, heads=2),
        ExchangeChoice("ring", "", per_node=1),
        ExchangeChoice("ring", "", per_node=2, channels=(INNER,)),
    ]
    groups = [made.of(choice, torch.device("cpu")) for choice in choices]
    assert [group.heads for group in groups] == [choice.heads for choice in choices]
    distinct = list(dict.fromkeys(map(id, groups)))
    return [distinct.index(id(group)) for group in groups]


def test_exchanges_with_equal_needs_share_a_context_group():
    assert gloo.run(2, shared) == [[0, 0, 1, 2, 3]] * 2
