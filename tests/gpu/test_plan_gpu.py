"""A pinned plan moves to the GPU in one copy, for which the host does not wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mtrain_cli.attention.device_copy import map_tensors
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.exchange import Plan, make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("request_", [None, IndexRequest(128, bitmap=True)])
def test_a_plan_of_another_thread_moves_without_a_wait(request_):
    layout = make_layout("striped", 4, 16384, 128, unit=128)
    exchange = make_exchange("ring", layout, ContextGroup(1, (0, 1, 2, 3)))
    documents = np.sort(np.random.default_rng(0).integers(0, 9, layout.seq))
    masks = [SequenceMask.from_documents(documents, layout.padded_seq)]
    plan = Plan.make(exchange, masks, request_, keep=0.5)
    with ThreadPoolExecutor(1) as loader:
        pinned = loader.submit(plan.pinned).result()
    assert pinned.buffer is not None
    assert pinned.buffer.is_pinned()
    pinned.to("cuda")  # the first copy creates the CUDA context
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = pinned.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, found = tables(plan), tables(moved)
    assert all(table.is_cuda for table in found)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))
    assert len({table.untyped_storage().data_ptr() for table in found}) == 1


def tables(plan: Plan) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors((plan.tiles, plan.early_tiles, plan.masked), lambda t: found.append(t) or t)
    return found
