"""Requests that do not fit a run are refused with a line each."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.studies.attention.request import AttentionRequest


def test_what_does_not_fit_is_refused():
    config = compose(["seq=256"])
    AttentionRequest(top_k=(1, 256), maps=((0, 0), (3, 3)), rope=True).require_fit(config)
    data = dataclasses.replace(config.data, positions_key="at")
    config = dataclasses.replace(config, data=data)
    request = AttentionRequest(top_k=(1, 257), maps=((4, 0), (0, 4), (3, 3)), rope=True)
    with pytest.raises(ConfigError) as refused:
        request.require_fit(config)
    heads = "model=tiny has layers 0 to 3 and heads 0 to 3"
    assert refused.value.problems == (
        "--top-k 257: must be at most seq=256",
        f"--maps 4:0: {heads}",
        f"--maps 0:4: {heads}",
        "--rope: needs positions that rise by 1 per token, but data.positions_key=at takes them "
        "from the data; leave out one of the two",
    )


def test_a_request_of_nothing_is_false():
    assert not AttentionRequest()
    assert AttentionRequest(rope=True)


def test_the_work_of_a_map_grows_as_the_square_and_that_of_rope_does_not():
    short, long = compose(["seq=1k"]), compose(["seq=64k"])
    assert AttentionRequest().flop(short, 8) == 0
    maps = AttentionRequest(maps=((0, 0),))
    assert maps.flop(short, 8) == 2 * 1024**2 * short.model.head_dim
    assert maps.flop(long, 8) == 64**2 * maps.flop(short, 8)
    heads = short.model.num_layers * short.model.num_heads
    one = AttentionRequest(top_k=(4,)).flop(short, 8)
    assert one == 2 * heads * 8 * 1024 * short.model.head_dim
    rope = AttentionRequest(rope=True)
    assert 64 < rope.flop(long, 8) / rope.flop(short, 8) < 80
