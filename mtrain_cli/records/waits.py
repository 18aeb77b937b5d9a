"""Attribute waits to the ranks, steps and links that cause them, and say why workers wait.

Delays propagate: in a ring, a rank waits for its neighbor, and the neighbor may have waited for
another rank one step before. This module traces each wait back to its origin: the rank and step
that caused the wait with their own work. The wait counts as time that other ranks lose because of
this origin. A slot is a step of a pass, or the time before all steps (`RecordedShape.slots`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, GAP, INDEX, MERGE
from mtrain_cli.parallel.schedule import HEADS, INNER, OUTER
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.records.record_sums import (
    BUSY,
    EXPOSED,
    LATE,
    SPENT,
    Iteration,
    RecordedShape,
    TensorWaits,
)

# Most cells of a table [samples, workers, steps, steps]. If an iteration has more, only some of its
# samples are used.
MOST_CELLS = 1 << 28
START = "start"  # a rank starts the pass later than the others
OWN = (*BUSY, START)
# A rank is a straggler if (its time / time of the others) is more than this many times (its work /
# work of the others). Otherwise it takes longer because it has more work.
SLOWER = 1.25
MORE = 1.1  # up to this ratio of their work, ranks have "the same work"
WORTH = 0.005  # a cause is listed if it costs at least this share of the time of all passes
MOST_LINES = 5
UNKNOWN = "unknown"  # the rank takes no longer than the others in any phase
_DELAYS = {
    START: "starts its attention {} later than the others",
    INDEX: "takes {} longer than the others to estimate the index",
    MERGE: "takes {} longer than the others to merge the results of its steps",
    ARRANGE: "takes {} longer than the others to arrange the gathered keys",
    GAP: "idles {} longer than the others between kernels: launch overhead on a busy or disturbed "
    "host",
}


@dataclass(frozen=True)
class WaitCause:
    """One cause of lost time.

    text: sentence that explains the cause to a user.
    ms: time that all ranks together lose per iteration, in milliseconds.
    kind: ``work`` (the rank has more work), ``slow`` (a straggler), ``start`` (a late start),
        ``link`` (exposed communication), ``tensor`` (a message of a tensor group that a rank starts
        late), ``unknown`` (no phase takes longer on this rank than on other ranks), or the name of
        the phase that takes longer.
    direction: pass in which the cause is costliest; empty for tensor groups.
    rank: the rank for which other ranks wait; None for a link.
    step: step in which the cause is costliest; -1 before the first step or outside attention.
    """

    text: str
    ms: float
    kind: str
    direction: str
    rank: int | None
    step: int | None


@dataclass
class LostTime:
    """Time in ms that other ranks lose because of each rank and slot, in one direction.

    Arrays are [groups, workers, slots]. All but ``lost`` are sums over waits, weighted by the lost
    time of each wait: divided by ``lost``, they are means.

    lost: time that the other ranks wait.
    own: time of the rank minus the mean time of the other ranks, by category, [OWN, ...].
    time, pairs: attention time and pairs of the rank, and their means over the others, [2, ...].
    """

    lost: np.ndarray
    own: np.ndarray
    time: np.ndarray
    pairs: np.ndarray

    @staticmethod
    def none(shape: tuple[int, ...]) -> LostTime:
        sizes = (), (len(OWN),), (2,), (2,)
        return LostTime(*(np.zeros((*size, *shape)) for size in sizes))


@dataclass(frozen=True)
class _Times:
    """Times of one direction of an iteration in one context group, in ms.

    Arrays are [samples, workers, slots] unless stated otherwise.

    kept: indices of the samples that are used, [samples].
    weight: number of samples of the iteration that each kept sample represents.
    own, busy: busy time by category, [BUSY, samples, workers, slots], and its sum.
    late: late part of the waits. An extra last slot holds the wait for the last rank at the end of
        the pass.
    exposed: exposed part of the waits.
    begin, offset: start of the pass, and the same minus the mean of the other ranks,
        [samples, workers].
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
        """Return the times of direction ``d``. present: whether a rank has rows, [workers]."""
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
            np.concatenate([iteration.behind[d, kept, group], behind_last[..., None]], -1),
        )


