"""Waits in records played from a schedule are charged to the ranks and steps that cause them."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_records import Play, recorded_once, ring

from mtrain_cli.records import wait_attribution
from mtrain_cli.records.record_files import LINKS, open_records
from mtrain_cli.records.record_sums import RecordedShape, iterations, survey
from mtrain_cli.records.wait_attribution import WaitAttribution

LINK = {"context": 0.2, "inner": 0.1, "outer": 0.5, "heads": 0.2}


def charged(
    folder, heavy: dict[tuple[int, int], float], workers: int = 12, link: dict[str, float] = LINK
) -> dict[tuple[int, int], float]:
    """Return ms of waits charged to (rank, step) in the forward pass of a ring.

    heavy: ms of attention of some (rank, step); all others take 1 ms.
    """
    return charges(
        folder,
        Play(
            ring(workers),
            lambda d, r, s: heavy.get((r, s), 1.0) if d == "forward" else 1.0,
            link=link,
        ),
    )


def charges(
    folder, play: Play, *, uncertainty: float = 0.0, direction: int = 0, layers: int = 1
) -> dict[tuple[int, int], float]:
    """Return ms of waits charged to (rank, step) in one direction. Step -1 is the time before."""
    recorded = open_records(recorded_once(folder, play, layers=range(layers)))
    shapes, last = survey(recorded)
    ((shape, iteration),) = iterations(recorded, shapes, last)
    blame = WaitAttribution(shape, uncertainty)
    blame.add(iteration)
    lost = blame.charges[direction].lost[0]
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


def test_waits_within_the_uncertainty_of_clocks_are_not_charged(tmp_path):
    """Rank 1 of three takes 0.5 ms longer, and the others wait for it."""
    play = Play(ring(3), lambda d, r, s: 1.5 if (r, s) == (1, 0) else 1.0)  # noqa: ARG005
    assert set(charges(tmp_path / "exact", play)) == {(1, 0)}
    assert set(charges(tmp_path / "small", play, uncertainty=0.4)) == {(1, 0)}
    assert charges(tmp_path / "large", play, uncertainty=0.6) == {}


def test_a_rank_that_starts_late_is_charged_for_its_start(tmp_path):
    """Rank 1 starts 3 ms late, and computes 0.2 ms longer in its first step."""
    play = Play(
        ring(4),
        lambda d, r, s: 1.2 if (r, s) == (1, 0) else 1.0,  # noqa: ARG005
        link=LINK,
        starts={1: 3.0},
    )
    assert set(charges(tmp_path, play)) == {(1, -1)}


def test_a_rank_that_sends_gradients_late_computed_before_it_sent(tmp_path):
    """Rank 1 takes 11 ms longer in step 1 of backward, and the three others wait that long.

    The next step takes 8 ms, so the others wait for gradients after it.
    """

    def attention(direction, rank, step):
        if direction == "backward" and step == 2:
            return 8.0
        return 12.0 if (direction, rank, step) == ("backward", 1, 1) else 1.0

    found = charges(tmp_path, Play(ring(4), attention), direction=1)
    assert found == {(1, 1): pytest.approx(3 * 11)}


def test_a_sample_of_layers_stands_for_all(tmp_path, monkeypatch):
    """Six equal layers lose six times the time of one, also if one or two of them are read."""
    play = Play(ring(4), lambda d, r, s: 3.0 if (r, s) == (1, 1) else 1.0)  # noqa: ARG005
    one = charges(tmp_path / "one", play)
    assert set(one) == {(1, 1)}
    for read in (6, 2, 1):
        # 4 ranks and 5 slots: four steps and the time before them.
        monkeypatch.setattr(wait_attribution, "MOST_CELLS", read * 4 * 5**2)
        found = charges(tmp_path / str(read), play, layers=6)
        assert found == {(1, 1): pytest.approx(6 * one[1, 1])}
