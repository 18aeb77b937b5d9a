"""Time the backward pass of a ring layer that circulates keys, queries with out, or with delta.

    torchrun --nproc-per-node 2 tests/gpu/time_ring_backward.py --tokens 65536 131072

All variants must give the gradients of the first one; a difference ends the script with exit code
1. The table shows the bytes that a rank sends in one backward pass, counted at the sending call,
and the median time of the slowest rank. `NCCL_P2P_DISABLE=1` disables the GPUs' direct link, to
stand in for a slower one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.flash4 import Flash4Kernel
from mtrain_cli.attention.kernel import Kernel, Saved
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.partials import row_delta
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.parallel.plan import Plan
from mtrain_cli.parallel.transport import Transport

HEAD_DIM = 128
MAX_DIFFERENCE = 1e-2  # orders of summation differ in bfloat16


class Flash4WithOut(Flash4Kernel):
    """Sends out with the queries instead of delta."""

    needs_out = True


class SdpaWithOut(SdpaKernel):
    needs_out = True


VARIANTS: dict[str, list[tuple[str, str, type[Kernel]]]] = {
    "flash4": [
        ("keys", "kv", Flash4Kernel),
        ("queries, out", "queries", Flash4WithOut),
        ("queries, delta", "queries", Flash4Kernel),
    ],
    "sdpa": [
        ("keys", "kv", SdpaKernel),
        ("queries, out", "queries", SdpaWithOut),
        ("queries, delta", "queries", SdpaKernel),
    ],
}


def count_sent() -> list[int]:
    """Make every hop add its bytes to the single number in the returned list."""
    sent = [0]
    hop = Transport.start_hop

    def counted(self: Transport, transfer, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        sent[0] += leaving.numel() * leaving.element_size()
        hop(self, transfer, leaving, arriving)

    Transport.start_hop = counted
    return sent


def slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def difference(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> float:
    return max(
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(got, want, strict=True)
    )


def one_call(device: torch.device) -> list[str]:
    """Compare flash4's backward of one rectangle with delta and with out, on one GPU."""
    lines = [f"{'one call, 8192 tokens':<34}{'with out':>11}{'with delta':>12}{'difference':>12}"]
    everywhere = np.arange(8192)
    for heads, kv_heads, head_dim in ((32, 32, 128), (32, 8, 128), (32, 32, 64)):
        kernel = Flash4Kernel()
        tiles = Tiles.make([SequenceMask.causal(8192, 8192).spans(everywhere, everywhere)], device)
        q, k, v, dout = (
            torch.randn(1, 8192, h, head_dim, device=device, dtype=torch.bfloat16)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        out, lse = kernel.forward(q, k, v, tiles, head_dim**-0.5)
        delta = row_delta(out, dout)
        gradients, times = [], []
        for given in ((out, None), (None, delta)):
            saved = Saved(q, k, v, given[0], lse, given[1])
            arguments = dout, saved, tiles, head_dim**-0.5
            gradients.append(kernel.backward(*arguments))
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(5):
                kernel.backward(*arguments)
            events[0].record()
            for _ in range(20):
                kernel.backward(*arguments)
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) / 20)
        variant = f"{heads} heads, {kv_heads} of keys, head_dim {head_dim}"
        lines.append(
            f"{variant:<34}{times[0]:>8.2f} ms{times[1]:>9.2f} ms{difference(*gradients):>12.1e}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 16, 1 << 17])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--kernels", nargs="+", choices=list(VARIANTS), default=["flash4"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    lines = one_call(device) if rank == 0 and "flash4" in args.kernels else []
    sent = count_sent()
    group: ContextGroup = make_context_group(rank, ParallelDims.of(world, cp=world), device)
    worst = 0.0
    for tokens in args.tokens:
        layout = make_layout("zigzag", world, tokens, 128)
        masks = [SequenceMask.causal(tokens, layout.padded_seq)]
        generator = torch.Generator(device).manual_seed(rank)
        q, k, v, dout = (
            torch.randn(
                1,
                layout.tokens_per_worker,
                h,
                HEAD_DIM,
                generator=generator,
                device=device,
                dtype=torch.bfloat16,
            )
            for h in (args.heads, args.kv_heads, args.kv_heads, args.heads)
        )
        mine = [t.requires_grad_() for t in (q, k, v)]
        for name in args.kernels:
            lines += [
                "",
                f"{f'{tokens} tokens, {name}':<34}{'sent':>11}{'backward':>12}"
                f"{'peak':>12}{'difference':>12}",
            ]
            first: tuple[torch.Tensor, ...] | None = None
            for variant, circulates, kernel in VARIANTS[name]:
                exchange = make_exchange("ring", layout, group, circulates=circulates)
                plan = Plan.make(exchange, masks).to(device)
                attend = ContextAttention.of(exchange, kernel(), plan)
                times = []
                for _ in range(2 + args.repeats):
                    out = attend(*mine, 0)
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    dist.barrier()
                    torch.cuda.synchronize()
                    sent[0] = 0
                    start = time.perf_counter()
                    gradients = torch.autograd.grad(out, mine, dout)
                    torch.cuda.synchronize()
                    times.append(slowest(time.perf_counter() - start, device))
                first = first or gradients
                deviation = slowest(difference(gradients, first), device)
                worst = max(worst, deviation)
                peak = torch.cuda.max_memory_allocated() / 2**30
                lines.append(
                    f"{variant:<34}{sent[0] / 2**30:>7.3f} GiB"
                    f"{statistics.median(times[2:]) * 1e3:>9.1f} ms"
                    f"{peak:>8.2f} GiB{deviation:>12.1e}"
                )
                del out, gradients, attend, exchange
            del first
    if rank == 0:
        lines = [
            f"{world} x {torch.cuda.get_device_name()}, {args.heads} heads, "
            f"{args.kv_heads} KV heads",
            *lines,
        ]
        print("\n".join(lines), flush=True)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "ring_backward.txt").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if worst > MAX_DIFFERENCE:
        print(
            f"rank {rank}: gradients differ by {worst:.1e}, over {MAX_DIFFERENCE}", file=sys.stderr
        )
    return int(worst > MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