class WaitAttribution:
    """Collects the waits of a case and attributes them to ranks, steps and links. Times are in ms.

    uncertainty: largest difference between the clocks of two ranks.
    ends_together: whether all ranks wait for the last rank at the end of a pass. In training, a
        rank continues and waits in the next pass instead.
    layers: number of samples of an iteration: layers times micro-batches.
    passes: time of all passes of all ranks, including the waits at the end of a pass.
    charges: lost time by direction. victims: the same by pair of waiting rank and rank that it
        waits for, as (codes, times), which `victim` decodes.
    link: `Iteration.link`, as a sum over iterations.
    pairs, attention: computed pairs and time of attention, [directions, groups, workers].
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
        s, charge = self.shape, self.charges[d]
        times = _Times.of(iteration, d, group, s.present[group])
        late, behind = times.late, times.behind
        others = max(1, int(s.present[group].sum()) - 1)
        attention = times.own[BUSY.index(ATTENTION)] + times.own[BUSY.index(COLUMNS)]
        pairs = iteration.pairs[d, times.kept, group]
        tables = np.stack([*times.own, attention, pairs])  # [BUSY + 2, samples, workers, slots]
        sums = tables.sum(2)
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
            # Charge the waits, but not waits for links and delays that came back to their rank.
            worker, slot = np.divmod(came, s.slots)
            counts = (worker != victim) & (came >= 0)
            at, victim, worker, slot = (v[counts] for v in (at, victim, worker, slot))
            lost = late[at, victim, t] * times.weight
            own = tables[:, at, worker, slot]
            of_others = (sums[:, at, slot] - own) / others
            offset = np.where(slot == 0, times.offset[at, worker], 0)
            more = *(own - of_others)[: len(BUSY)], offset
            both = own[-2], of_others[-2], own[-1], of_others[-1]
            totals = charge.lost, *charge.own, *charge.time, *charge.pairs
            for total, values in zip(totals, (1.0, *more, *both), strict=True):
                np.add.at(total, (group, worker, slot), lost * values)
            rank = group * s.workers
            codes = ((rank + worker) * s.slots + slot) * s.ranks + rank + victim
            self.victims[d].append(_summed((codes * (s.slots + 1) + t).astype(np.int64), lost))
        if len(self.victims[d]) > 64:
            self._join_victims(d)

    def _peers(
        self, behind: np.ndarray, late: np.ndarray, victim: np.ndarray, group: int
    ) -> np.ndarray:
        """Return the worker that directly causes each wait.

        In a collective, this is the worker that arrived last and therefore waited least.
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
            The waiting rank, the slot of the wait (`RecordedShape.slots` at the end of the pass),
            and the duration of the wait in ms per layer.
        """
        codes, ms = self._join_victims(d)
        s = self.shape
        rest, at = np.divmod(codes, s.slots + 1)
        rest, victim = np.divmod(rest, s.ranks)
        best = int(np.where(rest == rank * s.slots + slot, ms, -1).argmax())
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


# --- causes, in sentences -----


def causes_of(waits: WaitAttribution, tensor: TensorWaits | None = None) -> list[WaitCause]:
    """Return at most `MOST_LINES` causes of waits, the costliest first.

    tensor: waits for messages of tensor groups per iteration; None without such messages.
    """
    if not waits.iterations or not waits.passes:
        return []
    causes = [*_links(waits), *_ranks(waits)]
    if tensor is not None:
        causes += _in_tensor_groups(tensor, waits.shape.tensor)
    worth = [cause for cause in causes if cause.ms > WORTH * waits.passes / waits.iterations]
    return sorted(worth, key=lambda cause: -cause.ms)[:MOST_LINES]


def _links(waits: WaitAttribution) -> list[WaitCause]:
    causes = []
    ranks = int(waits.shape.present.sum())
    for d, direction in enumerate(waits.shape.directions):
        for name, exposed in zip(LINKS, waits.link[d], strict=True):
            steps = exposed.sum((0, 1)) / waits.iterations
            if not steps.sum():
                continue
            by_step = steps / (ranks * waits.layers)  # ms per rank and layer
            worst = int(by_step.argmax())
            step = f"in step {worst - 1}" if worst else "before the first step"
            text = (
                f"{direction}: {_ms(by_step.sum())} of exposed communication per layer on the "
                f"{name} link".replace("  ", " ")
                + f", most {step} ({_ms(by_step[worst])})"
            )
            causes.append(WaitCause(text, float(steps.sum()), "link", direction, None, worst - 1))
    return causes


def _in_tensor_groups(tensor: TensorWaits, degree: int) -> list[WaitCause]:
    causes = []
    for rank, lost in enumerate(tensor.late.sum(0).tolist()):
        first = rank // degree * degree
        victim = int(tensor.late[:, rank].argmax())
        text = (
            f"tensor group of ranks {first} to {first + degree - 1}: rank {victim} waits "
            f"{_ms(float(tensor.late[victim, rank]))} per iteration for rank {rank}, which starts "
            "its messages later"
        )
        causes.append(WaitCause(text, lost, "tensor", "", rank, -1))
    mean = _ms(float(tensor.exposed.mean()))
    text = f"tensor groups: {mean} of exposed messages per iteration and rank"
    return [*causes, WaitCause(text, float(tensor.exposed.sum()), "link", "", None, -1)]


Place = tuple[float, int, int]  # (lost ms, direction, slot) of a cause


def _ranks(waits: WaitAttribution) -> list[WaitCause]:
    """Return the causes for which a rank is responsible: more work, a slow device, a late start.

    More work is a separate cause in each direction.
    """
    shape = waits.shape
    merged: dict[tuple[int, str, int], list[Place]] = {}
    for d, charge in enumerate(waits.charges):
        lost = charge.lost.reshape(-1, shape.slots) / waits.iterations
        lost[~shape.present.reshape(-1)] = 0  # The work of a rank without rows is unknown.
        for rank, slot in np.argwhere(lost).tolist():
            kind = _kind(waits, d, rank, slot)
            places = merged.setdefault((rank, kind, d if kind == "work" else -1), [])
            places.append((float(lost[rank, slot]), d, slot))
    charged = sorted(merged.items(), key=lambda item: -sum(ms for ms, _, _ in item[1]))
    return [
        _cause(waits, rank, kind, sorted(places, reverse=True))
        for (rank, kind, _), places in charged[: 2 * MOST_LINES]
    ]


def _kind(waits: WaitAttribution, d: int, rank: int, slot: int) -> str:
    """Return `WaitCause.kind` of a rank's slot that delays other ranks."""
    charge, at = waits.charges[d], (*divmod(rank, waits.shape.workers), slot)
    own = charge.own[(slice(None), *at)]
    if own.max() <= 0:
        return UNKNOWN
    phase = OWN[int(own.argmax())]
    if phase == START:
        # The rank starts late. If its attention took longer by more than half of that delay, the
        # longer attention of the pass before is the cause.
        before = _longer(waits, d, rank) > 0.5 * own[-1] / charge.lost[at]
        if waits.ends_together or not before:
            return phase
        longer, more = _in_total(waits, d, rank)
    elif phase in (ATTENTION, COLUMNS):
        longer, more = _in_slot(charge, at)
    else:
        return phase
    return "slow" if longer > SLOWER * more else "work"


