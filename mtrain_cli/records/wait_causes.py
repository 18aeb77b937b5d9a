"""Why workers wait: the origins of late messages, as sentences with numbers.

A delay propagates: in a ring, a rank waits for its neighbour, which may itself have waited one step
before. So each wait is traced back to the rank whose own work kept the others waiting, and charged
to that rank and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, GAP, INDEX, MERGE
from mtrain_cli.parallel.schedule import HEADS, INNER, OUTER
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.records.record_sums import BUSY, EXPOSED, LATE, SPENT, Iteration, RecordedShape

SLOWER = 1.25  # time over what the work explains: a straggler beyond it, below it has more work
MORE = 1.1  # work over that of the others: the same work below it
WORTH = 0.005  # share of the time of all passes: cheaper causes are not listed
MOST_LINES = 5
MOST_CELLS = (
    1 << 28
)  # (sample, worker, step, step) cells per iteration; beyond, samples are thinned
START = "start"  # starts the pass later than others
_OWN = (*BUSY, START)


@dataclass(frozen=True)
class WaitCause:
    """One cause of lost time.

    text: a sentence for users
    ms: lost per iteration, over all ranks
    kind: work, slow, start, link, or the name of a phase
    rank: the rank that causes it; None for a link
    step: of the schedule; -1 before the first
    """

    text: str
    ms: float
    kind: str
    direction: str
    rank: int | None
    step: int | None


@dataclass
class _LostTime:
    """Time lost because of a rank in a step of one direction, [groups, workers, slots].

    lost: ms
    own: by `_OWN`, ms that the rank spent more than the others
    The other tables are weighted with ``lost``; ``*_of_others`` is the mean of the other ranks.
    """

    lost: np.ndarray
    attention: np.ndarray
    attention_of_others: np.ndarray
    pairs: np.ndarray
    pairs_of_others: np.ndarray
    blocks: np.ndarray
    blocks_of_others: np.ndarray
    own: np.ndarray

    @staticmethod
    def none(shape: tuple[int, ...]) -> _LostTime:
        tables = [np.zeros(shape) for _ in range(7)]
        return _LostTime(*tables, np.zeros((len(_OWN), *shape)))  # type: ignore[call-arg]


@dataclass
class WaitAttribution:
    """Collects the waits of a case's iterations and attributes them to ranks, steps and links."""

    shape: RecordedShape
    uncertainty: float  # of the clocks of different ranks, ms
    # Whether all ranks wait for the last one at the end of a pass. In training they go on and wait
    # in the next pass.
    ends_together: bool = True
    iterations: int = 0
    charges: list[_LostTime] = field(default_factory=list)
    # per direction: (codes, ms)
    victims: list[list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=list)
    link: np.ndarray | None = None
    passes: float = 0.0  # ms of all passes of all ranks, with the waits at their ends
    layers: int = 0
    pairs: np.ndarray = field(init=False)  # [directions, groups, workers], of whole passes
    attention: np.ndarray = field(init=False)  # [directions, groups, workers], ms

    def __post_init__(self) -> None:
        s = self.shape
        self.charges = [_LostTime.none((s.groups, s.workers, s.slots)) for _ in s.directions]
        self.victims = [[] for _ in s.directions]
        self.pairs, self.attention = np.zeros((2, len(s.directions), s.groups, s.workers))

    def add(self, iteration: Iteration) -> None:
        self.iterations += 1
        self.layers = iteration.spent.shape[2]
        self.pairs += iteration.pairs.sum((1, 4))
        computed = iteration.spent[[SPENT.index(ATTENTION), SPENT.index(COLUMNS)]]
        self.attention += computed.sum((0, 2, 5), dtype=np.float64)
        self.passes += float(np.nansum(iteration.length))
        self.link = iteration.link if self.link is None else self.link + iteration.link
        if self.shape.workers == 1:
            return
        for d in range(len(self.shape.directions)):
            for group in np.flatnonzero(self.shape.present.sum(1) > 1):
                self._add(iteration, d, int(group))

    def _add(self, iteration: Iteration, d: int, group: int) -> None:
        s = self.shape
        samples = iteration.spent.shape[2]
        each = s.workers * s.slots**2
        kept = np.unique(
            np.linspace(0, samples - 1, max(1, min(samples, MOST_CELLS // each))).astype(int)
        )
        weight = samples / len(kept)
        spent = iteration.spent[:, d, kept, group].astype(
            np.float64
        )  # [SPENT, samples, workers, slots]
        late, exposed = spent[SPENT.index(LATE)], spent[SPENT.index(EXPOSED)]
        own = spent[: len(BUSY)]
        busy = own.sum(0)
        begin = iteration.start[d, kept, group]
        known = ~np.isnan(begin)
        mean = np.where(known, begin, 0).sum(1, keepdims=True) / np.maximum(
            known.sum(1, keepdims=True), 1
        )
        begin = np.where(known, begin, mean)
        present = s.present[group]
        others = max(1, int(present.sum()) - 1)

        def of_others(table: np.ndarray) -> np.ndarray:
            return (table[..., present, :].sum(-2, keepdims=True) - table) / others

        excess = busy - of_others(busy)
        offset = begin - (begin[:, present].sum(1, keepdims=True) - begin) / others
        excess[..., 0] += offset
        starts = begin[..., None] + np.cumsum(busy + late + exposed, -1) - (busy + late + exposed)
        middle = starts + late + exposed + busy / 2
        threshold = max(
            self.uncertainty,
            1e-3,
            1e-3 * float(np.nan_to_num(iteration.length[d, :, group]).mean()),
        )
        # At the end of the pass, all wait for the last rank.
        ends = starts[..., -1] + (busy + late + exposed)[..., -1]
        tail = np.where(present, ends[:, present].max(1, keepdims=True) - ends, 0)
        self.passes += weight * float(tail.sum()) if self.ends_together else 0.0
        ended = np.where(present, ends, -np.inf).argmax(1)
        behind = np.concatenate(
            [
                iteration.behind[d, kept, group],
                np.repeat((ended + 1)[:, None] * len(LINKS) * 2, s.workers, 1)[..., None],
            ],
            -1,
        )
        late = np.concatenate([late, tail[..., None]], -1)
        starts = np.concatenate([starts, ends[..., None]], -1)
        # Origin of each wait: worker * slots + slot; -1 for a link.
        origin = np.full(late.shape, -1, np.int32)
        last = np.full(late.shape[:2], -1)
        charge = self.charges[d]
        for t in range(s.slots + self.ends_together):
            at, victim = np.nonzero((late[..., t] > threshold) & (behind[..., t] >= 0))
            if not len(at):
                continue
            lost = late[at, victim, t]
            peer = self._peers(behind[at, victim, t], late[at, :, t], victim, group)
            if t == 0:
                came = peer * s.slots
            else:
                after = (behind[at, victim, t] & 1).astype(bool)
                end = (
                    starts[at, victim, t]
                    + lost
                    + np.where(after, busy[at, victim, min(t, s.slots - 1)], 0)
                )
                came = self._origins(
                    lost,
                    peer * s.slots,
                    window=np.arange(t) >= np.maximum(last[at, victim] - 1, 0)[:, None],
                    did=middle[at, peer, :t] < end[:, None],
                    waited=late[at, peer, :t],
                    waited_too=late[at, victim, :t].sum(1),
                    excess=excess[at, peer, :t],
                    over=(
                        np.where(middle[at, peer, :t] < end[:, None], busy[at, peer, :t], 0)
                        - busy[at, victim, :t]
                    ).sum(1)
                    + begin[at, peer]
                    - begin[at, victim],
                    moved=exposed[at, peer, :t].sum(1) - exposed[at, victim, :t].sum(1),
                    before=origin[at, peer, :t],
                )
            origin[at, victim, t] = came
            last[at, victim] = t
            worker, slot = np.divmod(came, s.slots)
            counts = (worker != victim) & (came >= 0)  # skip a delay that came back to its own rank
            at, victim, worker, slot, lost = (
                v[counts] for v in (at, victim, worker, slot, lost * weight)
            )
            where = (group, worker, slot)
            np.add.at(charge.lost, where, lost)
            attention = own[BUSY.index(ATTENTION)] + own[BUSY.index(COLUMNS)]
            work, tiles = (
                iteration.pairs[d, kept, group].astype(np.float64),
                iteration.blocks[d, kept, group].astype(np.float64),
            )
            for total, table in (
                (charge.attention, attention),
                (charge.pairs, work),
                (charge.blocks, tiles),
            ):
                np.add.at(total, where, lost * table[at, worker, slot])
            for total, table in (
                (charge.attention_of_others, attention),
                (charge.pairs_of_others, work),
                (charge.blocks_of_others, tiles),
            ):
                column = table[at, :, slot]  # [waits, workers]
                np.add.at(total, where, lost * (column.sum(1) - table[at, worker, slot]) / others)
            for i in range(len(BUSY)):
                column = own[i][at, :, slot]
                np.add.at(
                    charge.own[i],
                    where,
                    lost
                    * (
                        own[i][at, worker, slot]
                        - (column.sum(1) - own[i][at, worker, slot]) / others
                    ),
                )
            np.add.at(charge.own[-1], where, lost * np.where(slot == 0, offset[at, worker], 0))
            rank = group * s.workers
            codes = (((rank + worker) * s.slots + slot) * s.ranks + rank + victim) * (
                s.slots + 1
            ) + t
            self.victims[d].append(_summed(codes.astype(np.int64), lost))
        if len(self.victims[d]) > 64:
            self.victims[d] = [
                _summed(*(np.concatenate(v) for v in zip(*self.victims[d], strict=True)))
            ]

    @staticmethod
    def _origins(
        lost: np.ndarray,
        first: np.ndarray,
        *,
        window: np.ndarray,
        did: np.ndarray,
        waited: np.ndarray,
        waited_too: np.ndarray,
        excess: np.ndarray,
        over: np.ndarray,
        moved: np.ndarray,
        before: np.ndarray,
    ) -> np.ndarray:
        """Return the origins of waits, from what the peer (waited for) did before, [waits, slots].

        A recent wait of the peer that explains half of the lost time is followed back. Otherwise
        the largest of three explanations counts: the peer's waits, its computation, its links.

        Args:
            lost: ms of each wait.
            first: peer * slots, the origin code of the peer's slot 0.
            window: slots since the victim last waited; earlier delays are mostly paid already.
            did: what the peer computed before it sent.
            waited, waited_too: late waits of the peer by slot, of the victim in total.
            excess: ms that the peer spent more than the others.
            over: ms that the peer computed more or started later than the victim, in total.
            moved: ms that the peer waited longer for links than the victim.
            before: origins of the peer's own waits.
        """
        rows = np.arange(len(lost))
        recent = np.where(window, waited, 0)
        own = np.where(window & did, excess, -np.inf)
        inherited = recent.sum(1) >= lost / 2
        computed = np.maximum(own, 0).sum(1) >= lost / 2
        in_all = np.stack([waited.sum(1) - waited_too, over, moved]).argmax(0)
        longest = np.where(inherited, recent.argmax(1), waited.argmax(1))
        most = np.where(computed, own.argmax(1), np.where(did, excess, -np.inf).argmax(1))
        from_before, from_own = before[rows, longest], first + most
        result = np.choose(in_all, [from_before, from_own, np.full_like(from_own, -1)])
        return np.where(inherited, from_before, result)

    def _peers(
        self, behind: np.ndarray, late: np.ndarray, victim: np.ndarray, group: int
    ) -> np.ndarray:
        """Return the workers waited for.

        For a collective it is the worker that waited least, since it came last.
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

    def causes(self) -> list[WaitCause]:
        """Return the causes, costliest first, at most `MOST_LINES`."""
        if not self.iterations or not self.passes:
            return []
        causes = [*self._links(), *self._ranks()]
        worth = [cause for cause in causes if cause.ms > WORTH * self.passes / self.iterations]
        return sorted(worth, key=lambda cause: -cause.ms)[:MOST_LINES]

    def _links(self) -> list[WaitCause]:
        """Return the links with exposed communication."""
        assert self.link is not None
        causes = []
        ranks = int(self.shape.present.sum())
        for d, direction in enumerate(self.shape.directions):
            for i, name in enumerate(LINKS):
                steps = self.link[d, i].sum((0, 1)) / self.iterations
                if not steps.sum():
                    continue
                each = steps / (ranks * self.layers)  # of a rank and layer
                worst = int(each.argmax())
                link = f"the {name} link" if name else "the link"
                total = _ms(each.sum())
                text = f"{direction}: {total} of exposed communication per layer on {link}"
                if np.count_nonzero(each) > 1:
                    text += f", most {_in_step(worst)} ({_ms(each[worst])})"
                else:
                    text += f", {_in_step(worst)}"
                causes.append(
                    WaitCause(text, float(steps.sum()), "link", direction, None, worst - 1)
                )
        return causes

    def _ranks(self) -> list[WaitCause]:
        merged: dict[tuple[int, str, int], list[tuple[float, int, int]]] = {}
        for d in range(len(self.shape.directions)):
            lost = self.charges[d].lost.reshape(-1, self.shape.slots) / self.iterations
            lost[~self.shape.present.reshape(-1)] = 0  # ranks without rows: their work is unknown
            for rank, slot in zip(*np.nonzero(lost), strict=True):
                kind = self._kind(d, int(rank), int(slot))
                merged.setdefault((int(rank), kind, d if kind == "work" else -1), []).append(
                    (float(lost[rank, slot]), d, int(slot))
                )
        charged = [
            (sum(p[0] for p in places), kind, sorted(places, reverse=True), rank)
            for (rank, kind, _), places in merged.items()
        ]
        charged.sort(key=lambda item: -item[0])
        return [
            self._cause(rank, kind, places) for _, kind, places, rank in charged[: 2 * MOST_LINES]
        ]

    def _kind(self, d: int, rank: int, slot: int) -> str:
        """Classify: more work, slow for its work, or the phase that took longer than elsewhere."""
        charge, at = self.charges[d], (*divmod(rank, self.shape.workers), slot)
        own = charge.own[(slice(None), *at)]
        phase = _OWN[int(own.argmax())]
        if (
            phase == START
            and not self.ends_together
            and self._over(d, rank) > 0.5 * own[-1] / charge.lost[at]
        ):
            # Delayed by the pass before, where this rank's attention takes that much longer.
            longer, more = (
                _against(table[d, at[0]], at[1]) for table in (self.attention, self.pairs)
            )
            return "slow" if longer > SLOWER * more else "work"
        if phase in (ATTENTION, COLUMNS):
            longer = _over(charge.attention[at], charge.attention_of_others[at])
            more = _over(charge.pairs[at], charge.pairs_of_others[at])
            return "slow" if longer > SLOWER * more else "work"
        return phase

    def _over(self, d: int, rank: int) -> float:
        """Return by how many ms a rank's attention of a layer takes longer than the others'."""
        group, worker = divmod(rank, self.shape.workers)
        computed = self.attention[d, group] / (self.iterations * self.layers)
        return float(
            computed[worker]
            - (computed.sum() - computed[worker]) / max(1, int((computed > 0).sum()) - 1)
        )

    def _cause(self, rank: int, kind: str, places: list[tuple[float, int, int]]) -> WaitCause:
        """Phrase one cause; places are (ms lost, direction, slot), costliest first."""
        ms, (_, d, slot) = sum(p[0] for p in places), places[0]
        charge, at = self.charges[d], (*divmod(rank, self.shape.workers), slot)
        lost = charge.lost[at]
        victim, step, each = self._victim(d, rank, slot)
        longer = _over(charge.attention[at], charge.attention_of_others[at])
        more_pairs, more_blocks = (
            _over(charge.pairs[at], charge.pairs_of_others[at]),
            _over(charge.blocks[at], charge.blocks_of_others[at]),
        )
        of_blocks = more_blocks > 1 and slot > 0 and charge.blocks[at] > 0
        more, unit = (more_blocks, "blocks") if of_blocks else (more_pairs, "pairs")
        extra = charge.own[(slice(None), *at)] / lost
        name = self.shape.directions[d]
        if kind == "work":
            whole = False
            where = (
                (f" in step {slot - 1}" if slot else " outside the steps") if slot != step else ""
            )
            if places[0][0] < 0.6 * ms or extra[BUSY.index(ATTENTION)] + extra[
                BUSY.index(COLUMNS)
            ] < 0.6 * self._over(d, rank):
                whole, unit, where = True, "pairs", " over all its steps"
                more = _against(self.pairs[d, at[0]], at[1])
            if whole and more < MORE:
                why = (
                    "which has the most work in several steps, "
                    f"with {more:.2f}x the {unit} of the others in total"
                )
            elif np.isinf(more):
                why = f"which has all the {unit} of step {slot - 1}"
            elif more < MORE:
                why = (
                    f"which takes {longer:.2f}x as long as the others{where}, "
                    f"for {more:.2f}x the {unit}"
                )
            else:
                why = f"which has {more:.1f}x the {unit} of the others{where}"
        elif kind == "slow":
            if slot == 0 and not charge.attention[at]:
                longer, more_pairs = (
                    _against(table[d, at[0]], at[1]) for table in (self.attention, self.pairs)
                )
            same = 1 / MORE < more_pairs < MORE
            work = "the same work" if same else f"{more_pairs:.1f}x the work"
            why = (
                f"a straggler: {longer:.1f}x the time of the others for {work} "
                "(slow or disturbed device)"
            )
        else:
            delay = {
                START: "starts its attention {} later than the others",
                INDEX: "takes {} longer than the others to estimate the index",
                MERGE: "takes {} longer than the others to merge the results of its steps",
                ARRANGE: "takes {} longer than the others to arrange the gathered keys",
                GAP: "idles {} longer than the others between kernels: "
                "launch overhead on a busy or disturbed host",
            }[kind]
            more_ms = float(extra[_OWN.index(kind)])
            # The delay is a mean over the times when a rank waited; the wait is a mean over all.
            often = "at times " if more_ms > 2 * each else ""
            why = "which " + often + delay.format(_ms(more_ms))
        spread = len({(direction, s) for _, direction, s in places})
        if spread > 1 and kind != "work":
            directions = " and ".join(
                self.shape.directions[i] for i in sorted({direction for _, direction, _ in places})
            )
            why += f" ({directions}, {spread} steps)"
        when = (
            f"{name}, at the end"
            if step == self.shape.slots
            else f"{name} step {step - 1}"
            if step
            else f"{name} before the first step"
        )
        text = f"{when}: rank {victim} waits {_ms(each)} for rank {rank}, {why}"
        if ms > 1.5 * each:
            share = ms * self.iterations / self.passes
            text += f"; {_ms(ms)} per iteration over all ranks, {share:.1%} of their time"
        return WaitCause(text, ms, kind, name, rank, slot - 1)

    def _victim(self, d: int, rank: int, slot: int) -> tuple[int, int, float]:
        """Find who waits longest for a rank's slot.

        Returns:
            The waiting rank, its slot (the number of slots: the end of the pass), ms per layer.
        """
        codes, ms = _summed(*(np.concatenate(v) for v in zip(*self.victims[d], strict=True)))
        self.victims[d] = [(codes, ms)]
        s = self.shape
        rest, at = np.divmod(codes, s.slots + 1)
        rest, victim = np.divmod(rest, s.ranks)
        mine = rest == rank * s.slots + slot
        best = int(np.where(mine, ms, -1).argmax())
        return int(victim[best]), int(at[best]), float(ms[best] / (self.iterations * self.layers))


def _summed(codes: np.ndarray, ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    unique, inverse = np.unique(codes, return_inverse=True)
    return unique, np.bincount(inverse, ms, minlength=len(unique))


def _over(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("inf") if part > 0 else 1.0


def _against(values: np.ndarray, worker: int) -> float:
    """Return a worker's value over the mean of the others that have any."""
    mine = float(values[worker])
    others = max(1, int((values > 0).sum()) - 1)
    return _over(mine * others, float(values.sum()) - mine)


def _in_step(slot: int) -> str:
    return f"in step {slot - 1}" if slot else "before the first step"


def _ms(value: float) -> str:
    return (
        f"{value:.2f} ms"
        if value < 10
        else f"{value:.0f} ms"
        if value < 1e4
        else f"{value / 1e3:.0f} s"
    )
