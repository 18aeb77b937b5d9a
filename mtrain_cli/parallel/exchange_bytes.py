"""Bytes of the transfers of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.parallel.schedule import DKV, DQ, HEADS, KV, QUERIES, Schedule, Steps, Transfer


@dataclass(frozen=True)
class ShardSizes:
    """The sizes that determine a shard's bytes.

    tokens: of a worker, times micro-batch.
    heads, kv_heads, head_dim: of the model.
    dtype_bytes: of the compute dtype; gradients travel in 4 bytes.
    needs_out: whether the kernel needs out in backward; out then travels with queries, not delta.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    needs_out: bool = False

    def shard(self, payload: str, part: tuple[int, int]) -> int:
        """Return the bytes of one shard of a payload, for one of ``part[1]`` parts of the heads."""
        kv_heads, heads = max(1, self.kv_heads // part[1]), self.heads // part[1]
        rows, e = self.tokens * self.head_dim, self.dtype_bytes
        if payload in (KV, DKV):
            return 2 * rows * kv_heads * (e if payload == KV else 4)
        if payload == DQ:
            return 4 * rows * heads
        assert payload == QUERIES
        third = rows * e * heads if self.needs_out else 4 * self.tokens * heads
        return 2 * rows * e * heads + 4 * self.tokens * heads + third


def sent_bytes(
    transfer: Transfer, sizes: ShardSizes, *, first: bool = True, backward: bool = False
) -> int:
    """Return the bytes that a rank sends; it receives the same number.

    A collective counts as the minimum that must cross: for a gather its own shard to every peer,
    for a reduce-scatter one sum to every peer.

    first, backward: which of the two head trades of a pass, and in which pass.
    """
    if transfer.payload == HEADS:
        peers = len(transfer.peers)
        kv_heads = max(sizes.kv_heads, peers)  # fewer heads than peers are repeated
        forward_heads = sizes.heads + 2 * kv_heads if first else sizes.heads
        heads = (
            (sizes.heads if first else sizes.heads + 2 * kv_heads) if backward else forward_heads
        )
        return sizes.tokens * sizes.head_dim * sizes.dtype_bytes * heads * (peers - 1) // peers
    one = sizes.shard(transfer.payload, transfer.part)
    if transfer.kind == "all_gather":
        return one * len(transfer.receives)
    return one * len(transfer.sends)


def pass_bytes(schedule: Schedule, rank: int, sizes: ShardSizes, *, backward: bool) -> int:
    """Return the bytes that a rank sends in one pass of one layer."""
    steps: Steps = (schedule.backward if backward else schedule.forward)[rank]
    total, trades = 0, 0
    for transfer in (t for step in steps for t in step.transfers):
        total += sent_bytes(transfer, sizes, first=trades == 0, backward=backward)
        trades += transfer.payload == HEADS
    return total
