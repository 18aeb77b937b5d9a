"""Analyses of records played from a schedule: every figure and every cause of waits is known."""

from __future__ import annotations

import json
import resource
import time

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.parallel.recording import KINDS
from mtrain_cli.records.analysis import BINS, Estimate, _CaseTotals, analyse
from mtrain_cli.records.imbalance import imbalance, ratios
from mtrain_cli.records.record_files import LINKS, PAYLOADS, open_records
from mtrain_cli.records.record_sums import iterations, survey
from mtrain_cli.records.wait_attribution import WaitAttribution

LINK = {"context": 0.2, "inner": 0.1, "outer": 0.5, "heads": 0.2}


def analysed(folder, what, **more):
    (found,) = analyse(open_records(recorded_once(folder, what, **more)))
    return found


def uneven(direction: str, rank: int, step: int) -> float:
    return (1 + 0.3 * rank + 0.1 * step) * (2 if direction == "backward" else 1)


@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("ring", {}),
        ("hierarchical_ring", {}),
        ("ring", {"circulates": "queries"}),
        ("all_gather", {"chunks": 2}),
        ("hierarchical_all_gather", {}),
        ("ring", {"heads": 2}),
    ],
)
def test_bins_fill_the_passes_for_every_exchange(tmp_path, exchange, options):
    what = Play(
        ring(4, 2, exchange, **options),
        uneven,
        link=LINK,
        index=0.3,
        columns=0.2,
        merge=0.05,
        gap=0.02,
        starts={1: 0.1},
    )
    found = analysed(tmp_path, what, layers=(0, 3), iterations=2)
    assert found.bins.sum(-1) == pytest.approx(found.passes_ms, rel=1e-4)
    assert found.bin_ms("index") == pytest.approx(
        0.3 * 2 * 2
    )  # two layers, both directions, of each iteration
    assert found.bin_ms("columns") == pytest.approx(0.2 * 2 * 2)
    assert set(found.exposed) <= {"context", "inner", "outer", "heads"}
    assert found.exposed or exchange == "hierarchical_ring"


def test_tables_and_degrees_match_the_played_times(tmp_path):
    found = analysed(
        tmp_path,
        Play(ring(4), uneven, pairs=lambda _d, r, _s: 100 * (r + 1)),
        layers=(2, 5),
        iterations=3,
    )
    assert (found.samples, found.iterations, found.layers) == (6, 3, (2, 5))
    for direction in ("forward", "backward"):
        table = [[uneven(direction, rank, step) for step in range(4)] for rank in range(4)]
        mine, known = found.passes[direction], imbalance(table)
        assert mine.attention == pytest.approx(np.array(table), rel=1e-5)
        assert mine.pairs == pytest.approx(np.array([[100 * (rank + 1)] * 4 for rank in range(4)]))
        assert mine.time.worker.mean == pytest.approx(known.worker, rel=1e-5)
        assert mine.time.step.mean == pytest.approx(known.step, rel=1e-5)
        assert mine.work.worker.mean == pytest.approx(4 / 2.5)
        assert mine.work.step.mean == pytest.approx(1)
        attention, elapsed = mine.attention[None], mine.elapsed[None]
        wall = np.array([mine.duration.mean])
        in_steps, in_all = ratios(attention, elapsed, attention.sum(2), wall)
        assert mine.computation.step.mean == pytest.approx(in_steps[0], rel=1e-5)
        assert mine.computation.total.mean == pytest.approx(in_all[0], rel=1e-5)
        assert mine.across_workers[:, [0, -1]] == pytest.approx(
            np.array([[t[0], t[-1]] for t in zip(*table, strict=True)]), rel=1e-5
        )
        assert mine.across_steps[:, 2] == pytest.approx(np.median(table, axis=1), rel=1e-5)
        assert [layer["layer"] for layer in mine.layers] == [2, 5]
    assert found.time.worker.mean == pytest.approx(
        sum(p.time.worker.mean for p in found.passes.values()) / 2
    )
    assert found.tokens == 4096


def test_columns_count_as_a_step_across_workers_only(tmp_path):
    found = analysed(tmp_path, Play(ring(2), lambda _d, r, _s: 1.0 + r, columns=3.0)).passes[
        "forward"
    ]
    assert found.time.worker.mean == pytest.approx((2 / 1.5 + 2 / 1.5 + 1) / 3, rel=1e-5)
    assert found.time.total.mean == pytest.approx((2 + 2 + 3) / 6, rel=1e-5)
    assert found.time.step.mean == pytest.approx(1)
    assert found.column_pairs.tolist() == [500, 500]


