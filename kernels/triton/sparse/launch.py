"""What a launch is given beside its tensors: the shape of its tiles, strides, and what stands in for parts of a plan that are not used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mtrain_cli.kernels.triton.sparse.plan import Plan


@dataclass(frozen=True)
class Tile:
    """keys or rows: width of the moving tile; the other side is one whole block (or ``columns`` packed columns)."""

    moving: int
    warps: int
    stages: int


def tile_for(table: dict[int, Tile], block: int) -> Tile:
    return table.get(block, Tile(min(block, 64), 4, 2))


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    assert all(t.stride(-1) == 1 for t in tensors)
    return tuple(s for t in tensors for s in t.stride()[:3])


def list_arguments(slashes: bool, plan: Plan, unused: torch.Tensor):
    """-> lists of blocks, their counts and width; any tensor stands in where no blocks are computed."""
    if not slashes:
        return unused, unused, 0
    assert plan.lines is not None
    return plan.lines, plan.upto, plan.lines.shape[-1]


def gate_arguments(plan: Plan, unused: torch.Tensor):
    """-> gates, held places of query blocks, held rows, words of a row and blocks of a chunk; any tensor stands in where none are used."""
    if plan.gates is None:
        return unused, unused, 0, 0, 1
    return plan.gates, plan.gate_slots, *plan.gates.shape[1:], plan.chunk // plan.block


def column_arguments(
    columns: tuple[torch.Tensor, torch.Tensor] | None, plan: Plan, unused: torch.Tensor
):
    """-> packed keys and values, their positions, counts and width; any tensor stands in where there are none."""
    if columns is None:
        return (unused, unused), unused, unused, unused, 0
    assert plan.column_positions is not None
    return (
        columns,
        plan.column_positions,
        plan.columns_upto,
        plan.covered,
        plan.column_positions.shape[-1],
    )
