"""Collect recorded spans, work and loads of experts of all workers on rank 0, as rows."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import FullLayers
from mtrain_cli.parallel import recording
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.schedule import STAGE
from mtrain_cli.records.expert_loads import ROW as LOADS
from mtrain_cli.records.record_files import PAYLOADS, ROW, WORDS
from mtrain_cli.simulation.work_counts import StepWork, WorkCounter
from mtrain_cli.training.batch import MixedAttention
from mtrain_cli.training.router_batches import OwnLoads

if TYPE_CHECKING:
    import pandas

    from mtrain_cli.training.trainer import Trainer

_PINGS = 16


@dataclass(frozen=True)
class Clock:
    """Rank 0's monotonic clock minus this rank's in seconds, and a bound on the error."""

    offset: float
    uncertainty: float


def boots_of_all(workers: int, group: dist.ProcessGroup) -> list[str]:
    """Return the boot id of every rank's machine. Ranks with equal ids share a clock."""
    boot_ids: list[str] = [""] * workers
    dist.all_gather_object(boot_ids, _boot(), group=group)
    return boot_ids


def align_clocks(rank: int, boots: Sequence[str], group: dist.ProcessGroup) -> Clock:
    """Measure the offset of this rank's clock. All ranks must call this function.

    Rank 0 asks each rank on another machine for its time, between request and reply, several times:
    the fastest round trip gives the best offset. boots: result of `boots_of_all`.
    """
    mine = Clock(0.0, 0.0)
    for other in [r for r in range(len(boots)) if boots[r] != boots[0]]:
        if rank == 0:
            best = (float("inf"), 0.0)
            for _ in range(_PINGS):
                asked = time.perf_counter()
                dist.send(torch.zeros(1, dtype=torch.float64), other, group=group)
                theirs = torch.zeros(1, dtype=torch.float64)
                dist.recv(theirs, other, group=group)
                answered = time.perf_counter()
                best = min(best, ((answered - asked) / 2, (asked + answered) / 2 - float(theirs)))
            dist.send(torch.tensor(best, dtype=torch.float64), other, group=group)
        elif rank == other:
            for _ in range(_PINGS):
                dist.recv(torch.zeros(1, dtype=torch.float64), 0, group=group)
                dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), 0, group=group)
            estimate = torch.zeros(2, dtype=torch.float64)
            dist.recv(estimate, 0, group=group)
            mine = Clock(float(estimate[1]), float(estimate[0]))
    return mine


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


# `ROW`, and fields that identify a message, to find it in the rows of other ranks.
_TAGS = ("to", "source", "first", "peers")
RAW = np.dtype([*ROW.descr, ("number", np.int32), *((name, np.int16) for name in _TAGS)])
# The work of one worker: (micro-batch, layer) -> direction -> work.
Work = dict[tuple[int, int], dict[str, StepWork]]


