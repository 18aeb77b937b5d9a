"""Every memory option gives the gradients of a plain run and computes nothing more than needed."""

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
    for cells in zip(*of_ranks, strict=True):
        # A rank may compute for other ranks' queries; together they compute each pair of the masks.
        kind = cells[0]["option"].partition(",")[0]
        expected = {"full": 1.0, "sequence_selective": cells[0]["early"]}.get(kind, 0.0)
        repeated = sum(cell["repeated"] for cell in cells) / sum(cell["pairs"] for cell in cells)
        assert repeated == pytest.approx(expected, abs=1e-9), cells[0]
        assert kind != "sequence_selective" or 0.05 < expected < 0.9


@pytest.mark.slow
def test_one_worker():
    check(gloo.run(1, outcomes, list(OPTIONS), WAYS[1]))


@pytest.mark.slow
def test_two_workers_that_exchange_keys_or_heads():
    check(gloo.run(2, outcomes, QUICK, (Way("ring"), Way("all_gather", heads=2)), "zigzag"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_every_exchange_and_option(world, layout):
    check(gloo.run(world, outcomes, list(OPTIONS), WAYS[world], layout))
