"""Recorded CUDA events agree with clocks around synchronised calls. Needs two GPUs."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel.ways import make_attention

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.parallel.recording import COMPUTING, Span, with_gaps
from mtrain_cli.profiling.record_collector import RecordCollector

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more")]
SEQ, HEADS, KV_HEADS, HEAD_DIM = 32768, 16, 2, 128


def recorded(rank: int, world: int, folder: str, name: str) -> None:
    torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        device_id=device,
    )
    group = make_context_group(
        rank, ParallelDims.of(world, cp=world), device, per_node=max(1, world // 2)
    )
    layout = make_layout("zigzag", world, SEQ, 128)
    exchange = make_exchange(name, layout, group)
    attend = make_attention(
        exchange, SdpaKernel(), [SequenceMask.causal(SEQ, layout.padded_seq)], device
    )
    shapes = [(1, layout.tokens_per_worker, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    )
    collector = RecordCollector(rank, world, device, dist.new_group(backend="gloo"))
    for _ in range(3):
        dist.barrier()
        exchange.set_recorder(collector.recorder)
        collector.start()
        began = time.perf_counter()
        with collector.recorder.iteration():
            attend(q, k, v, 0).sum().backward()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        spans = collector.recorder.read()
    torch.save((spans, began, seconds, collector.uncertainty), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["ring", "hierarchical_ring", "all_gather", "hierarchical_all_gather"]
)
def test_events_fill_every_pass_and_agree_with_the_clock(name):
    world = min(GPUS, 4)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(recorded, args=(world, folder, name), nprocs=world, join=True)
        results = [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)
        ]
    for spans, began, seconds, uncertainty in results:
        assert 0 < uncertainty < 1e-3
        (iteration,) = (s for s in spans if s.kind == "iteration")
        assert began - uncertainty - 1e-4 <= iteration.start <= began + seconds
        assert 0.5 * seconds < iteration.seconds <= seconds * 1.05
        for direction in ("forward", "backward"):
            mine: list[Span] = [s for s in spans if s.direction == direction]
            (whole,) = (s for s in mine if s.kind == "pass")
            filled = sum(s.seconds for s in with_gaps(mine) if s.kind in COMPUTING)
            assert filled == pytest.approx(whole.seconds, rel=1e-3)
            messages = [s for s in mine if s.kind == "receive"]
            assert messages
            for wait in (s for s in mine if s.kind == "wait" and s.seconds > 1e-4):
                # A wait ends with its message, which events on another stream record.
                (message,) = (m for m in messages if m.message == wait.message)
                assert message.start + message.seconds == pytest.approx(
                    wait.start + wait.seconds, abs=1e-4
                )
