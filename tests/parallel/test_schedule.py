"""Schedules, played without processes: all pairs once, complete gradients, no deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.parallel.schedule import (
    DKV,
    GRADIENTS,
    GROUP_REDUCE,
    HEADS,
    KV,
    QUERIES,
    Schedule,
    ScheduleOptions,
    ScheduleStep,
    Transfer,
    make_schedule,
)

NODES = {1: (1,), 2: (1, 2), 3: (3,), 4: (2, 8), 6: (2, 3), 7: (7, 1), 8: (4,), 12: (3, 4, 12)}
SIZES = [(workers, per_node) for workers, nodes in NODES.items() for per_node in nodes]


def cases() -> list[tuple[str, ScheduleOptions]]:
    """Every exchange, with every valid combination of options."""
    found = []
    for (workers, per_node), heads, circulates, prefetch in product(
        SIZES, (1, 2, 3, 4, 6), (KV, QUERIES), (1, 2, 3)
    ):
        if workers % heads or (per_node % heads and heads % per_node):
            continue
        for (name, traits), chunks in product(EXCHANGE_TRAITS.items(), (1, 2, 4)):
            options = ScheduleOptions(workers, per_node, chunks, prefetch, circulates, heads)
            if (circulates == KV and prefetch == 1) if traits.gathers else chunks == 1:
                stages = ((0, 0), (1, 1), (2, 2), (3, 2), (0, 1))[: 5 if traits.by_mask else 1]
                for forward, backward in stages:
                    of_both = replace(options, stages=forward, stages_backward=backward)
                    found.append((name, of_both))
                found.append((name, replace(options, rounds=True)))
    return [
        (name, o)
        for name, o in found
        if (o.workers // o.heads) % min(o.workers // o.heads, max(1, o.per_node // o.heads)) == 0
    ]


class Play:
    """Play one pass on all ranks; a rank blocks on its waits, a transfer on its partners."""

    def __init__(
        self,
        schedule: Schedule,
        steps: tuple[tuple[ScheduleStep, ...], ...],
        held: list[set[int]],
        moves: str,
    ) -> None:
        self.schedule, self.steps, self.moves = schedule, steps, moves
        self.heads = schedule.heads
        self.held = held  # by rank, the shards that it has of what moves
        self.ready = [schedule.heads == 1 for _ in steps]  # tokens have been traded for heads
        self.back = [schedule.heads == 1 for _ in steps]
        self.posted: list[dict[int, Transfer]] = [{} for _ in steps]
        # What is posted between two ranks, in order.
        self.lines = defaultdict[tuple, list[tuple[int, Transfer]]](list)
        self.begun: set[tuple[int, int]] = set()
        self.complete: set[tuple[int, int]] = set()
        self.collected: set[tuple[int, int]] = set()
        self.arrived: dict[tuple[int, int], dict[int, list]] = {}
        # (shard, part) -> who added what
        self.sums: list[dict[tuple[int, int, int], list]] = [defaultdict(list) for _ in steps]
        self.computed: list[tuple] = []
        programs = [self.program(rank) for rank in range(len(steps))]
        waiting = list(range(len(steps)))
        while waiting:
            before = (len(self.complete), len(waiting), sum(len(p) for p in self.posted))
            for rank in list(waiting):
                if next(programs[rank], "through") == "through":
                    waiting.remove(rank)
            self.progress()
            assert (len(self.complete), len(waiting), sum(len(p) for p in self.posted)) != before, (
                "deadlock"
            )
        assert all(
            (rank, number) in self.complete
            for rank, posted in enumerate(self.posted)
            for number in posted
        ), "all end"
        unwaited = {
            (r, n)
            for r, posted in enumerate(self.posted)
            for n, t in posted.items()
            if t.payload in GRADIENTS
        } - self.collected
        assert all(
            self.posted[r][n].kind in ("reduce_scatter", GROUP_REDUCE) for r, n in unwaited
        ), "every gradient that arrives by hops is added"

    def program(self, rank: int):
        for step in self.steps[rank]:
            for transfer in step.post:
                self.post(rank, transfer)
            for number in step.wait:
                while (rank, number) not in self.complete:
                    yield "waits"
            self.compute(rank, step)
            for number in step.collect:
                while (rank, number) not in self.complete:
                    yield "waits"
                self.collected.add((rank, number))
                # Collectives deliver complete sums.
                arrived = (
                    self.arrived.pop((rank, number))
                    if self.posted[rank][number].kind == "p2p"
                    else {}
                )
                for key, parts in arrived.items():
                    self.sums[rank][key] += parts
            for transfer in step.send:
                self.post(rank, transfer)

    def compute(self, rank: int, step: ScheduleStep) -> None:
        if not step.queries:
            assert not step.keys
            return
        assert self.ready[rank]
        assert set(step.queries if self.moves == QUERIES else step.keys) <= self.held[rank], (
            "computes only what it holds"
        )
        i, n = step.part
        assert 0 <= i < n
        members = set(range(rank - rank % self.heads, rank - rank % self.heads + self.heads))
        assert (set(step.keys) if self.moves == QUERIES else set(step.queries)) == members, (
            "one side is its own"
        )
        for q, k in product(step.queries, step.keys):
            self.computed.append((q, k, step.part))
            self.sums[rank][(q if self.moves == QUERIES else k), i, n].append((q, k))

    def post(self, rank: int, t: Transfer) -> None:
        assert t.number not in self.posted[rank], "numbers are unique"
        assert t.after is None or t.after in self.posted[rank], "what it sends on is on its way"
        self.posted[rank][t.number] = t
        what = "gradients" if t.payload in GRADIENTS else t.payload
        if t.kind == "p2p":
            self.lines[t.channel, what, rank, t.to, "out"].append((rank, t))
            self.lines[t.channel, what, t.source, rank, "in"].append((rank, t))
        else:
            assert rank in t.peers
            self.lines[t.channel, what, t.peers, rank].append((rank, t))
        if t.payload in GRADIENTS and t.after is None:
            self.take(rank, t)

    def take(self, rank: int, t: Transfer) -> None:
        """Send now: nothing may be added to the sent gradient later."""
        taken = {
            key: self.sums[rank].pop(key)
            for key in list(self.sums[rank])
            if key[0] in t.sends and self.inside(key, t.part)
        }
        assert {key[0] for key in taken} == set(t.sends), "sends what it has"
        self.arrived[rank, -2 - t.number] = taken

    @staticmethod
    def inside(key: tuple[int, int, int], part: tuple[int, int]) -> bool:
        _, i, n = key
        return part[0] * n <= i * part[1] < (part[0] + 1) * n or n == 1

    def progress(self) -> None:
        """Complete the transfers whose partners have all posted."""
        changed = True
        while changed:
            changed = False
            for rank, posted in enumerate(self.posted):
                for number, t in posted.items():
                    if (rank, number) in self.begun or (
                        t.after is not None and (rank, t.after) not in self.complete
                    ):
                        continue
                    if t.payload in (KV, QUERIES):
                        assert set(t.sends) <= self.held[rank] or t.kind == "p2p", (
                            "sends only what it holds"
                        )
                        if not set(t.sends) <= self.held[rank]:
                            continue
                    if t.payload in GRADIENTS and t.after is not None:
                        self.take(rank, t)
                    self.begun.add((rank, number))
                    changed = True
            for rank, posted in enumerate(self.posted):
                for number, t in posted.items():
                    if (
                        (rank, number) in self.begun
                        and (rank, number) not in self.complete
                        and self.finish(rank, t)
                    ):
                        self.complete.add((rank, number))
                        changed = True

    def partner(self, line: tuple, mine: tuple, t: Transfer) -> tuple[int, Transfer] | None:
        """Return the partner's transfer that matches ``t`` by its place in posting order."""
        place = [n.number for _, n in self.lines[mine]].index(t.number)
        others = self.lines[line]
        return (
            others[place]
            if place < len(others) and (others[place][0], others[place][1].number) in self.begun
            else None
        )

    def finish(self, rank: int, t: Transfer) -> bool:
        what = "gradients" if t.payload in GRADIENTS else t.payload
        if t.kind == "p2p":
            sender = self.partner(
                (t.channel, what, t.source, rank, "out"), (t.channel, what, t.source, rank, "in"), t
            )
            receiver = self.partner(
                (t.channel, what, rank, t.to, "in"), (t.channel, what, rank, t.to, "out"), t
            )
            if sender is None or receiver is None:
                return False
            assert (sender[1].sends, sender[1].part, sender[1].payload) == (
                t.receives,
                t.part,
                t.payload,
            ), "what arrives is what was sent"
            assert receiver[1].receives == t.sends
            others = [sender]
        else:
            found = [
                self.partner((t.channel, what, t.peers, p), (t.channel, what, t.peers, rank), t)
                for p in t.peers
            ]
            if any(f is None for f in found):
                return False
            others = [f for f in found if f is not None]
            assert all((o.kind, o.peers) == (t.kind, t.peers) for _, o in others)
        if t.payload == HEADS:
            assert not self.back[rank]
            self.back[rank], self.ready[rank] = self.ready[rank], True
        elif t.payload in GRADIENTS:
            arriving: dict = defaultdict(list)
            for other, o in others:
                for key, parts in self.arrived[other, -2 - o.number].items():
                    if key[0] in (t.receives if t.kind == "p2p" else set(t.receives)):
                        arriving[key] += parts
            assert {key[0] for key in arriving} == set(t.receives)
            if t.kind == "p2p":
                self.arrived[rank, t.number] = arriving
            else:
                for key, parts in arriving.items():
                    self.sums[rank][key] += parts
        else:
            if t.kind != "p2p":
                assert set(t.receives) <= {s for _, o in others for s in o.sends}
            self.held[rank] |= set(t.receives)
        return True


