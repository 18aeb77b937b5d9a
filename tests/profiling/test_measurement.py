"""Plans survive in files, orders rotate, and the slowest worker sets a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.profiling import measurement
from mtrain_cli.profiling.measurement import Bench, MeasurementPlan, MeasurementProgress


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


def test_cases_with_equal_communicators_share_a_group(monkeypatch):
    """A label shows what `auto` chose."""
    choices = [
        ExchangeChoice("ring", "", per_node=4, heads=heads, channels=channels)
        for heads, channels in ((1, ("context",)), (2, ("context",)), (2, ()), (1, ("context",)))
    ]
    made: list[Any] = []
    bench = bench_of([])
    bench._groups, bench.environment = {}, None  # type: ignore[assignment]
    bench.context_group = lambda **options: made.append(options) or options  # type: ignore
    layout = SimpleNamespace(name="balanced")
    monkeypatch.setattr(
        measurement,
        "resolve_run",
        lambda choice, _: SimpleNamespace(exchange=choice, layout=layout),
    )
    monkeypatch.setattr(measurement, "make_chosen_exchange", lambda *of: of[2])
    plan = SimpleNamespace(cases=[("dense auto auto 4k", choice) for choice in choices])
    cases = bench.cases(plan)  # type: ignore[arg-type]
    expected = [{"per_node": 4, "heads": c.heads, "channels": c.channels} for c in choices]
    assert [case.exchange for case in cases] == expected
    assert made == expected[:3]
    assert [case.label for case in cases] == [f"dense balanced {c.label} 4k" for c in choices]
    typed = SimpleNamespace(cases=[("dense zigzag ring", choices[1])])
    assert bench.cases(typed)[0].label == "dense zigzag ring"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "quiet", "lines"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_only_the_first_worker_prints_unless_quiet(first, quiet, lines, capsys):
    bench, plan = SimpleNamespace(first=first), SimpleNamespace(quiet=quiet)
    with MeasurementProgress(bench, plan, 2) as progress:  # type: ignore[arg-type]
        progress.sampled(1, 2)
        progress.done()
    assert capsys.readouterr().out.splitlines() == ["sample 1 of 2"] * lines
