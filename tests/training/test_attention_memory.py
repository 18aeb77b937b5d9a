"""The memory of attention: what a ring keeps, from its program, and what backward adds."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.attention_memory import AttentionMemory

WORKERS, BYTES = 8, 2
RUN = [
    "model=qwen3b",
    "seq=64k",
    "topology.workers=8",
    "topology.device=cuda",
]
SPARSE = ["sparsity=vertical_slash", "sparsity.max_columns=1000"]


def memory(
    name: str, *, sparse: bool = True, kernel: str = "flash4", **choice: object
) -> AttentionMemory:
    config = compose([*RUN, *(SPARSE if sparse else [])])
    layout = make_layout("striped", WORKERS, config.seq, 128, unit=128)
    exchange = ExchangeChoice(name, "", per_node=WORKERS, **choice)
    return AttentionMemory(config, layout, exchange, kernel, BYTES)


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


def test_a_ring_keeps_one_shard_of_keys_and_values():
    model, tokens = compose(RUN).model, 65536 // WORKERS
    shard = 2 * BYTES * tokens * model.num_kv_heads * model.head_dim
    assert memory("ring").ring_kv == memory("ring", circulates="queries").ring_kv == shard
    assert memory("all_gather").ring_kv == 0
    assert memory("ring", heads=WORKERS).ring_kv == 0, "no shard circulates"


@pytest.mark.parametrize("kernel", ["flash4", "triton"])
def test_gradients_of_gathered_columns_stay_while_the_ring_computes_its_steps(kernel):
    ring = memory("ring", kernel=kernel)
    none = memory("ring", kernel=kernel)
    none.index = dataclasses.replace(none.index, column_width=0)
    none.sizes = dataclasses.replace(none.sizes, column_width=0)
    gradients = 2 * 4 * ring.index.columns * ring.sizes.head_dim
    assert ring.in_backward() - none.in_backward() >= gradients
