"""Plans survive in files, orders rotate, and the slowest worker sets a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling.measurement import Bench, MeasurementPlan, MeasurementProgress, rotated


def test_a_saved_plan_is_loaded_with_its_cases_in_order(tmp_path):
    seqs = (512, 256, 1024)
    cases = [(f"case of {seq}", compose([f"seq={seq}"])) for seq in seqs]
    plan = MeasurementPlan("attention", cases, samples=3, warmup=2, every=4, quiet=True)
    plan.save(RunDir(tmp_path))
    assert MeasurementPlan.load(RunDir(tmp_path)) == plan


def bench_of(gathered: list[Any]) -> Bench:
    """Return a bench whose `gather` returns these values of all workers."""
    bench = object.__new__(Bench)
    bench.gather = lambda _: gathered  # type: ignore[method-assign]
    bench.first = True
    bench.stop = SimpleNamespace(requested=lambda: False)  # type: ignore[assignment]
    return bench


def test_the_slowest_worker_sets_the_time_of_each_part():
    found = bench_of([[(1.0, 5.0), (2.0, 2.0)], [(3.0, 4.0), (1.0, 9.0)]]).slowest([])
    assert found.tolist() == [[3.0, 5.0], [2.0, 9.0]]


def test_all_workers_get_what_the_first_worker_made():
    made = []

    def make() -> str:
        made.append(1)
        return "plan"

    first = bench_of(["plan", None])
    assert first.share(make) == "plan"
    other = bench_of(["plan", None])
    other.first = False
    assert other.share(make) == "plan"
    assert made == [1]


def test_each_sample_starts_with_another_case():
    orders = ["".join(rotated("abc", sample)) for sample in (0, 1, 5)]
    assert orders == ["abc", "bca", "cab"]


@pytest.mark.parametrize(
    ("first", "quiet", "lines"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_only_the_first_worker_prints_unless_quiet(first, quiet, lines, capsys):
    bench, plan = SimpleNamespace(first=first), SimpleNamespace(quiet=quiet)
    with MeasurementProgress(bench, plan, 2) as progress:  # type: ignore[arg-type]
        progress.sampled(1, 2)
        progress.done()
    assert capsys.readouterr().out.splitlines() == ["sample 1 of 2"] * lines