def check(name: str, options: ScheduleOptions) -> None:
    check_schedule(make_schedule(name, options), options)


def check_schedule(schedule: Schedule, options: ScheduleOptions) -> None:
    w, u = options.workers, options.heads
    everyone = range(w)
    own = [set(range(r - r % u, r - r % u + u)) for r in everyone]
    assert len(schedule.forward) == len(schedule.backward) == w
    assert all(
        schedule.keeps[r] and (schedule.circulates == KV or set(schedule.keeps[r]) == own[r])
        for r in everyone
    )
    forward = Play(schedule, schedule.forward, [set(s) for s in own], KV)
    moves = schedule.circulates
    backward = Play(
        schedule,
        schedule.backward,
        [set(schedule.keeps[r]) if moves == KV else set(own[r]) for r in everyone],
        moves,
    )
    for play in (forward, backward):
        parts = {part[1] for *_, part in play.computed}
        assert len(parts) == 1
        n = parts.pop()
        assert sorted(play.computed) == [
            (q, k, (i, n)) for q in everyone for k in everyone for i in range(n)
        ], "every pair once"
    ready = [(rank, set(schedule.keeps[rank])) for rank in everyone]
    assert all(kept <= forward.held[rank] for rank, kept in ready), "keeps what it held"
    for rank in everyone:
        sums = backward.sums[rank]
        shards = {key[0] for key, parts in sums.items() if parts}
        assert shards == own[rank], "each owner ends with its own shard alone"
        for (shard, *_), parts in sums.items():
            pairs = (
                [(q, shard) for q in everyone] if moves == KV else [(shard, k) for k in everyone]
            )
            assert sorted(parts) == pairs, "complete, nothing twice"


