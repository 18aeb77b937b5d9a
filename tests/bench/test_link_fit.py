"""Links fitted to measured messages, with bounds, as a cluster that `mtrain simulate` reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mtrain_cli.config.cluster import load_cluster
from mtrain_extras.bench.link_fit import (
    ALL_TO_ALL,
    GATHER,
    HOP,
    HOPS_AT_ONCE,
    INNER,
    OUTER,
    SCATTER,
    TWO_HOPS,
    LinkTime,
    MeasuredMachine,
    cluster_document,
    fit_link,
    slowdowns,
)

SIZES = tuple(1 << n for n in range(12, 28, 3))
MACHINE = MeasuredMachine(
    "NVIDIA H200", 989.0, "datasheet", 760.0, 139.8, 4200.0, 3600.0, (3.9, 4.2, 5.5)
)


def times(
    link: str,
    what: str,
    latency: float,
    gbps: float,
    *,
    loaded: float | None = None,
    slowdown: float | None = None,
):
    found = []
    for size in SIZES:
        us = latency + size / gbps / 1e3
        found.append(
            LinkTime(
                link, what, size, 2, us, 0.97 * us, 1.05 * us, loaded and loaded * us, slowdown
            )
        )
    return found


def everything(link: str, slower: float = 1.0) -> list[LinkTime]:
    return [
        *times(link, HOP, 40.0, 50.0, loaded=1.2, slowdown=1.25),
        *times(link, HOPS_AT_ONCE, 40.0, 50.0 / slower),
        *times(link, TWO_HOPS, 45.0, 40.0),
        *times(link, GATHER, 60.0, 200.0),
        *times(link, SCATTER, 60.0, 200.0),
    ]


def test_a_fit_recovers_both_constants_despite_one_disturbed_size():
    measured = times(INNER, HOP, 40.0, 50.0)
    found = fit_link(measured)
    assert (found.latency_us, found.gbps) == (pytest.approx(40.0), pytest.approx(50.0))
    assert found.worst < 1e-6
    measured[2] = replace(measured[2], us=3 * measured[2].us, high=4 * measured[2].us)
    disturbed = fit_link(measured)
    assert disturbed.latency_us == pytest.approx(40.0, rel=0.05)
    assert disturbed.gbps == pytest.approx(50.0, rel=0.05)
    assert disturbed.worst == pytest.approx(2 / 3, rel=0.02)
    assert disturbed.error > 0.1


def test_bounds_hold_all_samples_and_loaded_messages():
    measured = times(INNER, HOP, 40.0, 50.0, loaded=1.5)
    found = fit_link(measured)
    low, high = found.latency
    assert low <= 0.97 * 40.0
    assert 1.45 * 40.0 <= high < 2.5 * 40.0, "of small messages, not what large ones are late"
    slowest, fastest = found.bandwidth
    assert 50.0 / 2.2 < slowest <= 50.0 / 1.4, "all that is late may be its bytes'"
    assert fastest >= 50.0 / 0.98
    for t in measured:
        assert low + t.size / fastest / 1e3 <= t.low * 1.001
        assert high + t.size / slowest / 1e3 >= t.loaded_us * 0.999


def test_senseless_times_still_yield_a_link():
    falling = [
        LinkTime(INNER, HOP, size, 2, us, us, us)
        for size, us in ((4096, 900.0), (65536, 300.0), (1 << 20, 280.0))
    ]
    found = fit_link(falling)
    assert found.latency_us >= 0
    assert found.gbps > 0
    assert found.latency[1] >= 300
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_link(falling[:1])


@pytest.mark.parametrize(("slower", "shared"), [(1.0, 1), (1.9, 2), (4.3, 4)])
def test_measurements_become_a_cluster(tmp_path: Path, slower: float, shared: int):
    document = cluster_document(
        "mine",
        2,
        4,
        MACHINE,
        [*everything(INNER), *everything(OUTER, slower)],
        measured_ranks=8,
        virtual=False,
    )
    assert "device" not in document["gpu"]
    on_cpu = cluster_document(
        "mine",
        1,
        4,
        replace(MACHINE, device="cpu"),
        [
            *everything(INNER)[: -len(SIZES)],
            *times(INNER, SCATTER, 60.0, 100.0),
            *times(INNER, ALL_TO_ALL, 60.0, 160.0),
        ],
        measured_ranks=8,
        virtual=False,
    )
    assert on_cpu["gpu"]["device"] == "cpu"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(on_cpu))
    link = load_cluster(str(path)).inner
    assert link.collective_bandwidth_gbps.value == pytest.approx(200, rel=1e-3)
    assert link.reduce_factor.value == pytest.approx(2, rel=1e-3)
    assert link.all_to_all_factor.value == pytest.approx(1.25, rel=1e-3)
    path.write_text(yaml.safe_dump(document))
    cluster = load_cluster(str(path))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (2, 4, "NVIDIA H200")
    assert cluster.outer is not None
    assert cluster.outer.shared_by.value == shared
    # All groups between nodes ran at once, so each had a part of a shared card.
    for link, together in ((cluster.inner, 1), (cluster.outer, shared)):
        assert link.latency_us.value == pytest.approx(40, rel=1e-3)
        assert link.bandwidth_gbps.value == pytest.approx(50, rel=1e-3)
        assert link.capacity_gbps.value == pytest.approx(80, rel=1e-3), "two hops at once"
        assert link.collective_latency_us.value == pytest.approx(60, rel=1e-3)
        assert link.collective_bandwidth_gbps.value == pytest.approx(200 * together, rel=1e-3)
        assert link.reduce_factor is link.all_to_all_factor is None
        assert link.gpu_share.value == pytest.approx(0.2), "computing took 1.25 times as long"
        assert link.latency_us.low < link.latency_us.value < link.latency_us.high
    gpu = cluster.gpu
    assert gpu.hbm_gbps.value == pytest.approx((4200 * 3600) ** 0.5, rel=1e-3), (
        "between a copy and an addition"
    )
    assert (gpu.hbm_gbps.low, gpu.hbm_gbps.high) == (3600, 4200)
    assert (gpu.peak_tflops.value, gpu.gemm_tflops.value, gpu.hbm_gib.value) == (989, 760, 139.8)
    assert (gpu.launch_us.low, gpu.launch_us.value, gpu.launch_us.high) == (3.9, 4.2, 5.5)
    measured = {
        name for name, constant in cluster.constants().items() if constant.source == "measured"
    }
    host = {"gpu.host_gib", "gpu.host_link_gbps", "gpu.host_memory_gbps"}
    assert {name for name in cluster.constants() if name not in measured} == {
        "gpu.peak_tflops",
        "gpu.step_ms",
        "links.inner.shared_by",
        *host,
    }


def test_without_slowdown_messages_take_no_share_of_the_gpu():
    assert slowdowns(times(INNER, HOP, 1.0, 1.0, loaded=1.0, slowdown=0.9), INNER) == (
        0.0,
        0.0,
        0.0,
    )
    assert slowdowns(times(INNER, HOP, 1.0, 1.0), INNER) == (0.0, 0.0, 0.0)
