"""Select the candidates that hold a share of the mass in one kernel, a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_CANDIDATES = 8192  # of a row


@triton.jit
def _select(
    ORDER, TOTAL, SHARES, CANDIDATES, KEPT, width, last, at_least, SHARE: tl.constexpr,
    CROSSING: tl.constexpr, NUMBER_BITS: tl.constexpr, MASS_BITS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    keys = tl.load(ORDER + row * width + place, mask=place < width, other=0)
    number_mask = tl.full((), (1 << NUMBER_BITS) - 1, tl.int64)
    most_units = tl.full((), (1 << MASS_BITS) - 1, tl.int64)
    masses = (keys >> NUMBER_BITS) & most_units
    held = tl.cumsum(masses, 0)
    if CROSSING:
        held -= masses
    if SHARE is None:
        share = tl.load(SHARES + row).to(tl.float64)
    else:
        share = tl.full((), SHARE, tl.float64)  # Triton rounds a float argument to float32
    limit = share * tl.load(TOTAL + row).to(tl.float64)
    kept = (held.to(tl.float64) < limit) | (place < at_least)
    at = row * width + place
    tl.store(CANDIDATES + at, last - (keys & number_mask), mask=place < width)
    tl.store(KEPT + at, kept, mask=place < width)


def select(
    order: torch.Tensor,
    total: torch.Tensor,
    share: float | torch.Tensor,
    at_least: int,
    n: int,
    crossing: bool,
    number_bits: int,
    mass_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `sparsity.pattern.select_ranked` returns, from sorted rank keys.

    Args:
        order: int64 [..., candidates], the best first, at most `MOST_CANDIDATES`.
        total: int64 [..., 1].
        share: a float, or floats that expand to [..., 1].
        number_bits, mass_bits: the lowest bits of a key, and those above them.

    Returns:
        int64 and bool, like ``order``.
    """
    width, shape = order.shape[-1], (*order.shape[:-1], 1)
    candidates = torch.empty(order.shape, dtype=torch.int64, device=order.device)
    kept = torch.empty(order.shape, dtype=torch.bool, device=order.device)
    total, number = total.expand(shape).contiguous(), None
    if isinstance(share, torch.Tensor):
        shares = share.expand(shape).contiguous()
    else:
        shares, number = total, float(share)
    if total.numel():
        padded = triton.next_power_of_2(width)
        _select[(total.numel(),)](
            order.contiguous(), total, shares, candidates, kept, width, n - 1, at_least,
            SHARE=number, CROSSING=crossing, NUMBER_BITS=number_bits, MASS_BITS=mass_bits,
            WIDTH=padded, num_warps=max(1, min(16, padded // 256)),
        )  # fmt: skip
    return candidates, kept
