"""Analyze the attention of real training steps: largest keys, maps of heads, rotary embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.profiling.attention_request import AttentionRequest
from mtrain_cli.profiling.rope_analysis import RopeAnalysis, RotaryFrequencies, analyze_rope
from mtrain_cli.records.attention_files import AttentionFiles, HeadMap, RopeRow, TopKeyRow
from mtrain_cli.sparsity.attention_map import attention_map
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.top_keys import TopKeys, top_keys

_BINS = 256  # most bins of a curve over distances


@dataclass(frozen=True)
class Place:
    """Where a measurement is from: step of training or of the checkpoint, sample, and layer."""

    step: int
    sample: int
    layer: int


class AttentionAnalyzer:
    """Analyzes the attention of single sequences on one worker, and collects the results.

    files: the results.
    """

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.files = AttentionFiles()

    @torch.no_grad()
    def scores(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        masked: MaskedPositions,
        rows: IntArray,
        place: Place,
        frequencies: RotaryFrequencies,
    ) -> TopKeys | None:
        """Analyze the queries and keys of a layer. Return the largest keys if they are wanted.

        Args:
            q, k: [1, seq, heads, head_dim] and [1, seq, kv_heads, head_dim], rotated.
            positions: int64 [seq], rotary positions.
            rows: int64 [rows], positions of the sampled queries.
        """
        if self.request.rope:
            length = masked.masks[0].length
            tables = masked.tables
            analysis = analyze_rope(
                q[0, :length],
                k[0, :length],
                positions[:length],
                tables.first[0, :length],
                tables.last[0, :length],
                frequencies,
            )
            self.files.rope += _rope_rows(analysis, place)
        if not self.request.top_k:
            return None
        found = top_keys(q, k, masked, torch.from_numpy(rows).to(q.device), self.request.top_k)
        self.files.top_keys += _top_key_rows(found, rows, self.request.top_k, place)
        return found

    def watch_gradient(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        masked: MaskedPositions,
        place: Place,
    ) -> None:
        """Make the wanted maps of a layer when the backward pass reaches its attention.

        Args:
            q, k, v: inputs of attention, [batch, seq, heads, head_dim]; k and v have fewer heads.
            out: output of attention, [batch, seq, heads, head_dim].
        """
        heads = [head for layer, head in self.request.maps if layer == place.layer]
        if not heads:
            return
        group, length = q.shape[2] // k.shape[2], masked.masks[0].length
        first = masked.tables.first[0, :length]
        # Copies of single heads, which stay until the backward pass; the whole tensors need not.
        inputs = {
            head: tuple(
                t.detach()[0, :length, at].clone()
                for t, at in ((q, head), (k, head // group), (v, head // group))
            )
            for head in heads
        }

        def make_maps(dout: torch.Tensor) -> None:
            for head in heads:
                mine = dout[0, :length, head]
                found = attention_map(*inputs[head], mine, first, self.request.cells)
                arrays = (t.float().cpu().numpy() for t in (found.attention, found.gradient))
                self.files.maps.append(
                    HeadMap(**dataclasses.asdict(place), head=head, width=found.width,
                            **dict(zip(("attention", "gradient"), arrays, strict=True)))
                )  # fmt: skip

        out.register_hook(make_maps)


def _top_key_rows(
    found: TopKeys, rows: IntArray, counts: Sequence[int], place: Place
) -> list[TopKeyRow]:
    mass, seen = found.mass.cpu().numpy(), found.seen.cpu().numpy()
    result = []
    for at, k in enumerate(counts):
        chosen = seen > k  # the k largest keys of other queries are all keys
        queries = rows[chosen].tolist()
        for head, values in enumerate(mass[at][:, chosen]):
            mean, worst = (values.mean(), values.min()) if queries else (None, None)
            result.append(
                TopKeyRow(
                    **dataclasses.asdict(place),
                    head=head,
                    k=k,
                    mean=None if mean is None else float(mean),
                    worst=None if worst is None else float(worst),
                    queries=queries,
                    mass=values.tolist(),
                )
            )
    return result


def _rope_rows(analysis: RopeAnalysis, place: Place) -> list[RopeRow]:
    pairs = analysis.pairs.cpu().numpy()
    there = int(np.flatnonzero(pairs)[-1]) + 1  # distances with pairs come first
    starts = np.unique(np.geomspace(1, there + 1, _BINS + 1).astype(int))[:-1] - 1
    shares = analysis.shares
    numbers: dict[str, Any] = {
        "r2": analysis.r2,
        **{name: getattr(shares, name) for name in ("slash", "vertical", "both", "rest")},
    }
    numbers = {name: values.tolist() for name, values in numbers.items()}
    weights = pairs[:there]
    totals = np.add.reduceat(weights, starts)
    curves = {
        name: (
            np.add.reduceat(values[:, :there].cpu().numpy() * weights, starts, axis=1) / totals
        ).tolist()
        for name, values in (("measured", analysis.measured), ("predicted", analysis.predicted))
    }
    return [
        RopeRow(
            **dataclasses.asdict(place),
            head=head,
            **{name: _number(values[head]) for name, values in numbers.items()},
            distances=starts.tolist(),
            **{name: values[head] for name, values in curves.items()},
        )
        for head in range(len(analysis.measured))
    ]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
