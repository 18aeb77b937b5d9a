"""Let two shorter rings, which are played, stand for a long one (`ring.shorter_rings`).

In each step of a shorter ring, all ranks do what the slowest rank of the long ring does in one of
its steps. If all ranks have equal work, the time is that of the long ring. Otherwise it is mostly
too long (docs/simulation.md says by how much).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask import IntArray
from mtrain_cli.parallel.recording import BACKWARD, FORWARD
from mtrain_cli.parallel.ring import shorter_rings
from mtrain_cli.parallel.schedule import Schedule, make_schedule
from mtrain_cli.records.imbalance import Imbalance
from mtrain_cli.simulation import work_counts
from mtrain_cli.simulation.calibration import FloatArray
from mtrain_cli.simulation.causal_work import CausalRows
from mtrain_cli.simulation.spmd_schedule import RankGrid, SpmdSchedule
from mtrain_cli.simulation.timeline import PassTimes
from mtrain_cli.simulation.what_if import ReplayCase
from mtrain_cli.simulation.work_counts import StepWork, WorkCounter

SHORTEST = 64  # shards of the shorter ring


def is_long(counter: WorkCounter, index: Index | None) -> bool:
    """Return whether shorter rings can stand for a ring: it is long, and work has a closed form."""
    long = not counter.schedule.gathers and counter.groups > work_counts.MOST_PLAYED
    lines = index is None or (isinstance(index, VerticalSlash) and counter.gathers_columns)
    return long and lines and counter.closed


def shorter_cases(case: ReplayCase, per_node: int) -> list[tuple[Fraction, ReplayCase]]:
    """Return the shorter rings to play, each with a weight. per_node: GPUs of a real node."""
    name, options = case.choice.name, case.choice.options(case.setup.workers)
    work, found = lru_cache(1)(partial(RingWork.of, case.counter)), []
    for weight, shorter in shorter_rings(name, options, SHORTEST, per_node):
        schedule = make_schedule(name, shorter)
        counter = replace(case.counter, schedule=schedule, long=work)
        found.append((weight, replace(case, schedule=schedule, counter=counter, _programs={})))
    return found


@dataclass(frozen=True, eq=False)
class RingWork:
    """The pairs of a long ring.

    most: int64 [nodes, ranks of a node], in a flat ring [1, ranks]. Entry (n, r) is the largest
        number of pairs that a rank has with the keys of the group n nodes and r ranks before its
        own.
    columns, column_pairs: largest number of gathered columns of a rank, and of their pairs.
    total_pairs: of each group and part of the heads, with gathered columns.
    """

    most: IntArray
    columns: int
    column_pairs: int
    total_pairs: IntArray
    balance: Imbalance

    @staticmethod
    def of(counter: WorkCounter, index: Index | None) -> RingWork:
        grid, heads = RankGrid.of(counter.schedule), counter.schedule.heads
        most, sums = np.zeros((2, grid.nodes, grid.size), np.int64)
        totals, largest, of_columns = np.zeros((3, heads, counter.groups), np.int64)
        columns = 0
        for part in range(heads):
            rows, number = [], 0
            for kind in counter._kinds:
                assert kind.chunks is not None
                on, positions = counter.lines(index, kind, (part, heads))
                rows.append(CausalRows(kind.chunks, on.sum(0, dtype=np.int64)))
                if positions.size:
                    more, pairs = kind.column_pairs(on, positions)
                    number, of_columns[part] = number + more, of_columns[part] + pairs[:, 0]
            columns = max(columns, number)
            for group in range(counter.groups):
                row = sum((of_kind.row(group) for of_kind in rows[1:]), start=rows[0].row(group))
                seen = grid.seen_from(group, row)
                np.maximum(most, seen, out=most)
                sums += seen
                totals[part, group], largest[part, group] = row.sum(), row.max()
        steps, every = np.count_nonzero(most), totals + of_columns
        by_step, means = (
            np.append(of, more) for of, more in ((most, of_columns.max()), (sums, of_columns.sum()))
        )
        means, live = means / totals.size, by_step > 0
        balance = (
            (by_step[live] / means[live]).mean(),
            (largest * steps / np.maximum(totals, 1)).mean(),
            every.max() / every.mean(),
            by_step.sum() / means.sum(),
        )
        of_all = columns, int(of_columns.max()), every.ravel()
        return RingWork(most, *of_all, Imbalance(*map(float, balance)))

    def spread(self, schedule: Schedule) -> dict[str, StepWork]:
        """Return the work of a shorter ring, the same on all its ranks.

        A phase is the steps of a node, or a step in a flat ring. The first phase is that of the
        long ring. The others, sorted by their work, are divided into as many equal parts as the
        shorter ring has further phases: each has the mean of a part.
        """
        flat, spmd = self.most.shape[0] == 1, SpmdSchedule.of(schedule)
        grid, found = spmd.grid, {}
        first, *others = self.most.T if flat else self.most
        sums = np.cumsum([0 * first, *sorted(others, key=np.sum, reverse=True)], axis=0)
        parts = (grid.size if flat else grid.nodes) - 1
        ends, places = np.linspace(0, len(others), parts + 1), np.arange(len(sums))
        below = np.stack([np.interp(ends, places, column) for column in sums.T], 1)
        means = np.diff(below, axis=0) * parts / len(others)
        every = np.stack([first, *np.rint(means).astype(np.int64)])
        columns, of_columns = np.tile([[self.columns], [self.column_pairs]], grid.workers)
        for direction in (FORWARD, BACKWARD):
            pairs = np.zeros((grid.workers, len(spmd.steps(direction))), np.int64)
            for at, step in enumerate(spmd.steps(direction)):
                if step.queries is not None and step.keys is not None:
                    phase, place = divmod(max(step.queries, *step.keys), every.shape[1])
                    pairs[:, at] = every[-phase, -place]
            none = np.zeros_like(pairs)
            of_ring = columns, of_columns, none, none, self
            found[direction] = StepWork(direction, pairs, none, *of_ring)
        return found


def mixed(parts: Sequence[tuple[Fraction, PassTimes]]) -> PassTimes:
    """Return the weighted sum of the times of rings, for the ranks of the shortest, over steps."""
    (_, first), *_ = parts
    ranks = len(first.end)

    def total(*tables: FloatArray) -> FloatArray:
        weighted = zip((float(weight) for weight, _ in parts), tables, strict=True)
        return np.sum([weight * table[..., :ranks] for weight, table in weighted], axis=0)

    def over_steps(tables: Sequence[FloatArray], apart: int = 0) -> FloatArray:
        return total(*(np.stack([t[:, :apart].sum(1), t[:, apart:].sum(1)]) for t in tables)).T

    every = [times for _, times in parts]
    return PassTimes(
        first.direction,
        first.start,
        total(*(t.end for t in every)),
        {kind: over_steps([t.spent[kind] for t in every], 1) for kind in first.spent},
        over_steps([t.late for t in every]),
        {link: over_steps([t.exposed[link] for t in every]) for link in first.exposed},
        total(*(t.carried for t in every)),
    )
