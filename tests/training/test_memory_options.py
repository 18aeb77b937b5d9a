"""Every way of saving activation memory gives the gradients of a run that saves none, and computes no more than it has to."""

import gloo
import pytest
from parallel.ways import Way
from training.memory_options import OPTIONS, WAYS, outcomes

QUICK = ["sequence_selective, a quarter kept, offloaded", "sequence_selective, tiles, offloaded"]


def check(of_ranks: list[list[dict]]) -> None:
    for rank, cells in enumerate(of_ranks):
        for cell in cells:
            where = f"rank {rank}: {cell}"
            assert cell["gradient"] < 5e-6, where
            assert cell["loss"] < 1e-6, where
            assert cell["estimates"] == 0, f"an index is estimated once: {where}"
            assert cell["backward"] == 0, where
            assert (cell["offloaded"] > 0) == ("offloaded" in cell["option"]), where
            kind = cell["option"].partition(",")[0]
            if kind == "full":
                assert cell["repeated"] == pytest.approx(1), where
            elif kind == "sequence_selective":
                # Without documents half of the sequence has a quarter of the pairs, and three quarters have 9/16 of them.
                assert 0.05 < cell["repeated"] < (0.75 if "quarter" in cell["option"] else 0.5), where
            else:
                assert cell["repeated"] == 0, where


def test_one_worker():
    check(gloo.run(1, outcomes, list(OPTIONS), WAYS[1]))


def test_two_workers_that_send_keys_or_heads():
    check(gloo.run(2, outcomes, QUICK, (Way("ring"), Way("all_gather", heads=2))))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_every_exchange_and_option(world, layout):
    check(gloo.run(world, outcomes, list(OPTIONS), WAYS[world], layout))
