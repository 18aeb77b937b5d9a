"""Say why workers wait, in sentences with numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, GAP, INDEX, MERGE
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.records.record_sums import BUSY
from mtrain_cli.records.tensor_waits import TensorWaits
from mtrain_cli.records.wait_attribution import OWN, START, WaitAttribution, over

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
    step: step of the schedule in which the cause is costliest; -1 before the first step or outside
        attention.
    """

    text: str
    ms: float
    kind: str
    direction: str
    rank: int | None
    step: int | None


Place = tuple[float, int, int]  # (lost ms, direction, slot) of a cause


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
            each = steps / (ranks * waits.layers)  # ms per rank and layer
            worst = int(each.argmax())
            link = f"the {name} link" if name else "the link"
            text = f"{direction}: {_ms(each.sum())} of exposed communication per layer on {link}"
            step = f"in step {worst - 1}" if worst else "before the first step"
            several = np.count_nonzero(each) > 1
            text += f", most {step} ({_ms(each[worst])})" if several else f", {step}"
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
    each = float(tensor.exposed.mean())
    text = f"tensor groups: {_ms(each)} of exposed messages per iteration and rank"
    return [*causes, WaitCause(text, float(tensor.exposed.sum()), "link", "", None, -1)]


def _ranks(waits: WaitAttribution) -> list[WaitCause]:
    """Return the causes for which a rank is responsible: more work, a slow device, a late start.

    More work is a separate cause in each direction.
    """
    shape = waits.shape
    merged: dict[tuple[int, str, int], list[Place]] = {}
    for d, charge in enumerate(waits.charges):
        lost = charge.lost.reshape(-1, shape.slots) / waits.iterations
        lost[~shape.present.reshape(-1)] = 0  # The work of a rank without rows is unknown.
        for rank, slot in zip(*(axis.tolist() for axis in np.nonzero(lost)), strict=True):
            kind = _kind(waits, d, rank, slot)
            places = merged.setdefault((rank, kind, d if kind == "work" else -1), [])
            places.append((float(lost[rank, slot]), d, slot))
    charged = sorted(merged.items(), key=lambda item: -sum(ms for ms, _, _ in item[1]))
    return [
        _cause(waits, rank, kind, sorted(places, reverse=True))
        for (rank, kind, _), places in charged[: 2 * MOST_LINES]
    ]


def _kind(waits: WaitAttribution, d: int, rank: int, slot: int) -> str:
    """Return why a rank's slot delays other ranks.

    - work: the rank has more work
    - slow: the rank takes longer than its work explains
    - `START`: the rank starts late
    - the name of a phase: this phase took longer than on other ranks
    - `UNKNOWN`: no phase took longer
    """
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
        longer, more = (_against(waits, name, d, rank) for name in ("attention", "pairs"))
    elif phase in (ATTENTION, COLUMNS):
        longer, more = (charge.over(name, at) for name in (ATTENTION, "pairs"))
    else:
        return phase
    return "slow" if longer > SLOWER * more else "work"


