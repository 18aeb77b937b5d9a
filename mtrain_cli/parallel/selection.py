"""`topology.exchange=auto`: which exchange a run uses, and why."""

from __future__ import annotations

# A gathered KV and its float32 gradient may take this part of a GPU; beyond it the ring, which holds two shards at a time, is used.
_GATHER_SHARE = 0.15
_ASSUMED_MEMORY = 80 << 30


def gathered_bytes(tokens: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes that one layer's backward takes at most for gathered keys and values: these, their gradients, and float32 sums of them."""
    return tokens * 2 * kv_heads * head_dim * (2 * dtype_bytes + 4)


def choose_exchange(
    name: str,
    *,
    workers: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    device_memory: int | None = None,
) -> tuple[str, str]:
    """-> exchange and reason.

    name: as configured. workers: context group. tokens: padded sequence times micro-batch. device_memory: bytes of one device; None = not
    known.
    """
    if name != "auto":
        return name, "as configured"
    if workers == 1:
        return "all_gather", "one worker holds the whole sequence, nothing moves"
    size = gathered_bytes(tokens, kv_heads, head_dim, dtype_bytes)
    memory = device_memory or _ASSUMED_MEMORY
    if size <= _GATHER_SHARE * memory:
        return "all_gather", f"one collective and one kernel call a layer; gathered KV and dKV take {_readable(size)}"
    return "ring", f"gathered KV and dKV would take {_readable(size)}, over {_GATHER_SHARE:.0%} of {memory / 2**30:.0f} GiB"


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
