"""The worked examples of docs/extending.md run, and the exchange among them equals the oracle."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch
from docs.blocks import blocks_of
from parallel import test_context_attention as oracle
from parallel.test_schedule import Play

from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.parallel.context_attention import _Attend
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.parallel.ring_exchange import RingExchange
from mtrain_cli.parallel.schedule import KV, ScheduleOptions

EXAMPLES = [block for block in blocks_of("python") if block.page.name == "extending.md"]


def names_of(block) -> dict:
    names = {"__name__": "example"}
    exec(compile(block.text, str(block), "exec", dont_inherit=True), names)
    return names


def mirrored_ring():
    (block,) = [block for block in EXAMPLES if "def mirrored_ring" in block.text]
    return names_of(block)["mirrored_ring"]


def test_there_is_an_example_of_each_thing_to_add():
    text = "\n".join(block.text for block in EXAMPLES)
    for name in ("RecentPattern", "mirrored_ring", "EinsumKernel", "WindowMask"):
        assert name in text


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_examples_hold_what_they_assert(block):
    assert "assert" in block.text
    names_of(block)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_exchange_ends_with_every_pair_computed_once(workers):
    schedule = mirrored_ring()(ScheduleOptions(workers, workers))
    pairs = sorted((rank, shard) for rank in range(workers) for shard in range(workers))
    for steps, held in (
        (schedule.forward, [{rank} for rank in range(workers)]),
        (schedule.backward, [{rank, *schedule.keeps[rank]} for rank in range(workers)]),
    ):
        play = Play(schedule, tuple(steps), held, KV)
        computed = [(s.queries[0], s.keys[0]) for rank in steps for s in rank if s.keys]
        assert sorted(computed) == pairs
        assert len(play.computed) == len(pairs)


def exchange_differences(rank: int, world: int) -> list[float]:
    """Largest differences of out, dq, dk and dv from the oracle on one of several processes."""
    schedule = mirrored_ring()(ScheduleOptions(world, world))
    layout = make_layout("striped", world, oracle.SEQ, oracle.BLOCK, unit=oracle.BLOCK)
    group = make_context_group(rank, world, world, torch.device("cpu"))
    exchange = RingExchange(layout, group, schedule)
    positions = layout.positions(rank)
    real = positions < oracle.SEQ
    own = torch.from_numpy(np.minimum(positions, oracle.SEQ - 1))
    index = oracle.index_of("vertical_slash", 4, layout)
    masks = oracle.masks(True, layout.padded_seq)
    work = exchange.work(masks, "cpu", oracle.BLOCK).under(index)
    q, k, v, dout = (t[:, own] for t in oracle.inputs(4, 2, torch.float64))
    for t in (q, k, v):
        t.requires_grad_()
    out = _Attend.apply(q, k, v, oracle.Given(exchange, ReferenceKernel()), work, 0)
    got = (out, *torch.autograd.grad(out, (q, k, v), dout.clone()))
    want = oracle.oracle(4, 2, True, index)[:4]
    return [
        (a[:, real] - b[:, positions[real]]).abs().max().item()
        for a, b in zip(got, want, strict=True)
    ]


def test_the_exchange_equals_the_oracle_on_real_processes():
    for differences in gloo.run(3, exchange_differences):
        assert max(differences) < 1e-13