def test_columns_computed_inside_a_step_belong_to_no_step(tmp_path):
    rows = rows_of(Play(ring(2), lambda _d, r, _s: 1.0 + r, columns=3.0))
    inside = rows.copy()
    inside["step"][rows["phase"] == KINDS.index("columns")] = 1
    both = [
        analyse(open_records(write(tmp_path / name, [r], [facts_of(ring(2))])))[0]
        for name, r in (("a", rows), ("b", inside))
    ]
    assert json.dumps(both[0].to_json()) == json.dumps(both[1].to_json())


def test_groups_count_as_samples(tmp_path):
    def of(iteration: int, _layer: int, group: int) -> Play:
        return Play(ring(2), lambda _d, r, _s: 1.0 + r * (group + iteration))

    rows = [rows_of(of, iteration=i, groups=2) for i in range(2)]
    folder = write(tmp_path, rows, [facts_of(ring(2), groups=2)])
    (found,) = analyse(open_records(folder))
    degrees = [2 * (1 + x) / (2 + x) for x in (0, 1, 1, 2)]
    assert found.time.worker == Estimate(
        *(pytest.approx(v, rel=1e-5) for v in (np.mean(degrees), np.std(degrees, ddof=1))), 4
    )
    # Two iterations count as two values, whatever their groups and layers.
    means = np.mean(degrees[:2]), np.mean(degrees[2:])
    assert found.time.worker.error == pytest.approx(abs(means[0] - means[1]) / 2)
    assert np.isnan(
        analyse(open_records(write(tmp_path / "one", rows[:1], [facts_of(ring(2), groups=2)])))[
            0
        ].time.worker.error
    )
    assert (found.workers, found.groups, found.bins.shape) == (2, 2, (2, 4, len(BINS)))
    assert found.tokens == 2 * 4096


def test_a_pass_and_its_layers_last_as_long_as_the_slowest_worker(tmp_path):
    factors = {2: 1, 5: 4, 9: 2}

    def of(iteration: int, layer: int, _group: int) -> Play:
        return Play(ring(2), lambda _d, r, _s: (1.0 + iteration) * factors[layer] * (1.0 + r))

    rows = [rows_of(of, iteration=i, layers=tuple(factors), micros=2) for i in range(2)]
    (found,) = analyse(open_records(write(tmp_path, rows, [facts_of(ring(2), layers=3)])))
    forward = found.passes["forward"]
    # Steps of 1 ms and 2 ms, in layers that take 1x, 4x and 2x of that; the second iteration takes
    # twice as long.
    assert forward.duration == Estimate(
        *(pytest.approx(v, rel=1e-5) for v in (14, 28 / 3 / 2**0.5)), 2
    )
    assert forward.layers == [
        {
            "layer": layer,
            "ms": pytest.approx(1.5 * 4 * f),
            "attention_ms": pytest.approx(1.5 * 3 * f),
            "late_ms": 0,
            "exposed_ms": 0,
        }
        for layer, f in factors.items()
    ]
    # The other worker computes during half of the slowest worker's time.
    assert (forward.computation.step.mean, forward.computation.total.mean) == pytest.approx(
        (1, 0.75)
    )


def test_percentiles_cover_the_times_of_steps(tmp_path):
    found = analysed(
        tmp_path, Play(ring(4), lambda _d, _r, s: (1.0, 1.0, 1.0, 9.0)[s], merge=0.5), layers=(0, 1)
    ).passes["forward"]
    assert (found.p50, found.p95, found.longest) == pytest.approx((1.5, 9.5, 9.5))


def test_an_iteration_lasts_as_long_as_its_slowest_rank(tmp_path):
    rows = [rows_of(Play(ring(3)), iteration=i) for i in range(2)]
    for i, part in enumerate(rows):
        whole = part["phase"] == KINDS.index("iteration")
        part["dur_us"][whole] = np.array([10, 30, 20])[part["rank"][whole]] * (i + 1) * 1e3
    (found,) = analyse(open_records(write(tmp_path, rows, [facts_of(ring(3))])))
    assert found.iteration_ms == Estimate(pytest.approx(45), pytest.approx(30 / 2**0.5), 2)


