"""Attribute waits to the ranks, steps and links that cause them.

Delays propagate: in a ring, a rank waits for its neighbor, and the neighbor may have waited for
another rank one step before. This module traces each wait back to its origin: the rank and step
that caused the wait with their own work. The wait counts as time that other ranks lose because of
this origin.

A slot is a step of a pass, or the time before all steps (`RecordedShape.slots`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.parallel.recording import ATTENTION, COLUMNS
from mtrain_cli.parallel.schedule import HEADS, INNER, OUTER
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.records.record_sums import BUSY, EXPOSED, LATE, SPENT, Iteration, RecordedShape

# Most cells of a table [samples, workers, steps, steps]. If an iteration has more, only some of its
# samples are used.
MOST_CELLS = 1 << 28
START = "start"  # a rank starts the pass later than the others
OWN = (*BUSY, START)
_WORK = (ATTENTION, "pairs", "blocks")


@dataclass
class LostTime:
    """Time that other ranks lose because of each rank and slot, in one direction.

    Arrays are [groups, workers, slots]. All arrays except ``lost`` are sums over waits, weighted by
    the lost time of each wait. Divide such a sum by ``lost`` to get a mean. Times are in ms.

    lost: time that the other ranks wait.
    own: time of the rank minus the mean time of the other ranks, by category,
        [OWN, groups, workers, slots].
    work: attention time, number of pairs and number of blocks of the rank, by name.
    of_others: the same quantities, averaged over the other ranks.
    """

    lost: np.ndarray
    own: np.ndarray
    work: dict[str, np.ndarray]
    of_others: dict[str, np.ndarray]

    @staticmethod
    def none(shape: tuple[int, ...]) -> LostTime:
        work, of_others = ({name: np.zeros(shape) for name in _WORK} for _ in range(2))
        return LostTime(np.zeros(shape), np.zeros((len(OWN), *shape)), work, of_others)

    def over(self, name: str, at: tuple[int, ...]) -> float:
        """Return the rank's work divided by the mean work of the other ranks.

        name: `ATTENTION`, `pairs` or `blocks`.
        """
        return over(self.work[name][at], self.of_others[name][at])


@dataclass(frozen=True)
class _Times:
    """Times of one direction of an iteration in one context group, in ms.

    Arrays are [samples, workers, slots] unless stated otherwise.

    kept: indices of the samples that are used, [samples].
    weight: number of samples of the iteration that each kept sample represents.
    own: busy time by category, [BUSY, samples, workers, slots].
    busy: busy time of each slot.
    late: late part of the waits. An extra last slot holds the wait for the last rank at the end of
        the pass.
    exposed: exposed part of the waits.
    begin: start of the pass, [samples, workers].
    offset: start of the pass minus the mean start of the other ranks, [samples, workers].
    excess: busy time minus the mean busy time of the other ranks. Slot 0 includes ``offset``.
    starts: start of each slot. An extra last slot holds the end of the pass.
    middle: midpoint of the busy time of each slot.
    behind: code for peer and link of each slot's wait (`Iteration.behind`). In an extra last slot,
        the peer is the rank that ends the pass last.
    """

    kept: np.ndarray
    weight: float
    own: np.ndarray
    busy: np.ndarray
    late: np.ndarray
    exposed: np.ndarray
    begin: np.ndarray
    offset: np.ndarray
    excess: np.ndarray
    starts: np.ndarray
    middle: np.ndarray
    behind: np.ndarray

    @staticmethod
    def of(iteration: Iteration, d: int, group: int, present: np.ndarray) -> _Times:
        """Return the times of direction ``d`` in one context group.

        present: whether a rank has rows, [workers].
        """
        _, _, samples, _, workers, slots = iteration.spent.shape
        most = max(1, min(samples, MOST_CELLS // (workers * slots**2)))
        kept = np.unique(np.linspace(0, samples - 1, most).astype(int))
        # [SPENT, samples, workers, slots]
        spent = iteration.spent[:, d, kept, group].astype(np.float64)
        late, exposed = spent[SPENT.index(LATE)], spent[SPENT.index(EXPOSED)]
        own = spent[: len(BUSY)]
        busy = own.sum(0)
        begin = iteration.start[d, kept, group]
        known = ~np.isnan(begin)
        number = np.maximum(known.sum(1, keepdims=True), 1)
        begin = np.where(known, begin, np.where(known, begin, 0).sum(1, keepdims=True) / number)
        others = max(1, int(present.sum()) - 1)
        of_others = (busy[..., present, :].sum(-2, keepdims=True) - busy) / others
        offset = begin - (begin[:, present].sum(1, keepdims=True) - begin) / others
        excess = busy - of_others
        excess[..., 0] += offset
        took = busy + late + exposed
        starts = begin[..., None] + np.cumsum(took, -1) - took
        ends = starts[..., -1] + took[..., -1]
        tail = np.where(present, ends[:, present].max(1, keepdims=True) - ends, 0)
        last = np.where(present, ends, -np.inf).argmax(1)
        behind_last = np.repeat((last + 1)[:, None] * len(LINKS) * 2, workers, 1)
        behind = iteration.behind[d, kept, group]
        return _Times(
            kept,
            samples / len(kept),
            own,
            busy,
            np.concatenate([late, tail[..., None]], -1),
            exposed,
            begin,
            offset,
            excess,
            np.concatenate([starts, ends[..., None]], -1),
            starts + late + exposed + busy / 2,
            np.concatenate([behind, behind_last[..., None]], -1),
        )


class WaitAttribution:
    """Collects the waits of a case and attributes them to ranks, steps and links. Times are in ms.

    uncertainty: largest difference between the clocks of two ranks.
    ends_together: whether all ranks wait for the last rank at the end of a pass. In training, a
        rank continues and waits in the next pass instead.
    layers: number of samples of an iteration: layers times micro-batches.
    passes: time of all passes of all ranks, including the waits at the end of a pass.
    charges: lost time by direction.
    victims: lost time for each pair of a waiting rank and the rank it waits for, by direction, as
        (codes, times). `victim` decodes the codes.
    link: time of exposed communication by link class (`Iteration.link`), as a sum over iterations.
    pairs: number of computed query-key pairs, [directions, groups, workers].
    attention: time of attention, [directions, groups, workers].
    """

    def __init__(
        self, shape: RecordedShape, uncertainty: float, ends_together: bool = True
    ) -> None:
        self.shape = s = shape
        self.uncertainty, self.ends_together = uncertainty, ends_together
        self.iterations, self.layers, self.passes = 0, 0, 0.0
        self.charges = [LostTime.none((s.groups, s.workers, s.slots)) for _ in s.directions]
        self.victims: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in s.directions]
        self.link = np.zeros((len(s.directions), len(LINKS), s.groups, s.workers, s.slots))
        self.pairs, self.attention = np.zeros((2, len(s.directions), s.groups, s.workers))

    def add(self, iteration: Iteration) -> None:
        self.iterations += 1
        self.layers = iteration.spent.shape[2]
        self.pairs += iteration.pairs.sum((1, 4))
        computed = iteration.spent[[SPENT.index(ATTENTION), SPENT.index(COLUMNS)]]
        self.attention += computed.sum((0, 2, 5), dtype=np.float64)
        self.passes += float(np.nansum(iteration.length))
        self.link += iteration.link
        if self.shape.workers == 1:
            return
        for d in range(len(self.shape.directions)):
            for group in np.flatnonzero(self.shape.present.sum(1) > 1):
                self._add(iteration, d, int(group))

    def _add(self, iteration: Iteration, d: int, group: int) -> None:
        s = self.shape
        times = _Times.of(iteration, d, group, s.present[group])
        late, behind = times.late, times.behind
        self.passes += times.weight * float(late[..., -1].sum()) if self.ends_together else 0.0
        length = float(np.nan_to_num(iteration.length[d, :, group]).mean())
        threshold = max(self.uncertainty, 1e-3, 1e-3 * length)
        # Origin of each wait: worker * slots + slot, or -1 if a link was slow.
        origin = np.full(late.shape, -1, np.int32)
        last = np.full(late.shape[:2], -1)  # slot of the last wait
        for t in range(s.slots + self.ends_together):
            at, victim = np.nonzero((late[..., t] > threshold) & (behind[..., t] >= 0))
            if not len(at):
                continue
            peer = self._peers(behind[at, victim, t], late[at, :, t], victim, group)
            came = peer * s.slots
            if t:
                came = _origins(times, t, at, victim, peer, origin, last, came)
            origin[at, victim, t] = came
            last[at, victim] = t
            self._charge(iteration, times, d, group, t, at, victim, came)
        if len(self.victims[d]) > 64:
            self._join_victims(d)

    def _charge(
        self,
        iteration: Iteration,
        times: _Times,
        d: int,
        group: int,
        t: int,
        at: np.ndarray,
        victim: np.ndarray,
        came: np.ndarray,
    ) -> None:
        """Charge the waits of slot ``t`` to their origins: add lost time and work.

        Args:
            at: sample of each wait.
            victim: waiting worker of each wait.
            came: origin of each wait, as `_origins` returns it.
        """
        s, charge = self.shape, self.charges[d]
        worker, slot = np.divmod(came, s.slots)
        # Skip waits for links, and delays that came back to the rank that caused them.
        counts = (worker != victim) & (came >= 0)
        lost = times.late[at, victim, t] * times.weight
        at, victim, worker, slot, lost = (v[counts] for v in (at, victim, worker, slot, lost))
        where = (group, worker, slot)
        others = max(1, int(s.present[group].sum()) - 1)
        np.add.at(charge.lost, where, lost)
        own = times.own
        tables = {
            ATTENTION: own[BUSY.index(ATTENTION)] + own[BUSY.index(COLUMNS)],
            "pairs": iteration.pairs[d, times.kept, group].astype(np.float64),
            "blocks": iteration.blocks[d, times.kept, group].astype(np.float64),
        }

        for name, table in tables.items():
            mine = table[at, worker, slot]
            of_others = table[at, :, slot].sum(1) - mine
            np.add.at(charge.work[name], where, lost * mine)
            np.add.at(charge.of_others[name], where, lost * of_others / others)
        for total, table in zip(charge.own[: len(BUSY)], own, strict=True):
            mine = table[at, worker, slot]
            of_others = table[at, :, slot].sum(1) - mine
            np.add.at(total, where, lost * (mine - of_others / others))
        np.add.at(charge.own[-1], where, lost * np.where(slot == 0, times.offset[at, worker], 0))
        rank = group * s.workers
        codes = ((rank + worker) * s.slots + slot) * s.ranks + rank + victim
        self.victims[d].append(_summed((codes * (s.slots + 1) + t).astype(np.int64), lost))

    def _peers(
        self, behind: np.ndarray, late: np.ndarray, victim: np.ndarray, group: int
    ) -> np.ndarray:
        """Return the peer of each wait: the worker that directly causes the wait.

        In a collective, the peer is the worker that arrived last and therefore waited least.
        """
        s = self.shape
        code, link = np.divmod(behind >> 1, len(LINKS))
        peer = code - 1
        workers = np.arange(s.workers)
        per_node, heads = int(s.facts.get("per_node") or s.workers), int(s.facts.get("heads") or 1)
        node, place = workers // per_node, workers % per_node
        apart = np.zeros((len(behind), s.workers), bool)
        for name, key in ((INNER, node), (OUTER, place), (HEADS, workers // heads)):
            of_link = link == LINKS.index(name)
            apart[of_link] = key[None] != key[victim[of_link]][:, None]
        apart |= ~s.present[group][None]
        slowest = np.where(apart, np.inf, late).argmin(1)
        return np.where(peer >= 0, peer % s.workers, slowest)

    def victim(self, d: int, rank: int, slot: int) -> tuple[int, int, float]:
        """Find the rank that waits longest because of ``rank``'s work in ``slot``.

        Returns:
            The waiting rank, the slot of the wait, and the duration of the wait in ms per layer.
            For a wait at the end of the pass, the slot is `RecordedShape.slots`.
        """
        codes, ms = self._join_victims(d)
        s = self.shape
        rest, at = np.divmod(codes, s.slots + 1)
        rest, victim = np.divmod(rest, s.ranks)
        mine = rest == rank * s.slots + slot
        best = int(np.where(mine, ms, -1).argmax())
        return int(victim[best]), int(at[best]), float(ms[best] / (self.iterations * self.layers))

    def _join_victims(self, d: int) -> tuple[np.ndarray, np.ndarray]:
        joined = _summed(*(np.concatenate(v) for v in zip(*self.victims[d], strict=True)))
        self.victims[d] = [joined]
        return joined


def _origins(
    times: _Times,
    t: int,
    at: np.ndarray,
    victim: np.ndarray,
    peer: np.ndarray,
    origin: np.ndarray,
    last: np.ndarray,
    first: np.ndarray,
) -> np.ndarray:
    """Return the origin of each wait in slot t: worker * slots + slot, or -1 for a link.

    A worker, the victim, waits for another worker, its peer. If recent waits of the peer explain at
    least half of the lost time, the wait has the same origin as the peer's longest recent wait.
    Otherwise the largest of three explanations counts: the peer waited, the peer computed for
    longer, or a link was slow.

    Args:
        at, victim, peer: sample, waiting worker and peer of each wait.
        origin: origins of the waits in earlier slots, [samples, workers, slots].
        last: the latest slot in which each worker waited, [samples, workers].
        first: peer * slots for each wait, which is the origin that stands for the peer's slot 0.
    """
    busy, begin, exposed = times.busy, times.begin, times.exposed
    lost = times.late[at, victim, t]
    # A peer that sends gradients computes its step before it sends.
    after = (times.behind[at, victim, t] & 1).astype(bool)
    computing = np.where(after, busy[at, victim, min(t, busy.shape[2] - 1)], 0)
    end = times.starts[at, victim, t] + lost + computing
    # Delays before the victim's last wait are mostly part of that wait.
    window = np.arange(t) >= np.maximum(last[at, victim] - 1, 0)[:, None]
    did = times.middle[at, peer, :t] < end[:, None]  # slots that the peer computed before it sent
    waited, excess = times.late[at, peer, :t], times.excess[at, peer, :t]
    # Differences, peer minus victim: of waits, of computation and start, of exposed communication.
    more_waits = waited.sum(1) - times.late[at, victim, :t].sum(1)
    computed = (np.where(did, busy[at, peer, :t], 0) - busy[at, victim, :t]).sum(1)
    longer = computed + begin[at, peer] - begin[at, victim]
    moved = exposed[at, peer, :t].sum(1) - exposed[at, victim, :t].sum(1)
    recent = np.where(window, waited, 0)
    own = np.where(window & did, excess, -np.inf)
    inherited = recent.sum(1) >= lost / 2
    by_itself = np.maximum(own, 0).sum(1) >= lost / 2
    longest = np.where(inherited, recent.argmax(1), waited.argmax(1))
    most = np.where(by_itself, own.argmax(1), np.where(did, excess, -np.inf).argmax(1))
    from_before, from_own = origin[at, peer, longest], first + most
    explanation = np.stack([more_waits, longer, moved]).argmax(0)
    result = np.choose(explanation, [from_before, from_own, np.full_like(from_own, -1)])
    return np.where(inherited, from_before, result)


def _summed(codes: np.ndarray, ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    unique, inverse = np.unique(codes, return_inverse=True)
    return unique, np.bincount(inverse, ms, minlength=len(unique))


def over(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("inf") if part > 0 else 1.0
