"""The pool of a ring, and its peak memory in backward, are those of its program."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parallel.free_buffers import free_tensors
from parallel.test_memory_of_gathering import BLOCK, DIM, TOKENS, Held, Stub
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel import operations
from mtrain_cli.parallel.exchange import Plan, make_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.training import attention_memory

HEADS, KV_HEADS = 16, 8
STEPS = 3  # of training, each with two layers


class Whole(Stub):
    """A kernel with a forward pass, too."""

    def forward(self, q, k, v, *_):  # noqa: ARG002
        return torch.empty_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


@pytest.fixture
def alone():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("buffer", [0, 40 << 20])
@pytest.mark.parametrize(
    ("name", "ranks", "per_node", "heads", "prefetch", "circulates"),
    [
        ("ring", 2, 8, 1, 1, "kv"),
        ("ring", 3, 8, 1, 1, "kv"),
        ("ring", 8, 8, 1, 1, "kv"),
        ("ring", 8, 8, 1, 2, "kv"),
        ("ring", 8, 8, 2, 1, "kv"),
        ("ring", 2, 8, 1, 1, "queries"),
        ("ring", 8, 8, 1, 1, "queries"),
        ("ring", 8, 8, 2, 1, "queries"),
        ("hierarchical_ring", 8, 4, 1, 1, "kv"),
        ("hierarchical_ring", 8, 2, 1, 1, "kv"),
        ("hierarchical_ring", 8, 4, 1, 2, "kv"),
        ("hierarchical_ring", 8, 4, 1, 1, "queries"),
        ("all_gather", 4, 4, 4, 1, "kv"),
        ("all_gather", 8, 8, 2, 1, "kv"),
    ],
)
def test_pool_and_peak_are_those_of_the_program(
    name, ranks, per_node, heads, prefetch, circulates, buffer, rounds, monkeypatch
):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    layout = make_layout("striped", ranks, TOKENS * ranks, BLOCK, unit=BLOCK)
    dims, cpu = ParallelDims.of(ranks, cp=ranks), torch.device("cpu")
    group = make_context_group(0, dims, cpu, per_node=per_node, heads=heads)
    options = {"prefetch": prefetch, "circulates": circulates, "rounds": rounds}
    exchange = make_exchange(name, layout, group, shared_columns=False, **options)
    mask = SequenceMask.causal(TOKENS * ranks, TOKENS * ranks)
    tiles, kernel = Plan.make(exchange, [mask]).tiles, Whole(torch.float32, buffer)
    q, dout = (torch.randn(1, TOKENS, HEADS, DIM).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, TOKENS, KV_HEADS, DIM).bfloat16() for _ in range(2))
    # On a GPU one kernel computes it, without temporaries.
    monkeypatch.setattr(
        operations, "row_delta", lambda out, _: torch.zeros(1, out.shape[2], out.shape[1])
    )
    held = Held()
    with held:
        for _ in range(STEPS):
            saved = [exchange.forward(q, k, v, tiles, kernel, 1.0)[2] for _ in range(2)]
            while saved:
                inputs = saved.pop()
                now, held.most = held.now, 0
                exchange.backward(dout, inputs, tiles, kernel, 1.0)
                peak = held.most
                del inputs
    pool = sum(t.nbytes for t in free_tensors(exchange.buffers))

    model = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    words = [f"model.{key}={value}" for key, value in {**model, "hidden_size": HEADS * DIM}.items()]
    config = compose(["model=tiny", f"seq={TOKENS * ranks}", "train.dtype=bfloat16", *words])
    monkeypatch.setattr(
        attention_memory,
        "kernel_backward",
        lambda *_, **__: attention_memory.KernelBuffers(4, buffer),
    )
    choice = ExchangeChoice(name, "", min(per_node, ranks), heads=heads, **options)
    estimate = attention_memory.AttentionMemory(config, layout, choice, "flash4", 2)
    assert pool == estimate.pool
    # What is there before backward includes the pool.
    assert peak - now + pool == estimate.in_backward
