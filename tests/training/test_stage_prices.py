"""The price of stages: pairs by definition, and times that agree with the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parallel.mask_samples import dense, random_mask, sliding_window

from mtrain_cli.config.cluster import Constant, load_cluster
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.parallel.traffic import Nodes, Rates
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.what_if import ReplaySetup
from mtrain_cli.training.layout_choice import attention_seconds, pairs_by_stage

NAME = "hierarchical_group_cast"


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_stages_have_the_pairs_of_own_keys_of_the_node_and_of_others(stages):
    seq, layout = 192, make_layout("zigzag", 4, 192, 16)
    masks = [sliding_window(seq, 70), random_mask(np.random.default_rng(0), seq, 2)]
    shards = [layout.positions(rank) for rank in range(4)]
    found = pairs_by_stage(masks, shards, Nodes.of(4, 2), stages)
    owner = np.empty(seq, int)
    for rank, positions in enumerate(shards):
        owner[positions] = rank
    expected = np.zeros((4, 3), int)
    for query, key in np.argwhere(np.concatenate([dense(mask) for mask in masks])):
        rank, holder = owner[query % seq], owner[key]
        stage = 0 if holder == rank else 1 if holder // 2 == rank // 2 else 2
        expected[rank, stage] += 1
    own, near, far = expected.T
    parts = {1: {}, 2: {0: own, 1: near + far}, 3: {0: own, 1: near, 2: far}}[stages]
    assert found.keys() == {None, *parts}
    for stage, pairs in {None: own + near + far, **parts}.items():
        np.testing.assert_array_equal(found[stage], pairs)


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
    for stages in (1, 2, 3) if heads < 8 else (1, 2):
        channels = ("inner", "outer") if heads < 8 else ("context",)
        details = {"heads": heads, "chunks": 2 // min(2, heads), "channels": channels}
        choice = ExchangeChoice(NAME, "", 8, stages=stages, **details)
        setup = ReplaySetup(layout, NAME, workers, 8)
        predicted = predict(cluster, workload, setup, kernel="flash4", choice=choice, bounds=False)
        simulated.append(predicted.duration.value / 1e3)
        ours.append(
            attention_seconds(
                make_schedule(NAME, choice.options(workers)),
                make_layout(layout, workers, seq, 128),
                [mask],
                sizes,
                Rates.on(cluster),
            )
        )
    np.testing.assert_allclose(ours, simulated, rtol=0.15)
    gains = np.array(ours[1:]) / ours[0], np.array(simulated[1:]) / simulated[0]
    np.testing.assert_allclose(*gains, atol=0.05)


@pytest.mark.parametrize("name", Rates._fields)
def test_every_rate_changes_the_time(name):
    seq, workers = 1 << 16, 8
    options = ScheduleOptions(workers, 4, chunks=2, stages=3)
    sizes = ExchangeNeeds(workers, 4, seq, 16, 2, 128, 2).sizes(seq // workers)

    def seconds(rates: Rates) -> float:
        layout = make_layout("striped", workers, seq, 128)
        masks = [sliding_window(seq, 1 << 13)]
        return attention_seconds(make_schedule(NAME, options), layout, masks, sizes, rates)

    usual = Rates.on(None)
    value = getattr(usual, name)
    faster = name in ("flops", "inner", "outer", "memory")
    worse = value / 4 if faster else min(0.9, 4 * value)
    assert seconds(usual._replace(**{name: worse})) > 1.001 * seconds(usual)
