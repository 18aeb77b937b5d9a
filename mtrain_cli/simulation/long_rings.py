"""Predict a long ring from two shorter ones (`ring.shorter_rings`), which are played in full.

In the shorter rings, every rank computes in each step what the slowest rank of the long ring
computes in one of its steps. So the time is an upper bound, and exact if all work is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask import IntArray
from mtrain_cli.parallel.ring import shorter_rings
from mtrain_cli.parallel.schedule import make_schedule
from mtrain_cli.records.imbalance import Imbalance
from mtrain_cli.simulation.calibration import FloatArray
from mtrain_cli.simulation.causal_work import CausalRows, column_sums
from mtrain_cli.simulation.spmd_schedule import RankGrid, SpmdSchedule
from mtrain_cli.simulation.timeline import PassTimes
from mtrain_cli.simulation.what_if import ReplayCase
from mtrain_cli.simulation.work_counts import MOST_PLAYED, StepWork, WorkCounter

SHORTEST = 64  # shards of the shorter ring


@dataclass(frozen=True, eq=False)
class RingWork:
    """The pairs of a long ring, by the place of the keys' group before that of the queries.

    most, mean: [nodes, places of a node], over all ranks; of one node if the ring is flat.
    columns: largest number of gathered columns of a rank, and (largest, mean) of their pairs.
    total, step: imbalance degrees, as in `Imbalance`.
    pairs: number of pairs of all ranks, with columns.
    """

    most: IntArray
    mean: FloatArray
    columns: int
    column_pairs: tuple[int, float]
    total: float
    step: float
    pairs: int

    @staticmethod
    def of(counter: WorkCounter, index: Index | None) -> RingWork:
        """Count the work of a layer. index: None for dense attention; see `is_long`."""
        grid, parts = RankGrid.of(counter.schedule), counter.schedule.heads
        most = np.zeros((grid.nodes, grid.size), np.int64)
        mean, totals, steps = np.zeros(most.shape), [], []
        columns, column_pairs = 0, []
        for part in range(parts if index is not None else 1):
            rows, own_columns, of_columns = _rows(counter, index, part)
            for group in range(counter.groups):
                row = np.sum([of_kind.row(group) for of_kind in rows], axis=0)
                seen = grid.seen_from(group, row)
                np.maximum(most, seen, out=most)
                mean += seen
                totals.append(int(row.sum()))
                steps.append(int(row.max()))
            columns = max(columns, own_columns)
            column_pairs.append(of_columns)
        ranks = len(totals)
        every = np.array(totals) + np.concatenate(column_pairs)
        live = np.count_nonzero(most)
        return RingWork(
            most,
            mean / ranks,
            columns,
            (int(np.max(column_pairs)), float(np.mean(column_pairs))),
            float(every.max() / every.mean()),
            float(np.mean(np.array(steps) * live / np.maximum(totals, 1))),
            int(every.sum()) * parts * counter.groups // ranks,
        )

    def whole(self, direction: str) -> StepWork:
        """Return the sum over all workers and steps, with the imbalance degrees."""
        columns = ([[number]] for number in self.column_pairs)
        most, mean = (np.append(t, c) for t, c in zip((self.most, self.mean), columns, strict=True))
        ratio = float(np.mean(most[most > 0] / mean[most > 0]))
        balance = Imbalance(ratio, self.step, self.total, float(most.sum() / mean.sum()))
        pairs, none = np.array([[self.pairs]]), np.zeros(1, np.int64)
        return StepWork(direction, pairs, np.zeros_like(pairs), none, none, balance=balance)

    def spread(self, spmd: SpmdSchedule, direction: str) -> StepWork:
        """Return the work of a shorter ring, the same on all its ranks.

        A phase is the steps of a node, or a step in a flat ring. The first phase is that of the
        long ring. The others, sorted by their work, are divided into as many equal parts as the
        shorter ring has further phases: each has the mean of a part.
        """
        flat, grid = self.most.shape[0] == 1, spmd.grid
        first, *others = self.most.T if flat else self.most
        sums = np.cumsum([0 * first, *sorted(others, key=np.sum, reverse=True)], axis=0)
        parts = (grid.size if flat else grid.nodes) - 1
        ends = np.linspace(0, len(others), parts + 1)
        of_place = (np.interp(ends, np.arange(len(sums)), column) for column in sums.T)
        means = np.diff(np.stack(list(of_place), 1), axis=0) * parts / len(others)
        every = np.stack([first, *np.rint(means).astype(np.int64)])
        pairs = np.zeros(len(spmd.steps(direction)), np.int64)
        for at, step in enumerate(spmd.steps(direction)):
            if step.queries is not None and step.keys is not None:
                phase, place = divmod(max(step.queries, *step.keys), every.shape[1])
                pairs[at] = every[-phase, -place]
        table = np.tile(pairs, (grid.workers, 1))
        columns = (np.full(grid.workers, n) for n in (self.columns, self.column_pairs[0]))
        return StepWork(direction, table, 0 * table, *columns, 0 * table, 0 * table)


def _rows(
    counter: WorkCounter, index: Index | None, part: int
) -> tuple[list[CausalRows], int, IntArray]:
    """Return the rows of each kind of mask for a part of the heads, and its gathered columns."""
    rows, columns, pairs = [], 0, np.zeros(counter.groups, np.int64)
    of_part = counter.heads // counter.schedule.heads
    for kind in counter._kinds:
        assert kind.chunks is not None
        number = counter.blocks if counter.block_owner is not None else len(counter.owner)
        chosen = np.full(number, of_part * len(kind.rows))
        if isinstance(index, VerticalSlash):
            heads = slice(part * of_part, (part + 1) * of_part)
            on = index.slashes.numpy()[kind.rows, heads].reshape(-1, counter.blocks)
            of_columns = index.columns.numpy()[kind.rows, heads].reshape(len(on), -1)
            chosen = on.sum(0, dtype=np.int64)
            more, counted = column_sums(kind.chunks, on, of_columns)
            columns, pairs = columns + more, pairs + counted
        rows.append(CausalRows(kind.chunks, chosen))
    return rows, columns, pairs


def is_long(counter: WorkCounter, index: Index | None) -> bool:
    """Return whether shorter rings can stand for a ring, because its work has a closed form."""
    lines = index is None or (isinstance(index, VerticalSlash) and counter.gathers_columns)
    large = counter.groups > MOST_PLAYED and not counter.schedule.gathers
    return large and lines and counter.closed


def shorter_cases(case: ReplayCase, per_node: int) -> list[tuple[Fraction, ReplayCase]]:
    """Return the shorter rings to play, each with a weight. per_node: GPUs of a real node."""
    options = case.choice.options(case.setup.workers)
    return [
        (weight, replace(case, schedule=make_schedule(case.choice.name, own), _programs={}))
        for weight, own in shorter_rings(case.choice.name, options, SHORTEST, per_node)
    ]


def mixed(parts: Sequence[tuple[Fraction, PassTimes]]) -> PassTimes:
    """Return the weighted sum of the times of rings, for the ranks of the shortest, over steps."""
    ranks = len(parts[0][1].end)

    def total(*tables: FloatArray) -> FloatArray:
        return np.sum(
            [float(w) * t[..., :ranks] for (w, _), t in zip(parts, tables, strict=True)], axis=0
        )

    def summed(*tables: FloatArray, apart: int = 0) -> FloatArray:
        split = [np.stack([t[:, :apart].sum(1), t[:, apart:].sum(1)]) for t in tables]
        return total(*split).T

    times = [of for _, of in parts]
    first = times[0]
    return PassTimes(
        direction=first.direction,
        start=first.start[:ranks],
        end=total(*(of.end for of in times)),
        spent={kind: summed(*(of.spent[kind] for of in times), apart=1) for kind in first.spent},
        late=summed(*(of.late for of in times)),
        exposed={link: summed(*(of.exposed[link] for of in times)) for link in first.exposed},
        carried=total(*(of.carried for of in times)),
    )