@pytest.mark.parametrize("name", EXCHANGE_TRAITS)
def test_every_pair_is_computed_once_and_gradients_come_home(name):
    mine = [options for exchange, options in cases() if exchange == name]
    assert len(mine) > 40
    for options in mine:
        check(name, options)


def crosses_nodes(schedule: Schedule, rank: int, transfer: Transfer) -> bool:
    """Return whether a transfer of this rank leaves or enters its node."""
    others = transfer.peers if transfer.kind != "p2p" else (transfer.to, transfer.source)
    return any(
        other is not None and other // schedule.per_node != rank // schedule.per_node
        for other in others
    )


@pytest.mark.parametrize("name", ["hierarchical_ring", "hierarchical_all_gather"])
def test_a_shard_enters_each_other_node_once(name):
    schedule = make_schedule(name, ScheduleOptions(12, 4))
    for steps, payload in ((schedule.forward, KV), (schedule.backward, DKV)):
        for rank, mine in enumerate(steps):
            crossing = [
                t
                for s in mine
                for t in s.transfers
                if t.payload == payload and crosses_nodes(schedule, rank, t)
            ]
            assert sum(len(t.receives if payload == KV else t.sends) for t in crossing) == 2, (
                "two other nodes, one shard of each"
            )


@pytest.mark.parametrize(
    ("exchange", "options", "message"),
    [
        ("star", ScheduleOptions(2, 2), "topology.exchange=star"),
        ("ring", ScheduleOptions(6, 4), "6 workers: not a multiple of 4 ranks per node"),
        ("ring", ScheduleOptions(6, 6, heads=4), "6 workers: not a multiple of the 4 ranks"),
        ("ring", ScheduleOptions(12, 4, heads=3), "do not fit nodes of 4 ranks"),
        ("ring", ScheduleOptions(2, 2, prefetch=0), "at least 1"),
    ],
)
def test_invalid_options_are_refused(exchange, options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(exchange, options)


def test_inner_transfers_wait_for_the_head_trade():
    for steps in make_schedule("ring", ScheduleOptions(4, 4, heads=2)).forward:
        trade, *others = steps[0].post
        assert trade.kind == "all_to_all"
        assert others
        assert all(t.after is not None for t in others)


@pytest.mark.parametrize(
    ("name", "options", "channels"),
    [
        ("ring", ScheduleOptions(4, 2), ("context",)),
        ("hierarchical_ring", ScheduleOptions(4, 2), ("inner", "outer")),
        ("hierarchical_ring", ScheduleOptions(4, 4), ("inner",)),
        ("hierarchical_ring", ScheduleOptions(4, 1), ("outer",)),
        ("hierarchical_all_gather", ScheduleOptions(4, 2), ("inner", "outer")),
        ("hierarchical_all_gather", ScheduleOptions(4, 4), ("context",)),
        ("hierarchical_all_gather", ScheduleOptions(4, 1), ("context",)),
        ("hierarchical_all_gather", ScheduleOptions(4, 2, heads=2), ("context",)),
        ("all_gather", ScheduleOptions(4, 4, heads=4), ()),
        ("ring", ScheduleOptions(1, 1), ()),
    ],
)
def test_channels_of_a_schedule(name, options, channels):
    assert make_schedule(name, options).channels == channels
