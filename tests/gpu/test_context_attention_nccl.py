"""Attention over a context group of GPUs equals the float64 oracle on one: output and gradients, through NCCL. Needs two GPUs or more."""

from __future__ import annotations

import faulthandler

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.registry import _KERNELS
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more")]

SEQ, HEADS, KV_HEADS, HEAD_DIM = 3000, 16, 2, 128


def work(rank: int, world: int, store: str, kernel_name: str) -> None:
    # A failed rank leaves the others in a collective: the test must end with a traceback, not hang.
    faulthandler.dump_traceback_later(240, exit=True)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    group = make_context_group(rank, world, world, device)
    kernel = _KERNELS[kernel_name]()
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, SEQ, h, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16)
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    scale = HEAD_DIM**-0.5
    wrong: list[str] = []
    for documents in (False, True):
        ids = np.sort(np.random.default_rng(2).integers(0, 5 if documents else 1, SEQ))
        positions = np.arange(SEQ)
        whole = Tiles.make([SequenceMask.from_documents(ids, SEQ).spans(positions, positions)], device)
        exact = [t.double() for t in (q, k, v)]
        out, lse = ReferenceKernel().forward(*exact, whole, scale)
        expected = (out, *ReferenceKernel().backward(dout.double(), *exact, out, lse, None, whole, scale))
        for layout_name in ("zigzag", "striped"):
            layout = make_layout(layout_name, world, SEQ, 128)
            own = layout.positions(rank)
            real = torch.from_numpy(own < SEQ).to(device)
            index = torch.from_numpy(np.minimum(own, SEQ - 1)).to(device)
            for exchange in ("all_gather", "ring"):
                mask = SequenceMask.from_documents(ids, layout.padded_seq)
                attend = ContextAttention.make(make_exchange(exchange, layout, group), kernel, [mask], device)
                mine = [t[:, index].clone().requires_grad_() for t in (q, k, v)]
                got_out = attend(*mine, 0)
                got = (got_out, *torch.autograd.grad(got_out, mine, dout[:, index]))
                for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
                    a, b = a[:, real].double(), b[:, index[real]]
                    error = ((a - b).norm() / b.norm()).item()
                    if not error < 1e-2:
                        wrong.append(f"{layout_name} {exchange} documents={documents} {name}: {error:.2e}")
    answers: list[list[str] | None] = [None] * world
    dist.all_gather_object(answers, wrong)
    dist.destroy_process_group()
    assert not any(answers), answers[rank]


@pytest.mark.parametrize("kernel", ["flash4", "sdpa"])
def test_output_and_gradients_equal_the_oracle(kernel, tmp_path):
    request = KernelRequest("cuda", torch.cuda.get_device_capability(), "bfloat16", HEAD_DIM, HEADS, KV_HEADS)
    missing = _KERNELS[kernel]().missing(request)
    if missing:
        pytest.skip(missing)
    world = min(GPUS, 4)
    mp.spawn(work, args=(world, str(tmp_path / "store"), kernel), nprocs=world, join=True)
