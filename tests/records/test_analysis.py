"""Analyses of records played from a schedule: every figure and every cause of waits is known."""

from __future__ import annotations

import json
import resource
import time

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.parallel.recording import KINDS
from mtrain_cli.records.analysis import BINS, analyse
from mtrain_cli.records.imbalance import Estimate, imbalance, ratios
from mtrain_cli.records.record_files import open_records

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


def test_an_iteration_lasts_as_long_as_its_slowest_rank(tmp_path):
    rows = [rows_of(Play(ring(3)), iteration=i) for i in range(2)]
    for i, part in enumerate(rows):
        whole = part["phase"] == KINDS.index("iteration")
        part["dur_us"][whole] = np.array([10, 30, 20])[part["rank"][whole]] * (i + 1) * 1e3
    (found,) = analyse(open_records(write(tmp_path, rows, [facts_of(ring(3))])))
    assert found.iteration_ms == Estimate(pytest.approx(45), pytest.approx(30 / 2**0.5), 2)


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


def test_a_killed_profile_is_analysed_up_to_its_end(tmp_path):
    folder = recorded_once(tmp_path, Play(ring(2)), iterations=3, complete=False, wanted=10)
    (found,) = analyse(open_records(folder))
    assert (found.iterations, found.wanted, found.partial) == (3, 10, True)


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
