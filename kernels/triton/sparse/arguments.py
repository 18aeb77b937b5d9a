"""Launch arguments that the kernels share.

Every kernel takes the tensors of all its variants. For the tensors that a launch does not read, the
functions here pass the tensor ``unused`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mtrain_cli.kernels.triton.sparse.tile_plan import TilePlan


@dataclass(frozen=True)
class Tile:
    """Launch shape of a kernel.

    moving: keys per loop iteration of a program that computes a query block, or queries per
        iteration of a program that computes a key block.
    warps, stages: Triton's num_warps and num_stages.
    masked: num_stages of the loop over tiles that need a mask; 0 for the same.
    """

    moving: int
    warps: int
    stages: int
    masked: int = 0


def tile_for(table: dict[int, Tile], block: int) -> Tile:
    return table.get(block, Tile(min(block, 64), 4, 2))


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the first three strides of each tensor; the last stride must be 1."""
    assert all(t.stride(-1) == 1 for t in tensors)
    return tuple(s for t in tensors for s in t.stride()[:3])


def list_arguments(slashes: bool, plan: TilePlan, unused: torch.Tensor):
    """Return entries, counts and width of the plan; ``unused`` tensors and 0 without slashes."""
    if not slashes:
        return unused, unused, 0
    assert plan.entries is not None
    return plan.entries, plan.counts, plan.entries.shape[-1]


def gate_arguments(plan: TilePlan, unused: torch.Tensor):
    """Return gates, gate_slots, rows of gates per head, words per row, and blocks per chunk.

    If the plan has no gates, return unused tensors.
    """
    if plan.gates is None:
        return unused, unused, 0, 0, 1
    return plan.gates, plan.gate_slots, *plan.gates.shape[1:], plan.chunk // plan.block


def column_arguments(
    columns: tuple[torch.Tensor, torch.Tensor] | None, plan: TilePlan, unused: torch.Tensor
):
    """Return (packed k, packed v), positions, columns_below, covered and width.

    If columns is None, return unused tensors and width 0.
    """
    if columns is None:
        return (unused, unused), unused, unused, unused, 0
    assert plan.column_positions is not None
    return (
        columns,
        plan.column_positions,
        plan.columns_below,
        plan.covered,
        plan.column_positions.shape[-1],
    )