class RecordCollector:
    """Record this rank's iterations, and collect the records of all ranks on rank 0.

    rank: of this process in torch.distributed.
    host_group: of all processes; None for one without torch.distributed.
    ranks: the process of each worker, if rows number the workers otherwise.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        device: torch.device,
        host_group: dist.ProcessGroup | None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.workers, self.host_group = rank, workers, host_group
        self._numbers = None if ranks is None else np.append(np.argsort(ranks), -1)
        self.boots = [_boot()] if host_group is None else boots_of_all(workers, host_group)
        self.clock, self.uncertainty = Clock(0.0, 0.0), 0.0
        self.recorder = recording.Recorder(device)

    def start(self) -> None:
        """Start an iteration. With several machines, align the clocks again, because they drift."""
        if self.host_group is not None and len(set(self.boots)) > 1:
            self.clock = align_clocks(self.rank, self.boots, self.host_group)
        self.uncertainty = max(self.uncertainty, self.recorder.start() + self.clock.uncertainty)

    def collect(
        self, case: int, iteration: int, work: Work, flop: tuple[float, float]
    ) -> np.ndarray:
        """Return the rows of all ranks in the last iteration on rank 0; none on other ranks.

        Args:
            work: work of this rank in the iteration.
            flop: number of FLOP per query-key pair, (forward, backward).
        """
        spans = recording.with_gaps(self.recorder.read())
        mine = own_rows(spans, self.rank, self.clock.offset, work, flop)
        if self._numbers is not None:
            for name in ("rank", "peer", "to", "source", "first"):
                mine[name] = self._numbers[mine[name]]  # -1 stays
        everyone: list[np.ndarray | None] | None = [None] * self.workers if self.rank == 0 else None
        if self.host_group is None:
            everyone = [mine]
        else:
            dist.gather_object(mine, everyone, group=self.host_group)
        if everyone is None:
            return np.empty(0, ROW)
        rows = merge_ranks([table for table in everyone if table is not None])
        rows["case"], rows["iteration"] = case, iteration
        return rows


def own_rows(
    spans: Sequence[recording.Span], rank: int, offset: float, work: Work, flop: tuple[float, float]
) -> np.ndarray:
    """Turn the spans of one rank into rows of dtype `RAW`, with start_us on rank 0's clock."""
    table = np.zeros(len(spans), RAW)
    table["rank"], table["peer"] = rank, -1
    counted: set[tuple[int, int, str, int, str]] = set()
    for row, span in zip(table, spans, strict=True):
        message = span.message
        row["micro"], row["layer"], row["step"] = span.micro, span.layer, span.step
        row["direction"], row["phase"] = _DIRECTION[span.direction], _KIND[span.kind]
        row["link"], row["payload"] = _LINK[message.link], _PAYLOAD[message.payload]
        row["start_us"], row["dur_us"] = (span.start + offset) * 1e6, span.seconds * 1e6
        row["shard"] = message.leaving if span.kind == recording.SEND else message.shard
        if span.kind in (recording.SEND, recording.RECEIVE, recording.WAIT):
            row["number"], row["to"], row["source"] = message.number, message.to, message.source
            row["first"], row["peers"] = min(message.peers, default=-1), len(message.peers)
            row["bytes"] = message.size
            leaves = span.kind == recording.SEND or message.source < 0
            row["peer"] = message.to if leaves else message.source
        elif span.kind in (recording.ATTENTION, recording.COLUMNS):
            # Several kernel calls may share one count of work: for example, the single columns
            # before and those after the steps. Count that work once.
            step = span.step if span.kind == recording.ATTENTION else -1
            key = span.micro, span.layer, span.direction, step, span.kind
            recomputes = span.direction == recording.RECOMPUTE
            direction = recording.FORWARD if recomputes else span.direction
            done = work.get((span.micro, span.layer), {}).get(direction)
            if done is None or key in counted:
                continue
            counted.add(key)
            if span.kind == recording.ATTENTION:
                row["blocks"], row["pairs"] = done.blocks[0, step], done.pairs[0, step]
            else:
                row["columns"], row["pairs"] = done.columns[0], done.column_pairs[0]
            row["flop"] = float(row["pairs"]) * flop[span.direction == recording.BACKWARD]
    return table