def _cause(waits: WaitAttribution, rank: int, kind: str, places: list[Place]) -> WaitCause:
    """Return a cause with its sentence. places: those of the rank, the costliest first."""
    ms, (_, d, slot) = sum(p[0] for p in places), places[0]
    slots, names, charge = waits.shape.slots, waits.shape.directions, waits.charges[d]
    at = (*divmod(rank, waits.shape.workers), slot)
    victim, step, wait = waits.victim(d, rank, slot)
    notes = []
    if kind == "work":
        why = _more_work(waits, rank, places, step)
    elif kind == "slow":
        longer, more = _in_slot(charge, at)
        if slot == 0 and not charge.time[(0, *at)]:
            longer, more = _in_total(waits, d, rank)
        work = "the same work" if 1 / MORE < more < MORE else f"{more:.1f}x the work"
        why = f"a straggler: {longer:.1f}x the time of the others for {work}"
        notes.append("slow or disturbed device")
    elif kind == UNKNOWN:
        why = "which takes no longer than the others in any phase: a disturbed host or link"
    else:
        longer = float(charge.own[(OWN.index(kind), *at)] / charge.lost[at])
        # The delay is a mean over the samples with a wait. The wait is a mean over all samples.
        often = "at times " if longer > 2 * wait else ""
        why = f"which {often}{_DELAYS[kind].format(_ms(longer))}"
    if len(places) > 1 and kind != "work":
        directions = (names[i] for i in sorted({direction for _, direction, _ in places}))
        notes.append(f"{' and '.join(directions)}, {len(places)} steps")
    note = f" ({'; '.join(notes)})" if notes else ""
    when = f" step {step - 1}" if step else " before the first step"
    when = ", at the end" if step == slots else when
    name, other = (int(waits.shape.ranks_by_place[place]) for place in (rank, victim))
    text = f"{names[d]}{when}: rank {other} waits {_ms(wait)} for rank {name}, {why}{note}"
    if ms > 1.5 * wait:
        share = ms * waits.iterations / waits.passes
        text += f"; {_ms(ms)} per iteration over all ranks, {share:.1%} of their time"
    return WaitCause(text, ms, kind, names[d], name, slot - 1)


