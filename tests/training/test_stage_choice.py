"""``topology.stages=auto`` compares the times of several numbers of stages, and states them."""

from __future__ import annotations

import re
from itertools import product

import pytest

from mtrain_cli import resource_dir
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.training import layout_choice, stage_prices
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.stage_prices import PricedStages

WINDOW = ("seq=512k", "mask=sliding_window", "mask.window=32k")


@pytest.fixture(autouse=True)
def no_remembered_times():
    stage_prices.static_stages.cache_clear()
    yield
    stage_prices.static_stages.cache_clear()


@pytest.fixture
def slow(tmp_path):
    """Return the file of a cluster with a tenth of the bandwidth of ``h100_4x8``."""
    text = (resource_dir("conf") / "cluster/h100_4x8.yaml").read_text()
    for fast in (322, 50):
        key = f"bandwidth_gbps: {{value: {fast}"
        assert key in text
        text = text.replace(key, f"bandwidth_gbps: {{value: {fast / 10}")
    text = text.replace("low: 230, high: 370", "low: 23, high: 37")
    path = tmp_path / "slow.yaml"
    path.write_text(text)
    return str(path)


def exchange(*words: str, cluster: str = "h100_4x8"):
    overrides = ("model=qwen3b", *words, f"topology.cluster={cluster}", "topology.device=cuda")
    return make_plan(compose([*overrides, "topology.workers=32"], plan=True)).exchange


def test_slow_links_get_stages_and_fast_links_do_not(slow):
    fast = exchange(*WINDOW)
    assert (fast.name, fast.stages) == ("hierarchical_group_cast", 0)
    staged = exchange(*WINDOW, cluster=slow)
    assert staged.name == fast.name
    assert min(staged.stages, staged.stages_backward) > 0
    assert f"{staged.stages} stages of received keys" in staged.label
    given = exchange(*WINDOW, "topology.stages=3", cluster=slow)
    assert (given.stages, given.stages_backward) == (3, staged.stages_backward)
    assert "(topology.stages_backward=auto, " in given.reason


def test_the_reason_states_the_times_and_the_smallest_wins(slow):
    chosen = exchange(*WINDOW, cluster=slow)
    found = re.search(
        r"moves the rows .*; (\d) stages?, (\d) in backward: "
        r"(\S+) ms, (.*) in both passes a layer "
        r"\(topology\.stages=auto, predicted for the links of topology\.cluster=\S+\)$",
        chosen.reason,
    )
    assert found is not None, chosen.reason
    assert (int(found[1]), int(found[2])) == (chosen.stages, chosen.stages_backward)
    others = {n: float(ms) for ms, n in re.findall(r"(\S+) ms with (\d)", found[4])}
    assert "0" in others
    assert float(found[3]) <= min(others.values())


@pytest.mark.parametrize("layout", ["auto", "zigzag", "balanced"])
@pytest.mark.parametrize("ulysses", ["auto", 1, 2, 4])
def test_every_exchange_is_planned_under_every_mask(layout, ulysses):
    """With eight GPUs in nodes of two, and with all other choices left to auto."""
    masks = (("mask=sliding_window", "mask.window=1k"), ("mask=prefix_lm", "mask.prefix=100"))
    for exchange, mask in product(("auto", *EXCHANGE_TRAITS), masks):
        words = ("model=tiny", "seq=2k", "topology.device=cuda", "data.document_mask=false")
        topology = {"workers": 8, "gpus_per_node": 2, "layout": layout}
        topology |= {"exchange": exchange, "ulysses": ulysses}
        given = (f"topology.{name}={value}" for name, value in topology.items())
        choice = make_plan(compose([*words, *mask, *given], plan=True)).exchange
        assert exchange in ("auto", choice.name)
        assert choice.heads == (1 if ulysses == "auto" else ulysses)
        if choice.traits.by_mask:
            assert "in backward: " in choice.reason


@pytest.mark.parametrize(("seconds", "stages"), [(0.979, 1), (0.98, 0), (0.981, 0), (1.5, 0)])
def test_stages_must_win_by_two_percent_in_each_pass(seconds, stages):
    slow, fast = {0: 1.0, 1: seconds, 2: 2.0}, {0: 1.0, 1: 1.1, 2: 0.5}
    assert PricedStages(slow, fast).best == (stages, 2)
    assert PricedStages(fast, slow).best == (2, stages)
    assert PricedStages(fast, slow, (1, None)).best == (1, stages), "given in forward"


@pytest.mark.parametrize(
    "words",
    [
        ("topology.exchange=ring",),
        ("topology.exchange=group_cast", "sparsity=vertical_slash"),
        ("topology.exchange=group_cast", "topology.stages=2", "topology.stages_backward=0"),
    ],
)
def test_only_auto_stages_of_dense_group_casts_are_priced(monkeypatch, words):
    monkeypatch.delattr(layout_choice, "static_stages")
    found = exchange("seq=32k", *words)
    assert "stage" not in found.reason
    assert found.stages == (2 if "topology.stages=2" in words else 0)


def test_layers_with_different_masks_share_their_mean_time(monkeypatch):
    """With every sixth layer full, most of the layers take the time of a window."""
    pairs = []

    def of(_, __, masks):
        pairs.append(masks[0].pairs)
        return PricedStages({0: float(masks[0].pairs)}, {0: 0.0})

    monkeypatch.setattr(stage_prices.StagePrices, "of", of)
    words = ("topology.exchange=group_cast", "topology.layout=zigzag")
    window = ("seq=32k", "mask=sliding_window", "mask.window=1k", "mask.full_every=6")
    found = exchange(*window, *words)
    both = sorted(set(pairs))
    mean = (5 * both[0] + both[1]) / 6
    assert f"in backward: {1e3 * mean:.3g} ms" in found.reason
