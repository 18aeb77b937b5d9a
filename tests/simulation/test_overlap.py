"""Predictions in which messages wait for computation, as in other implementations of rings."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.exchanges import OVERLAPS, RingVariant
from mtrain_cli.simulation.prediction import Prediction
from mtrain_cli.simulation.scenario import PairSource, Scenario, predict_attention_alone


def predicted(variant: RingVariant, nodes: int = 0) -> Prediction:
    config = compose(["model=qwen3b", "seq=64k", "topology.circulates=kv"])
    scenario = Scenario(config, PairSource("dense").problem(config), variant=variant)
    cluster = load_cluster("h100_4x8", nodes=nodes) if nodes else load_cluster("h200_1x8")
    return predict_attention_alone(cluster, scenario, "zigzag", "ring", workers=cluster.gpus)


def test_a_rank_waits_for_messages_that_do_not_overlap():
    none, keys, every = (predicted(RingVariant(overlap)) for overlap in OVERLAPS)
    of = {name: found.passes for name, found in zip(OVERLAPS, (none, keys, every), strict=True)}
    # The forward pass has no gradients. In backward, a rank sends gradients in all steps but one.
    assert of["keys"]["forward"].duration == of["all"]["forward"].duration
    for name in ("forward", "backward"):
        assert of["none"][name].duration.value > of["all"][name].duration.value
        assert of["none"][name].carried == of["all"][name].carried
    hop = of["none"]["forward"].exposed["context"] / 7
    assert hop > 0
    backward = {name: passes["backward"] for name, passes in of.items()}
    exposed = {name: one.exposed["context"] for name, one in backward.items()}
    assert exposed["none"] == pytest.approx(exposed["keys"] + 7 * hop, rel=0.02)
    assert exposed["keys"] > 7 * hop, "gradients have twice the bytes of keys and values"
    for name in ("none", "keys"):
        longer = backward[name].duration.value - backward["all"].duration.value
        waits = exposed[name] - exposed["all"]
        # Messages in flight slow attention, which those that are waited for do not.
        assert 0.5 * waits < longer <= waits


def test_a_ring_that_visits_the_ends_in_turn_crosses_nodes_in_every_hop():
    near, ends = (predicted(RingVariant("none", order), nodes=4) for order in ("next", "ends"))
    for name in ("forward", "backward"):
        (inner, outer), (none, every) = (of.passes[name].carried for of in (near, ends))
        assert (none, inner > 0) == (0, True)
        assert every == pytest.approx(outer), "each GPU has a network card of its own"
        # A ring is as slow as its slowest hop.
        assert ends.passes[name].duration.value == pytest.approx(near.passes[name].duration.value)
    one = predicted(RingVariant(order="ends")).duration
    assert one == predicted(RingVariant()).duration, "one node has no other nodes"


@pytest.mark.parametrize("given", [{"overlap": "some"}, {"order": "last"}])
def test_other_variants_are_refused(given):
    with pytest.raises(ValueError, match="allowed: n"):
        RingVariant(**given)
