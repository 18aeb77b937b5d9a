"""Represent the schedules of all ranks by rank 0's schedule.

Ranks form a torus of nodes and local ranks, on which each rank does what rank 0 does, shifted to
its own position. So one schedule, with arrays over ranks for peers, stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.parallel.schedule import GRADIENTS, HEADS, SUM, Schedule, ScheduleStep, Transfer


@dataclass(frozen=True, eq=False)
class SpmdTransfer:
    """One transfer of all ranks.

    first: rank 0's transfer.
    to, source: [workers], the rank to which and from which each sends and receives.
    peers: [workers], the lowest rank in each rank's collective; None for a p2p message.
    arriving, leaving: the groups whose shards rank 0 receives and sends; None for a collective.
    """

    first: Transfer
    to: IntArray | None
    source: IntArray | None
    peers: IntArray | None
    arriving: int | None = None
    leaving: int | None = None

    @property
    def number(self) -> int:
        return self.first.number

    @property
    def queue(self) -> tuple[str, bool]:
        """The communicator: its name, and whether it carries gradients, one after another."""
        if self.first.kind == SUM:
            return "whole", False
        return self.first.channel, self.first.payload in GRADIENTS


@dataclass(frozen=True, eq=False)
class SpmdStep:
    """One step of all ranks; see `schedule.ScheduleStep` for the other fields.

    queries: the group whose queries rank 0 computes; None without attention.
    keys: the groups whose keys rank 0 computes, or `EVERYTHING`; None without attention.
    part: (i, n): rank 0 computes the i-th of n equal parts of the heads.
    """

    queries: int | None
    keys: tuple[int, ...] | None
    part: tuple[int, int]
    post: tuple[SpmdTransfer, ...]
    send: tuple[SpmdTransfer, ...]


EVERYTHING = (-1,)


@dataclass(frozen=True)
class RankGrid:
    """The torus of ``nodes`` x ``size`` groups, whose ``heads`` ranks split the heads (Ulysses)."""

    nodes: int
    size: int
    heads: int

    @staticmethod
    def of(schedule: Schedule) -> RankGrid:
        groups = schedule.workers // schedule.heads
        per_node = schedule.per_node
        if schedule.heads > 1:
            per_node = min(groups, max(1, schedule.per_node // schedule.heads))
        nodes = -(-groups // per_node) if schedule.traits.hierarchical else 1
        return RankGrid(nodes, groups // nodes, schedule.heads)

    @property
    def workers(self) -> int:
        return self.nodes * self.size * self.heads

    @cached_property
    def _own(self) -> tuple[IntArray, IntArray]:
        """Node and local number of each rank's group."""
        return np.divmod(np.arange(self.workers) // self.heads, self.size)

    def groups_of(self, group: int) -> IntArray:
        """Translate a group, as numbered by rank 0, into that of each rank, [workers]."""
        own, (node, local) = self._own, divmod(group, self.size)
        return (own[0] + node) % self.nodes * self.size + (own[1] + local) % self.size

    def seen_from(self, group: int, values: IntArray) -> IntArray:
        """Order values of groups by their nodes and places before ``group``, [nodes, size]."""
        node, local = divmod(group, self.size)
        backwards = values.reshape(self.nodes, self.size)[::-1, ::-1]
        return np.roll(backwards, (node + 1, local + 1), (0, 1))

    def ranks_of(self, rank: int) -> IntArray:
        """Translate a peer of rank 0 into that of each rank, [workers]."""
        assert rank % self.heads == 0
        place = np.arange(self.workers) % self.heads
        return self.groups_of(rank // self.heads) * self.heads + place


@dataclass(frozen=True, eq=False)
class SpmdSchedule:
    schedule: Schedule
    grid: RankGrid
    forward: tuple[SpmdStep, ...]
    backward: tuple[SpmdStep, ...]

    @staticmethod
    def of(schedule: Schedule) -> SpmdSchedule:
        """Represent a schedule by that of rank 0.

        Raises:
            ConfigError: a rank does not send to the ranks that rank 0 sends to, seen from itself.
        """
        grid = RankGrid.of(schedule)
        assert grid.workers == schedule.workers
        maker = _SpmdStepMaker(grid)
        forward, backward = (
            tuple(map(maker.step, steps)) for steps in (schedule.forward[0], schedule.backward[0])
        )
        last = schedule.workers - 1
        for steps, every in ((forward, schedule.forward), (backward, schedule.backward)):
            for rank in {min(1, last), schedule.workers // 2, last}:  # all would take W^2 time
                for step, own in zip(steps, every[rank], strict=True):
                    messages = zip((*step.post, *step.send), (*own.post, *own.send), strict=True)
                    if any(m.to is not None and m.to[rank] != t.to for m, t in messages):
                        raise ConfigError(
                            f"topology.exchange={schedule.exchange}: cannot be predicted, because "
                            f"rank {rank} does not do what rank 0 does, relative to its own number"
                        )
        return SpmdSchedule(schedule, grid, forward, backward)

    def steps(self, direction: str) -> tuple[SpmdStep, ...]:
        return self.backward if direction == "backward" else self.forward

    def transfers(self, direction: str) -> dict[int, SpmdTransfer]:
        steps = self.steps(direction)
        return {sent.number: sent for step in steps for sent in (*step.post, *step.send)}

    def parts_of(self, step: SpmdStep) -> IntArray:
        """Return the part of the heads that each rank computes, [workers]."""
        own = step.part[1] // self.grid.heads
        return np.arange(self.grid.workers) % self.grid.heads * own + step.part[0]

    def column_sum(self, first: Transfer) -> SpmdTransfer:
        """Return the all-reduce of gathered columns among ranks of the same heads."""
        return SpmdTransfer(first, None, None, np.arange(self.grid.workers) % self.grid.heads)


class _SpmdStepMaker:
    def __init__(self, grid: RankGrid) -> None:
        self.grid, self.of_node = grid, grid.size * grid.heads
        # Shared arrays: costs and timeline recognize peers by their identity.
        self._ranks = lru_cache(None)(grid.ranks_of)
        self._lowest = lru_cache(None)(self._lowest_peers)

    def step(self, step: ScheduleStep) -> SpmdStep:
        heads = self.grid.heads
        queries = step.queries[0] // heads if step.queries else None
        everything = len(step.keys) == self.grid.workers
        groups = tuple(dict.fromkeys(key // heads for key in step.keys)) or None
        keys = EVERYTHING if everything else groups
        post, send = (tuple(map(self._transfer, transfers)) for transfers in (step.post, step.send))
        return SpmdStep(queries, keys, step.part, post, send)

    def _transfer(self, t: Transfer) -> SpmdTransfer:
        if t.to is None or t.source is None:
            return SpmdTransfer(t, None, None, self._lowest(t.payload == HEADS, t.peers))
        arriving, leaving = (shards[0] // self.grid.heads for shards in (t.receives, t.sends))
        to, source = self._ranks(t.to), self._ranks(t.source)
        return SpmdTransfer(t, to, source, None, arriving, leaving)

    def _lowest_peers(self, of_heads: bool, peers: tuple[int, ...]) -> IntArray:
        ranks, heads, of_node = np.arange(self.grid.workers), self.grid.heads, self.of_node
        if of_heads:
            return ranks // heads * heads
        # Without a table [peers, workers]: all ranks, the ranks of a node, counterparts of nodes.
        if peers == tuple(range(0, self.grid.workers, heads)):
            return ranks % heads
        if peers == tuple(range(0, of_node, heads)):
            return ranks // of_node * of_node + ranks % heads
        if peers == tuple(range(0, self.grid.workers, of_node)):
            return ranks % of_node
        return np.min([self.grid.ranks_of(peer) for peer in peers], axis=0)
