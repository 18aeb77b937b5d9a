"""Every element of a parameter is in exactly one stored tensor, whatever region a worker holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_models import tiny_model

from mtrain_cli.config.schema import FAMILIES
from mtrain_cli.model.huggingface import overlaps, parameter_shapes, stored_parts, whole


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_unique_and_shapes_add_up(family):
    model = tiny_model(family, tied=False)
    shapes = parameter_shapes(model)
    parts = [part for name, shape in shapes.items() for part in stored_parts(name, shape, model)]
    assert len({part.name for part in parts}) == len(parts)
    numbers = (torch.Size(shape).numel() for shape in shapes.values())
    assert sum(torch.Size(part.shape).numel() for part in parts) == sum(numbers)


def test_any_region_is_read_from_the_parts_that_it_covers():
    model = tiny_model("mixtral")
    name, shape = "layers.1.mlp.experts.gate_up", (6, 112, 40)
    assert parameter_shapes(model)[name] == shape
    values = torch.arange(6 * 112 * 40).view(shape)
    parts = stored_parts(name, shape, model)
    stored = {p.name: values[p.expert, p.start : p.start + p.shape[0]] for p in parts}
    cuts = itertools.product(
        [slice(0, 6), slice(2, 5)], [slice(0, 112), slice(50, 60), slice(0, 20)], [slice(7, 30)]
    )
    for region in [*cuts, whole(shape)]:
        result = torch.full(shape, -1)[region]
        for stored_name, rows, place in overlaps(parts, region):
            result[place] = stored[stored_name][rows]
        assert torch.equal(result, values[region]), region
    one = list(overlaps(parts, (slice(2, 3), slice(0, 20), slice(0, 40))))
    assert [part for part, _, _ in one] == ["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
