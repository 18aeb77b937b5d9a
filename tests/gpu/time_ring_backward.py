"""Times the backward pass of one ring layer on the GPUs of this host: keys circulate, or queries with out, or queries with delta.

    torchrun --nproc-per-node 2 tests/gpu/time_ring_backward.py --tokens 65536 131072

Every way must give the gradients of the first one; a difference ends the script with exit code 1. The table shows the bytes that a rank
sends in one backward pass, counted at the call that sends them, and the median time of the slowest rank. `NCCL_P2P_DISABLE=1` takes the
GPUs' direct link away and so stands for a slower one.
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
from mtrain_cli.attention.kernel import Kernel, row_delta
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange_registry import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.parallel.transport import Transport

HEAD_DIM = 128
MOST_DIFFERENCE = 1e-2  # two orders of summation in bfloat16; the float64 oracle allows as much in test_context_attention_nccl.py


class Flash4WithOut(Flash4Kernel):
    """Has out travel with queries, as before delta did."""

    needs_out = True


class SdpaWithOut(SdpaKernel):
    needs_out = True


WAYS: dict[str, list[tuple[str, str, type[Kernel]]]] = {
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
    """Has every hop add its bytes to the one number of the list."""
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
    """flash4's backward of one rectangle: with delta, and with out, on one GPU."""
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
        found, times = [], []
        for given in ((out, None), (None, delta)):
            arguments = dout, q, k, v, given[0], lse, given[1], tiles, head_dim**-0.5
            found.append(kernel.backward(*arguments))
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(5):
                kernel.backward(*arguments)
            events[0].record()
            for _ in range(20):
                kernel.backward(*arguments)
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) / 20)
        what = f"{heads} heads, {kv_heads} of keys, head_dim {head_dim}"
        lines.append(f"{what:<34}{times[0]:>8.2f} ms{times[1]:>9.2f} ms{difference(*found):>12.1e}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 16, 1 << 17])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--kernels", nargs="+", choices=list(WAYS), default=["flash4"])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    lines = one_call(device) if rank == 0 and "flash4" in asked.kernels else []
    sent = count_sent()
    group: ContextGroup = make_context_group(rank, world, world, device)
    worst = 0.0
    for tokens in asked.tokens:
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
            for h in (asked.heads, asked.kv_heads, asked.kv_heads, asked.heads)
        )
        mine = [t.requires_grad_() for t in (q, k, v)]
        for name in asked.kernels:
            lines += [
                "",
                f"{f'{tokens} tokens, {name}':<34}{'sent':>11}{'backward':>12}{'peak':>12}{'difference':>12}",
            ]
            first: tuple[torch.Tensor, ...] | None = None
            for what, circulates, kernel in WAYS[name]:
                exchange = make_exchange("ring", layout, group, circulates=circulates)
                attend = ContextAttention.make(exchange, kernel(), masks, device)
                times = []
                for _ in range(2 + asked.repeats):
                    out = attend(*mine, 0)
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    dist.barrier()
                    torch.cuda.synchronize()
                    sent[0] = 0
                    start = time.perf_counter()
                    found = torch.autograd.grad(out, mine, dout)
                    torch.cuda.synchronize()
                    times.append(slowest(time.perf_counter() - start, device))
                first = first or found
                apart = slowest(difference(found, first), device)
                worst = max(worst, apart)
                peak = torch.cuda.max_memory_allocated() / 2**30
                lines.append(
                    f"{what:<34}{sent[0] / 2**30:>7.3f} GiB{statistics.median(times[2:]) * 1e3:>9.1f} ms{peak:>8.2f} GiB{apart:>12.1e}"
                )
                del out, found, attend, exchange
            del first
    if rank == 0:
        lines = [
            f"{world} x {torch.cuda.get_device_name()}, {asked.heads} heads, {asked.kv_heads} of keys",
            *lines,
        ]
        print("\n".join(lines), flush=True)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "ring_backward.txt").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if worst > MOST_DIFFERENCE:
        print(
            f"rank {rank}: gradients differ by {worst:.1e}, over {MOST_DIFFERENCE}", file=sys.stderr
        )
    return int(worst > MOST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
