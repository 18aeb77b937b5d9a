"""The memory of attention: what a ring keeps, from its program, and what backward adds."""

from __future__ import annotations

import dataclasses

import gloo
import numpy as np
import pytest
import torch
from training.masked_runs import SMALL

from mtrain_cli.attention.block_lists import mask_lists, mask_words
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.attention_memory import AttentionMemory, kernel_backward, shard_sizes
from mtrain_cli.training.layout_choice import choose_layout
from mtrain_cli.training.trainer import Trainer

WORKERS, BYTES = 8, 2
RUN = ["model=qwen3b", "seq=64k", "topology.workers=8", "topology.device=cuda"]
SPARSE = ["sparsity=vertical_slash", "sparsity.max_columns=1000"]


def memory(
    name: str,
    *,
    sparse: bool = True,
    kernel: str = "flash4",
    layout: str = "striped",
    **choice: object,
) -> AttentionMemory:
    config = compose([*RUN, *(SPARSE if sparse else [])])
    made = make_layout(layout, WORKERS, config.seq, 128, unit=128)
    exchange = ExchangeChoice(name, "", per_node=WORKERS, **choice)
    return AttentionMemory(config, made, exchange, kernel, BYTES)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_ring_keeps_the_columns_that_it_gathers_once(heads):
    # 1,000 columns per head are padded to whole tiles; ranks that share heads divide the heads.
    ring = memory("ring", heads=heads)
    model, width = compose(RUN).model, ring.index.column_width
    assert 1000 <= width < 1200
    assert ring.gathered_columns == 2 * BYTES * model.num_heads // heads * width * model.head_dim
    assert memory("ring", heads=heads, shared_columns=False).gathered_columns == 0
    assert memory("all_gather", heads=heads).gathered_columns == 0
    assert memory("ring", sparse=False, heads=heads).gathered_columns == 0


def test_a_ring_keeps_the_keys_and_values_of_another_worker():
    model, tokens = compose(RUN).model, 65536 // WORKERS
    shard = 2 * BYTES * tokens * model.num_kv_heads * model.head_dim
    assert memory("ring").ring_kv == shard
    assert memory("ring", circulates="queries").ring_kv == 0, "its own shard is recomputed"
    assert memory("all_gather").ring_kv == 0
    assert memory("ring", heads=WORKERS).ring_kv == 0, "no shard circulates"


WAYS = {
    "queries": ["topology.circulates=queries"],
    "queries, ulysses": ["topology.circulates=queries", "topology.ulysses=2"],
    "queries, hierarchical": ["topology.circulates=queries", "topology.exchange=hierarchical_ring"],
    "queries, offloaded": ["topology.circulates=queries", "train.offload_activations=true"],
    "queries, columns": [
        *("topology.circulates=queries", "sparsity=vertical_slash", "sparsity.block=16"),
        *("sparsity.last_q=16", "sparsity.max_columns=16", "sparsity.min_columns=8"),
    ],
    "keys": ["topology.circulates=kv"],
}


def kept_by_selective(
    rank: int, world: int, of_ways: list[list[str]]
) -> list[tuple[list[int], list[int], bool]]:
    """Train two steps of each way with selective checkpoints.

    Returns for each way the bytes that a layer keeps for attention, its planned bytes, and whether
    the weights equal those of a run that also keeps its own keys and values.
    """
    found = []
    original, kept_for_recompute = Exchange._ends_with_own_keys, Exchange.kept_for_recompute
    for way in of_ways:
        words = [*SMALL, "seq=128", "topology.exchange=ring", "topology.columns=once", *way]
        weights, kept = [], []

        def record(self, saved, early, kept=kept):
            tensors = kept_for_recompute(self, saved, early)
            kept.append(sum(t.untyped_storage().nbytes() for t in tensors))
            return tensors

        for keeps_more in (True, False):
            kept.clear()
            Exchange.kept_for_recompute = record
            if keeps_more:
                Exchange._ends_with_own_keys = False
            config = compose([*words, f"topology.workers={world}", "train.steps=2"])
            trainer = Trainer(config, gloo.environment(rank, world, world, 2))
            for _ in range(2):
                trainer.train_step(False)
            Exchange.kept_for_recompute = kept_for_recompute
            Exchange._ends_with_own_keys = original
            weights.append([p.detach().clone() for p in trainer.decoder.parameters()])
            plan = trainer.plan
            trainer.close()
        planned = AttentionMemory(plan.config, plan.layout, plan.exchange, plan.kernel, 4)
        sizes = planned.sizes
        results = 4 * sizes.tokens * sizes.heads * (sizes.head_dim + 1)
        planned = [results + planned.ring_kv + planned.gathered_columns]
        equal = all(map(torch.equal, *weights))
        found.append((sorted(set(kept)), planned, equal))
    return found


