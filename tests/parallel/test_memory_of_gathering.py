"""Peak memory of a gathering exchange in backward equals the closed form of the estimate."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.exchange import Plan, make_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.training import attention_memory

TOKENS, DIM, BLOCK = 1024, 64, 16


class Held(TorchDispatchMode):
    """Track the bytes of tensors made inside that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._seen.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)

    def ignore(self, *tensors: torch.Tensor) -> None:
        self._seen.update(t.untyped_storage()._cdata for t in tensors)


class Stub:
    """A kernel that allocates its results and a temporary buffer."""

    def __init__(self, grad: torch.dtype, buffer: int) -> None:
        self.grad, self.buffer = grad, buffer

    def backward(self, dout, saved, *_):  # noqa: ARG002
        q, k, v = saved[:3]
        buffer = torch.empty(self.buffer, dtype=torch.uint8)
        found = (
            torch.empty_like(q),
            torch.empty_like(k, dtype=self.grad),
            torch.empty_like(v, dtype=self.grad),
        )
        del buffer
        return found


@pytest.fixture
def alone():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("buffer", [0, 40 << 20])
@pytest.mark.parametrize(
    ("ranks", "layout", "chunks", "kv_heads", "heads", "per_node", "kind", "stages"),
    [
        (2, "striped", 1, 8, 16, 0, "all_gather", 0),
        (8, "striped", 2, 2, 16, 0, "all_gather", 0),
        (2, "contiguous", 2, 8, 16, 0, "all_gather", 0),
        (4, "striped", 4, 16, 16, 0, "all_gather", 0),
        (8, "zigzag", 2, 8, 8, 0, "all_gather", 0),  # keys and values are
        (2, "striped", 3, 6, 12, 0, "all_gather", 0),
        (8, "striped", 2, 8, 32, 2, "all_gather", 0),
        (8, "zigzag", 4, 8, 16, 4, "all_gather", 0),
        (4, "striped", 2, 8, 16, 1, "all_gather", 0),  # one rank a node: nothing is inside
        (2, "striped", 2, 2, 16, 0, "all_gather", 0),  # queries are most of it
        (2, "striped", 8, 8, 128, 0, "all_gather", 0),  # and here the joining of dq
        (1, "striped", 1, 8, 32, 0, "all_gather", 0),
        (1, "striped", 2, 2, 2, 0, "all_gather", 0),
        (4, "zigzag", 1, 8, 16, 0, "group_cast", 0),
        (4, "striped", 4, 4, 16, 0, "group_cast", 0),
        (8, "zigzag", 4, 8, 16, 4, "group_cast", 0),
        (4, "zigzag", 1, 8, 16, 0, "group_cast", 1),
        (4, "striped", 4, 4, 16, 0, "group_cast", 1),
        (8, "zigzag", 4, 8, 16, 4, "group_cast", 2),
    ],
)
def test_peak_memory_equals_the_closed_form(
    ranks,
    layout,
    chunks,
    kv_heads,
    heads,
    per_node,
    kind,
    stages,
    grad,
    buffer,
    rounds,
    monkeypatch,
):
    if per_node and chunks > 1 and buffer:
        pytest.skip("on a CPU what is added up in a node is gone once that between nodes has begun")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    parts = make_layout(layout, ranks, TOKENS * ranks, BLOCK, unit=BLOCK)
    group = make_context_group(
        0,
        ParallelDims.of(ranks, cp=ranks),
        torch.device("cpu"),
        per_node=per_node or ranks,
        heads=1,
    )
    name = f"hierarchical_{kind}" if per_node else kind
    options = {"chunks": chunks, "stages": stages, "stages_backward": stages, "rounds": rounds}
    exchange = make_exchange(name, parts, group, shared_columns=False, **options)
    work = Plan.make(exchange, [SequenceMask.causal(TOKENS * ranks, TOKENS * ranks)]).tiles
    q, out, dout = (torch.randn(1, TOKENS, heads, DIM).bfloat16() for _ in range(3))
    packed, lse = torch.randn(2, 1, TOKENS, kv_heads, DIM).bfloat16(), torch.randn(1, heads, TOKENS)
    held = Held()
    rows = None if work.rows is None else work.rows[1]
    tables = ()
    if rows is not None:
        places = (keys.places for keys in (rows.keys, *rows.stages))
        tables = *places, *(cast.leaving for cast in rows.casts)
    held.ignore(q, out, dout, packed, lse, *tables)
    with held:
        results = exchange.backward(
            dout, (q, packed, out, lse), work, Stub(grad, buffer // chunks), 1.0, "layer 0"
        )
    assert [r.shape for r in results] == [q.shape, packed[0].shape, packed[1].shape]

    shape = [
        f"model.num_heads={heads}",
        f"model.num_kv_heads={kv_heads}",
        f"model.head_dim={DIM}",
        f"model.hidden_size={heads * DIM}",
    ]
    config = compose(["model=tiny", f"seq={TOKENS * ranks}", "train.dtype=bfloat16", *shape])
    monkeypatch.setattr(
        attention_memory,
        "kernel_backward",
        lambda *_, **__: attention_memory.KernelBuffers(grad.itemsize, buffer),
    )
    if rows is not None:  # the estimate takes the largest of all ranks
        monkeypatch.setattr(attention_memory, "_casts", lambda *_: rows.shares)
    how = ExchangeChoice(name, "", per_node=per_node or ranks, **options)
    told = attention_memory.AttentionMemory(config, parts, how, "flash4", 2).in_backward
    assert held.most == told
