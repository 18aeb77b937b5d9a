"""Bytes of a dynamic index: bitmaps, lists, slashes and columns, and what kernels derive."""

import pytest
import torch
from training.test_memory import estimate

from mtrain_cli.composition.compose import compose
from mtrain_cli.sparsity.block_topk import BlockTopkPattern


def moba(*overrides, **kwargs):
    words = (
        "model=llama8b",
        "sparsity=moba",
        "sparsity.gate=block",
        "train.activation_checkpoint=full",
    )
    return estimate(*words, *overrides, **kwargs)


def test_per_query_choices_take_one_bit_per_chunk():
    layers, heads, tokens, chunks = 32, 32, 131072, 32
    for workers in (1, 8):
        block, query = (
            moba(f"sparsity.gate={gate}", workers=workers, kernel="triton").moments[0].index
            for gate in ("block", "query")
        )
        gates, starts = layers * heads * (tokens // workers) * chunks // 8, 8 * tokens
        assert query - block == gates + starts


def test_bitmaps_stay_until_backward_and_are_counted_by_pairs_of_blocks():
    layers, heads, blocks = 32, 32, 1024
    for workers in (1, 8):
        counted = 2 * blocks * blocks // workers
        at_loss = moba(workers=workers, kernel="triton").moments[0]
        assert at_loss.index == layers * heads * blocks * blocks // workers + counted
        assert moba(workers=workers, kernel="triton").moments[-1].index == counted
    four = moba("train.global_batch=4", workers=8, kernel="triton").moments[0]
    assert four.index - at_loss.index == 3 * counted
    # Ranks that compute for other ranks' queries hold all rows.
    everywhere = moba(
        "train.global_batch=1", workers=8, kernel="triton", exchange="all_gather", heads=8
    ).moments[0]
    assert everywhere.index == layers * heads * blocks * blocks + counted


def test_first_queries_take_a_byte_for_each_pair_and_kv_head():
    words = ("model=llama8b", "sparsity=block_topk", "sparsity.score=exact", "seq=128k")
    moments = {
        owner: estimate(
            *words, f"sparsity.index_per={owner}", "train.activation_checkpoint=full",
            workers=8, kernel="triton",
        ).moments[0].index
        for owner in ("kv_group", "query_head")
    }  # fmt: skip
    layers, heads, kv_heads, blocks = 32, 32, 8, 131072 // 64
    a_head = 2 * layers * blocks * blocks // 8
    assert moments["query_head"] - moments["kv_group"] == (heads - kv_heads) * a_head
    counted = 2 * blocks * blocks // 8
    assert moments["kv_group"] == kv_heads * a_head + counted


@pytest.mark.parametrize("dense", [0, 10])
def test_what_a_pattern_learns_stays_on_the_device(dense):
    words = ["model=qwen3b", "seq=16k", "sparsity=block_topk", f"sparsity.dense_layers={dense}"]
    learned, exact = (
        estimate(*words, f"sparsity.score={score}", workers=2).moments
        for score in ("learned", "exact")
    )
    pattern, model = BlockTopkPattern(**vars(compose(words).sparsity)), compose(words).model
    state = pattern.state(model, [0], torch.device("cpu")).values()
    stays = (36 - dense) * sum(tensor.nbytes for tensor in state if tensor.is_floating_point())
    for with_maps, without in zip(learned, exact, strict=True):
        assert with_maps.index - without.index == stays > 0


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("sparsity=vertical_slash sparsity.max_slashes=64", 64),
        ("sparsity=fixed sparsity.density=0.0146 sparsity.columns=4096", 61),
    ],
)
def test_lists_of_blocks_have_room_for_the_most_slashes_of_an_index(words, most):
    wide, narrow = (
        estimate("seq=512k", *given.split(), workers=2).peak.exchange
        for given in ("sparsity=vertical_slash", words)
    )
    blocks_of_keys, blocks_of_queries, heads = 4096, 2048, 16
    # The columns of a KV head stand in front of its keys: 32 tiles of 8 heads, in 4 copies. Lists
    # of partial blocks have the width that the columns need.
    rows = blocks_of_keys + 8 * 4 * 32
    assert wide - narrow == 4 * heads * rows * (blocks_of_queries - most)


def test_slashes_and_columns_take_kilobytes_but_gathered_columns_do_not():
    overrides = ("sparsity=vertical_slash", "model=llama8b")
    layers, heads, width, dim = 32, 32, 4096, 128
    lines = layers * heads * (1024 + 4 * width)
    # Kernels derive them once: the slot of each column, and the columns below each block.
    derived = layers * heads * 4 * (width + 1025)
    result = estimate(*overrides, "train.activation_checkpoint=selective").moments
    assert (result[0].index, result[-2].index) == (lines + derived, lines + derived // layers), (
        "slashes and columns stay until they are counted"
    )
    assert (
        estimate(*overrides, "train.activation_checkpoint=selective", kernel="sdpa")
        .moments[0]
        .index
        == lines
    )
    lines += derived + layers * heads * 4 * width  # among all keys, and among a rank's own
    ring = (
        estimate(
            *overrides, "train.activation_checkpoint=selective", exchange="ring", kernel="triton"
        )
        .moments[0]
        .index
    )
    assert ring == lines + layers * 2 * 2 * heads * width * dim
    # Recomputation gathers them again.
    assert (
        estimate(*overrides, "train.activation_checkpoint=full", exchange="ring", kernel="triton")
        .moments[0]
        .index
        == lines
    )
