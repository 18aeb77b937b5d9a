"""Waits in records played from a schedule are charged to the ranks and steps that cause them."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_records import Play, recorded_once, ring

from mtrain_cli.records.record_files import LINKS, open_records
from mtrain_cli.records.record_sums import RecordedShape, iterations, survey
from mtrain_cli.records.wait_attribution import WaitAttribution

LINK = {"context": 0.2, "inner": 0.1, "outer": 0.5, "heads": 0.2}


def charged(
    folder, heavy: dict[tuple[int, int], float], workers: int = 12, link: dict[str, float] = LINK
) -> dict[tuple[int, int], float]:
    """Return ms of waits charged to (rank, step) in the forward pass of a ring.

    heavy: extra ms of some (rank, step).
    """
    schedule = ring(workers)
    recorded = open_records(
        recorded_once(
            folder,
            Play(
                schedule,
                lambda d, r, s: heavy.get((r, s), 1.0) if d == "forward" else 1.0,
                link=link,
            ),
        )
    )
    shapes, last = survey(recorded)
    ((shape, iteration),) = iterations(recorded, shapes, last)
    blame = WaitAttribution(shape, 0.0)
    blame.add(iteration)
    lost = blame.charges[0].lost[0]
    return {(int(r), int(s) - 1): float(lost[r, s]) for r, s in zip(*np.nonzero(lost), strict=True)}


def test_two_delays_are_charged_separately(tmp_path):
    # The second delay hits a rank that waited for the first: the ranks behind it wait for both.
    found = charged(tmp_path / "ranks", {(1, 2): 4.0, (2, 7): 4.0})
    assert set(found) == {(1, 2), (2, 7)}
    assert 8 < found[1, 2] < 14  # 3 ms to rank 2, and on to others before the second comes
    # The second delay of a rank is not charged to its first, which was longer.
    found = charged(tmp_path / "steps", {(1, 1): 6.0, (1, 8): 4.0})
    assert set(found) == {(1, 1), (1, 8)}
    assert min(found.values()) > 3


@pytest.mark.parametrize(
    ("link", "peer"), [("context", 7), ("inner", 3), ("outer", 4), ("heads", 1)]
)
def test_a_collective_waits_for_the_last_rank_of_those_that_take_part(link, peer):
    """Two nodes of four ranks, pairs share heads. The later a rank is, the less it waits."""
    shape = RecordedShape(
        case=0,
        facts={"per_node": 4, "heads": 2},
        iterations=(0,),
        micros=(0,),
        layers=(0,),
        workers=8,
        ranks=8,
        present=np.ones((1, 8), bool),
        steps={"forward": 1},
    )
    late = np.arange(8.0, 0.0, -1.0)[None]
    behind = np.array([LINKS.index(link) * 2])  # no single peer
    (found,) = WaitAttribution(shape, 0.0)._peers(behind, late, np.array([0]), 0)
    assert found == peer


def test_a_delay_that_comes_back_to_its_rank_is_not_charged(tmp_path):
    """Slow messages make rank 3 the last. Rank 1 waits 1 ms for it, because of its own delay.

    Ranks 2 and 3 wait 2.5 ms each; at the end, ranks 0 and 2 wait 3.5 and 0.5 ms for rank 3.
    """
    found = charged(tmp_path, {(1, 0): 5.0}, workers=4, link={"context": 1.5})
    assert found == {(1, 0): pytest.approx(2.5 + 2.5 + 3.5 + 0.5)}