@pytest.mark.parametrize(
    ("world", "names"),
    [(2, ["queries", "queries, columns"]), pytest.param(4, [*WAYS], marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_selective_keeps_what_the_plan_says_and_nothing_that_it_recomputes(world, names):
    for of_rank in gloo.run(world, kept_by_selective, [WAYS[name] for name in names]):
        for name, (kept, planned, equal) in zip(names, of_rank, strict=True):
            assert kept == planned, name
            assert equal, name


def test_long_sequences_need_wider_lists_of_a_bitmap():
    """Triton lists the pairs of 16 query blocks and 32 key blocks of each head."""
    model = compose(RUN).model
    for blocks, each in ((32767, 4), (32768, 8)):
        index = dataclasses.replace(
            memory("ring").index, bitmap=True, block=64, blocks=blocks, column_width=0
        )
        found = kernel_backward("triton", model, 16 * 64, 32 * 64, BYTES, False, index)
        statistics = 4 * (16 * 64) * model.num_heads
        assert found.blocks == 2 * statistics + each * model.num_heads * 16 * 32
        assert found.columns == 0


@pytest.mark.parametrize("circulates", ["kv", "queries"])
def test_torch_needs_a_placeholder_for_out_if_queries_circulate(circulates):
    """At the peak, a rank computes its own queries; it holds dq in float32 and in bf16."""
    ring = memory("ring", sparse=False, kernel="sdpa", circulates=circulates)
    model, tokens = compose(RUN).model, 65536 // WORKERS
    rows = tokens * model.num_heads * model.head_dim
    keys = 2 * tokens * model.num_kv_heads * model.head_dim
    statistics = 4 * tokens * model.num_heads
    made = (4 + BYTES) * rows + 4 * keys
    # The kernel's own dq in float32, lse and delta, dk and dv of every query head, and one copy.
    call = 4 * rows + 2 * statistics + 2 * BYTES * rows + BYTES * (rows + keys)
    # Message: q, dout, lse and delta.
    more = {"kv": statistics, "queries": 2 * BYTES * rows + 2 * statistics + BYTES * rows}
    assert ring.in_backward - ring.pool == made + call + more[circulates]


def test_a_ring_that_gathers_columns_computes_them_before_the_blocks():
    """At the peak, Triton computes columns: no step holds their buffers, or dk and dv."""
    ring = memory("ring", kernel="triton")
    model, tokens = compose(RUN).model, 65536 // WORKERS
    sums = 4 * tokens * model.num_heads * model.head_dim
    delta = 4 * tokens * model.num_heads
    gradients = 2 * 4 * ring.index.columns * model.head_dim
    columns = ring.index.columns_in_backward(tokens, model.head_dim, BYTES)
    assert ring.in_backward - ring.pool == sums + delta + gradients + columns
    # Without gathered columns, each step holds both.
    apart = memory("ring", kernel="triton", shared_columns=False)
    columns = apart.index.columns_in_backward(tokens, model.head_dim, BYTES)
    dkv = 4 * 2 * tokens * model.num_kv_heads * model.head_dim
    made = sums // 2 + dkv
    assert apart.in_backward - apart.pool == sums + delta + made + columns + 2 * delta


def test_zigzag_orders_three_quarters_of_the_gradients_before_it_cuts_them_into_shards():
    """The middle parts of two ranks adjoin, and so do the ends of the sequence."""
    model = compose(RUN).model
    gradients = 4 * 2 * 65536 * model.num_kv_heads * model.head_dim
    dq = BYTES * 65536 // WORKERS * model.num_heads * model.head_dim
    zigzag = memory("all_gather", sparse=False, kernel="triton", layout="zigzag")
    # The kernel's gradients, their shards and the reordered copy.
    assert zigzag.in_backward - zigzag.pool == dq + 2 * gradients + 3 * gradients // 4


def test_flash4_is_called_once_for_a_zigzag_worker_with_an_index():
    """Without an index it is called for two rectangles, whose gradients are summed in float32."""
    model = compose(RUN).model
    rows = 65536 // WORKERS * model.num_heads * model.head_dim
    keys = 65536 * model.num_kv_heads * model.head_dim
    sums = 4 * rows + 2 * 4 * 65536 // WORKERS * model.num_heads + 8 * keys
    sparse, dense = (
        memory("all_gather", sparse=sparse, layout="zigzag") for sparse in (True, False)
    )
    assert dense.in_backward >= sums + BYTES * (rows + 2 * keys) + 4 * 2 * keys
    assert sparse.in_backward < dense.in_backward


@pytest.mark.parametrize("name", ["group_cast", "hierarchical_group_cast"])
def test_a_group_cast_is_planned_with_the_keys_that_the_mask_shows(name):
    def received(*words: str) -> list[float]:
        config = compose([*RUN, "topology.layout=zigzag", *words])
        made = make_layout("zigzag", WORKERS, config.seq, 128, unit=128)
        exchange = ExchangeChoice(name, "", per_node=4 if "hier" in name else WORKERS)
        casts = shard_sizes(config, made, exchange, BYTES).casts
        return [float(rows) for _, rows in casts]

    window = ["mask=sliding_window", "mask.window=1k"]
    assert sum(received(*window)) < 1 < sum(received()) <= sum(received("mask=full"))
    assert received(*window, "mask.full_every=2") == received()
    # Masks from the data may show everything, which moves no more rows than a causal mask on the
    # rank that moves most.
    data = ["data=tokens", "data.path=/", "data.mask_key=mask"]
    assert received(*data) == received("mask=full")


def test_documents_may_spread_the_chunks_of_a_balanced_layout():
    """Their layouts are unknown, so memory is planned for chunks that are dealt out in turn."""

    def received(documents: str) -> float:
        words = ["mask=sliding_window", "mask.window=1k", "topology.layout=balanced"]
        config = compose([*RUN, *words, f"data.document_mask={documents}"], plan=True)
        layout = choose_layout(config, WORKERS, WORKERS).layout
        exchange = ExchangeChoice("group_cast", "", per_node=WORKERS)
        ((_, rows),) = shard_sizes(config, layout, exchange, BYTES).casts
        return float(rows)

    assert received("true") > 3 * received("false")


@pytest.mark.parametrize(("global_tokens", "sums"), [(0, 0), (128, 1)])
def test_several_intervals_per_query_sum_dq_in_float32(global_tokens, sums):
    words = ["mask=sliding_window", "mask.window=1k", f"mask.global_tokens={global_tokens}"]
    layout = make_layout("striped", WORKERS, 65536, 128, unit=128)
    exchange = ExchangeChoice("all_gather", "", per_node=WORKERS)
    found, causal = (
        AttentionMemory(compose([*RUN, *more]), layout, exchange, "sdpa", BYTES).in_backward
        for more in (words, [])
    )
    model = compose(RUN).model
    row = 65536 // WORKERS * model.num_heads * model.head_dim
    assert found - causal == sums * (4 - BYTES) * row


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize(
    "words",
    [["mask.window=1k"], ["mask.window=1k", "mask.global_tokens=128"], ["mask.full_every=2"]],
)
def test_the_tables_of_masks_have_the_size_of_those_that_are_built(layout, words):
    run = [*RUN, "mask=sliding_window", "mask.window=2k", *words, "train.micro_batch=2"]
    config = compose([*run, "train.global_batch=2", "seq=16k"])
    made = make_layout(layout, WORKERS, config.seq, 128)
    exchange = ExchangeChoice("all_gather", "", per_node=WORKERS)
    expected = 0
    for rule, _ in MaskRule.of(config).by_layers(config.model.num_layers):
        mask = rule.undivided(config.seq, config.seq)
        tiles = Tiles.make([mask.spans(made.positions(0), np.arange(config.seq))] * 2)
        for lists in mask_lists(tiles, 128):
            expected += sum(table.nbytes for table in lists.values())
        words_of = mask_words(tiles)
        expected += sum(t.nbytes for t in (words_of.ids, words_of.of_queries, words_of.of_keys))
    found = AttentionMemory(config, made, exchange, "flash4", BYTES).mask_tables
    assert found == expected


def test_rectangles_other_kernels_and_indices_need_no_tables_of_masks():
    def tables(layout: str, kernel: str, *words: str) -> int:
        config = compose([*RUN, *words])
        made = make_layout(layout, WORKERS, config.seq, 128, unit=128)
        exchange = ExchangeChoice("all_gather", "", per_node=WORKERS)
        return AttentionMemory(config, made, exchange, kernel, BYTES).mask_tables

    one = "data.document_mask=false"
    assert tables("zigzag", "flash4", one) == 0
    assert tables("zigzag", "flash4") > 0
    assert tables("striped", "flash4", one) > 0
    assert tables("striped", "triton") == 0
    assert tables("striped", "flash4", *SPARSE) == 0