def _cause(waits: WaitAttribution, rank: int, kind: str, places: list[Place]) -> WaitCause:
    """Return a cause with its sentence.

    places: (lost ms, direction, slot) of each slot of the rank that costs other ranks time, the
        costliest first.
    """
    ms, (_, d, slot) = sum(p[0] for p in places), places[0]
    slots, names = waits.shape.slots, waits.shape.directions
    victim, step, each = waits.victim(d, rank, slot)
    notes = []
    if kind == "work":
        why = _more_work(waits, rank, places, step)
    elif kind == "slow":
        why = _slow(waits, d, rank, slot)
        notes.append("slow or disturbed device")
    elif kind == UNKNOWN:
        why = "which takes no longer than the others in any phase: a disturbed host or link"
    else:
        at = (*divmod(rank, waits.shape.workers), slot)
        longer = float(waits.charges[d].own[(OWN.index(kind), *at)] / waits.charges[d].lost[at])
        # The delay is a mean over the samples with a wait. The wait is a mean over all samples.
        often = "at times " if longer > 2 * each else ""
        why = f"which {often}{_DELAYS[kind].format(_ms(longer))}"
    steps = len({(direction, s) for _, direction, s in places})
    if steps > 1 and kind != "work":
        directions = (names[i] for i in sorted({direction for _, direction, _ in places}))
        notes.append(f"{' and '.join(directions)}, {steps} steps")
    note = f" ({'; '.join(notes)})" if notes else ""
    when = f" step {step - 1}" if step else " before the first step"
    when = ", at the end" if step == slots else when
    name, other = (int(waits.shape.ranks_by_place[place]) for place in (rank, victim))
    text = f"{names[d]}{when}: rank {other} waits {_ms(each)} for rank {name}, {why}{note}"
    if ms > 1.5 * each:
        share = ms * waits.iterations / waits.passes
        text += f"; {_ms(ms)} per iteration over all ranks, {share:.1%} of their time"
    return WaitCause(text, ms, kind, names[d], name, slot - 1)


def _more_work(waits: WaitAttribution, rank: int, places: list[Place], step: int) -> str:
    """Say how much more work a rank has than other ranks."""
    ms, (most, d, slot) = sum(p[0] for p in places), places[0]
    charge, at = waits.charges[d], (*divmod(rank, waits.shape.workers), slot)
    own = charge.own[(slice(None), *at)] / charge.lost[at]
    computed = own[BUSY.index(ATTENTION)] + own[BUSY.index(COLUMNS)]
    if most < 0.6 * ms or computed < 0.6 * _longer(waits, d, rank):
        more = _against(waits, "pairs", d, rank)
        if more < MORE:
            return (
                "which has the most work in several steps, "
                f"with {more:.2f}x the pairs of the others in total"
            )
        unit, where = "pairs", " over all its steps"
    else:
        more, unit = charge.over("pairs", at), "pairs"
        if slot and charge.work["blocks"][at] > 0 and charge.over("blocks", at) > 1:
            more, unit = charge.over("blocks", at), "blocks"
        where = f" in step {slot - 1}" if slot else " outside the steps"
        where = "" if slot == step else where
    if np.isinf(more):
        return f"which has all the {unit} of step {slot - 1}"
    if more < MORE:
        longer = charge.over(ATTENTION, at)
        return f"which takes {longer:.2f}x as long as the others{where}, for {more:.2f}x the {unit}"
    return f"which has {more:.1f}x the {unit} of the others{where}"


def _slow(waits: WaitAttribution, d: int, rank: int, slot: int) -> str:
    charge, at = waits.charges[d], (*divmod(rank, waits.shape.workers), slot)
    longer, more = charge.over(ATTENTION, at), charge.over("pairs", at)
    if slot == 0 and not charge.work[ATTENTION][at]:
        longer, more = (_against(waits, name, d, rank) for name in ("attention", "pairs"))
    work = "the same work" if 1 / MORE < more < MORE else f"{more:.1f}x the work"
    return f"a straggler: {longer:.1f}x the time of the others for {work}"


def _longer(waits: WaitAttribution, d: int, rank: int) -> float:
    group, worker = divmod(rank, waits.shape.workers)
    computed = waits.attention[d, group] / (waits.iterations * waits.layers)
    others = max(1, int((computed > 0).sum()) - 1)
    return float(computed[worker] - (computed.sum() - computed[worker]) / others)


def _against(waits: WaitAttribution, name: str, d: int, rank: int) -> float:
    """Return a rank's total divided by the mean total of the other ranks."""
    group, worker = divmod(rank, waits.shape.workers)
    values = getattr(waits, name)[d, group]
    mine = float(values[worker])
    others = max(1, int((values > 0).sum()) - 1)
    return over(mine * others, float(values.sum()) - mine)


def _ms(value: float) -> str:
    if value < 10:
        return f"{value:.2f} ms"
    return f"{value:.0f} ms" if value < 1e4 else f"{value / 1e3:.0f} s"
