"""The rates of GPUs come from the constants of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtrain_cli.config.cluster import Constant, load_cluster
from mtrain_cli.parallel.traffic import Rates


def test_the_rates_are_those_of_the_clusters_file():
    rates = Rates.on(load_cluster("h100_4x8"))
    assert rates.flops == pytest.approx(0.55 * 989e12)
    assert (rates.inner, rates.outer, rates.memory) == (322e9, 50e9, 3350e9)
    assert (rates.inner_latency, rates.outer_latency) == pytest.approx((79e-6, 90e-6))
    assert (rates.inner_share, rates.outer_share) == (0.06, 0.03)


def test_gpus_that_share_a_network_card_share_its_bandwidth():
    cluster = load_cluster("h100_4x8")
    shared = replace(cluster.outer, shared_by=Constant.of(4, "guess"))
    assert Rates.on(replace(cluster, outer=shared)).outer == 50e9 / 4


def test_one_node_keeps_the_usual_links_to_others():
    """A group of one node may be split into virtual nodes."""
    rates = Rates.on(load_cluster("h200_1x8"))
    assert rates.outer == Rates.on(None).outer
    assert rates.inner == 322e9
