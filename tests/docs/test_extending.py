"""The worked examples of docs/extending.md run, and the exchange among them equals the oracle."""

from __future__ import annotations

import gloo
import pytest
from docs.blocks import blocks_of
from parallel import test_context_attention as oracle
from parallel.test_schedule import Play
from parallel.ways import Way

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


def exchange_differences(rank: int, world: int) -> dict[str, float]:
    """The largest difference from the oracle on this process, for layouts, heads and indices."""
    make = mirrored_ring()
    oracle.WAYS = (Way("mirrored_ring"),)
    oracle.make_exchange = lambda _, layout, group, **options: RingExchange(
        layout, group, make(ScheduleOptions(world, world)), shared_columns=options["shared_columns"]
    )
    return oracle.cells(rank, world, "reference", "float64", ("dense", "vertical_slash"), False)


def test_the_exchange_equals_the_oracle_on_real_processes():
    for differences in gloo.run(3, exchange_differences):
        assert len(differences) >= 18, "three layouts, three numbers of key heads, two indices"
        assert max(differences.values()) < 1e-13
