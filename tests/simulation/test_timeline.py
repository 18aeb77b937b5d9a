"""The timeline: small cases by hand, equality with an event loop, and no gaps or overlaps."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from simulation.event_loop import EventLoop
from simulation.free_prices import Prices

from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import (
    Cut,
    FromHeads,
    FromTokens,
    Merge,
    Reduce,
    Shards,
    ToHeads,
    ToTokens,
)
from mtrain_cli.parallel.program import Operation
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.parallel.schedule import INNER, OUTER, SUM, Schedule, ScheduleOptions, make_schedule
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.simulation.costs import PricedMessage, actions
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdTransfer
from mtrain_cli.simulation.timeline import Disturbances, PassTimes, play, together


@dataclass
class Given(Prices):
    """attention: [workers, steps] us. link: us of a message by channel, all on the link."""

    spmd: SpmdSchedule
    attention_us: np.ndarray
    link: dict[str, float] = field(default_factory=dict)
    direction: str = "forward"
    merge_us: float = 0.0
    share: float = 0.0
    columns_us: float = 0.0
    sum_us: float = 0.0
    others: dict[type[Operation], float] = field(default_factory=dict)
    host: float = 0.0
    index_us: float = 0.0

    def attention(self, step):
        return self.attention_us[:, step]

    def copy(self, op):
        if isinstance(op, Merge):
            return self.merge_us
        return self.others.get(type(op), 0.0)

    def index(self):
        return self.index_us

    def dispatch(self, what):
        return self.host if what == "step" else 0.0

    def column_times(self):
        return np.full(self.spmd.grid.workers, self.columns_us), None, None

    def message(self, transfer: SpmdTransfer, post) -> PricedMessage:  # noqa: ARG002
        t, workers = transfer.first, self.spmd.grid.workers
        latency, busy, outer, share = self.cost(t.number, t.channel, np.arange(workers), transfer)
        if t.kind == SUM:
            latency, busy = latency + self.sum_us, np.zeros(workers)
        return PricedMessage(transfer, latency, busy, outer, share, 10)

    def cost(self, number, channel, ranks, transfer):  # noqa: ARG002
        zero = np.zeros(len(ranks))
        return (
            zero,
            zero + self.link.get(channel, 0.0),
            np.full(len(ranks), channel == OUTER),
            zero + self.share,
        )


def simulated(
    prices: Given, *, conditions: Disturbances | None = None, rows: bool = False, start=None
) -> PassTimes:
    spmd = prices.spmd
    steps = len(spmd.steps(prices.direction))
    program = lower(
        spmd.schedule,
        0,
        backward=prices.direction == "backward",
        traits=Traits(columns=prices.columns_us > 0),
    )
    return play(
        actions(program, spmd, prices),
        prices.direction,
        spmd.grid.workers,
        steps,
        start=start,
        grid=spmd.grid,
        conditions=conditions,
        rows=rows,
    )


def of(exchange: str, workers: int, per_node: int = 8, **options) -> SpmdSchedule:
    return SpmdSchedule.of(make_schedule(exchange, ScheduleOptions(workers, per_node, **options)))


def even(spmd: SpmdSchedule, us: float = 100.0, direction: str = "forward") -> np.ndarray:
    return np.full((spmd.grid.workers, len(spmd.steps(direction))), us)


def test_a_ring_that_hides_its_messages_never_waits():
    ring = of("ring", 4)
    found = simulated(Given(ring, even(ring), {"context": 100.0}))
    assert found.duration == 400
    assert found.late.sum() == sum(table.sum() for table in found.exposed.values()) == 0
    assert found.attention.tolist() == [[100.0] * 4] * 4


def test_messages_longer_than_a_step_are_exposed():
    ring = of("ring", 3)
    found = simulated(Given(ring, even(ring), {"context": 130.0}))
    # The second hop is posted when the second step begins, at 130.
    assert found.duration == 360
    assert found.exposed["context"].tolist() == [[0, 0, 30, 30]] * 3
    assert found.late.sum() == 0


def test_two_hops_ahead_the_second_message_follows_the_first_on_its_communicator():
    ring = of("ring", 3, prefetch=2)
    found = simulated(Given(ring, even(ring), {"context": 130.0}))
    # Both are posted at 0 and end at 130 and 260.
    assert found.exposed["context"].tolist() == [[0, 0, 30, 30]] * 3
    slow_start = simulated(Given(ring, np.array([[300.0, 100, 100]] * 3), {"context": 130.0}))
    assert slow_start.exposed["context"].sum() == 0
    one_ahead = of("ring", 3)
    assert simulated(
        Given(one_ahead, np.array([[300.0, 100, 100]] * 3), {"context": 130.0})
    ).exposed["context"].tolist()[0] == [0, 0, 0, 30]


def test_neighbours_wait_for_a_slow_rank():
    ring = of("ring", 4)
    found = simulated(
        Given(ring, even(ring), {"context": 0.0}), conditions=Disturbances(slow={2: 2.0}), rows=True
    )
    # A hop is posted when a step begins, and both ends have to post it: rank 2 posts its third at
    # 400, and its neighbours are there at 300.
    assert found.end.tolist() == [400, 500, 800, 500]
    assert found.late.tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 100],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 100],
    ]
    assert found.exposed["context"].sum() == 0
    rows = together([(0, found)])
    waits = rows[(rows["phase"] == KINDS.index("wait")) & (rows["late_us"] > 0)]
    assert sorted(zip(waits["rank"], waits["step"], waits["peer"], strict=True)) == [
        (1, 3, 2),
        (3, 3, 2),
    ]


def test_an_outer_hop_has_a_turn_of_the_inner_ring_to_arrive():
    rings = of("hierarchical_ring", 4, 2)
    hidden = simulated(Given(rings, even(rings), {INNER: 50.0, OUTER: 200.0}))
    assert hidden.duration == 400
    exposed = simulated(Given(rings, even(rings), {INNER: 50.0, OUTER: 260.0}))
    assert exposed.duration == 460
    assert exposed.exposed[OUTER].tolist() == [[0, 0, 0, 60, 0]] * 4
    assert exposed.exposed[INNER].sum() == 0


def test_a_flat_ring_waits_for_the_link_between_nodes_everywhere():
    class Across(Given):
        def cost(self, number, channel, ranks, transfer):  # noqa: ARG002
            per_node = self.spmd.schedule.per_node
            outer = transfer.source // per_node != ranks // per_node
            return np.zeros(len(ranks)), np.where(outer, 150.0, 10.0), outer, np.zeros(len(ranks))

    ring = of("ring", 4, 2)
    found = simulated(Across(ring, even(ring)))
    assert found.duration > 400 + 3 * 40
    assert simulated(Given(ring, even(ring), {"context": 150.0})).duration == found.duration


def test_a_collective_begins_with_the_last_rank_and_ends_for_all():
    gather = of("all_gather", 3)
    found = simulated(
        Given(gather, even(gather), {"context": 40.0}), start=np.array([0.0, 30.0, 70.0]), rows=True
    )
    assert found.end.tolist() == [210, 210, 210]
    assert found.late[:, 1].tolist() == [70, 40, 0]
    assert found.exposed["context"][:, 1].tolist() == [40, 40, 40]
    waits = [row for row in together([(0, found)]) if row["phase"] == KINDS.index("wait")]
    assert [int(row["peer"]) for row in waits] == [2, 2, -1]


def test_the_next_part_of_the_heads_is_gathered_during_computation():
    gather = of("all_gather", 4, chunks=2)
    found = simulated(Given(gather, even(gather), {"context": 40.0}))
    assert found.duration == 240
    backward = simulated(
        Given(gather, even(gather, 100, "backward"), {"context": 40.0}, direction="backward")
    )
    # Only the gradients of the second part are exposed.
    assert backward.duration == 280


def test_gradients_of_a_part_leave_once_those_of_the_part_before_have():
    gather = of("all_gather", 4, chunks=2)

    def backward(link):
        others = {Shards: 5.0, Reduce: 7.0, Cut: 3.0}
        return simulated(
            Given(
                gather,
                even(gather, 100, "backward"),
                {"context": link},
                direction="backward",
                others=others,
            )
        ).duration

    # Two kernels, what is cut before and after each, the first gather and the last return.
    assert backward(40.0) == 40 + 2 * (3 + 100 + 5) + 40
    # The link has the keys of the second part until 260, and then the first gradients, until 390.
    # The second part is computed at 363.
    assert backward(130.0) == 390 + 5 + 130


def test_parts_of_a_hierarchical_gather_follow_one_another():
    gather = of("hierarchical_all_gather", 4, 2)
    found = simulated(Given(gather, even(gather), {INNER: 30.0, OUTER: 50.0}))
    assert found.duration == 180
    assert found.exposed[INNER][:, 1].tolist() == [80] * 4


def test_head_trades_block():
    trading = of("all_gather", 4, heads=4)
    others = dict.fromkeys((ToHeads, FromTokens, ToTokens, FromHeads), 5.0)
    found = simulated(Given(trading, even(trading), {"heads": 25.0}, others=others))
    assert found.duration == 100 + 2 * (25 + 2 * 5)
    assert found.exposed["heads"].sum() == 4 * 50


def test_gradients_come_home_one_hop_behind():
    ring = of("ring", 3)
    found = simulated(
        Given(
            ring, even(ring, 100, "backward"), {"context": 90.0}, direction="backward", merge_us=5.0
        )
    )
    # The gradient of the first step is posted at 105 and has the link to 195, the second hop of
    # keys from then to 285; step 2 waits for it from 210 on. The last gradient arrives at 375,
    # before that step ends.
    assert found.end.tolist() == [390] * 3
    assert found.exposed["context"].tolist() == [[0, 0, 0, 75]] * 3


def test_columns_are_summed_during_the_first_step_and_during_backward():
    ring = of("ring", 4)
    found = simulated(Given(ring, even(ring), {"context": 10.0}, columns_us=30.0, sum_us=150.0))
    assert found.duration == 4 * 100 + 50 + 30
    assert found.spent["columns"][:, 0].tolist() == [30] * 4
    backward = simulated(
        Given(
            ring,
            even(ring, 100, "backward"),
            {},
            direction="backward",
            columns_us=30.0,
            sum_us=300.0,
        )
    )
    assert backward.duration == 430


def test_messages_take_their_share_of_the_gpu_from_attention():
    ring = of("ring", 2)
    found = simulated(Given(ring, even(ring), {"context": 60.0}, share=0.25))
    # 60 us at three quarters of the speed, 55 at full speed; then no message is under way.
    assert found.attention.tolist() == [[115.0, 100.0]] * 2


def test_a_host_that_is_behind_leaves_gaps():
    ring = of("ring", 2)
    found = simulated(Given(ring, even(ring, 10.0), host=50.0))
    assert found.spent["gap"].tolist() == [[0, 50, 40]] * 2
    assert found.duration == 110


def test_jitter_depends_on_the_seed_and_affects_messages_only():
    ring = of("ring", 4)
    plain, again, other = (
        simulated(
            Given(ring, even(ring), {"context": 120.0}),
            conditions=Disturbances(jitter=0.3, seed=seed),
        )
        for seed in (1, 1, 2)
    )
    assert plain.end.tolist() == again.end.tolist() != other.end.tolist()
    assert plain.attention.tolist() == even(ring).tolist()


@pytest.mark.parametrize("heads", [1, 2])
def test_jitter_of_a_collective_is_the_same_for_all_its_ranks(heads):
    """Ranks 0, 2 and 1, 3 gather keys if pairs of ranks share heads."""
    gather = of("all_gather", 4, heads=heads)
    found = simulated(
        Given(gather, even(gather), {"context": 40.0}), conditions=Disturbances(jitter=0.3, seed=1)
    )
    waits = found.exposed["context"].sum(1).tolist()
    assert waits[:heads] * (4 // heads) == waits
    assert len(set(waits)) == heads, "groups draw their own jitter"
    assert 40.0 not in waits


class Random(Given):
    """A case with all times drawn from a seed."""

    def draw(self, *key) -> np.random.Generator:
        return np.random.default_rng(
            [
                zlib.crc32(repr([k if isinstance(k, str) else int(k) for k in key]).encode()),
                self.seed,
            ]
        )

    seed = 0

    def one(
        self, number: int, rank: int, direction: str, peers: int | None, outer: bool
    ) -> tuple[float, float, bool, float]:
        lowest = rank if peers is None else peers
        rng = self.draw(direction, number, lowest)
        latency, busy = rng.uniform(0, 20), rng.uniform(0, 150)
        return latency, busy, outer, float(self.draw(number, rank).uniform(0, 0.4))

    def cost(self, number, channel, ranks, transfer):  # noqa: ARG002
        found = []
        for rank in ranks:
            peers = None if transfer.peers is None else int(transfer.peers[rank])
            found.append(
                self.one(
                    number, rank, self.direction, peers, crosses(self.spmd.schedule, rank, transfer)
                )
            )
        latency, busy, outer, share = (np.array(values) for values in zip(*found, strict=True))
        return latency, busy, outer, share


def crosses(schedule: Schedule, rank: int, transfer: SpmdTransfer) -> bool:
    if transfer.source is not None:
        return bool(transfer.source[rank] // schedule.per_node != rank // schedule.per_node)
    return transfer.first.channel == OUTER


CASES = [
    ("ring", 4, 2, {}),
    ("ring", 5, 8, {"prefetch": 2}),
    ("ring", 4, 4, {"circulates": "queries"}),
    ("ring", 6, 3, {"circulates": "queries", "prefetch": 3}),
    ("hierarchical_ring", 6, 2, {}),
    ("hierarchical_ring", 8, 4, {"prefetch": 2}),
    ("hierarchical_ring", 6, 3, {"circulates": "queries"}),
    ("hierarchical_ring", 8, 2, {"circulates": "queries", "prefetch": 2}),
    ("all_gather", 4, 2, {}),
    ("all_gather", 4, 4, {"chunks": 2}),
    ("hierarchical_all_gather", 6, 2, {"chunks": 2}),
    ("hierarchical_all_gather", 8, 4, {"chunks": 4}),
    ("all_gather", 4, 4, {"heads": 4}),
    ("all_gather", 8, 4, {"heads": 2, "chunks": 2}),
    ("ring", 8, 4, {"heads": 2}),
    ("hierarchical_ring", 8, 4, {"heads": 2, "circulates": "queries"}),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("exchange", "workers", "per_node", "options"), CASES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_equal_to_an_event_loop(exchange, workers, per_node, options, direction, seed):
    spmd = of(exchange, workers, per_node, **options)
    schedule = spmd.schedule
    rng = np.random.default_rng(seed)
    us = rng.uniform(0, 200, (workers, len(spmd.steps(direction)))) * (
        rng.random((workers, len(spmd.steps(direction)))) < 0.9
    )
    prices = Random(spmd, us, direction=direction, merge_us=7.0)
    prices.seed = seed
    found = simulated(prices, rows=True)
    moves = {m.number: m for step in spmd.steps(direction) for m in (*step.post, *step.send)}

    def costs(number: int, rank: int) -> tuple[float, float, bool, float]:
        # Peers and nodes from the rank's own schedule.
        steps = getattr(schedule, direction)[rank]
        (t,) = (t for step in steps for t in step.transfers if t.number == number)
        peers = min(t.peers) if t.peers else None
        outer = (
            t.channel == OUTER
            if t.source is None
            else t.source // schedule.per_node != rank // schedule.per_node
        )
        return prices.one(number, rank, direction, peers, outer)

    loop = EventLoop(schedule, direction, lambda rank, step: float(us[rank, step]), 7.0, costs)
    assert found.end == pytest.approx([rank.end for rank in loop.ranks], abs=1e-6)
    rows = together([(0, found)])
    for kind in ("attention", "merge"):
        mine = rows[rows["phase"] == KINDS.index(kind)]
        expected = sorted(
            (r, step, a, b - a)
            for r, rank in enumerate(loop.ranks)
            for k, step, a, b in rank.spans
            if k == kind
        )
        told = sorted((row["rank"], row["step"], row["start_us"], row["dur_us"]) for row in mine)
        assert np.array(told) == pytest.approx(np.array(expected), abs=1e-3)
    assert len(moves) == len({number for _, number in loop.ops})
    _bins_fill_the_pass(found)


def _bins_fill_the_pass(found: PassTimes) -> None:
    assert found.elapsed.sum(1) == pytest.approx(found.end - found.start)
    assert all(
        (table >= 0).all() for table in (*found.spent.values(), found.late, *found.exposed.values())
    )


def test_rows_agree_with_the_tables():
    spmd = of("hierarchical_ring", 8, 4)
    us = np.random.default_rng(3).uniform(50, 150, (8, 8))
    prices = Random(
        spmd,
        us,
        direction="forward",
        merge_us=3.0,
        index_us=11.0,
        columns_us=9.0,
        sum_us=5.0,
        host=60.0,
    )
    found = simulated(prices, rows=True, conditions=Disturbances(slow={3: 1.3}, jitter=0.1))
    _bins_fill_the_pass(found)
    rows = together([(4, found)], case=2, iteration=7)
    assert set(rows["layer"]) == {4, -1}
    assert (rows["case"] == 2).all()
    computing = rows[
        np.isin(
            rows["phase"],
            [
                KINDS.index(k)
                for k in ("index", "wait", "attention", "columns", "merge", "arrange", "gap")
            ],
        )
    ]
    for rank in range(8):
        mine = np.sort(computing[computing["rank"] == rank], order="start_us")
        # One after the other, without gaps or overlaps.
        assert mine["start_us"][1:] == pytest.approx(
            (mine["start_us"] + mine["dur_us"])[:-1], abs=1e-2
        )
    for link, table in found.exposed.items():
        waits = rows[(rows["phase"] == KINDS.index("wait")) & (rows["link"] == LINKS.index(link))]
        assert (waits["dur_us"] - waits["late_us"]).sum() == pytest.approx(table.sum(), abs=1e-2)
    sent = rows[rows["phase"] == KINDS.index("send")]
    assert len(sent) == 8 * (7 + 1)
    schedule = spmd.schedule
    for rank in range(8):
        named = [(t.to, t.sends[0]) for step in schedule.forward[rank] for t in step.post]
        own = sent[(sent["rank"] == rank) & (sent["payload"] != 6)]
        assert sorted(zip(own["peer"].tolist(), own["shard"].tolist(), strict=True)) == sorted(
            named
        )
    assert DIRECTIONS[int(sent["direction"][0])] == "forward"
