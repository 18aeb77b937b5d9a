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
    Merge,
)
from mtrain_cli.parallel.program import Operation
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.parallel.schedule import OUTER, SUM, Schedule, ScheduleOptions, make_schedule
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.simulation.costs import PricedMessage
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdTransfer
from mtrain_cli.simulation.timeline import NOT_SLOW, PassTimes, play, together


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
    launch: float = 0.0
    estimate: float = 0.0

    def attention(self, step):
        return self.attention_us[:, step]

    def copy(self, op):
        if isinstance(op, Merge):
            return self.merge_us
        return self.others.get(type(op), 0.0)

    def index_us(self):
        return self.estimate

    def host(self, what):
        return self.launch if what == "step" else 0.0

    def column_times(self):
        return np.full(self.spmd.grid.workers, self.columns_us), {}

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


def simulated(prices: Given, *, slow=NOT_SLOW, rows: bool = False, start=None) -> PassTimes:
    spmd = prices.spmd
    program = lower(
        spmd.schedule,
        0,
        backward=prices.direction == "backward",
        traits=Traits(columns=prices.columns_us > 0),
    )
    return play(program, spmd, prices, start=start, slow=slow, rows=rows)


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


def test_neighbours_wait_for_a_slow_rank():
    ring = of("ring", 4)
    found = simulated(Given(ring, even(ring), {"context": 0.0}), slow={2: 2.0}, rows=True)
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
    found = simulated(Given(ring, even(ring, 10.0), launch=50.0))
    assert found.spent["gap"].tolist() == [[0, 50, 40]] * 2
    assert found.duration == 110


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
    tables = (*found.spent.values(), found.late, *found.exposed.values())
    assert np.sum(tables, axis=(0, 2)) == pytest.approx(found.end - found.start)
    assert all((table >= 0).all() for table in tables)


def test_rows_agree_with_the_tables():
    spmd = of("hierarchical_ring", 8, 4)
    us = np.random.default_rng(3).uniform(50, 150, (8, 8))
    prices = Random(
        spmd,
        us,
        direction="forward",
        merge_us=3.0,
        estimate=11.0,
        columns_us=9.0,
        sum_us=5.0,
        launch=60.0,
    )
    found = simulated(prices, rows=True, slow={3: 1.3})
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
