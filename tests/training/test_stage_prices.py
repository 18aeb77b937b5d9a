"""The price of stages: pairs by definition, and times that agree with the simulator."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from parallel.mask_samples import dense, random_mask, sliding_window

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.cluster import Constant, load_cluster
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.parallel.traffic import Rates
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.what_if import ReplaySetup
from mtrain_cli.training.stage_prices import StagePrices, by_stage, pairs_between

NAME = "hierarchical_group_cast"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("name", "stages"), [("group_cast", 3), (NAME, 0), (NAME, 1), (NAME, 3)])
def test_pairs_are_those_of_the_ranks_whose_keys_a_stage_brings(layout, name, stages):
    seq, workers = 192, 6
    made = make_layout(layout, workers, seq, 16)
    masks = [sliding_window(seq, 70), random_mask(np.random.default_rng(0), seq, 2)]
    owner = np.empty(seq, int)
    for rank in range(workers):
        owner[made.positions(rank)] = rank
    expected = np.zeros((workers, workers), int)
    for query, key in np.argwhere(np.concatenate([dense(mask) for mask in masks])):
        expected[owner[query % seq], owner[key]] += 1
    found = pairs_between(masks, [made.positions(rank) for rank in range(workers)])
    np.testing.assert_array_equal(found, expected)
    options = ScheduleOptions(workers, 2, stages=stages, stages_backward=stages)
    schedule = make_schedule(name, options)
    work = by_stage(schedule, found)
    assert work.keys() == {None, *range(stages + 1 if stages else 0)}
    np.testing.assert_array_equal(work.pop(None), expected.sum(1))
    for rank in range(workers):
        for step in schedule.forward[rank]:
            if step.stage is not None:
                assert work[step.stage][rank] == expected[rank, list(step.keys)].sum()


def priced(options: ScheduleOptions, layout: str, mask, sizes, rates: Rates, name: str = NAME):
    prices = StagePrices(name, options, sizes, rates)
    return prices.of(make_layout(layout, options.workers, len(mask.low[0]), 128), [mask])


def test_a_candidate_of_eight_workers_and_64_documents_takes_milliseconds():
    seq = 1 << 19
    ids = np.sort(np.random.default_rng(0).integers(0, 64, seq))
    mask = SequenceMask.from_documents(ids, seq)
    options = ScheduleOptions(8, 8)
    sizes = ExchangeNeeds(8, 8, seq, 16, 2, 128, 2).sizes(seq // 8)
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        found = priced(options, "zigzag", mask, sizes, Rates(), "group_cast")
        seconds.append(time.thread_time() - start)
    assert len(found.forward) == 6  # 0, 1, 2, 3, 4, 6 stages; at most 7
    assert min(seconds) / len(found.forward) < 0.010


def slow():
    """Return a cluster whose links have a tenth of the bandwidth."""
    cluster = load_cluster("h100_4x8")
    inner, outer = (
        replace(
            link,
            collective_bandwidth_gbps=link.collective_bandwidth_gbps.scaled(0.1),
            capacity_gbps=Constant.of(link.capacity_gbps.value / 10, "guess"),
        )
        for link in (cluster.inner, cluster.outer)
    )
    return replace(cluster, inner=inner, outer=outer)


@pytest.mark.parametrize("links", ["fast", "slow"])
@pytest.mark.parametrize(
    ("layout", "heads"), [("zigzag", 1), ("contiguous", 1), ("zigzag", 2), ("zigzag", 16)]
)
def test_the_times_are_near_those_of_the_simulator(links, layout, heads):
    seq, workers = 1 << 17, 32
    cluster = slow() if links == "slow" else load_cluster("h100_4x8")
    mask = sliding_window(seq, 1 << 14)
    made = RecordedSetup(seq, 16, 2, 128, 2, workers, 8, layout, NAME)
    workload = AttentionWorkload(made, (mask,), (0,), lambda _: None, "dense", estimated=False)
    sizes = ExchangeNeeds(workers, 8, seq, 16, 2, 128, 2).sizes(seq // workers)
    ours, simulated = [], []
    for stages in (0, 1, 2) if heads < 8 else (0, 1):
        channels = ("inner", "outer") if heads < 8 else ("context",)
        details = {"heads": heads, "chunks": 2 // min(2, heads), "channels": channels}
        details |= {"stages": stages, "stages_backward": stages}
        choice = ExchangeChoice(NAME, "", 8, **details)
        setup = ReplaySetup(layout, NAME, workers, 8)
        predicted = predict(cluster, workload, setup, kernel="flash4", choice=choice, bounds=False)
        simulated.append(predicted.duration.value / 1e3)
        plain = replace(choice.options(workers), stages=0, stages_backward=0)
        times = priced(plain, layout, mask, sizes, Rates.on(cluster))
        ours.append(times.forward[stages] + times.backward[stages])
    np.testing.assert_allclose(ours, simulated, rtol=0.15)
    gains = np.array(ours[1:]) / ours[0], np.array(simulated[1:]) / simulated[0]
    np.testing.assert_allclose(*gains, atol=0.05)


@pytest.mark.parametrize("name", Rates._fields)
def test_every_rate_changes_the_time(name):
    seq, workers = 1 << 16, 8
    options = ScheduleOptions(workers, 4, chunks=2)
    sizes = ExchangeNeeds(workers, 4, seq, 16, 2, 128, 2).sizes(seq // workers)

    def seconds(rates: Rates) -> float:
        times = priced(options, "striped", sliding_window(seq, 1 << 13), sizes, rates)
        return times.forward[2] + times.backward[2]

    usual = Rates.on(None)
    value = getattr(usual, name)
    faster = name in ("flops", "inner", "outer", "memory")
    worse = value / 4 if faster else min(0.9, 4 * value)
    assert seconds(usual._replace(**{name: worse})) > 1.001 * seconds(usual)
