"""The vertical-slash training pattern of MTraining: block diagonals and single columns, with budgets found online."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.sparsity.pattern import Masked, kept_lines

_SCORE_BYTES = 1 << 30  # scores that exist at once while an index is estimated


@dataclass(frozen=True)
class VerticalSlashPattern:
    """Probes the last queries of one or more windows and keeps the lines that hold a share of their attention (paper section B.1,
    algorithm 1): single columns at token level, slashes pooled over block diagonals, as the kernels compute them.

    last_q: queries of a window. windows: how many, evenly spread; the last one ends the sequence. One window says little about packed
        documents, since its queries see only their own.
    p_v, p_s: share of the probed attention that columns and slashes are to hold, each by itself; the line that crosses it is kept.
    joint: columns are counted on the mass outside the chosen slashes only, until both together hold p_v.
    min_bars, max_bars, min_slashes, max_slashes: bounds per head; max 0 = none. Diagonal 0 and the first sink_tokens columns always stay.
    per_group: one index for the query heads that share a key-value head.
    """

    block: int
    last_q: int
    windows: int
    p_v: float
    p_s: float
    joint: bool
    sink_tokens: int
    min_bars: int
    max_bars: int
    min_slashes: int
    max_slashes: int
    per_group: bool
    name: ClassVar[str] = "vertical_slash"
    synthetic: ClassVar[bool] = False

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=False)

    def describe(self) -> str:
        probe = f"the last {self.last_q} queries" + (f" of {self.windows} windows" if self.windows > 1 else "")
        caps = [f"{most} {what}" for most, what in ((self.max_bars, "columns"), (self.max_slashes, "diagonals")) if most]
        columns = f"columns that, joint with the diagonals, hold {self.p_v:.0%}" if self.joint else f"columns that hold {self.p_v:.0%}"
        told = [
            f"{columns} and block diagonals that hold {self.p_s:.0%} of the attention of {probe}",
            *((f"at most {' and '.join(caps)} a head",) if caps else ()),
            *(("one index per key-value group",) if self.per_group else ()),
        ]
        return ", ".join(told)

    def covers(self, seq: int) -> str | None:
        blocks = -(-seq // self.block)
        if self.min_slashes >= blocks:
            return f"at least {self.min_slashes} block diagonals of {self.block} tokens cover"
        if max(self.min_bars, self.sink_tokens) >= seq:
            return f"at least {max(self.min_bars, self.sink_tokens)} columns cover"
        return f"one block of {self.block} tokens covers" if blocks == 1 else None

    def estimate(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, layer: int) -> VerticalSlash:  # noqa: ARG002
        group = q.shape[2] // k.shape[2]
        slashes, bars = [], []
        for b in range(len(q)):
            columns, numbers = self.mass(q[b], k[b], masked, b)
            if self.per_group:
                columns = columns.unflatten(1, (-1, group)).mean(2)
            chosen = self._slashes(columns, numbers)
            slashes.append(chosen)
            bars.append(self._bars(columns, numbers, chosen))
        repeat = group if self.per_group else 1
        chosen, single = (torch.stack(t).repeat_interleave(repeat, 1) for t in (slashes, bars))
        return VerticalSlash(self.block, masked.geometry.blocks, chosen, single)

    def mass(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, sequence: int) -> tuple[torch.Tensor, list[int]]:
        """Probed attention of one sequence, q [seq, heads, head_dim], k [seq, kv_heads, head_dim].

        Returns the attention that each column gets from the queries of each probed block, float32 [probed blocks, heads, blocks * block],
        adding up to 1 per head, and the number of each probed block.
        """
        length, width = masked.masks[sequence].length, masked.geometry.blocks * self.block
        positions = self.probed_rows(length)
        numbers, of_row = torch.unique(positions // self.block, return_inverse=True)
        rows = positions.to(q.device)
        if fused_probe_usable(q):
            from mtrain_cli.kernels.triton.probe import probed_columns

            first = masked.geometry.first[sequence, rows]
            group = of_row.int().to(q.device)
            columns = probed_columns(q[rows], k[:length], first, rows.int(), group, len(numbers), width, q.shape[-1] ** -0.5)
        else:
            mean_of = (torch.nn.functional.one_hot(of_row, len(numbers)).float().T / len(rows)).to(q.device)
            columns = _columns(q[rows], k[:length], ~masked.visible(sequence, rows, length), mean_of, width)
        return columns, numbers.tolist()

    def probed_rows(self, length: int) -> torch.Tensor:
        """Positions of the probed queries, ascending, each once."""
        ends = [length * (w + 1) // self.windows for w in range(self.windows)]
        return torch.unique(torch.cat([torch.arange(max(0, end - self.last_q), end) for end in ends]))

    def _slashes(self, columns: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        """-> bool [heads, blocks]."""
        pooled = columns.unflatten(-1, (-1, self.block)).sum(-1)
        diagonals = torch.zeros_like(pooled[0])
        for number, row in zip(numbers, pooled, strict=True):
            diagonals[:, : number + 1] += row[:, : number + 1].flip(-1)
        blocks = diagonals.shape[-1]
        forced = torch.arange(blocks, device=columns.device) == 0
        lines, keep = kept_lines(diagonals, self.p_s, forced, self.min_slashes, self.max_slashes or blocks)
        return torch.zeros_like(diagonals, dtype=torch.bool).scatter_(1, lines, keep)

    def _bars(self, columns: torch.Tensor, numbers: list[int], slashes: torch.Tensor) -> torch.Tensor:
        """-> int32 [heads, width], ascending."""
        tokens = columns.shape[-1]
        share: float | torch.Tensor = self.p_v
        if self.joint:
            outside = []
            for number, row in zip(numbers, columns, strict=True):
                covered = slashes[:, : number + 1].flip(-1).repeat_interleave(self.block, -1)
                outside.append(row[:, : covered.shape[-1]].masked_fill(covered, 0.0))
            vertical = torch.stack([torch.nn.functional.pad(t, (0, tokens - t.shape[-1])) for t in outside]).sum(0)
            # Slashes hold what is not outside; columns have to bring what is missing to p_v of all.
            left = vertical.sum(-1, keepdim=True)
            share = ((left - (1 - self.p_v)) / left.clamp(min=1e-20)).clamp(min=0.0)
        else:
            vertical = columns.sum(0)
        forced = torch.arange(tokens, device=columns.device) < self.sink_tokens
        lines, keep = kept_lines(vertical, share, forced, self.min_bars, self.max_bars or tokens)
        return torch.where(keep, lines, tokens).sort(-1).values.to(torch.int32)


def fused_probe_usable(q: torch.Tensor) -> bool:
    """Whether the Triton kernel, which never writes scores to memory, can serve the queries."""
    return q.is_cuda and q.shape[-1] in (16, 32, 64, 128) and importlib.util.find_spec("triton") is not None


def _columns(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, mean_of: torch.Tensor, width: int) -> torch.Tensor:
    """Attention of probed queries summed per group and key.

    q [rows, heads, head_dim], k [keys, kv_heads, head_dim], hidden bool [rows, keys], mean_of [groups, rows] -> float32 [groups, heads,
    width].
    """
    heads, dim = q.shape[1:]
    keys, kv_heads = k.shape[:2]
    columns = torch.zeros(len(mean_of), heads, width, device=q.device)
    probe = q.float().unflatten(1, (kv_heads, -1))
    # As many key-value heads at once as the budget for scores allows.
    at_once = max(1, _SCORE_BYTES // (4 * len(q) * keys * (heads // kv_heads)))
    for g in range(0, kv_heads, at_once):
        queries = probe[:, g : g + at_once].permute(1, 2, 0, 3)  # [kv heads, group, rows, dim]
        scores = (queries.flatten(1, 2) @ k[:, g : g + at_once].permute(1, 2, 0).float()).mul_(dim**-0.5).view(-1, len(q), keys)
        p = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        first = g * (heads // kv_heads)
        columns[:, first : first + len(p), :keys] = (mean_of @ p).transpose(0, 1)
    return columns
