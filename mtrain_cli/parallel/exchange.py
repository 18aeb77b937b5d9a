"""Exchanges: how keys and values reach the queries of a context group. Each executes a schedule, with any kernel.

k and v travel packed in one message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and gradients are added in float32 (float64
where the inputs are); gradients also travel in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.kernel import Kernel, accumulation_dtype, merge, row_delta
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.shared_columns import SharedColumns
from mtrain_cli.attention.tiles import BlockGeometry, Tiles
from mtrain_cli.attention.transfer import to_device
from mtrain_cli.launch import whereabouts
from mtrain_cli.parallel.layout import Joined, Layout
from mtrain_cli.parallel.mail import Buffers, Mail, naming
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, BACKWARD, COLUMNS, FORWARD, MERGE, Recorder
from mtrain_cli.parallel.schedule import CONTEXT, KV, QUERIES, Options, Schedule, Step, Steps, Transfer, make_schedule

Shards = tuple[int, ...]
Saved = tuple[torch.Tensor, ...]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WHOLE_SEQUENCE = (-1,)  # in place of key shards: all of them, in sequence order


@dataclass(frozen=True)
class Work:
    """What one rank computes under the masks of a batch: the tiles of every pair of query and key shards that its steps name.

    Made once per batch. `under` narrows all of it by the dynamic index of one layer.
    """

    tiles: dict[tuple[Shards, Shards], Tiles]
    index: Index | None = None
    _narrow: dict[tuple, Tiles] = field(default_factory=dict, repr=False, compare=False)

    def under(self, index: Index | None) -> Work:
        return Work(self.tiles, index)

    def of(self, queries: Shards, keys: Shards, part: tuple[int, int] = (0, 1), *, columns: bool = True) -> Tiles:
        """part: (i, n), the i-th of n equal parts of the heads. columns: whether single columns of the index count, too."""
        tiles = self.tiles[queries, keys]
        if self.index is None:
            return tiles
        key = (queries, keys, part, columns)
        if key not in self._narrow:
            index = self.index.part(*part)
            if not columns and isinstance(index, VerticalSlash):
                index = index.without_columns()
            self._narrow[key] = tiles.under(index)
        return self._narrow[key]


class Exchange(ABC):
    """One way of moving keys and values, bound to a layout and a context group.

    part: (i, n), which part of the heads of the model its ranks work on, where others hold the rest.
    """

    def __init__(self, layout: Layout, group: ContextGroup, schedule: Schedule, part: tuple[int, int] = (0, 1)) -> None:
        assert layout.workers == group.size == schedule.workers, "A layout and a schedule are made for their context group."
        self.layout = layout
        self.group = group
        self.schedule = schedule
        self.part = part
        self.forward_steps: Steps = schedule.forward[group.rank]
        self.backward_steps: Steps = schedule.backward[group.rank]
        self.buffers = Buffers()
        self.recorder: Recorder | None = None

    @property
    def name(self) -> str:
        return self.schedule.exchange

    def record(self, recorder: Recorder | None) -> None:
        """Has the times of all later passes recorded, until it is called with None."""
        self.recorder = recorder

    @property
    def foreign_queries(self) -> bool:
        """Whether this rank computes attention of other ranks' queries, too."""
        return False

    @property
    def gathers_columns(self) -> bool:
        """Whether single columns of an index are gathered once, and computed apart from the steps."""
        return False

    @abstractmethod
    def named_tiles(self, *, indexed: bool, forward_only: bool = False) -> set[tuple[Shards, Shards]]:
        """Which tiles `forward`, and unless it is ``forward_only`` `backward`, ask for."""

    @property
    def queries(self) -> int:
        """How many queries of a sequence this rank computes for, where it shares heads those of all ranks that it shares them with."""
        return self.layout.tokens_per_worker

    @property
    def rebuilds_alone(self) -> bool:
        """Whether `again` needs no other rank where nothing is computed again."""
        return True

    def work(
        self, masks: Sequence[SequenceMask], device: torch.device | str, block: int | None = None, *, early: int | None = None
    ) -> Work:
        """masks: one per sequence of the batch. block: of the dynamic index that will narrow it, if any. early: only what a forward pass
        of the first so many queries of this rank asks for.

        Raises:
            ValueError: a shard does not consist of whole blocks of the index.
        """
        named = sorted(self.named_tiles(indexed=block is not None, forward_only=early is not None))
        positions = {shards: self._positions(shards) for pair in named for shards in pair}
        everything = self._positions(WHOLE_SEQUENCE)
        geometry = None if block is None else BlockGeometry.make(masks, everything, everything, block, device)
        tiles = {}
        for queries, keys in named:
            rows = positions[queries][:early]
            spans = [mask.spans(rows, positions[keys]) for mask in masks]
            between = None if geometry is None else geometry.between(rows, positions[keys], masks[0].padded)
            tiles[queries, keys] = Tiles.make(spans, device, between)
        return Work(tiles)

    def pairs(self, work: Work) -> float:
        """Query-key pairs that the masks leave this rank, per head and layer; a pair for a part of the heads counts as that part."""
        return sum(work.tiles[self._tile(step)].pairs / self._part(step)[1] for step in self.forward_steps if step.keys)

    @abstractmethod
    def _tile(self, step: Step) -> tuple[Shards, Shards]:
        """Under which name `Work` has what a step computes."""

    def _positions(self, shards: Shards):
        """Global positions of the slots of a shard, ascending."""
        if shards == WHOLE_SEQUENCE:
            return np.arange(self.layout.padded_seq, dtype=np.int64)
        (shard,) = shards
        return self.layout.positions(shard)

    def _part(self, step: Step) -> tuple[int, int]:
        """The part of a step's heads among all heads of the model."""
        return self.part[0] * step.part[1] + step.part[0], self.part[1] * step.part[1]

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, kernel: Kernel, scale: float, what: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """-> out like q, lse, and what this rank saves for `backward`. what: for messages, such as ``layer 3``."""

    @abstractmethod
    def backward(self, dout: torch.Tensor, saved: Saved, work: Work, kernel: Kernel, scale: float, what: str = "") -> Triple:
        """-> dq, dk, dv of this rank's own queries, keys and values."""

    def kept(self, saved: Saved, early: int) -> Saved:
        """What of ``saved`` stays for `again`, which computes the first ``early`` queries once more: output and lse of the later ones.

        Of all queries, also the keys and values that came from other ranks: with grouped heads they are fewer bytes than what comes from
        here, and fetching them again would stop the backward pass.
        """
        _, keys, out, lse, *columns = saved
        if early:
            # Copies, or the whole would stay.
            return out[:, early:].clone(), lse[..., early:].clone()
        return (out, lse) if self._keys_are_own else (out, lse, keys, *columns)

    def again(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kept: Saved,
        early: int,
        work: Work,
        kernel: Kernel,
        scale: float,
        what: str = "",
    ) -> tuple[torch.Tensor, Saved]:
        """A forward pass once more, by what stayed of it (`kept`) -> out and what `backward` takes, as `forward` gave it.

        work: of the early queries (`work`). Only these are computed; where there are any, keys travel as they did before, on all ranks.
        """
        if not early:
            out, lse, *travelled = kept
            keys, *columns = travelled or [torch.stack([k, v])]
            return out, (q, keys, out, lse, *columns)
        late, late_lse = kept
        first, first_lse, saved = self.forward(q[:, :early].contiguous(), k, v, work, kernel, scale, what)
        out, lse = torch.cat([first, late], 1), torch.cat([first_lse, late_lse], 2)
        return out, (q, saved[1], out, lse, *saved[4:])

    @property
    def _keys_are_own(self) -> bool:
        """Whether the keys that `forward` saves are this rank's own."""
        return True

    @contextmanager
    def _mail(self, what: str, direction: str) -> Iterator[Mail]:
        """The transfers of one pass; all of them are complete at its end."""
        steps = self.forward_steps if direction == FORWARD else self.backward_steps
        mail = Mail(self.group, self.name, what, direction, len(steps), self.recorder)
        yield mail
        mail.finish()
        whereabouts.note(f"after {mail.what}")


