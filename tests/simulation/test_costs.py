"""A collective's latency is that of the ranks it was measured with; longer rings take longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from mtrain_cli.config.cluster import Constant, load_cluster, shipped
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.simulation.calibration import HIGH, VALUE, KernelCurves
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.simulation.link_fit import (
    GATHER,
    HOP,
    INNER,
    OUTER,
    SCATTER,
    LinkTime,
    MeasuredMachine,
    cluster_document,
)
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule

MACHINE = MeasuredMachine(
    "NVIDIA H200", 989.0, "datasheet", 760.0, 139.8, 4200.0, 3600.0, (3.9, 4.2, 5.5)
)


def costs(cluster, bound: str = VALUE) -> Costs:
    lockstep = SpmdSchedule.of(make_schedule("ring", ScheduleOptions(2, 2)))
    return Costs(
        cluster, KernelCurves({}, ()), ShardSizes(128, 4, 2, 64, 2), lockstep, 64, bound=bound
    )


def measured(ranks: int, tmp_path):
    """A cluster file whose collectives took 60 us over this many ranks."""
    times = [
        LinkTime(link, what, size, ranks if what != HOP else 2, us, us, us)
        for link in (INNER, OUTER)
        for what in (HOP, GATHER, SCATTER)
        for size in (1 << 12, 1 << 20, 1 << 26)
        for us in [60 + size / 2e5]
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(
            cluster_document("mine", 8, 8, MACHINE, times, measured_ranks=64, virtual=False)
        )
    )
    return load_cluster(str(path))


def test_the_measured_ranks_take_the_measured_time(tmp_path):
    for ranks, used, expected in ((16, 16, 60), (16, 31, 120), (16, 9, 60), (2, 16, 15 * 60)):
        cluster = measured(ranks, tmp_path)
        assert cluster.outer.collective_ranks.value == cluster.inner.collective_ranks.value == ranks
        us, _ = costs(cluster).collective(False, used, 8, 0)
        assert us == pytest.approx(expected, rel=1e-3), (ranks, used)
    inner = measured(2, tmp_path)
    assert costs(inner).collective(False, 8, 8, 0)[0] == pytest.approx(60, rel=1e-3), "launches"
    assert costs(inner, HIGH).collective(False, 8, 8, 0)[0] == pytest.approx(7 * 60, rel=1e-2)
    assert costs(inner, HIGH).collective(True, 8, 8, 0)[0] == pytest.approx(60, rel=1e-2), (
        "an all-to-all is no ring"
    )


def test_files_without_collective_ranks_mean_eight():
    for name in shipped():
        assert load_cluster(name).inner.collective_ranks.value == 8
    a100 = load_cluster("a100_4x8")
    assert a100.outer.collective_ranks.source == "guess"
    latency = a100.outer.collective_latency_us.value
    assert costs(a100).collective(False, 15, 8, 0)[0] == pytest.approx(2 * latency)
    alone = replace(a100, outer=replace(a100.outer, collective_ranks=Constant.of(1, "measured")))
    assert costs(alone).collective(False, 3, 2, 0)[0] == pytest.approx(2 * latency), (
        "one rank is no ring"
    )
