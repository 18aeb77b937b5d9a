"""Analyze the attention of real training steps: largest keys, maps of heads, rotary embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.console import Console
from mtrain_cli.profiling.pattern_quality import LayerAttention, Place
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_extras.studies.attention.attention_map import attention_map
from mtrain_extras.studies.attention.files import AttentionFiles, HeadMap, RopeRow, TopKeyRow
from mtrain_extras.studies.attention.request import AttentionRequest
from mtrain_extras.studies.attention.rope_analysis import (
    RopeAnalysis,
    RotaryFrequencies,
    analyze_rope,
)
from mtrain_extras.studies.attention.tables import tables
from mtrain_extras.studies.attention.top_keys import TopKeys, top_keys

_BINS = 256  # most bins of a curve over distances


class AttentionAnalyzer:
    """Analyzes the attention of single sequences on one worker, and collects the results.

    files: the results.
    """

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.files = AttentionFiles()

    def on_layer(self, layer: LayerAttention) -> None:
        self.scores(
            layer.q,
            layer.k,
            layer.positions,
            layer.masked,
            layer.rows,
            layer.place,
            RotaryFrequencies(layer.per_position, layer.factor),
        )

    def finish(self) -> None:
        """Put the results into order."""
        self.files.sort()

    def write(self, folder: Path) -> None:
        """Write the results into the folder of a measurement."""
        self.files.write(folder)

    def show(self, console: Console) -> None:
        """Print the results."""
        for table in tables(self.files):
            table.print(console)

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
    ) -> None:
        """Analyze the queries and keys of a layer.

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
        if self.request.top_k:
            found = top_keys(q, k, masked, torch.from_numpy(rows).to(q.device), self.request.top_k)
            self.files.top_keys += _top_key_rows(found, rows, self.request.top_k, place)

    def on_output(
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

        def of_head(t: torch.Tensor, head: int) -> torch.Tensor:
            # A copy, so that the whole tensor need not stay until the backward pass.
            return t.detach()[0, :length, head].clone()

        inputs = {
            head: (of_head(q, head), of_head(k, head // group), of_head(v, head // group))
            for head in heads
        }

        def make_maps(dout: torch.Tensor) -> None:
            for head in heads:
                q_head, k_head, v_head = inputs[head]
                mine, cells = dout[0, :length, head], self.request.cells
                found = attention_map(q_head, k_head, v_head, mine, first, cells)
                self.files.maps.append(
                    HeadMap(
                        step=place.step,
                        sample=place.sample,
                        layer=place.layer,
                        head=head,
                        width=found.width,
                        attention=found.attention.float().cpu().numpy(),
                        gradient=found.gradient.float().cpu().numpy(),
                    )
                )

        out.register_hook(make_maps)


def _top_key_rows(
    found: TopKeys, rows: IntArray, counts: Sequence[int], place: Place
) -> list[TopKeyRow]:
    mass, seen = found.mass.cpu().numpy(), found.seen.cpu().numpy()
    result = []
    for at, k in enumerate(counts):
        chosen = seen > k  # the k largest keys of other queries are all keys
        queries = rows[chosen].tolist()
        uniform = float((k / seen[chosen]).mean()) if queries else None
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
                    uniform=uniform,
                )
            )
    return result


def _rope_rows(analysis: RopeAnalysis, place: Place) -> list[RopeRow]:
    pairs = analysis.pairs.cpu().numpy()
    there = int(np.flatnonzero(pairs)[-1]) + 1  # distances with pairs come first
    starts = np.unique(np.geomspace(1, there + 1, _BINS + 1).astype(int))[:-1] - 1
    weights = pairs[:there]
    totals = np.add.reduceat(weights, starts)
    curves = {
        name: (
            np.add.reduceat(values[:, :there].cpu().numpy() * weights, starts, axis=1) / totals
        ).tolist()
        for name, values in (("measured", analysis.measured), ("predicted", analysis.predicted))
    }
    shares = analysis.shares
    numbers = torch.stack(
        [analysis.r2, shares.slash, shares.vertical, shares.both, shares.rest], -1
    ).tolist()
    rows = []
    for head, values in enumerate(numbers):
        r2, slash, vertical, both, rest = map(_number, values)
        rows.append(
            RopeRow(
                step=place.step,
                sample=place.sample,
                layer=place.layer,
                head=head,
                r2=r2,
                slash=slash,
                vertical=vertical,
                both=both,
                rest=rest,
                distances=starts.tolist(),
                measured=curves["measured"][head],
                predicted=curves["predicted"][head],
            )
        )
    return rows


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
