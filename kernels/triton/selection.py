"""Select the candidates that hold a share of the mass in one kernel, a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _select(
    ORDER, TOTAL, SHARES, NUMBERS, KEPT, width, n, at_least, SHARE: tl.constexpr,
    CROSSING: tl.constexpr, NUMBER_BITS: tl.constexpr, MASS_BITS: tl.constexpr,
    WIDTH: tl.constexpr, FORM: tl.constexpr,
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
    number = n - 1 - (keys & number_mask)
    at = row * width + place
    if FORM == "flags":
        tl.store(KEPT + row * n + number, kept, mask=place < width)
    elif FORM == "numbers":
        tl.store(NUMBERS + at, tl.where(kept, number, n).to(tl.int32), mask=place < width)
    else:
        tl.store(NUMBERS + at, number, mask=place < width)
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
    form: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a form of a `sparsity.pattern.Selection`.

    Args:
        order: int64 [..., candidates], rank keys, the best first. A program holds a row.
        total: int64 [..., 1].
        share: a float, or floats that expand to [..., 1].
        number_bits, mass_bits: the lowest bits of a key, and those above them.
        form: "pairs", "numbers" or "flags".

    Returns:
        The numbers (with "numbers", n for those not selected) and which of them are selected, like
        ``order``; with "flags", bool [..., n]. Each form but "pairs" lacks one of both.
    """
    order, width, shape = order.contiguous(), order.shape[-1], (*order.shape[:-1], 1)
    numbers = kept = None
    if form == "flags":
        # All flags are written if all candidates are there.
        make = order.new_empty if width == n else order.new_zeros
        kept = make((*order.shape[:-1], n), dtype=torch.bool)
    else:
        numbers = torch.empty_like(order, dtype=torch.int32 if form == "numbers" else torch.int64)
    if form == "pairs":
        kept = torch.empty_like(order, dtype=torch.bool)
    total, constant = total.expand(shape).contiguous(), None
    if isinstance(share, torch.Tensor):
        shares = share.expand(shape).contiguous()
    else:
        shares, constant = total, float(share)
    if total.numel():
        padded = triton.next_power_of_2(width)
        _select[(total.numel(),)](
            order, total, shares, numbers, kept, width, n, at_least, SHARE=constant,
            CROSSING=crossing, NUMBER_BITS=number_bits, MASS_BITS=mass_bits, WIDTH=padded,
            FORM=form, num_warps=max(1, min(16, padded // 256)),
        )  # fmt: skip
    return numbers, kept
