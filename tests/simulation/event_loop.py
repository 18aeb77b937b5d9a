"""The timeline computed another way: each rank has its own schedule, and time moves by events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtrain_cli.parallel.schedule import GRADIENTS, HEADS, Schedule, Transfer

Costs = Callable[
    [int, int], tuple[float, float, bool, float]
]  # (number, rank) -> latency, busy, outer, share


@dataclass
class Op:
    """A transfer, as seen by one rank."""

    rank: int
    transfer: Transfer
    posted: float
    ready: float | None = None
    through: float | None = None  # when what arrives has left the link
    arrives: float | None = None
    ended: float | None = None


@dataclass
class Rank:
    items: list[tuple[str, Any]]
    began: float = 0.0
    left: float | None = None
    end: float | None = None
    waiting: float | None = None
    spans: list[tuple[str, int, float, float]] = field(
        default_factory=list
    )  # kind, step or number, start, end


class EventLoop:
    """attention: (rank, step) -> us, slowed by messages. merge: us of each step that computes."""

    def __init__(
        self,
        schedule: Schedule,
        direction: str,
        attention: Callable[[int, int], float],
        merge: float,
        costs: Costs,
    ) -> None:
        self.schedule, self.attention, self.merge, self.costs = schedule, attention, merge, costs
        rings = not schedule.gathers
        steps = schedule.backward if direction == "backward" else schedule.forward
        self.ranks = [Rank(self._items(r, mine, rings)) for r, mine in enumerate(steps)]
        self.ops: dict[tuple[int, int], Op] = {}
        self.order: dict[tuple, list[Op]] = {}
        self.now = 0.0
        while any(rank.end is None for rank in self.ranks):
            while self._settle():
                pass
            if all(rank.end is not None for rank in self.ranks):
                break
            self._advance()

    def _items(self, rank: int, steps, rings: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        unwaited: list[int] = []
        for at, step in enumerate(steps):
            first = [t for t in step.post if t.payload == HEADS]
            if first and at:
                # The trade back sends what these bring.
                items += [("wait", n) for n in unwaited]
                unwaited.clear()
            for t in first:
                items += [("post", t), ("wait", t.number)]
            for t in step.post:
                if t not in first:
                    items.append(("post", t))
                    unwaited.append(t.number)
            for n in step.wait:
                if n in unwaited:
                    items.append(("wait", n))
                    unwaited.remove(n)
            if step.keys:
                items.append(("attention", at))
                if rings and self.attention(rank, at) > 0:
                    items.append(("merge", at))
            for n in step.collect:
                items.append(("wait", n))
                unwaited.remove(n)
            for t in step.send:
                items.append(("post", t))
                unwaited.append(t.number)
        return items + [("wait", n) for n in unwaited]

    def _settle(self) -> bool:
        changed = False
        for number, rank in enumerate(self.ranks):
            while rank.left is None and rank.end is None:
                if not self._next(number, rank):
                    break
                changed = True
        for op in self.ops.values():
            changed |= self._get_ready(op)
        for op in self.ops.values():
            changed |= self._begin(op)
        for op in self.ops.values():
            changed |= self._finish(op)
        return changed

    def _next(self, number: int, rank: Rank) -> bool:
        if not rank.items:
            rank.end = self.now
            return True
        kind, what = rank.items[0]
        if kind == "post":
            self._post(number, what)
        elif kind == "wait":
            if rank.waiting is None:
                rank.waiting = self.now
            if self.ops[number, what].ended is None:
                return False
            rank.spans.append(("wait", what, rank.waiting, self.now))
            rank.waiting = None
        else:
            us = self.attention(number, what) if kind == "attention" else self.merge
            if us > 0:
                rank.left, rank.began = us, self.now
                return True
        rank.items.pop(0)
        return True

    def _post(self, rank: int, t: Transfer) -> None:
        op = self.ops[rank, t.number] = Op(rank, t, self.now)
        lines = [
            ("queue", rank, t.channel, t.payload in GRADIENTS),
            ("in", rank, self._outer(rank, t)),
        ]
        lines.append(("out", rank, self._outer(rank if t.to is None else t.to, t)))
        for line in lines:
            self.order.setdefault(line, []).append(op)

    def _outer(self, rank: int, t: Transfer) -> bool:
        """Of what arrives at a rank."""
        return self.costs(t.number, rank)[2]

    def _get_ready(self, op: Op) -> bool:
        if op.ready is not None:
            return False
        t = op.transfer
        line = self.order["queue", op.rank, t.channel, t.payload in GRADIENTS]
        before = line[: line.index(op)]
        if any(other.ended is None for other in before) or (
            t.after is not None and self.ops[op.rank, t.after].ended is None
        ):
            return False
        op.ready = self.now
        return True

    def _free(self, side: str, op: Op, outer: bool) -> bool:
        """Whether everything before it on a link of its rank has passed."""
        line = self.order[side, op.rank, outer]
        for other in line[: line.index(op)]:
            passing = (
                other
                if side == "in" or other.transfer.to is None
                else self.ops.get((other.transfer.to, other.transfer.number))
            )
            if passing is None or passing.through is None or passing.through > self.now:
                return False
        return True

    def _begin(self, op: Op) -> bool:
        if op.through is not None or op.ready is None:
            return False
        t = op.transfer
        latency, busy, outer, _ = self.costs(t.number, op.rank)
        if t.kind == "p2p":
            sender = self.ops.get((t.source, t.number))
            if (
                sender is None
                or sender.ready is None
                or not self._free("in", op, outer)
                or not self._free("out", sender, outer)
            ):
                return False
        else:
            peers = [self.ops.get((peer, t.number)) for peer in t.peers]
            if any(
                p is None
                or p.ready is None
                or not self._free("in", p, outer)
                or not self._free("out", p, outer)
                for p in peers
            ):
                return False
        op.through = self.now + busy
        op.arrives = op.through + latency
        return True

    def _finish(self, op: Op) -> bool:
        if op.ended is not None or op.arrives is None or op.arrives > self.now:
            return False
        t = op.transfer
        if t.kind == "p2p":
            other = self.ops.get((t.to, t.number))
            if other is None or other.arrives is None or other.arrives > self.now:
                return False
        op.ended = self.now
        return True

    def _power(self, rank: int) -> float:
        taken = sum(
            self.costs(op.transfer.number, rank)[3]
            for (at, _), op in self.ops.items()
            if at == rank and op.ready is not None and op.ended is None
        )
        return max(1 - taken, 0.05)

    def _advance(self) -> None:
        times = [
            t
            for op in self.ops.values()
            for t in (op.through, op.arrives)
            if t is not None and t > self.now
        ]
        rates = {}
        for number, rank in enumerate(self.ranks):
            if rank.left is not None:
                rates[number] = self._power(number) if rank.items[0][0] == "attention" else 1.0
                times.append(self.now + rank.left / rates[number])
        assert times, "deadlock"
        until = min(times)
        for number, rate in rates.items():
            rank = self.ranks[number]
            assert rank.left is not None
            rank.left -= (until - self.now) * rate
            if rank.left < 1e-9:
                rank.left = None
                kind, step = rank.items.pop(0)
                rank.spans.append((kind, step, rank.began, until))
        self.now = until