def test_samples_drawn_from_long_recordings_cover_every_step_and_layer(tmp_path, monkeypatch):
    layers, steps, count = 5, 4, 40
    what = rows_of(
        lambda _i, layer, _g: Play(ring(steps), lambda _d, _r, s: 10.0 * (layer + 1) + s),
        layers=range(layers),
        directions=("forward",),
    )
    rows = np.tile(what, count)
    rows["iteration"] = np.repeat(np.arange(count), len(what))
    # One value of as many as there are steps is kept, one table of as many as there are layers.
    monkeypatch.setattr("mtrain_cli.records.analysis.MOST_VALUES", count * layers * (steps + 1))
    monkeypatch.setattr("mtrain_cli.records.analysis.MOST_TABLES", count)
    recorded = open_records(
        write(tmp_path, [rows], [facts_of(ring(steps), layers=layers)], wanted=count)
    )
    shapes, last = survey(recorded)
    totals = _CaseTotals(shapes[0], WaitAttribution(shapes[0], 0.0))
    assert (totals.value_stride, totals.table_stride) == (steps, layers)
    for _, iteration in iterations(recorded, shapes, last):
        totals.add(iteration)
    times = [[10 * (layer + 1) + step for step in range(steps)] for layer in range(layers)]
    values = np.rint(np.concatenate(totals.values[0]))
    assert len(values) == pytest.approx(count * layers * steps, rel=0.2)  # of four times as many
    assert set(values) == {time for layer in times for time in layer}
    assert len(totals.tables[0]) == pytest.approx(count, rel=0.4)
    assert {tuple(np.rint(table[0])) for table in totals.tables[0]} == {
        tuple(layer) for layer in times
    }
    found = totals.result(count).passes["forward"]
    assert found.p50 == pytest.approx(np.percentile(times, 50), abs=1)
    assert found.p95 == pytest.approx(np.percentile(times, 95), abs=1)
    assert found.longest == pytest.approx(53)
    assert found.across_workers[:, [0, -1]] == pytest.approx(np.array([times[0], times[-1]]).T)
    assert found.across_steps[:, [0, -1]] == pytest.approx(np.array([[10, 53]] * steps))


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
    assert "rank 4, which has 1.9x the blocks of the others in step 2" in cause.text
    # 0.9 ms that the five others wait for in each of three layers.
    assert cause.ms == pytest.approx(0.9 * 5 * 3, rel=0.01)


