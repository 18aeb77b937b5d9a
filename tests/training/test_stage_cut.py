"""Layers of each stage: the slowest stage is as fast as possible."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.flops import ASSUMED_DENSITY
from mtrain_cli.training.pipeline_plan import cut, head_cost, layer_costs, stage_layers


def slowest(counts: tuple[int, ...], costs: list[float], head: float) -> float:
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    parts = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    parts[-1] += head
    return max(parts)


def test_no_cut_has_a_faster_slowest_stage():
    draw = random.Random(0)
    for _ in range(500):
        layers = draw.randint(1, 9)
        stages, head = draw.randint(1, layers), draw.choice([0, 0.5, 1, 4, 20])
        costs = [draw.choice([1.0, 1.0, 3.0, 0.5]) for _ in range(layers)]
        found = cut(costs, head, stages)
        assert len(found) == stages
        assert sum(found) == layers
        assert min(found) >= 1
        cuts = combinations(range(1, layers), stages - 1)
        others = [
            tuple(end - begin for begin, end in zip((0, *ends), (*ends, layers), strict=True))
            for ends in cuts
        ]
        best = min(slowest(other, costs, head) for other in others)
        assert slowest(found, costs, head) <= best * (1 + 1e-9), (costs, head, stages)


@pytest.mark.parametrize(
    ("layers", "head", "stages", "expected"),
    [(36, 2.5, 4, (10, 9, 10, 7)), (8, 0, 4, (2, 2, 2, 2)), (4, 10, 2, (3, 1))],
)
def test_the_last_stage_has_fewer_layers_because_of_the_head(layers, head, stages, expected):
    assert cut([1.0] * layers, head, stages) == expected


def test_costs_follow_from_model_sequence_and_mask():
    config = compose(["seq=4k", "model.num_layers=4", "topology.pipeline_parallel=2"])
    model = config.model
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matrices = 2 * heads + 2 * kv + 3 * model.intermediate_size
    attention = 4 * heads * (4096 + 1) / 2
    assert layer_costs(config) == pytest.approx([2 * model.hidden_size * matrices + attention] * 4)
    assert head_cost(config) == 2 * model.vocab_size * model.hidden_size
    mixed = compose(
        [
            "seq=4k",
            "model.num_layers=4",
            "mask=sliding_window",
            "mask.window=64",
            "mask.full_every=2",
        ]
    )
    narrow, full = layer_costs(mixed)[:2]
    assert full == pytest.approx(layer_costs(config)[0])
    assert narrow < full
    assert layer_costs(mixed) == [narrow, full, narrow, full]


LONG = ["seq=64k", "model.num_layers=8", "model.vocab_size=264", "topology.pipeline_parallel=2"]


@pytest.mark.parametrize(
    ("pattern", "share"),
    [
        (["sparsity=vertical_slash"], ASSUMED_DENSITY),
        (["sparsity=fixed", "sparsity.density=0.2", "sparsity.columns=0"], 0.2),
    ],
)
def test_dense_layers_at_the_end_cost_more_and_stages_are_cut_for_it(pattern, share):
    config = compose([*LONG, *pattern, "sparsity.dense_layers=2"])
    matrices = layer_costs(compose([*LONG, "seq=16"]))[0]
    dense = layer_costs(compose(LONG))
    matrices -= 4 * config.model.num_heads * config.model.head_dim * 17 / 2
    sparse = matrices + share * (dense[0] - matrices)
    assert layer_costs(config) == pytest.approx([sparse] * 6 + dense[6:])
    assert stage_layers(compose(LONG)) == (4, 4)
    assert stage_layers(config)[1] < 4


def test_a_pattern_in_all_layers_counts_all_pairs_unless_its_density_is_known():
    assert layer_costs(compose([*LONG, "sparsity=moba"])) == layer_costs(compose(LONG))


def test_given_numbers_of_layers_are_kept():
    words = ["model.num_layers=6", "topology.pipeline_parallel=2", "topology.stage_layers=[5,1]"]
    assert stage_layers(compose(words)) == (5, 1)
