"""``topology.stages=auto`` compares the times of 1, 2 and 3 stages, and states them."""

from __future__ import annotations

import re
from itertools import product

import pytest

from mtrain_cli import resource_dir
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.training import layout_choice
from mtrain_cli.training.planning import make_plan

WINDOW = ("seq=512k", "mask=sliding_window", "mask.window=32k")


@pytest.fixture(autouse=True)
def no_remembered_times():
    layout_choice._mean_seconds.cache_clear()
    yield
    layout_choice._mean_seconds.cache_clear()


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
    assert (fast.name, fast.stages) == ("hierarchical_group_cast", 1)
    staged = exchange(*WINDOW, cluster=slow)
    assert staged.name == fast.name
    assert staged.stages > 1
    assert f"{staged.stages} stages" in staged.label


def test_the_reason_states_all_times_and_the_smallest_wins(slow):
    chosen = exchange(*WINDOW, cluster=slow)
    found = re.search(
        r"moves the rows .*; with (\d) stages, attention of a layer takes (\S+) ms, "
        r"(\S+) ms with 1 stage and (\S+) ms with \d stages "
        r"\(topology\.stages=auto, predicted for the links of topology\.cluster=\S+\)$",
        chosen.reason,
    )
    assert found is not None, chosen.reason
    stages, best, *others = map(float, found.groups())
    assert stages == chosen.stages
    assert best < min(others)


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
            assert "attention of a layer takes" in choice.reason


@pytest.mark.parametrize(("seconds", "stages"), [(0.979, 2), (0.98, 1), (0.981, 1), (1.5, 1)])
def test_stages_must_win_by_two_percent(monkeypatch, seconds, stages):
    times = {1: 1.0, 2: seconds, 3: 2.0}
    monkeypatch.setattr(
        layout_choice, "attention_seconds", lambda schedule, *_: times[schedule.stages]
    )
    assert exchange(*WINDOW).stages == stages


@pytest.mark.parametrize(
    "words",
    [
        ("topology.exchange=ring",),
        ("topology.exchange=group_cast", "sparsity=vertical_slash"),
        ("topology.exchange=group_cast", "topology.stages=2"),
    ],
)
def test_only_auto_stages_of_dense_group_casts_are_priced(monkeypatch, words):
    monkeypatch.delattr(layout_choice, "attention_seconds")
    found = exchange("seq=32k", *words)
    assert "stage" not in found.reason
    assert found.stages == (2 if "topology.stages=2" in words else 1)


def test_layers_with_different_masks_share_their_mean_time(monkeypatch):
    """With every second layer full, half of the layers take the time of each mask."""
    pairs = []
    monkeypatch.setattr(
        layout_choice,
        "attention_seconds",
        lambda _, __, masks, *___: pairs.append(masks[0].pairs) or float(masks[0].pairs),
    )
    words = ("topology.exchange=group_cast", "topology.layout=zigzag")
    window = ("seq=32k", "mask=sliding_window", "mask.window=1k", "mask.full_every=6")
    found = exchange(*window, *words)
    both = sorted(set(pairs))
    mean = (5 * both[0] + both[1]) / 6
    assert f"takes {1e3 * mean:.3g} ms" in found.reason