def charged(folder, heavy: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return ms of waits charged to (rank, step) in the forward pass of a ring of 12.

    heavy: extra ms of some (rank, step).
    """
    schedule = ring(12)
    recorded = open_records(
        recorded_once(
            folder,
            Play(
                schedule,
                lambda d, r, s: heavy.get((r, s), 1.0) if d == "forward" else 1.0,
                link=LINK,
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


def test_a_delay_before_the_first_step_is_named(tmp_path):
    found = analysed(tmp_path, Play(ring(4), starts={2: 0.7}))
    assert [(c.rank, c.kind) for c in found.causes] == [(2, "start")]
    assert (
        "rank 2, which starts its attention 0.70 ms later than the others" in found.causes[0].text
    )


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


def test_a_busy_host_is_named(tmp_path):
    found = analysed(tmp_path, Play(ring(4), gap=0.1, gaps={1: 0.6}))
    assert [(c.rank, c.kind) for c in found.causes] == [(1, "gap")]
    assert "rank 1, which idles" in found.causes[0].text


def test_exposed_communication_is_named_with_its_step(tmp_path):
    found = analysed(
        tmp_path, Play(ring(8, 4, "hierarchical_ring"), link={"inner": 1.4, "outer": 0.1})
    )
    (cause,) = found.causes
    assert cause.kind == "link"
    assert (
        cause.text == "forward: 2.40 ms of exposed communication per layer on the inner link, "
        "most in step 1 (0.40 ms)"
    )
    assert found.exposed == pytest.approx({"inner": 2.4}, rel=1e-3)
    assert found.bin_ms("late") == pytest.approx(0, abs=1e-3)


def test_exposed_communication_is_per_layer_and_rank(tmp_path):
    what = Play(ring(8, 4, "hierarchical_ring"), link={"inner": 1.4, "outer": 0.1})
    (cause,) = analysed(tmp_path, what, layers=(0, 1, 2), iterations=2).causes
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


def test_one_worker_has_degrees_of_one(tmp_path):
    found = analysed(tmp_path, Play(ring(1)))
    assert (
        found.time.worker.mean,
        found.time.step.mean,
        found.computation.step.mean,
        found.causes,
    ) == (1, 1, 1, [])


def test_a_pass_without_computation_is_balanced(tmp_path):
    found = analysed(tmp_path, Play(ring(2), lambda *_: 0.0, index=1.0))
    assert (found.time.worker.mean, found.computation.step.mean, found.computation.total.mean) == (
        1,
        0,
        0,
    )


def test_missing_ranks_are_listed_and_excluded(tmp_path):
    rows = rows_of(Play(ring(4), uneven))
    rows = rows[rows["rank"] != 3]
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts_of(ring(4))])))
    assert (found.missing, found.partial) == ((3,), True)
    table = [[uneven("forward", rank, step) for step in range(4)] for rank in range(3)]
    assert found.passes["forward"].time.worker.mean == pytest.approx(
        imbalance(table).worker, rel=1e-5
    )


def test_a_group_without_any_rows_is_missing(tmp_path):
    rows = rows_of(Play(ring(2), uneven))
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts_of(ring(2), groups=2)])))
    assert (found.missing, found.time.worker.n) == ((2, 3), 1)


def test_a_killed_profile_is_analysed_up_to_its_end(tmp_path):
    folder = recorded_once(tmp_path, Play(ring(2)), iterations=3, complete=False, wanted=10)
    (found,) = analyse(open_records(folder))
    assert (found.iterations, found.wanted, found.partial) == (3, 10, True)


def test_cases_and_iterations_may_interleave_in_a_file(tmp_path):
    first, second = Play(ring(2), uneven), Play(ring(4), slower(0, 3.0))
    rows = np.concatenate(
        [rows_of(p, case=c, iteration=i) for i in range(2) for c, p in enumerate((first, second))]
    )
    shuffled = rows[np.random.default_rng(0).permutation(len(rows))]
    facts = [facts_of(p.schedule, label=name) for p, name in ((first, "a"), (second, "b"))]
    found = analyse(open_records(write(tmp_path / "mixed", [shuffled], facts)))
    assert [f.label for f in found] == ["a", "b"]
    alone = analysed(tmp_path / "alone", second, iterations=2)
    assert json.dumps(found[1].to_json()["passes"]) == json.dumps(alone.to_json()["passes"])


def test_recomputation_is_a_separate_pass(tmp_path):
    def again(direction: str, rank: int, step: int) -> float:
        return 1.0 if direction == "recompute" else uneven(direction, rank, step)

    rows = rows_of(Play(ring(2), again), directions=("forward", "recompute", "backward"))
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts_of(ring(2))])))
    assert found.directions == ("forward", "recompute", "backward")
    assert found.bins.sum(-1) == pytest.approx(found.passes_ms, rel=1e-4)
    assert found.time.worker.n == 1
    assert found.passes["recompute"].time.worker.mean == 1
    assert found.time.worker.mean == pytest.approx(
        found.passes["forward"].time.worker.mean, rel=1e-5
    )


def test_json_is_strict_and_small_numbers_stay(tmp_path):
    document = json.loads(
        json.dumps(analysed(tmp_path, Play(ring(2), lambda *_: 1e-4)).to_json(), allow_nan=False)
    )
    assert document["passes"]["forward"]["attention_ms"] == [[1e-4, 1e-4], [1e-4, 1e-4]]


@pytest.mark.slow
def test_millions_of_rows_take_seconds_and_bounded_memory(tmp_path):
    times = np.random.default_rng(0).gamma(20, 0.05, (2, 128, 128))
    what = Play(
        ring(128, 8, "hierarchical_ring"),
        lambda d, r, s: times[int(d == "backward"), r, s],
        link=LINK,
        merge=0.01,
        gap=0.01,
    )
    one = rows_of(what)
    parts = []
    for layer in range(36):
        rows = one[one["layer"] == 0].copy()
        rows["layer"] = layer
        parts.append(rows)
    folder = write(tmp_path, [np.concatenate(parts)], [facts_of(what.schedule, layers=36)])
    count = sum(map(len, parts))
    del parts, one
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    (found,) = analyse(open_records(folder))
    assert count > 6e6
    assert found.samples == 36
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3e6  # KiB
