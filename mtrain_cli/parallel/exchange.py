"""Exchanges bring keys and values to queries; a plan says which pairs a rank computes at a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import map_tensors, packed, to_device, unpacked
from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest, Kernel
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.partials import accumulation_dtype, add_sinks, sink_gradient
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Buffer, Side
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout, Placement, early_queries
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.operations import QueryMessage, RunningAttention
from mtrain_cli.parallel.program import (
    Keys,
    Operation,
    Part,
    Program,
    Recompute,
    Shard,
    Whole,
)
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, Recorder
from mtrain_cli.parallel.schedule import (
    Schedule,
    ScheduleOptions,
    make_schedule,
    with_stages,
)
from mtrain_cli.parallel.transport import Buffers, Transport
from mtrain_cli.parallel.wide_copy import part_of_heads
from mtrain_cli.sparsity.pattern import MaskedPositions

Saved = tuple[Tensor, ...]


@dataclass(frozen=True)
class ShardTiles:
    """What each kernel call of one rank computes for a batch.

    tiles: the query-key pairs that the masks allow (`Tiles`), by the call's (queries,
        keys). They are made once per batch, and all layers share them.
    """

    tiles: dict[tuple[Shard, Keys], Tiles]
    placement: Placement
    rows: tuple[CastRows, CastRows] | None = None  # of forward and backward
    index: Index | None = None
    _narrow: dict[tuple, Tiles] = field(default_factory=dict, repr=False, compare=False)

    def under(self, index: Index | None) -> ShardTiles:
        return ShardTiles(self.tiles, self.placement, self.rows, index)

    def for_pair(
        self, queries: Shard, keys: Keys, part: Part = (0, 1), *, columns: bool = True
    ) -> Tiles:
        """Return the tiles of queries and keys, narrowed by the index."""
        if self.index is None:
            return self.tiles[queries, keys]
        key = queries, keys, part, columns
        if (narrowed := self._narrow.get(key)) is None:
            index = self.index.part(*part)
            if not columns and isinstance(index, VerticalSlash):
                index = index.without_columns()
            narrowed = self._narrow[key] = self.tiles[queries, keys].with_index(index)
        return narrowed


@dataclass(eq=False)
class Executor:
    """Runs the program of one pass of one layer's attention on this rank.

    An operation must not keep a tensor, which would add to the next kernel's peak memory.

    tensors: one per live buffer. Pooled buffers return to the pool when an operation frees them.
    widths: heads of the tensors that Ulysses trades together.
    """

    exchange: Exchange
    program: Program
    transport: Transport
    tiles: ShardTiles
    columns: SharedColumns | None
    kernel: Kernel
    scale: float
    tensors: dict[Buffer, Any]
    message: QueryMessage | None = None
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = self.exchange.buffers
        self.high = accumulation_dtype(next(iter(self.tensors.values())).dtype)
        self.message_dtype = torch.bfloat16 if self.exchange.schedule.rounds else self.high

    def run(self, operations: Iterable[Operation]) -> None:
        tensors, pooled = self.tensors, self.program.pooled
        for op in operations:
            op.run(self)
            for buffer in op.frees:
                # A step without pairs has no results.
                tensor = tensors.pop(buffer, None)
                if tensor is not None and buffer in pooled:
                    self.buffers.release(tensor)
                del tensor

    @property
    def rows(self) -> CastRows:
        assert self.tiles.rows is not None, "a group cast needs a plan of its rows"
        return self.tiles.rows[self.transport.direction == BACKWARD]

    def total(self, buffer: Buffer) -> RunningAttention:
        """Return the running attention output of a buffer; the first call creates it."""
        if buffer not in self.tensors:
            self.tensors[buffer] = RunningAttention(self.tensors[buffers.Q])
        return self.tensors[buffer]


class Exchange:
    """One way of moving keys and values, bound to a layout, a context group and a schedule.

    shared_columns: whether a ring gathers the KV of the index's single columns once per pass. If
        True, the ring's steps compute block diagonals only.
    """

    def __init__(
        self,
        layout: Layout,
        group: ContextGroup,
        schedule: Schedule,
        *,
        shared_columns: bool = True,
    ) -> None:
        assert layout.workers == group.size == schedule.workers, (
            "A layout and a schedule are made for their context group."
        )
        self.placement = Placement(layout, schedule.heads)
        self.group, self.schedule = group, schedule
        self.part: Part = (group.rank % schedule.heads, schedule.heads)
        self.own = Shard(group.rank // schedule.heads)
        self.gathers_columns = shared_columns and not schedule.gathers and schedule.groups > 1
        self.buffers = Buffers()
        self.recorder: Recorder | None = None
        self.kv_heads = 0  # of the model; the first forward pass sets it
        self._programs: dict[tuple[bool, Traits], Program] = {}
        self._staged: dict[tuple[int, int], Exchange] = {}

    @property
    def name(self) -> str:
        return self.schedule.exchange

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def inside(self) -> Layout:
        return self.placement.inside

    def placed(self, layout: Layout | None) -> Placement:
        if layout is None or layout is self.layout:
            return self.placement
        assert (layout.workers, layout.padded_seq) == (self.layout.workers, self.layout.padded_seq)
        return Placement(layout, self.schedule.heads)

    def set_recorder(self, recorder: Recorder | None) -> None:
        for exchange in (self, *self._staged.values()):
            exchange.recorder = recorder

    def with_stages(self, forward: int, backward: int) -> Exchange:
        """Return this exchange with other stages of its group casts. It shares the buffers."""
        stages = forward, backward
        if stages == (self.schedule.stages, self.schedule.stages_backward):
            return self
        if stages not in self._staged:
            other = self._staged[stages] = copy(self)
            other.schedule = with_stages(self.schedule, *stages)
            other._programs, other._staged = {}, {}
        return self._staged[stages]

    def program(self, *, backward: bool, traits: Traits | None = None) -> Program:
        key = backward, traits or Traits()
        if key not in self._programs:
            rank = self.group.rank
            self._programs[key] = lower(self.schedule, rank, backward=backward, traits=traits)
        return self._programs[key]

    @property
    def foreign_queries(self) -> bool:
        """Whether this rank also computes attention for other ranks' queries."""
        return self.schedule.heads > 1 or self.schedule.queries_travel

    def cast_rows(
        self, masks: Sequence[SequenceMask], inside: Layout, block: int | None
    ) -> tuple[CastRows, CastRows] | None:
        """Return the rows that this rank's group casts move in forward and backward, if any."""
        if not self.schedule.traits.by_mask or self.schedule.groups == 1:
            return None
        return CastRows.make(inside, masks, self.own.number, self.schedule, block)

    def needed_tiles(
        self, *, indexed: bool, forward_only: bool = False
    ) -> dict[tuple[Shard, Keys], None]:
        """Return the (queries, keys) of all tiles that `forward` and `backward` need, in order."""
        passes = (False,) if forward_only else (False, True)
        computes = (op for b in passes for op in self.program(backward=b).computes)
        needed: dict[tuple[Shard, Keys], None] = {(op.queries, op.keys): None for op in computes}
        if indexed and self.gathers_columns:
            # Local queries attend to gathered columns anywhere in the sequence.
            needed[self.own, Whole()] = None
        return needed

    def columns_of(self, shard_tiles: ShardTiles) -> SharedColumns | None:
        """Return the index's columns that this rank gathers, once per pass."""
        if not self.gathers_columns or shard_tiles.index is None:
            return None
        pairs = (shard_tiles.for_pair(self.own, keys, self.part) for keys in (Whole(), self.own))
        return SharedColumns.make(*pairs)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shard_tiles: ShardTiles,
        kernel: Kernel,
        scale: float,
        label: str = "",
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Saved]:
        """Return out, lse [batch, heads, tokens], and the tensors that `backward` needs.

        sinks: [heads], see `add_sinks`. Each rank adds those of the heads that it computes.
        """
        run = self._begin_forward(q, k, v, shard_tiles, kernel, scale, label)
        operations = run.program.operations
        if sinks is not None:
            stop = run.program.inside.stop
            run.run(operations[:stop])
            whole = run.tensors[buffers.OUT], run.tensors[buffers.LSE]
            own = part_of_heads(sinks, self.part, 0)
            run.tensors[buffers.OUT], run.tensors[buffers.LSE] = add_sinks(*whole, own)
            operations = operations[stop:]
        run.run(operations)
        run.transport.end()
        out, lse = (run.tensors[name] for name in run.program.results)
        return out, lse, tuple(run.tensors[name] for name in run.program.saved)

    def backward(
        self,
        dout: Tensor,
        saved: Saved,
        shard_tiles: ShardTiles,
        kernel: Kernel,
        scale: float,
        label: str = "",
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return dq, dk and dv, then dsinks, to which each rank adds what it computes."""
        traits = Traits(self.columns_of(shard_tiles) is not None)
        tensors = dict(zip(self.program(backward=False, traits=traits).saved, saved, strict=True))
        tensors[buffers.DOUT.on(self._side)] = dout
        run = self._begin(BACKWARD, tensors, shard_tiles, kernel, scale, label)
        operations, more = run.program.operations, []
        if sinks is not None:
            start = run.program.inside.start
            run.run(operations[:start])
            dsinks = torch.zeros_like(sinks)
            own, made = (part_of_heads(of_heads, self.part, 0) for of_heads in (sinks, dsinks))
            out, lse, dout = (tensors[name] for name in (buffers.OUT, buffers.LSE, buffers.DOUT))
            made.copy_(sink_gradient(out, lse, dout, own))
            operations, more = operations[start:], [dsinks]
        run.run(operations)
        run.transport.end()
        return *(tensors[name] for name in run.program.results), *more

    def _begin_forward(self, q, k, v, *call) -> Executor:
        self.kv_heads = k.shape[2]
        inputs = (buffer.on(self._side) for buffer in (buffers.Q, buffers.K, buffers.V))
        return self._begin(FORWARD, dict(zip(inputs, (q, k, v), strict=True)), *call)

    def _begin(self, direction, tensors, shard_tiles, kernel, scale, label) -> Executor:
        columns, backward = self.columns_of(shard_tiles), direction == BACKWARD
        traits = Traits(columns is not None)
        program = self.program(backward=backward, traits=traits)
        names = self.group, self.name, label, direction
        transport = Transport(*names, program.steps, self.recorder)
        return Executor(self, program, transport, shard_tiles, columns, kernel, scale, tensors)

    @property
    def _side(self) -> Side:
        return Side.INSIDE if self.schedule.heads == 1 else Side.OWN

    def kept_for_recompute(self, saved: Saved, early: int) -> Saved:
        """Return the tensors to keep if `recompute` computes only the first ``early`` queries.

        These are out and lse of the later queries. If ``early`` is 0, a ring also keeps its single
        columns, and the KV of another rank that it holds: fetching this KV again would stall the
        backward pass, and with grouped heads it takes fewer bytes than this rank's own activations.
        """
        _, keys, out, lse, *columns = saved
        if early:
            # Clone: a view would keep the whole tensor alive.
            return out[:, early:].clone(), lse[..., early:].clone()
        return (out, lse, *columns) if self._ends_with_own_keys else (out, lse, *columns, keys)

    @property
    def _ends_with_own_keys(self) -> bool:
        """Whether forward ends with the keys of this rank, which recomputation makes anyway."""
        rank = self.group.rank
        return rank in self.schedule.keeps[rank]

    def recompute(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Saved, early: int, *call: Any
    ) -> tuple[Tensor, Saved]:
        """Restore the results of `forward` from what `kept_for_recompute` kept.

        Compute attention for the first ``early`` queries only. If ``early`` is not 0, all ranks
        exchange KV again as in forward. call: the other arguments of `forward`.
        """
        what = Recompute.of(early, self.schedule.heads)
        if what is Recompute.NOTHING:
            return self._restored(q, k, v, kept)
        run = self._begin_forward(q, k, v, *call)
        program, tensors = run.program.recomputed(what), run.tensors
        operations, inside = program.operations, program.inside
        run.run(operations[: inside.start])
        if early:
            q = tensors[buffers.Q]
            tensors[buffers.Q] = q[:, :early].contiguous()
            run.run(operations[inside])
            out = torch.cat([tensors[buffers.OUT], kept[0]], 1)
            lse = torch.cat([tensors[buffers.LSE], kept[1]], 2)
            _, keys, _, _, *columns = (tensors[name] for name in run.program.saved)
            saved = q, keys, out, lse, *columns
        else:
            q, k, v = (tensors[buffer] for buffer in (buffers.Q, buffers.K, buffers.V))
            out, saved = self._restored(q, k, v, kept)
        tensors[buffers.OUT] = out
        run.run(operations[inside.stop :])
        run.transport.end()
        return tensors[run.program.results[0]], saved

    def _restored(self, q: Tensor, k: Tensor, v: Tensor, kept: Saved) -> tuple[Tensor, Saved]:
        out, lse, *columns = kept
        keys = torch.stack([k, v]) if self._ends_with_own_keys else columns.pop()
        return out, (q, keys, out, lse, *columns)


def make_exchange(
    name: str, layout: Layout, group: ContextGroup, *, shared_columns: bool = True, **options: Any
) -> Exchange:
    """Make an exchange by name. options: fields of `ScheduleOptions`, such as ``prefetch``."""
    sizes = ScheduleOptions(group.size, group.per_node, heads=group.heads, **options)
    return Exchange(layout, group, make_schedule(name, sizes), shared_columns=shared_columns)


def make_chosen_exchange(choice: ExchangeChoice, layout: Layout, group: ContextGroup) -> Exchange:
    names = "chunks", "prefetch", "circulates", "stages", "stages_backward", "shared_columns"
    options = {name: getattr(choice, name) for name in (*names, "rounds")}
    return make_exchange(choice.name, layout, group, **options)


@dataclass(frozen=True, repr=False)
class Plan:
    """What one rank computes for one batch, in every layer.

    early: number of queries that recomputation computes again, counted from this rank's first; the
        first forward pass keeps out and lse of the others. None if it keeps nothing.
    pairs: number of query-key pairs that this rank computes under the masks, before any index, per
        head and layer. A pair for 1/n of the heads counts as 1/n.
    """

    placement: Placement
    schedule: Schedule
    rank: int
    masks: tuple[SequenceMask, ...]
    forward: Program
    backward: Program
    tiles: ShardTiles
    early: int | None
    early_tiles: ShardTiles | None
    masked: MaskedPositions | None
    allowed_pairs: int
    pairs: float
    buffer: Tensor | None = None

    @staticmethod
    def make(
        exchange: Exchange,
        masks: Sequence[SequenceMask],
        request: IndexRequest | None = None,
        *,
        layout: Layout | None = None,
        keep: float = 0.0,
    ) -> Plan:
        """Make a plan on the host, without the device or other ranks.

        keep: share of this rank's queries whose out and lse the first forward pass keeps for
            recomputation, counted from the last query.
        """
        placement, rank = exchange.placed(layout), exchange.group.rank
        block = masked = tables = None
        if request is not None:
            block, outer = request.block, placement.layout
            shards = [outer.positions(worker) for worker in range(outer.workers)]
            masked = MaskedPositions.make(masks, block, shards, rank, bitmap=request.bitmap)
            tables = masked.tables
        queries = placement.inside.tokens_per_worker
        early = early_queries(queries, keep, block)
        moved = exchange.cast_rows(masks, placement.inside, block)

        def tiles(rows: int | None) -> ShardTiles:
            needed = exchange.needed_tiles(indexed=block is not None, forward_only=rows is not None)
            keys = {keys for pair in needed for keys in pair}
            positions = {key: positions_of(placement.inside, key, moved) for key in keys}
            made = {
                (q, k): Tiles.between(masks, positions[q][:rows], positions[k], tables)
                for q, k in needed
            }
            if tables is None:  # find the rectangles here, not in the first call of a kernel
                _ = [pair.slices for pair in made.values()]
            return ShardTiles(made, placement, moved)

        forward, whole = exchange.program(backward=False), tiles(None)
        recomputes_all = early == queries
        return Plan(
            placement=placement,
            schedule=exchange.schedule,
            rank=rank,
            masks=tuple(masks),
            forward=forward,
            backward=exchange.program(backward=True),
            tiles=whole,
            early=None if recomputes_all else early,
            early_tiles=None if recomputes_all or not early else tiles(early),
            masked=masked,
            allowed_pairs=sum(mask.pairs for mask in masks),
            pairs=sum(
                whole.tiles[op.queries, op.keys].pairs / op.part[1] for op in forward.computes
            ),
        )

    def pinned(self) -> Plan:
        """Return the plan with its tables in one pinned buffer, for one asynchronous copy."""
        parts, buffer = packed(self._parts, pin=True)
        return replace(self, **parts, buffer=buffer)

    def to(self, device: torch.device | str) -> Plan:
        """Return the plan with its tables on a device, without waiting for the copies."""
        if self.buffer is None:
            parts = map_tensors(self._parts, lambda tensor: to_device(tensor, device))
        else:
            parts = unpacked(self._parts, self.buffer, device)
        return replace(self, **parts, buffer=None)

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tiles", "early_tiles", "masked")}

    def __repr__(self) -> str:
        """Name the layout, and count the pairs of each step of forward."""
        layout, exchange = self.placement.inside, self.schedule.exchange
        lines = [
            f"Plan of rank {self.rank} of {self.schedule.workers}: {exchange}, {layout.name}, "
            f"{layout.tokens_per_worker:,} queries per sequence"
        ]
        for op in self.forward.computes:
            pairs = self.tiles.tiles[op.queries, op.keys].pairs
            lines.append(f"step {op.step}: {op.queries} x {op.keys}: {pairs:,} pairs")
        return "\n".join(lines)


def positions_of(
    layout: Layout, keys: Keys, rows: tuple[CastRows, CastRows] | None = None
) -> IntArray:
    """Return the global positions of these tokens, ascending, int64[tokens]."""
    if isinstance(keys, Shard):
        return layout.positions(keys.number)
    if rows is not None:
        if isinstance(keys, Whole):
            return rows[0].keys.positions
        of_pass = next(of for of in rows if len(of.stages) == keys.of)
        return of_pass.of_stage(keys.number).positions
    assert isinstance(keys, Whole), "a stage is a part of a group cast"
    return np.arange(layout.padded_seq, dtype=np.int64)
