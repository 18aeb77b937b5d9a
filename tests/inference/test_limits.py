"""Prompts that cannot be computed are refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from inference.small_models import POSITIONS, source, tokens, write_hf, write_run

from mtrain_cli.attention.named_masks import CAUSAL, SlidingWindow
from mtrain_cli.composition import compose
from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.limits import (
    GIB,
    MOST_TOGETHER,
    MemoryNeed,
    longer_than_trained,
    require_hidden_labels,
    require_prompts,
)
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.launch.environment import Environment, ParallelDims


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelSource:
    return source(write_hf(tmp_path_factory.mktemp("model") / "hf"))


def problems(model: ModelSource, prompts, max_new: int = 8, **options) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        require_prompts(model, prompts, max_new, **options)
    return raised.value.problems


def test_each_prompt_has_its_line(model):
    found = problems(model, [[], [5, 97], [1, -1], tokens(POSITIONS - 7)])
    assert found == (
        "prompt 1 is empty; give at least one token",
        "prompt 2 has the id 97 at token 2; the model's 97 ids are 0 to 96",
        "prompt 3 has the id -1 at token 2; the model's 97 ids are 0 to 96",
        "prompt 4 has 2,041 tokens; with --max-new 8 it exceeds the 2,048 positions of the model. "
        "Give --max-new 7, or add --beyond to go on anyway",
    )


def test_the_last_position_is_allowed_and_beyond_insists(model):
    require_prompts(model, [tokens(POSITIONS - 8)], 8)
    require_prompts(model, [tokens(POSITIONS)], 8, beyond=True)
    (line,) = problems(model, [tokens(POSITIONS)])
    assert "Give a shorter prompt" in line


def test_positions_of_a_run_follow_its_length_and_yarn(tmp_path):
    words = ("model.rope.original_max_position=128",)
    write_run(tmp_path / "plain", *words)
    assert source(tmp_path / "plain").max_position == 512
    write_run(tmp_path / "yarn", *words, "model.rope.scaling=yarn", "model.rope.factor=8")
    assert source(tmp_path / "yarn").max_position == 1024
    write_run(tmp_path / "auto", *words, "model.rope.scaling=yarn", "model.rope.factor=auto")
    assert source(tmp_path / "auto").max_position == 512
    assert source(tmp_path / "auto").rope_factor == 4


@pytest.mark.parametrize(
    ("mask", "prompt", "part"),
    [
        (SlidingWindow(64), 60, "window ends after 64 tokens"),
        (dataclasses.replace(SlidingWindow(64), global_tokens=4), 60, "after 64 tokens"),
        (
            MASKS["full"](),
            5,
            "mask full: a new token sees the whole cache, but under this model's mask a token sees "
            "later tokens, too. Generate with a run that has mask=causal, prefix_lm or sliding_wi",
        ),
        (
            MASKS["dilated"](block=4, stride=2, count=3),
            5,
            "a token does not see all earlier tokens. Generate with",
        ),
    ],
)
def test_masks_that_hide_the_cache_are_refused(model, mask, prompt, part):
    masked = dataclasses.replace(model, config=dataclasses.replace(model.config, mask=mask))
    (line,) = problems(masked, [tokens(prompt)])
    assert part in line
    if mask.kind == "sliding_window":
        require_prompts(masked, [tokens(56)], 8)


def test_losses_need_a_mask_without_later_tokens(model):
    for mask in (CAUSAL, SlidingWindow(4)):
        require_hidden_labels(dataclasses.replace(model.config, mask=mask), "perplexity")
    prefix = MASKS["prefix_lm"](prefix=5)
    require_prompts(
        dataclasses.replace(model, config=dataclasses.replace(model.config, mask=prefix)),
        [tokens(9)],
        8,
    )
    with pytest.raises(ConfigError, match=r"mask prefix_lm, prefix 5: perplexity needs the loss"):
        require_hidden_labels(dataclasses.replace(model.config, mask=prefix), "perplexity")


def on_cpu(workers: int = 1) -> Environment:
    return Environment(
        "cpu", ParallelDims.of(workers, cp=workers), workers, 0, 0, "mtrain", workers
    )


def need(model: ModelSource, gib: float, workers: int = 1) -> MemoryNeed:
    config = model.config.changed(topology={"host_memory_gib": gib})
    return MemoryNeed.of(config, on_cpu(workers))


def test_the_longest_prompt_that_fits_is_named_and_fits(model):
    found = need(model, 0.01)
    with pytest.raises(ConfigError) as raised:
        found.require_fit(10**6, 100, "cpu")
    (line,) = raised.value.problems
    longest = found.longest(100)
    assert f"the longest that fits has {longest:,} tokens" in line
    assert 500 < longest < 10**6
    assert found.require_fit(longest, 100, "cpu") == 1
    with pytest.raises(ConfigError):
        found.require_fit(longest + 1, 100, "cpu")


def test_too_many_new_tokens_are_refused(model):
    with pytest.raises(ConfigError, match=r"weights and logits alone take .* smaller --max-new"):
        need(model, 0.01).require_fit(20, 10**6, "cpu")


def test_no_prompt_fits_a_tiny_memory(model):
    with pytest.raises(ConfigError, match=r"1 token with .* weights and logits alone take"):
        need(model, 0.0001).require_fit(1, 1, "cpu")
    with pytest.raises(ConfigError, match=r"topology\.tensor_parallel=N"):
        need(model, 0.0001).require_fit(5, 1, "cpu")


def test_tiles_bound_the_memory_of_the_mlp(model):
    whole = dataclasses.replace(need(model, 1.0), tile=0, per_attended=0)
    tiled = dataclasses.replace(whole, tile=1 << 26)
    assert whole.bytes(10**5, 1) - tiled.bytes(10**5, 1) == 10**5 * whole.per_tiled - 2**26
    assert whole.bytes(10, 1) == tiled.bytes(10, 1)
    assert tiled.longest(1) > whole.longest(1)
    # The MLP comes after attention, so only the larger of them counts.
    wide = dataclasses.replace(whole, per_attended=10**6)
    assert wide.bytes(10, 1) == dataclasses.replace(wide, per_tiled=0).bytes(10, 1)
    assert wide.bytes(10, 1) > whole.bytes(10, 1)


def test_workers_share_the_keys(model):
    """Each has a worker's share of the memory, but all the weights."""
    fixed = need(model, 1.0).fixed
    one, four = need(model, 1.0), need(model, 4.0, workers=4)
    assert (one.capacity, four.capacity) == (GIB, GIB)
    assert four.fixed == fixed
    assert four.longest(10) > 2 * one.longest(10)


def test_short_prompts_generate_together(model):
    found = need(model, 0.05)
    assert found.require_fit(10, 10, "cpu") == MOST_TOGETHER
    assert 1 <= found.require_fit(found.longest(10) - 10, 10, "cpu") < MOST_TOGETHER


def test_only_a_run_knows_the_length_it_was_trained_on():
    config = compose.compose(["seq=512"])
    assert longer_than_trained(ModelSource(Path(), True, config), 513) == ""
    assert longer_than_trained(ModelSource(Path(), False, config), 512) == ""
    assert "512 tokens (seq=512)" in longer_than_trained(ModelSource(Path(), False, config), 513)