def merge_ranks(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Join the rows of all ranks as dtype `ROW`: start_us from the start, peer and late_us set."""
    table = np.concatenate(tables)
    if not len(table):
        return np.empty(0, ROW)
    _find_late(table)
    _find_late_hops(table)
    table["start_us"] -= table["start_us"].min()
    merged = np.zeros(len(table), ROW)
    for name in ROW.names or ():
        merged[name] = table[name]
    return merged


_DIRECTION, _KIND, _LINK, _PAYLOAD = (
    {word: code for code, word in enumerate(words)}
    for words in (recording.DIRECTIONS, recording.KINDS, WORDS["link"], PAYLOADS)
)
_PASS = ["micro", "layer", "direction", "payload"]


def _find_late(table: np.ndarray) -> None:
    """Set peer and late_us of waits."""
    # A message starts when its last participant posts it. `late_us` is the part of a wait before
    # this start, and `peer` is that participant.
    import pandas

    more = "phase rank number to source first peers link start_us dur_us"
    columns = [*_PASS, *more.split()]
    rows = pandas.DataFrame({name: table[name] for name in columns})
    waits = rows[rows.phase == _KIND[recording.WAIT]].drop(columns="phase")
    posted = rows[rows.phase == _KIND[recording.SEND]].drop(columns=["phase", "dur_us"])
    hops = posted[posted.to >= 0].sort_values([*_PASS, "rank", "number"])
    # In a pass, the k-th message that a rank sends to a peer is the k-th that the peer receives.
    hops["sent"] = hops.groupby([*_PASS, "rank", "to"]).cumcount()
    hops["taken"] = hops.groupby([*_PASS, "rank", "source"]).cumcount()
    mine = waits.reset_index().merge(
        hops[[*_PASS, "rank", "number", "sent", "taken"]], on=[*_PASS, "rank", "number"]
    )
    # Join the time at which the source posted the message to this rank. Then join the time at which
    # the receiver of this rank's message posted its own.
    for end, back, mine_of, its in (
        ("source", "to", "taken", "sent"),
        ("to", "source", "sent", "taken"),
    ):
        theirs = hops[[*_PASS, "rank", back, its, "start_us"]].rename(
            columns={"rank": end, back: "rank", its: mine_of}
        )
        keys = [*_PASS, "rank", end, mine_of]
        mine = mine.merge(theirs, on=keys, how="left", suffixes=("", f"_{end}"))
    from_source, from_to = (
        mine[name].fillna(-np.inf).to_numpy() for name in ("start_us_source", "start_us_to")
    )
    later = np.where(from_to > from_source, mine.to, mine.source)
    _note(table, mine, np.maximum(from_source, from_to), later)
    among = [*_PASS, "link", "number", "first", "peers"]
    collectives = posted[posted.to < 0].sort_values("start_us")
    last = collectives.drop_duplicates(among, keep="last")[[*among, "rank", "start_us"]]
    waiting = waits[waits.peers > 0].reset_index()
    mine = waiting.merge(last, on=among, suffixes=("", "_last"))
    others = np.where(mine.rank_last == mine["rank"], -1, mine.rank_last)
    _note(table, mine, mine.start_us_last.to_numpy(), others)


def _find_late_hops(table: np.ndarray) -> None:
    """Set late_us of waits for a stage of a pipeline: the part before its pass has ended."""
    phase, forward = table["phase"], table["direction"] == _DIRECTION[recording.FORWARD]
    passes = table[phase == _KIND[recording.STAGE]]
    ends = {
        (row["rank"], row["micro"], row["step"], row["direction"]): row["start_us"] + row["dur_us"]
        for row in passes
    }
    waits = (phase == _KIND[recording.WAIT]) & (table["link"] == _LINK[STAGE])
    for at in np.flatnonzero(waits & (table["source"] >= 0)):
        row = table[at]
        sender = row["step"] + (-1 if forward[at] else 1)
        ended = ends.get((row["source"], row["micro"], sender, row["direction"]), row["start_us"])
        table["late_us"][at] = np.clip(ended - row["start_us"], 0, row["dur_us"])


def _note(table: np.ndarray, waits: pandas.DataFrame, posted: np.ndarray, peer: np.ndarray) -> None:
    at = waits["index"].to_numpy()
    table["late_us"][at] = np.clip(posted - waits.start_us.to_numpy(), 0, waits.dur_us.to_numpy())
    table["peer"][at] = peer


class Estimated(NamedTuple):
    """What attention computed in a micro-batch.

    indices: the indices by layer; None for dense attention.
    others: the layers with other masks or without an index, by kind; empty if all are alike.
    """

    layout: Layout
    masks: Sequence[SequenceMask]
    indices: Mapping[int, Index] | None
    others: tuple[FullLayers, ...] = ()


def estimated(attend: ContextAttention | MixedAttention) -> Estimated:
    if isinstance(attend, MixedAttention):
        full = FullLayers(attend.full.plan.masks, attend.full_layers, attend.layers)
        return estimated(attend.window)._replace(others=(full,))
    indices = None if attend.index is None else attend.index.estimated
    return Estimated(attend.plan.placement.layout, attend.plan.masks, indices)


def own_work(
    exchange: Exchange, heads: int, layers: Sequence[int], micro_batches: Sequence[Estimated]
) -> Work:
    """Return the work of this worker, in micro-batches of ``layers``."""
    rank = exchange.group.rank
    work: Work = {}
    for micro, (layout, masks, indices, others) in enumerate(micro_batches):
        every = frozenset(layers)
        first = every.difference(*(other.layers for other in others))
        kinds = [(masks, first, indices), *((o.masks, o.layers & every, None) for o in others)]
        block = next(iter(indices.values())).block if indices else None
        for of_kind, numbers, of_layers in kinds:
            counter = WorkCounter.make(
                exchange.schedule,
                layout,
                of_kind,
                heads,
                block,
                shared_columns=exchange.gathers_columns,
            )
            if of_layers is None:
                dense = counter.count(None, rank)
                work |= {(micro, layer): dense for layer in numbers}
            else:
                work |= {(micro, n): counter.count(index, rank) for n, index in of_layers.items()}
    return work


def expert_workers(trainer: Trainer) -> int:
    """Return the number of workers over which a run deals the experts of a layer."""
    return 1 if trainer.experts is None else trainer.experts.size


def own_loads(own: OwnLoads | None, case: int, step: int, rank: int) -> np.ndarray:
    """Return the loads of a worker's tokens in a training step as rows of `expert_loads`."""
    if own is None:
        return np.empty(0, LOADS)
    tokens = own.counts()
    rows = np.zeros(tokens.size, LOADS)
    layers, experts = np.indices(tokens.shape).reshape(2, -1)
    rows["case"], rows["step"], rows["rank"] = case, step, rank
    rows["layer"], rows["expert"] = np.array(own.layers, np.int64)[layers], experts
    rows["tokens"] = tokens.reshape(-1)
    return rows
