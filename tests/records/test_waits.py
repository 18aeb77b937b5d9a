"""Waits in records played from a schedule are charged to the ranks and steps that cause them."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.parallel.recording import KINDS
from mtrain_cli.records import waits
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.record_files import LINKS, PAYLOADS, open_records
from mtrain_cli.records.record_sums import RecordedShape, iterations, survey
from mtrain_cli.records.waits import WaitAttribution

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
        monkeypatch.setattr(waits, "MOST_CELLS", read * 4 * 5**2)
        found = charges(tmp_path / str(read), play, layers=6)
        assert found == {(1, 1): pytest.approx(6 * one[1, 1])}


def analysed(folder, what, **more):
    (found,) = analyse(open_records(recorded_once(folder, what, **more)))
    return found


def slower(rank: int, times: float):
    return lambda _d, r, _s: times if r == rank else 1.0


@pytest.mark.parametrize(
    "schedule",
    [
        ring(2),
        ring(8),
        ring(8, 4, "hierarchical_ring"),
        ring(4, exchange="all_gather"),
        ring(4, heads=2),
    ],
)
def test_a_straggler_is_named_and_not_its_victims(tmp_path, schedule):
    found = analysed(tmp_path, Play(schedule, slower(1, 2.1), link=LINK), layers=(0, 1))
    blamed = [cause for cause in found.causes if cause.kind != "link"]
    assert [(cause.rank, cause.kind) for cause in blamed] == [(1, "slow")], [
        c.text for c in found.causes
    ]
    assert (
        "rank 1, a straggler: 2.1x the time of the others for the same work "
        "(slow or disturbed device" in blamed[0].text
    )
    assert found.work.worker.mean == 1


def test_a_rank_with_more_work_in_a_step_is_named_with_that_step(tmp_path):
    def heavy(direction: str, rank: int, step: int) -> float:
        return 1.9 if (direction, rank, step) == ("forward", 4, 2) else 1.0

    found = analysed(
        tmp_path, Play(ring(6), heavy, pairs=lambda *at: int(1000 * heavy(*at))), layers=(0, 1, 2)
    )
    (cause,) = found.causes
    assert (cause.rank, cause.step, cause.kind, cause.direction) == (4, 2, "work", "forward")
    assert "rank 4, which has 1.9x the pairs of the others in step 2" in cause.text
    # 0.9 ms that the five others wait for in each of three layers.
    assert cause.ms == pytest.approx(0.9 * 5 * 3, rel=0.01)


def test_a_rank_behind_a_slow_link_is_not_to_blame(tmp_path):
    # Rank 1 gets its keys late and is a little slow. Rank 0 shares heads with it and waits for it.
    what = Play(
        ring(4, heads=2),
        slower(1, 1.05),
        link={"context": 0.3, "heads": 0.1},
        slow_into={("context", 1): 3.0},
    )
    found = analysed(tmp_path, what)
    assert found.bin_ms("late") > 0.5
    assert found.causes[0].kind == "link"
    assert all(cause.kind == "link" or cause.ms < 0.5 for cause in found.causes)


def test_more_work_in_all_steps_is_one_cause(tmp_path):
    times = (
        np.random.default_rng(0).gamma(20, 0.05, (6, 6))
        * np.where(np.arange(6) == 2, 1.6, 1)[:, None]
    )
    found = analysed(
        tmp_path,
        Play(ring(6), lambda _d, r, s: times[r, s], pairs=lambda _d, r, s: int(1e4 * times[r, s])),
    )
    assert [(c.rank, c.kind) for c in found.causes[:2]] == [(2, "work")] * 2
    assert all("x the pairs of the others over all its steps" in c.text for c in found.causes[:2])


def test_in_training_a_late_start_is_the_slow_attention_before(tmp_path):
    # In training, no rank waits at the end of a pass; the others wait in the next layer.
    slow = Play(ring(4, exchange="all_gather"), slower(3, 2.1), link=LINK, starts={3: 1.1})
    found = analysed(tmp_path / "slow", slow, mode="training")
    assert found.causes[0].ms == pytest.approx(2 * 3 * 1.1, rel=0.01)
    assert (found.causes[0].rank, found.causes[0].kind) == (3, "slow")
    pairs = Play(
        slow.schedule,
        slow.attention,
        pairs=lambda _d, r, _s: 2100 if r == 3 else 1000,
        link=LINK,
        starts={3: 1.1},
    )
    found = analysed(tmp_path / "work", pairs, mode="training")
    assert (
        "rank 3, which has 2.1x the pairs of the others over all its steps" in found.causes[0].text
    )
    found = analysed(
        tmp_path / "start", Play(slow.schedule, link=LINK, starts={3: 1.1}), mode="training"
    )
    assert (found.causes[0].rank, found.causes[0].kind) == (3, "start")


def test_a_wait_for_a_rank_that_is_not_slower_has_an_unknown_cause(tmp_path):
    rows = rows_of(Play(ring(2), index=0.3), directions=("forward",))
    waits = rows[rows["phase"] == KINDS.index("index")].copy()
    waits["phase"], waits["link"] = KINDS.index("wait"), LINKS.index("context")
    waits["dur_us"] = waits["late_us"] = np.where(waits["rank"] == 0, 1000, 0)
    waits["start_us"] += 300
    (found,) = analyse(
        open_records(write(tmp_path, [np.concatenate([rows, waits])], [facts_of(ring(2))]))
    )
    cause = found.causes[0]
    assert (cause.rank, cause.kind, cause.step) == (1, "unknown", -1)
    assert "rank 0 waits 1.00 ms for rank 1, which takes no longer than the others" in cause.text


def test_a_slow_index_estimate_is_named(tmp_path):
    rows = rows_of(Play(ring(2), index=1.3), directions=("forward",))
    index = rows["phase"] == KINDS.index("index")
    waits = rows[index].copy()
    rows["dur_us"][index & (rows["rank"] == 0)] = 300
    waits["phase"], waits["link"], waits["payload"] = (
        KINDS.index("wait"),
        LINKS.index("context"),
        PAYLOADS.index("index"),
    )
    waits["dur_us"] = waits["late_us"] = np.where(waits["rank"] == 0, 1000, 0)
    waits["start_us"] += np.where(waits["rank"] == 0, 300, 1300)
    (found,) = analyse(
        open_records(write(tmp_path, [np.concatenate([rows, waits])], [facts_of(ring(2))]))
    )
    assert [(c.rank, c.kind, c.step) for c in found.causes] == [(1, "index", -1)]
    assert (
        "forward before the first step: rank 0 waits 1.00 ms for rank 1, "
        "which takes 1.00 ms longer than the others to estimate the index" in found.causes[0].text
    )


def test_exposed_communication_is_per_layer_and_rank(tmp_path):
    what = Play(ring(8, 4, "hierarchical_ring"), link={"inner": 1.4, "outer": 0.1})
    found = analysed(tmp_path, what, layers=(0, 1, 2), iterations=2)
    (cause,) = found.causes
    assert cause.kind == "link"
    assert found.exposed == pytest.approx({"inner": 2.4 * 3}, rel=1e-3)
    assert found.bin_ms("late") == pytest.approx(0, abs=1e-3)
    assert (
        cause.text == "forward: 2.40 ms of exposed communication per layer on the inner link, "
        "most in step 1 (0.40 ms)"
    )
    assert cause.ms == pytest.approx(2.4 * 8 * 3, rel=1e-3)  # of an iteration, all ranks together


def test_a_cause_has_its_share_of_the_time_of_all_ranks(tmp_path):
    # Three of four ranks finish after 1 ms and wait for the last, 9 of 10 ms, in two passes of two
    # layers.
    found = analysed(
        tmp_path / "alone",
        Play(ring(4, exchange="all_gather"), slower(3, 10.0)),
        layers=(0, 1),
        iterations=2,
    )
    (cause,) = found.causes
    assert cause.ms == pytest.approx(3 * 9 * 4)
    assert "waits 9.00 ms for rank 3" in cause.text
    assert cause.text.endswith("; 108 ms per iteration over all ranks, 67.5% of their time")
    # In training, no rank waits at the end: 1.1 of 2.1 ms, before the step.
    slow = Play(ring(4, exchange="all_gather"), slower(3, 2.1), starts={3: 1.1})
    (cause,) = analysed(
        tmp_path / "training", slow, layers=(0, 1), iterations=2, mode="training"
    ).causes
    assert "waits 1.10 ms for rank 3" in cause.text
    assert cause.text.endswith(
        f"; 13 ms per iteration over all ranks, {3 * 1.1 / (4 * 2.1):.1%} of their time"
    )