class Gathering(Exchange):
    """Keys and values are gathered in sequence order, one part of the heads after the other; their gradients return by reduce-scatter."""

    def named_tiles(self, *, indexed: bool, forward_only: bool = False) -> set[tuple[Shards, Shards]]:  # noqa: ARG002 - the same for all
        return {((self.group.rank,), WHOLE_SEQUENCE)}

    def _tile(self, step: Step) -> tuple[Shards, Shards]:
        return step.queries, WHOLE_SEQUENCE

    def forward(self, q, k, v, work, kernel, scale, what=""):
        parts = []
        with self._mail(what, FORWARD) as mail:
            with mail.span(ARRANGE):
                packed = torch.stack([k, v])
            for step, keys, values in self._gathered(mail, self.forward_steps, packed):
                tiles = work.of(*self._tile(step), self._part(step))
                with mail.span(ATTENTION):
                    parts.append(kernel.forward(_heads(q, step.part, 2), keys, values, tiles, scale))
            outs, lses = zip(*parts, strict=True)
            with mail.span(ARRANGE):
                out, lse = _joined(outs, 2), _joined(lses, 1)
        return out, lse, (q, packed, out, lse)

    def backward(self, dout, saved, work, kernel, scale, what=""):
        q, packed, out, lse = saved
        high = accumulation_dtype(packed.dtype)
        queries, gradients = [], []
        with self._mail(what, BACKWARD) as mail:
            for step, keys, values in self._gathered(mail, self.backward_steps, packed):
                tiles = work.of(*self._tile(step), self._part(step))
                with mail.span(ARRANGE):
                    dout_part, q_part, out_part = (_heads(t, step.part, 2).contiguous() for t in (dout, q, out))
                    lse_part = _heads(lse, step.part, 1).contiguous()
                with mail.span(ATTENTION):
                    dq, dk, dv = kernel.backward(dout_part, q_part, keys, values, out_part, lse_part, None, tiles, scale)
                del keys, values
                queries.append(dq)
                with mail.span(ARRANGE):
                    gradients.append(self._returned(mail, step.send, dk, dv, high) if step.send else torch.stack([dk, dv]))
        dk, dv = _joined(gradients, 3).to(packed.dtype)
        return _joined(queries, 2), dk, dv

    def _gathered(self, mail: Mail, steps: Steps, packed: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        """-> every step with its keys and values [batch, padded_seq, kv_heads of the part, head_dim], once they are complete."""
        coming: dict[int, tuple[Transfer, torch.Tensor]] = {}
        for at, step in enumerate(steps):
            mail.begin(at)
            for transfer in step.post:
                # The second collective of a pair sends on what the first one brought.
                mine = _heads(packed, transfer.part, 3) if transfer.after is None else coming[transfer.after][1]
                coming[transfer.number] = transfer, mail.gather(transfer, mine)
            for number in step.wait:
                mail.wait(number)
            if not step.wait:
                yield step, packed[0], packed[1]
                continue
            transfer, shards = coming.pop(step.wait[-1])
            with mail.span(ARRANGE):
                if transfer.after is not None:
                    # [ranks of the node, nodes, ...] -> rank order
                    coming.pop(transfer.after)
                    shards = shards.transpose(0, 1).flatten(0, 1)
                keys, values = (self.layout.to_sequence(shards[:, i]) for i in (0, 1))
            del shards
            yield step, keys, values

    def _returned(self, mail: Mail, sends: tuple[Transfer, ...], dk: torch.Tensor, dv: torch.Tensor, high: torch.dtype) -> torch.Tensor:
        """Begins to add up the gradients of all ranks; -> this rank's shard, complete when the pass has ended."""
        shape = (self.group.size, 2, dk.shape[0], self.layout.tokens_per_worker, *dk.shape[2:])
        shards = torch.empty(shape, dtype=high, device=dk.device)
        shards[:, 0] = self.layout.to_shards(dk)
        shards[:, 1] = self.layout.to_shards(dv)
        if len(sends) > 1:
            # rank order -> [ranks of the node, nodes, ...]
            shards = shards.unflatten(0, (-1, len(sends[0].peers))).transpose(0, 1).contiguous()
        for transfer in sends:
            shards = mail.scatter(transfer, shards)
        return shards


class Circulating(Exchange):
    """Shards circulate in rings; compute may be skipped where nothing is seen, communication never is.

    shared_columns: single columns of an index are gathered once, and leave block diagonals alone to the steps.
    """

    def __init__(
        self, layout: Layout, group: ContextGroup, schedule: Schedule, part: tuple[int, int] = (0, 1), *, shared_columns: bool = True
    ) -> None:
        super().__init__(layout, group, schedule, part)
        self.shared_columns = shared_columns and group.size > 1
        self.own: Shards = (group.rank,)

    @property
    def gathers_columns(self) -> bool:
        return self.shared_columns

    @property
    def foreign_queries(self) -> bool:
        return self.schedule.circulates == QUERIES

    @property
    def _keys_are_own(self) -> bool:
        return self.group.size == 1

    def named_tiles(self, *, indexed: bool, forward_only: bool = False) -> set[tuple[Shards, Shards]]:
        named = self.forward_steps if forward_only else (*self.forward_steps, *self.backward_steps)
        steps = {self._tile(step) for step in named if step.keys}
        # Shared columns are seen by the queries at hand among all keys.
        return steps | {(self.own, WHOLE_SEQUENCE)} if indexed and self.shared_columns else steps

    def _tile(self, step: Step) -> tuple[Shards, Shards]:
        return step.queries, step.keys

    def forward(self, q, k, v, work, kernel, scale, what=""):
        total = _Total(q)
        with self._mail(what, FORWARD) as mail:
            with mail.span(ARRANGE):
                packed = torch.stack([k, v])
            columns = _Columns.make(self, work, mail.what)
            if columns is not None:
                with mail.span(ARRANGE):
                    columns.gather(packed, mail)
            (last,) = self.schedule.keeps[self.group.rank]
            travel = _Travel(self.buffers, mail, self.forward_steps, {self.group.rank: packed}, KV, keep=last)
            for at, step in enumerate(self.forward_steps):
                mail.begin(at)
                keys = travel.begin(at)
                tiles = work.of(*self._tile(step), self._part(step), columns=columns is None)
                if not tiles.empty:
                    with mail.span(ATTENTION):
                        part = kernel.forward(q, keys[0], keys[1], tiles, scale)
                    with mail.span(MERGE):
                        total.add(*part)
                    del part
                if at == 0 and columns is not None:
                    packed_columns = columns.awaited(mail)
                    with mail.span(COLUMNS):
                        total.continued(*kernel.forward_columns(q, packed_columns, columns.shared, scale, total.partial()))
                travel.end(at)
            kept = travel.kept()
            with mail.span(ARRANGE):
                out, lse = total.result()
        return out, lse, (q, kept, out, lse, *(() if columns is None else (columns.packed(),)))

    def backward(self, dout, saved, work, kernel, scale, what=""):
        q, kept, out, lse, *gathered = saved
        high = accumulation_dtype(q.dtype)
        columns = _Columns.make(self, work, f"{self.name}, {what}, backward")
        with self._mail(what, BACKWARD) as mail:
            with mail.span(ARRANGE):
                # Kernels that derive it by themselves would not read it.
                delta = None if kernel.needs_out and columns is None else row_delta(out, dout)
            if columns is None:
                dq = torch.zeros(q.shape, dtype=high, device=q.device)
            else:
                assert delta is not None
                with mail.span(COLUMNS):
                    dq, of_columns = kernel.backward_columns(dout, q, gathered[0], lse, delta, columns.shared, scale)
                columns.give_back(of_columns, mail)
            run = self._backward_of_queries if self.schedule.circulates == QUERIES else self._backward_of_keys
            gradient = run(mail, (q, dout, out, lse, delta), kept, dq, work, kernel, scale, with_columns=columns is None)
            if columns is not None:
                columns.awaited(mail)
                with mail.span(COLUMNS):
                    columns.add_to(gradient)
            with mail.span(ARRANGE):
                dk, dv = gradient.to(kept.dtype, copy=True)
                dq = dq.to(q.dtype)
        self.buffers.give(gradient)
        return dq, dk, dv

    def _backward_of_keys(self, mail, rows, kept, dq, work, kernel, scale, *, with_columns):
        """-> gradient of this rank's keys and values; adds to dq."""
        q, dout, out, lse, delta = rows
        steps = self.backward_steps
        (start,) = self.schedule.keeps[self.group.rank]
        travel = _Travel(self.buffers, mail, steps, {start: kept}, KV)
        sums = _Sums(self.buffers, mail)
        for at, step in enumerate(steps):
            mail.begin(at)
            packed = travel.begin(at)
            tiles = work.of(*self._tile(step), self._part(step), columns=with_columns)
            gradient = sums.fresh(step.keys[0], packed.shape, dq.dtype, packed.device)
            if tiles.empty:
                gradient.zero_()
            else:
                with mail.span(ATTENTION):
                    part_q, part_k, part_v = kernel.backward(dout, q, packed[0], packed[1], out, lse, delta, tiles, scale)
                with mail.span(MERGE):
                    dq += part_q
                    gradient[0].copy_(part_k)
                    gradient[1].copy_(part_v)
            sums.exchange(step)
            travel.end(at)
        return sums.only(self.group.rank)

    def _backward_of_queries(self, mail, rows, kept, dq, work, kernel, scale, *, with_columns):
        """-> gradient of this rank's keys and values; adds to dq."""
        steps = self.backward_steps
        with mail.span(ARRANGE):
            message = _QueryMessage(rows, needs_out=kernel.needs_out)
        travel = _Travel(self.buffers, mail, steps, {self.group.rank: message.packed}, QUERIES)
        sums = _Sums(self.buffers, mail)
        gradient = self.buffers.like(kept, dq.dtype).zero_()
        for at, step in enumerate(steps):
            mail.begin(at)
            bundle = travel.begin(at)
            if step.queries:
                tiles = work.of(*self._tile(step), self._part(step), columns=with_columns)
                their = sums.fresh(step.queries[0], dq.shape, dq.dtype, dq.device)
                if tiles.empty:
                    their.zero_()
                else:
                    q, dout, out, lse, delta = message.unpack(bundle)
                    with mail.span(ATTENTION):
                        part_q, part_k, part_v = kernel.backward(dout, q, kept[0], kept[1], out, lse, delta, tiles, scale)
                    with mail.span(MERGE):
                        their.copy_(part_q)
                        gradient[0] += part_k
                        gradient[1] += part_v
            sums.exchange(step)
            travel.end(at)
        mine = sums.only(self.group.rank)
        dq += mine
        self.buffers.give(mine)
        return gradient


class SharedHeads(Exchange):
    """Ulysses: the ranks of a head group trade their tokens for a part of the heads of all of them, and then take part in another exchange
    as one (DeepSpeed-Ulysses, arXiv:2309.14509). Where there are fewer key-value heads than ranks, they are repeated.
    """

    def __init__(self, layout: Layout, group: ContextGroup, schedule: Schedule, inner: Exchange) -> None:
        super().__init__(layout, group, schedule)
        self.inner = inner
        self.heads = group.heads
        first = group.rank - group.rank % group.heads
        together = np.concatenate([layout.positions(r) for r in range(first, first + self.heads)])
        order = np.argsort(together, kind="stable")
        self._kv_heads = 0  # of the model, known from the first forward pass
        self._order, self._back = order, np.argsort(order)
        self._moved: dict[int, torch.Tensor] = {}

    def _on(self, order: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """On the device, where it is copied once."""
        if id(order) not in self._moved:
            self._moved[id(order)] = to_device(order, device)
        return self._moved[id(order)]

    def record(self, recorder: Recorder | None) -> None:
        super().record(recorder)
        self.inner.record(recorder)

    @property
    def foreign_queries(self) -> bool:
        return True

    @property
    def gathers_columns(self) -> bool:
        return self.inner.gathers_columns

    def named_tiles(self, *, indexed, forward_only=False):
        return self.inner.named_tiles(indexed=indexed, forward_only=forward_only)

    @property
    def queries(self) -> int:
        return self.inner.queries

    @property
    def rebuilds_alone(self) -> bool:
        return False

    def _tile(self, step: Step) -> tuple[Shards, Shards]:  # noqa: ARG002
        raise AssertionError("its tiles are those of the exchange inside")

    def work(self, masks, device, block=None, *, early=None):
        return self.inner.work(masks, device, block, early=early)

    def pairs(self, work: Work) -> float:
        return self.inner.pairs(work)

    def forward(self, q, k, v, work, kernel, scale, what=""):
        return self._traded(q, k, v, what, lambda q, k, v: self.inner.forward(q, k, v, work, kernel, scale, what))

    def kept(self, saved, early):
        return self.inner.kept(saved, early)

    def again(self, q, k, v, kept, early, work, kernel, scale, what=""):
        def inside(q, k, v):
            out, saved = self.inner.again(q, k, v, kept, early, work, kernel, scale, what)
            return out, saved[3], saved

        out, _, saved = self._traded(q, k, v, what, inside)
        return out, saved

    def _traded(self, q, k, v, what, attend):
        """attend: takes q, k, v of a part of the heads for the tokens of all ranks -> out, lse, saved."""
        with self._mail(what, FORWARD) as mail:
            parts = [_heads_for(t, self.heads) for t in (q, k, v)]
            mail.begin(0)
            q_part, k_part, v_part = self._to_heads(mail, self.forward_steps[0].post[0], parts)
            out, lse, saved = attend(q_part, k_part, v_part)
            mail.begin(len(self.forward_steps) - 1)
            (whole,) = self._to_tokens(mail, self.forward_steps[-1].post[0], [out])
            self._kv_heads = k.shape[2]
        return whole.flatten(2, 3), lse, saved

    def backward(self, dout, saved, work, kernel, scale, what=""):
        with self._mail(what, BACKWARD) as mail:
            mail.begin(0)
            (mine,) = self._to_heads(mail, self.backward_steps[0].post[0], [_heads_for(dout, self.heads)])
            gradients = self.inner.backward(mine, saved, work, kernel, scale, what)
            mail.begin(len(self.backward_steps) - 1)
            dq, dk, dv = self._to_tokens(mail, self.backward_steps[-1].post[0], list(gradients))
        return dq.flatten(2, 3), _added(dk, self._kv_heads), _added(dv, self._kv_heads)

    def _to_heads(self, mail: Mail, transfer: Transfer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """tensors [ranks, batch, tokens, heads of the rank, head_dim] -> [batch, tokens of all ranks ascending, heads, head_dim]."""
        with mail.span(ARRANGE):
            together = torch.cat(tensors, 3)
        arrived = mail.trade(transfer, together)
        with mail.span(ARRANGE):
            whole = arrived.transpose(0, 1).flatten(1, 2).index_select(1, self._on(self._order, arrived.device))
            return [t.contiguous() for t in whole.split([t.shape[3] for t in tensors], 2)]

    def _to_tokens(self, mail: Mail, transfer: Transfer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """tensors [batch, tokens of all ranks, heads, head_dim] -> [batch, tokens, ranks, heads, head_dim]."""
        with mail.span(ARRANGE):
            together = torch.cat(tensors, 2).index_select(1, self._on(self._back, tensors[0].device))
            leaving = together.unflatten(1, (self.heads, -1)).transpose(0, 1).contiguous()
        arrived = mail.trade(transfer, leaving)
        return list(arrived.permute(1, 2, 0, 3, 4).split([t.shape[2] for t in tensors], 3))


class _Total:
    """Attention over more and more keys."""

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q
        self._high = accumulation_dtype(q.dtype)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        self._out = self._out.to(self._high)
        merge(self._out, self._lse, out, lse)

    def partial(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._out is None or self._lse is None else (self._out, self._lse)

    def continued(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """out and lse contain what there was."""
        self._out, self._lse = out, lse

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        q = self._q
        if self._out is None or self._lse is None:
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=self._high, device=q.device)
            return torch.zeros_like(q), lse
        return self._out.to(q.dtype), self._lse


class _Travel:
    """The shards that circulate in one pass: what is at hand, and when its buffer is free again."""

    def __init__(
        self, buffers: Buffers, mail: Mail, steps: Steps, held: dict[int, torch.Tensor], payload: str, keep: int | None = None
    ) -> None:
        """keep: a shard that stays at hand to the end."""
        self._buffers, self._mail, self._steps, self._payload = buffers, mail, steps, payload
        self._held = held
        self._keep = keep
        self._foreign = set(held)  # not made here
        self._leaving: dict[int, int] = {}  # transfer -> shard
        self._last_use: dict[int, int] = {}
        for at, step in enumerate(steps):
            for shard in [*self._shards(step), *(s for t in step.post for s in t.sends)]:
                self._last_use[shard] = at

    def _shards(self, step: Step) -> Shards:
        return step.queries if self._payload == QUERIES else step.keys

    def begin(self, at: int) -> torch.Tensor:
        """Posts and awaits the transfers of a step; -> what it computes (anything if nothing)."""
        step = self._steps[at]
        for transfer in step.post:
            (leaving,), (arriving,) = transfer.sends, transfer.receives
            self._held[arriving] = self._buffers.like(self._held[leaving])
            self._leaving[transfer.number] = leaving
            self._mail.hop(transfer, self._held[leaving], self._held[arriving])
        for number in step.wait:
            self._mail.wait(number)
            self._leaving.pop(number)
        for shard in self._shards(step):
            return self._held[shard]
        return torch.empty(0)

    def end(self, at: int) -> None:
        """Frees what no later step uses, once it has been sent."""
        for shard in [s for s in self._held if self._last_use.get(s, -1) <= at and s not in self._leaving.values()]:
            if shard != self._keep:
                self._free(shard)

    def kept(self) -> torch.Tensor:
        """The shard that stays."""
        assert self._keep is not None
        return self._held[self._keep]

    def _free(self, shard: int) -> None:
        buffer = self._held.pop(shard)
        if shard not in self._foreign:
            self._buffers.give(buffer)


class _Sums:
    """Gradients of the shards that circulate, handed on and added up."""

    def __init__(self, buffers: Buffers, mail: Mail) -> None:
        self._buffers, self._mail = buffers, mail
        self._parts: dict[int, torch.Tensor] = {}
        self._under_way: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}  # transfer -> shard that arrives, its buffer, what left

    def fresh(self, shard: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for this rank's part of a shard's gradient, to be filled at once."""
        assert shard not in self._parts
        self._parts[shard] = self._buffers.take(shape, dtype, device)
        return self._parts[shard]

    def exchange(self, step: Step) -> None:
        """Adds what a step collects, and sends what it hands on."""
        for number in step.collect:
            self._mail.wait(number)
            shard, arrived, left = self._under_way.pop(number)
            self._buffers.give(left)
            if shard in self._parts:
                self._parts[shard] += arrived
                self._buffers.give(arrived)
            else:
                self._parts[shard] = arrived
        for transfer in step.send:
            (leaving,), (arriving,) = transfer.sends, transfer.receives
            left = self._parts.pop(leaving)
            arrived = self._buffers.like(left)
            self._under_way[transfer.number] = arriving, arrived, left
            self._mail.hop(transfer, left, arrived)

    def only(self, shard: int) -> torch.Tensor:
        """The complete gradient of the one shard that is left."""
        assert not self._under_way
        (found,) = self._parts
        assert found == shard
        return self._parts.pop(shard)


class _QueryMessage:
    """What a worker needs to compute gradients for another's queries, in one flat message: q, dout, lse, and out or delta."""

    def __init__(self, rows: tuple[torch.Tensor, ...], *, needs_out: bool) -> None:
        q, dout, out, lse, delta = rows
        self._needs_out = needs_out
        parts = [q, dout, lse, out if needs_out else delta]
        self._shapes = [(t.shape, t.dtype) for t in parts]
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in parts]
        self._sizes = [len(t) for t in flat]
        # Every part starts at a multiple of 256 bytes, as kernels like it.
        self._room = [-(-n // 256) * 256 for n in self._sizes]
        self.packed = torch.empty(sum(self._room), dtype=torch.uint8, device=q.device)
        for place, part in zip(self.packed.split(self._room), flat, strict=True):
            place[: len(part)] = part

    def unpack(self, packed: torch.Tensor) -> tuple[Any, ...]:
        """-> q, dout, out, lse, delta; what did not travel is q in place of out, or None in place of delta."""
        places = zip(packed.split(self._room), self._sizes, self._shapes, strict=True)
        q, dout, lse, last = (place[:n].view(dtype).view(shape) for place, n, (shape, dtype) in places)
        return (q, dout, last, lse, None) if self._needs_out else (q, dout, q, lse, last)


class _Columns:
    """The shared columns of one layer on their way between the ranks (`SharedColumns`). what: for messages."""

    def __init__(self, shared: SharedColumns, group: ContextGroup, what: str) -> None:
        self.shared = shared
        self._group = group
        self._what = f"{what}, shared columns"
        self._tensor: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @staticmethod
    def make(exchange: Circulating, work: Work, what: str) -> _Columns | None:
        """None where steps compute the columns themselves, or there are none."""
        if not exchange.shared_columns or work.index is None:
            return None
        whole, own = (work.of(exchange.own, keys, exchange.part) for keys in (WHOLE_SEQUENCE, exchange.own))
        shared = SharedColumns.make(whole, own)
        return None if shared is None else _Columns(shared, exchange.group, what)

    def gather(self, packed: torch.Tensor, mail: Mail) -> None:
        """Begins to bring the columns of all ranks together. packed: this rank's keys and values."""
        self._start(self.shared.pack(packed[0], packed[1]), mail)

    def give_back(self, gradients: torch.Tensor, mail: Mail) -> None:
        """Begins to add up the gradients of all ranks."""
        self._start(gradients, mail)

    def _start(self, tensor: torch.Tensor, mail: Mail) -> None:
        self._tensor, self._work = tensor, mail.add_up(tensor, CONTEXT, COLUMNS, self._group.whole)

    def awaited(self, mail: Mail) -> torch.Tensor:
        """What was begun, complete."""
        assert self._tensor is not None
        if self._work is not None:
            come = naming(self._what, f"waits for {self._group.size} ranks", "they did not come together", whereabouts.SEVERAL)
            with come:
                mail.wait_for(self._work)
            self._work = None
        return self._tensor

    def packed(self) -> torch.Tensor:
        """The columns of all ranks, or their gradients, as they were awaited."""
        assert self._tensor is not None
        assert self._work is None
        return self._tensor

    def add_to(self, gradient: torch.Tensor) -> None:
        """gradient [2, batch, tokens, kv_heads, head_dim] of this rank's keys and values."""
        self.shared.add_gradients(gradient[0], gradient[1], self.packed())


def _heads(tensor: torch.Tensor, part: tuple[int, int], dim: int) -> torch.Tensor:
    """The i-th of n equal parts along the dimension of heads, a view."""
    i, n = part
    return tensor if n == 1 else tensor.unflatten(dim, (n, -1)).select(dim, i)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _heads_for(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] -> [ranks, batch, tokens, heads of each rank, head_dim]; too few heads are repeated."""
    heads = tensor.shape[2]
    if heads < ranks:
        tensor = tensor.repeat_interleave(ranks // heads, 2)
    return tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def _added(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, tokens, ranks, heads of each, head_dim] -> [batch, tokens, heads, head_dim]: gradients of repeated heads are added."""
    flat = gradient.flatten(2, 3)
    repeats = flat.shape[2] // heads
    if repeats == 1:
        return flat
    return flat.unflatten(2, (heads, repeats)).to(accumulation_dtype(flat.dtype)).sum(3).to(flat.dtype)


def make_exchange(
    name: str,
    layout: Layout,
    group: ContextGroup,
    *,
    chunks: int = 1,
    prefetch: int = 1,
    circulates: str = KV,
    shared_columns: bool = True,
) -> Exchange:
    """The exchange of a run; `selection.choose_exchange` turns ``auto`` into a name before.

    chunks, prefetch, circulates: `schedule.Options`. shared_columns: single columns of an index are gathered once, in rings.
    """
    options = Options(group.size, group.per_node, chunks, prefetch, circulates, group.heads)
    schedule = make_schedule(name, options)
    if group.heads == 1:
        return _plain(layout, group, schedule, (0, 1), shared_columns)
    assert group.exchange is not None
    among = replace(options, workers=group.exchange.size, per_node=group.exchange.per_node, heads=1)
    part = (group.rank % group.heads, group.heads)
    inner = _plain(Joined.of(layout, group.heads), group.exchange, make_schedule(name, among), part, shared_columns)
    return SharedHeads(layout, group, schedule, inner)


def _plain(layout: Layout, group: ContextGroup, schedule: Schedule, part: tuple[int, int], shared_columns: bool) -> Exchange:
    if schedule.exchange in ("ring", "hierarchical_ring"):
        return Circulating(layout, group, schedule, part, shared_columns=shared_columns)
    return Gathering(layout, group, schedule, part)
