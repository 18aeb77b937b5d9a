"""Schedules: for every rank the steps of an exchange, as plain data.

A schedule is made without a process group. The executor (`exchange.py`) follows it; tests check it; profiler and simulator read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """One message of one rank.

    kind: ``p2p`` (to one peer while the same payload arrives from another), ``all_gather`` or ``reduce_scatter`` (whole context group).
    payload: ``kv`` or ``dkv``. sends, receives: the key shards that leave and arrive. to, source: context ranks, for p2p.
    """

    kind: str
    payload: str
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    to: int | None = None
    source: int | None = None


@dataclass(frozen=True)
class Step:
    """What a rank does between two waits.

    compute: key shards whose attention with the local queries is computed, in one kernel call.
    before: transfers that must be complete before the computation. during: posted before it, complete after it.
    after: posted after the computation, complete before the computation of the next step is added to (or the end).
    """

    compute: tuple[int, ...]
    before: tuple[Transfer, ...] = ()
    during: tuple[Transfer, ...] = ()
    after: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """forward[rank] and backward[rank] are the steps of that rank. keeps[rank]: the key shard it holds between forward and backward."""

    exchange: str
    workers: int
    forward: tuple[tuple[Step, ...], ...]
    backward: tuple[tuple[Step, ...], ...]
    keeps: tuple[int, ...]


def all_gather(workers: int) -> Schedule:
    """All keys and values reach every rank in one collective; gradients return in one reduce-scatter. One kernel call a pass."""
    everyone = tuple(range(workers))

    def steps(rank: int, backward: bool) -> tuple[Step, ...]:
        if workers == 1:
            return (Step(compute=(0,)),)
        gather = Transfer("all_gather", "kv", sends=(rank,), receives=tuple(s for s in everyone if s != rank))
        scatter = Transfer("reduce_scatter", "dkv", sends=tuple(s for s in everyone if s != rank), receives=(rank,))
        return (Step(compute=everyone, before=(gather,), after=(scatter,) if backward else ()),)

    return Schedule(
        "all_gather",
        workers,
        tuple(steps(r, False) for r in everyone),
        tuple(steps(r, True) for r in everyone),
        everyone,
    )


def ring(workers: int) -> Schedule:
    """Key shards travel from rank to rank while the ones at hand are computed.

    Forward: rank r computes shard r - t in step t and passes it on to r + 1. Backward runs the other way round, from the shard that arrived
    last (r + 1), so that each shard is home in the last step together with its complete gradient: workers - 1 hops for keys and for
    gradients alike.
    """
    w = workers

    def forward(rank: int) -> tuple[Step, ...]:
        steps = []
        for t in range(w):
            now, following = (rank - t) % w, (rank - t - 1) % w
            move = Transfer("p2p", "kv", (now,), (following,), to=(rank + 1) % w, source=(rank - 1) % w)
            steps.append(Step((now,), during=(move,) if t < w - 1 else ()))
        return tuple(steps)

    def backward(rank: int) -> tuple[Step, ...]:
        steps = []
        for t in range(w):
            now, following = (rank + 1 + t) % w, (rank + 2 + t) % w
            kv, dkv = (
                Transfer("p2p", payload, (now,), (following,), to=(rank - 1) % w, source=(rank + 1) % w) for payload in ("kv", "dkv")
            )
            last = t == w - 1
            steps.append(Step((now,), during=() if last else (kv,), after=() if last else (dkv,)))
        return tuple(steps)

    ranks = range(w)
    return Schedule("ring", w, tuple(map(forward, ranks)), tuple(map(backward, ranks)), tuple((r + 1) % w for r in ranks))


_SCHEDULES: dict[str, Callable[[int], Schedule]] = {"all_gather": all_gather, "ring": ring}


def make_schedule(exchange: str, workers: int) -> Schedule:
    """The schedule of an exchange over a context group of `workers` ranks."""
    if exchange not in _SCHEDULES:
        raise ValueError(f"topology.exchange={exchange}: no such exchange; allowed: auto, {', '.join(_SCHEDULES)}")
    return _SCHEDULES[exchange](workers)
