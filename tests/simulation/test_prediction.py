"""Predictions: counted work, messages priced by link, bounds, and records like a profile's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from simulation.counting import count_work

from mtrain_cli.attention.flash4 import Flash4Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.triton_kernel import TritonKernel
from mtrain_cli.config.cluster import Cluster, Constant, load_cluster
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Recompute, ShardSizes
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.records import record_files
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import HIGH, LOW, SPARSE, kernels_for
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.simulation.families import IndexFamily
from mtrain_cli.simulation.prediction import BoundedTime, Prediction, _CasePlayer, predict
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule
from mtrain_cli.simulation.what_if import ReplaySetup, make_case
from mtrain_cli.simulation.workload import AttentionWorkload

SEQ, HEADS, BLOCK = 16384, 4, 128


def problem(family: str | None = "clustered", layers: int = 1, seq: int = SEQ) -> AttentionWorkload:
    made = RecordedSetup(
        seq=seq,
        heads=HEADS,
        kv_heads=2,
        head_dim=128,
        dtype_bytes=2,
        workers=8,
        per_node=8,
        layout="striped",
        exchange="ring",
    )
    of = None if family is None else IndexFamily(family, density=0.1, columns=64)
    masks = (SequenceMask.causal(seq, seq),)
    return AttentionWorkload(
        made,
        masks,
        tuple(range(layers)),
        lambda layer: None if of is None else of.index(layer, seq, HEADS),
        family or "dense",
    )


def costs(
    cluster: Cluster,
    exchange: str = "ring",
    workers: int | None = None,
    bound: str = "value",
    **options,
) -> Costs:
    workers = workers or cluster.gpus
    spmd = SpmdSchedule.of(
        make_schedule(
            exchange, ScheduleOptions(workers, min(workers, cluster.gpus_per_node), **options)
        )
    )
    kernels = kernels_for(
        cluster.gpu.name,
        cluster.gpu.peak_tflops.value * 1e12,
        "triton",
        SPARSE,
        {"NVIDIA H200": 989e12},
    )
    return Costs(cluster, kernels, ShardSizes(1 << 14, 16, 2, 128, 2), spmd, 128, bound=bound)


def first_size(found: Costs) -> int:
    """Bytes of the first message of a forward pass."""
    return found.bytes_of(next(lower(found.spmd.schedule, 0).posts).sends)


def test_a_message_takes_latency_and_bytes_over_bandwidth_of_its_link():
    cluster = load_cluster("a100_4x8")
    found = costs(cluster)
    (transfer,) = found.spmd.forward[0].post
    size = first_size(found)
    message = found.message(transfer, size)
    assert size == 2 * (1 << 14) * 2 * 128 * 2  # 16.8 MB: a hop of 512K tokens over 32 workers
    us = message.latency + message.busy
    crossing = np.arange(32) % 8 == 0
    assert message.outer.tolist() == crossing.tolist()
    assert us[crossing] == pytest.approx(70 + size / 25e3)
    assert us[~crossing] == pytest.approx(60 + size / 300e3)


def shared(cluster: Cluster, gpus: int) -> Cluster:
    return dataclasses.replace(
        cluster,
        outer=dataclasses.replace(cluster.outer, shared_by=Constant(gpus, "guess", "", gpus, gpus)),
    )


def test_gpus_behind_one_card_share_it_when_they_send_at_once():
    cluster = load_cluster("a100_4x8")
    for exchange, times in (("ring", 1), ("hierarchical_ring", 4)):
        alone, together = costs(cluster, exchange), costs(shared(cluster, 4), exchange)
        transfer = alone.spmd.forward[0].post[0]
        size = first_size(alone)
        before, after = (c.message(transfer, size) for c in (alone, together))
        assert before.outer[0]
        assert (after.latency + after.busy)[0] == pytest.approx(70 + times * size / 25e3)
        assert (before.latency + before.busy)[0] == pytest.approx(70 + size / 25e3)


def test_collectives_are_rings_over_the_slowest_link():
    cluster = load_cluster("a100_4x8")
    us, busy = costs(cluster).collective(False, 8, 8, 7 << 20)
    assert us == pytest.approx(60 + (7 << 20) / 300e3)
    # Eight cards carry what enters a node; each set of counterparts has one.
    across, _ = costs(cluster).collective(False, 32, 8, 31 << 20)
    assert across == pytest.approx(70 * 31 / 7 + (31 << 20) / 200e3)
    counterparts, busy = costs(cluster).collective(False, 4, 1, 3 << 20)
    assert counterparts == pytest.approx(70 + (3 << 20) / 25e3)
    assert busy == pytest.approx((3 << 20) / 25e3)
    trade, _ = costs(cluster).collective(True, 32, 8, 31 << 20)
    assert trade == pytest.approx(70 + (24 << 20) / 25e3)


def test_swapped_bounds_are_detected(monkeypatch):
    """Sorting three figures would make valid bounds of any of them."""
    play = _CasePlayer.play

    def swapped(self, work, index, layer, direction, bound, **more):
        return play(
            self, work, index, layer, direction, {LOW: HIGH, HIGH: LOW}.get(bound, bound), **more
        )

    monkeypatch.setattr(_CasePlayer, "play", swapped)
    for of_pass in predict(
        load_cluster("a100_4x8"), problem(), ReplaySetup("striped", "ring", 8, 8)
    ).passes.values():
        assert of_pass.duration.low == of_pass.duration.value == of_pass.duration.high
    assert (
        BoundedTime.around(2.0) == BoundedTime.around(2.0, 3.0, 1.0) == BoundedTime(2.0, 2.0, 2.0)
    )


@pytest.mark.parametrize("name", ["h200_1x8", "a100_4x8"])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_every_estimate_has_bounds(name, exchange):
    cluster = load_cluster(name)
    found = predict(cluster, problem(), ReplaySetup("striped", exchange, 8, 8))
    for of_pass in found.passes.values():
        assert of_pass.duration.low < of_pass.duration.value < of_pass.duration.high
    # Fixed times, which have wide bounds, dominate such a small problem.
    assert found.duration.high < (14 if name == "h200_1x8" else 32) * found.duration.low
    assert any("not calibrated" in remark for remark in found.remarks) == (name != "h200_1x8")
    low, high = (costs(cluster, bound=bound) for bound in (LOW, HIGH))
    assert low.copied(1 << 30) < high.copied(1 << 30)


def test_work_equals_that_of_the_counter():
    checked = 0
    one = problem(layers=2)
    for layout in ("contiguous", "zigzag", "striped"):
        for exchange in ("ring", "hierarchical_ring", "all_gather", "ulysses"):
            workers = 4 if exchange == "ulysses" else 8
            setup = ReplaySetup(layout, exchange, workers, 2)
            found = predict(load_cluster("h200_1x8"), one, setup, rows=True, bounds=False)
            for layer in one.layers:
                index = one.index(layer)
                case = make_case(one.made, one.masks, setup, index)
                for direction, work in count_work(
                    case.schedule,
                    case.layout,
                    one.masks,
                    index,
                    heads=HEADS,
                    shared_columns=case.choice.shared_columns,
                ).items():
                    mine = found.rows[
                        (found.rows["layer"] == layer)
                        & (
                            found.rows["direction"]
                            == record_files.WORDS["direction"].index(direction)
                        )
                    ]
                    attention = mine[
                        mine["phase"] == record_files.WORDS["phase"].index("attention")
                    ]
                    pairs, blocks = np.zeros_like(work.pairs), np.zeros_like(work.blocks)
                    pairs[attention["rank"], attention["step"]] = attention["pairs"]
                    blocks[attention["rank"], attention["step"]] = attention["blocks"]
                    assert (pairs == work.pairs).all()
                    assert (blocks[work.pairs > 0] == work.blocks[work.pairs > 0]).all()
                    columns = mine[mine["phase"] == record_files.WORDS["phase"].index("columns")]
                    assert columns["pairs"].sum() == work.column_pairs.sum()
                    checked += 1
    assert checked == 3 * 4 * 2 * 2


def test_no_kernel_needs_out_as_predictions_assume():
    kernels = (ReferenceKernel, SdpaKernel, TritonKernel, Flash4Kernel)
    assert not any(kernel.needs_out for kernel in kernels)


def test_pairs_of_columns_are_counted_separately_in_every_exchange():
    one = problem()
    index = one.index(0)
    expected = int(index.counts(MaskTables.make(one.masks, BLOCK)).column_pairs.sum())
    assert expected > 0
    for exchange, shared_columns, apart in (
        ("all_gather", True, False),
        ("ring", False, False),
        ("ring", True, True),
    ):
        schedule = make_schedule(exchange, ScheduleOptions(8, 8))
        layout = make_layout("striped", 8, SEQ, BLOCK, unit=BLOCK)
        for work in count_work(
            schedule, layout, one.masks, index, heads=HEADS, shared_columns=shared_columns
        ).values():
            assert (int(work.of_columns.sum()), int(work.column_pairs.sum())) == (
                (0, expected) if apart else (expected, 0)
            )
            assert (work.of_columns <= work.pairs).all()


def test_a_simulation_reads_like_a_profile(tmp_path):
    cluster = load_cluster("a100_4x8", nodes=2)
    setups = [
        ReplaySetup("zigzag", "ring", 16, 8),
        ReplaySetup("striped", "hierarchical_ring", 16, 8),
    ]
    found = [
        predict(
            cluster,
            problem(layers=2),
            s,
            number=i,
            rows=True,
            recompute=Recompute.EVERYTHING,
            bounds=False,
        )
        for i, s in enumerate(setups)
    ]
    for i, prediction in enumerate(found):
        record_files.write_part(prediction.rows, tmp_path, i)
    record_files.join_parts(tmp_path)
    document = {
        "kind": "simulation",
        "mode": "attention",
        "complete": True,
        "workers": 16,
        "samples_wanted": 1,
    }
    record_files.write_summary(
        tmp_path, document | {"cases": [prediction.facts for prediction in found]}
    )
    for case, prediction in zip(analyse(record_files.open_records(tmp_path)), found, strict=True):
        assert set(case.passes) == {"forward", "recompute", "backward"}
        assert case.bins.sum(-1) == pytest.approx(case.passes_ms, rel=1e-4), "bins fill the passes"
        for direction, of_pass in prediction.passes.items():
            told = case.passes[direction]
            assert told.duration.mean == pytest.approx(of_pass.duration.value, rel=1e-3)
            for degree in ("worker", "step", "total", "critical"):
                assert getattr(told.time, degree).mean == pytest.approx(
                    getattr(of_pass.time, degree), rel=1e-3
                )
                assert getattr(told.work, degree).mean == pytest.approx(
                    getattr(of_pass.work, degree), rel=1e-6
                )
            assert told.computation.total.mean == pytest.approx(of_pass.computed, rel=1e-3)
            assert case.bin_ms("late", direction) / 2 == pytest.approx(
                of_pass.late, rel=1e-3, abs=1e-6
            )
            for link, ms in of_pass.exposed.items():
                assert case.bin_ms(f"exposed {link}", direction) / 2 == pytest.approx(
                    ms, rel=1e-3, abs=1e-6
                )


def exposed(found: Prediction) -> float:
    return sum(sum(of_pass.exposed.values()) for of_pass in found.passes.values())