def _more_work(waits: WaitAttribution, rank: int, places: list[Place], step: int) -> str:
    """Say how much more work a rank has than other ranks."""
    ms, (most, d, slot) = sum(p[0] for p in places), places[0]
    charge, at = waits.charges[d], (*divmod(rank, waits.shape.workers), slot)
    own = charge.own[(slice(None), *at)] / charge.lost[at]
    computed = own[BUSY.index(ATTENTION)] + own[BUSY.index(COLUMNS)]
    where = f" in step {slot - 1}" if slot else " outside the steps"
    where *= slot != step
    longer, more = _in_slot(charge, at)
    if most < 0.6 * ms or computed < 0.6 * _longer(waits, d, rank):
        where = " over all its steps"
        longer, more = _in_total(waits, d, rank)
    if more < MORE:
        return f"which takes {longer:.2f}x as long as the others{where}, for {more:.2f}x the pairs"
    if np.isinf(more):
        return f"which has all the pairs of step {slot - 1}"
    return f"which has {more:.1f}x the pairs of the others{where}"


def _longer(waits: WaitAttribution, d: int, rank: int) -> float:
    """Return the ms per layer by which a rank's attention takes longer than that of the others."""
    group, worker = divmod(rank, waits.shape.workers)
    computed = waits.attention[d, group] / (waits.iterations * waits.layers)
    others = max(1, int((computed > 0).sum()) - 1)
    return float(computed[worker] - (computed.sum() - computed[worker]) / others)


def _in_slot(charge: LostTime, at: tuple[int, ...]) -> tuple[float, float]:
    """Return the rank's attention time and pairs, each divided by the mean of the other ranks."""
    group, worker, slot = at
    time, pairs = (table[:, group, worker, slot] for table in (charge.time, charge.pairs))
    return _over(time[0], time[1]), _over(pairs[0], pairs[1])


def _in_total(waits: WaitAttribution, d: int, rank: int) -> tuple[float, float]:
    """Return as `_in_slot`, over all slots."""
    group, worker = divmod(rank, waits.shape.workers)

    def against(values: np.ndarray) -> float:
        others = max(1, int((values > 0).sum()) - 1)
        return _over(values[worker] * others, values.sum() - values[worker])

    return against(waits.attention[d, group]), against(waits.pairs[d, group])


def _over(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("inf") if part > 0 else 1.0


def _ms(value: float) -> str:
    if value < 10:
        return f"{value:.2f} ms"
    return f"{value:.0f} ms" if value < 1e4 else f"{value / 1e3:.0f} s"
