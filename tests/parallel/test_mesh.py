"""Context groups: consecutive ranks, and separate communicators for what travels at the same time."""

from __future__ import annotations

from datetime import timedelta

import gloo
import pytest
import torch
import torch.distributed as dist

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.parallel import exchange
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group


def groups(rank: int, world: int, cp: int) -> tuple[int, tuple[int, ...], list[list[int]], bool]:
    group = make_context_group(rank, world, cp, torch.device("cpu"))
    members = [dist.get_process_group_ranks(g) for g in (group.kv, group.gradients) if g is not None]
    return group.rank, group.ranks, members, group.kv is group.gradients


def test_consecutive_ranks_share_a_sequence():
    found = gloo.run(4, groups, 2)
    assert [rank for rank, *_ in found] == [0, 1, 0, 1]
    for rank, (_, ranks, members, same) in enumerate(found):
        assert ranks == ((0, 1) if rank < 2 else (2, 3))
        assert members == [list(ranks), list(ranks)]
        assert not same


def timeouts(rank: int, world: int, seconds: float | None) -> list[timedelta]:
    timeout = None if seconds is None else timedelta(seconds=seconds)
    group = make_context_group(rank, world, world, torch.device("cpu"), timeout)
    return [g._get_backend(torch.device("cpu")).options._timeout for g in (group.kv, group.gradients) if g is not None]


def test_a_context_group_waits_for_a_peer_as_long_as_it_is_told_to():
    assert gloo.run(2, timeouts, 45.0) == [[timedelta(seconds=45)] * 2] * 2


def users(rank: int, world: int, name: str) -> set[tuple[str, str]]:
    """Which communicator carries messages in forward, and which in backward."""
    group = make_context_group(rank, world, world, torch.device("cpu"))
    seen: set[tuple[str, str]] = set()
    phase = "forward"

    def spy(function, used):
        def call(*args):
            seen.add((phase, "kv" if used(args) is group.kv else "gradients" if used(args) is group.gradients else "another"))
            return function(*args)

        return call

    exchange.all_gather = spy(exchange.all_gather, lambda args: args[-1])
    exchange.reduce_scatter = spy(exchange.reduce_scatter, lambda args: args[-1])
    dist.batch_isend_irecv = spy(dist.batch_isend_irecv, lambda args: args[0][0].group)
    layout = make_layout("striped", world, 24, 4)
    attend = ContextAttention.make(
        make_exchange(name, layout, group), ReferenceKernel(), [SequenceMask.causal(24, layout.padded_seq)], "cpu"
    )
    q, k, v = (torch.randn(1, layout.padded_seq // world, 2, 4, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, 0)
    phase = "backward"
    out.sum().backward()
    return seen


@pytest.mark.parametrize("name", ["all_gather", "ring"])
def test_gradients_never_queue_behind_keys_and_values(name):
    for seen in gloo.run(2, users, name):
        assert seen == {("forward", "kv"), ("backward", "kv"), ("backward", "gradients")}
