"""The operations that send, compute and add up, and how each runs on tensors.

k and v travel as one message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and gradients
are summed in float32 (float64 for float64 inputs). Gradients travel in the dtype of the sums, or
rounded to bfloat16 (`Schedule.rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.partials import Pair, accumulation_dtype, merge, row_delta
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Buffer
from mtrain_cli.parallel.program import Compute, ComputeColumns, Copy, Part, Post
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, MERGE
from mtrain_cli.parallel.schedule import GROUP_CAST, GROUP_REDUCE, SUM
from mtrain_cli.parallel.wide_copy import (
    concatenate,
    contiguous,
    part_of_heads,
    split_heads,
    sum_repeated_heads,
)

if TYPE_CHECKING:
    from mtrain_cli.parallel.exchange import Executor


class QueryMessage:
    """The format of a query message: q, dout, lse and delta."""

    def __init__(self, shapes: list[tuple[torch.Size, torch.dtype]]) -> None:
        self._shapes = shapes
        self._sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
        # Align every part to 256 bytes, as torch's allocator does.
        self._room = [-(-n // 256) * 256 for n in self._sizes]

    @staticmethod
    def pack(*parts: Tensor) -> tuple[QueryMessage, Tensor]:
        """Pack q, dout, lse and delta. Return the format and the message, uint8 [bytes]."""
        message = QueryMessage([(t.shape, t.dtype) for t in parts])
        packed = torch.empty(sum(message._room), dtype=torch.uint8, device=parts[0].device)
        for place, part in zip(packed.split(message._room), parts, strict=True):
            flat = part.contiguous().view(-1).view(torch.uint8)
            place[: len(flat)] = flat
        return message, packed

    def unpack(self, packed: Tensor) -> tuple[Any, ...]:
        """Return q, dout, out, lse and delta; out is not sent and None."""
        places = zip(packed.split(self._room), self._sizes, self._shapes, strict=True)
        q, dout, lse, delta = (
            place[:n].view(dtype).view(shape) for place, n, (shape, dtype) in places
        )
        return q, dout, None, lse, delta


class RunningAttention:
    """Attention over the keys added so far. sums: out and lse; None before the first keys."""

    def __init__(self, q: Tensor) -> None:
        self._q, self._high = q, accumulation_dtype(q.dtype)
        self.sums: Pair | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the attention over further keys. The first call takes over ``out`` and ``lse``."""
        if self.sums is None:
            self.sums = out, lse
        else:
            self.sums = self.sums[0].to(self._high), self.sums[1]
            merge(*self.sums, out, lse)

    def result(self) -> Pair:
        """Return out in the dtype of q, and lse. If no key was added, out is 0 and lse -inf."""
        q = self._q
        if self.sums is not None:
            return self.sums[0].to(q.dtype), self.sums[1]
        shape = q.shape[0], q.shape[2], q.shape[1]
        return torch.zeros_like(q), q.new_full(shape, float("-inf"), dtype=self._high)


class PostHop(Post):
    """Send a shard to one rank, and receive another shard into a buffer of the pool."""

    def run(self, state: Executor) -> None:
        leaving = state.tensors[self.reads[0]]
        arriving = state.buffers.take_like(leaving)
        state.transport.start_hop(self.transfer, leaving, arriving)
        state.tensors[self.writes[0]] = arriving


class PostGather(Post):
    """Gather a part of the heads."""

    def run(self, state: Executor) -> None:
        arriving, *copy = self.writes
        own = contiguous(part_of_heads(state.tensors[self.reads[0]], self.piece, 3))
        state.tensors.update(dict.fromkeys(copy, own))
        state.tensors[arriving] = state.transport.start_gather(self.transfer, own)


class PostScatter(Post):
    """Reduce-scatter shards. Rounded shards travel one by one, and `AddShards` adds them up."""

    def run(self, state: Executor) -> None:
        (shards,), (_, *copies) = self.read(state), self.writes
        if not state.exchange.schedule.rounds:
            state.tensors[self.writes[0]] = state.transport.start_scatter(self.transfer, shards)
            return

        def leaving() -> Tensor:
            return add_up(shards, state.high).to(state.message_dtype) if copies else shards

        peers = (1,) * len(self.transfer.peers)
        size = shards.nbytes // len(shards) // (len(shards[0]) if copies else 1)
        sending, arriving = state.transport.start_rows(self.transfer, leaving, size, peers, peers)
        state.tensors.update(zip(self.writes, (arriving, sending), strict=False))


class PostTrade(Post):
    """Trade tokens for heads, or heads for tokens, and wait for the result (Ulysses)."""

    def run(self, state: Executor) -> None:
        parts = state.tensors[self.reads[0]]
        state.tensors[self.writes[0]] = state.transport.all_to_all(self.transfer, parts)


class PostSum(Post):
    """Sum single columns, or their gradients, in place."""

    def run(self, state: Executor) -> None:
        state.transport.start_all_reduce(self.transfer, state.tensors[self.reads[0]])


class PostCast(Post):
    """Send rows of keys to the ranks that need them. Reads own keys, and rows to forward."""

    def run(self, state: Executor) -> None:
        own, *arrived = self.read(state)
        rows, cast = state.rows, state.rows.casts[self.cast]

        def leaving() -> Tensor:
            return rows.picked(self.cast, part_of_heads(own, self.piece, 3), arrived)

        row_bytes = own[:, :, 0].nbytes // self.piece[1]
        sending, arriving = state.transport.start_rows(
            self.transfer, leaving, row_bytes, cast.sent, cast.received
        )
        state.tensors.update(zip(self.writes, (arriving, sending), strict=True))


class PostReturn(Post):
    """Send gradients of rows to their owners, with what the last cast forwarded and got back."""

    def run(self, state: Executor) -> None:
        gradients, *returned = self.read(state)
        rows, cast = state.rows, state.rows.casts[self.cast]

        def leaving() -> Tensor:
            for tensor in returned:
                rows.add_returned(self.cast + 1, gradients, tensor)  # the cast that forwarded them
            return gradients[rows.arriving(self.cast)].to(state.message_dtype)

        size = gradients[0].numel() * state.message_dtype.itemsize
        sending, arriving = state.transport.start_rows(
            self.transfer, leaving, size, cast.received, cast.sent
        )
        state.tensors.update(zip(self.writes, (arriving, sending), strict=False))


POSTS: dict[str, type[Post]] = {  # by `Transfer.kind`
    "p2p": PostHop,
    "all_gather": PostGather,
    "reduce_scatter": PostScatter,
    "all_to_all": PostTrade,
    SUM: PostSum,
    GROUP_CAST: PostCast,
    GROUP_REDUCE: PostReturn,
}


class ComputeForward(Compute):
    """Read q and keys, and write one buffer with out and lse."""

    def run(self, state: Executor) -> None:
        if (tiles := self.tiles(state)) is not None:
            q, (k, v) = self.read(state)
            q = part_of_heads(q, self.piece, 2)
            with state.transport.span(ATTENTION):
                part = state.kernel.forward(q, k, v, tiles, state.scale)
            state.tensors[self.writes[0]] = part


class ComputeBackward(Compute):
    """Read q, dout, out, lse, delta and keys. Write dq, and one buffer with dk and dv.

    Without delta, the kernel computes delta from out.
    """

    def run(self, state: Executor) -> None:
        if (tiles := self.tiles(state)) is not None:
            q, dout, out, lse, *delta, (k, v) = self.read(state)
            q, dout, out = (part_of_heads(t, self.piece, 2) for t in (q, dout, out))
            saved = Saved(q, k, v, out, lse, delta[0] if delta else None)
            self._call(state, dout, saved, tiles)

    def _call(self, state: Executor, dout: Tensor, saved: Saved, tiles: Tiles) -> None:
        with state.transport.span(ATTENTION):
            dq, dk, dv = state.kernel.backward(dout, saved, tiles, state.scale)
        state.tensors[self.writes[0]], state.tensors[self.writes[1]] = dq, (dk, dv)


class ComputeMessage(ComputeBackward):
    """Read a message with another rank's queries, and keys. Write as `ComputeBackward` does."""

    def run(self, state: Executor) -> None:
        if (tiles := self.tiles(state)) is not None:
            message, (k, v) = self.read(state)
            assert state.message is not None
            q, dout, *rest = state.message.unpack(message)
            self._call(state, dout, Saved(q, k, v, *rest), tiles)


class ColumnsForward(ComputeColumns):
    """Read q, the gathered columns and the output so far, and merge them."""

    def run(self, state: Executor) -> None:
        q, columns = (state.tensors[buffer] for buffer in self.reads[:2])
        total, where = state.total(self.writes[0]), state.columns
        assert where is not None
        with state.transport.span(COLUMNS):
            total.sums = state.kernel.forward_columns(q, columns, where, state.scale, total.sums)


class ColumnsBackward(ComputeColumns):
    """Read q, dout, out, lse, delta and the gathered columns. Write dq and their gradients."""

    def run(self, state: Executor) -> None:
        q, dout, _, lse, delta, columns = self.read(state)
        assert state.columns is not None
        call = dout, q, columns, lse, delta, state.columns, state.scale
        with state.transport.span(COLUMNS):
            gradients = state.kernel.backward_columns(*call)
        state.tensors.update(zip(self.writes, gradients, strict=True))


class AddColumns(Copy):
    """Add the gradients of gathered columns to the gradients of this rank's keys."""

    def run(self, state: Executor) -> None:
        gradient = state.tensors[self.writes[0]]
        assert state.columns is not None
        with state.transport.span(COLUMNS):
            state.columns.add_gradients(gradient[0], gradient[1], state.tensors[self.reads[0]])


class Merge(Copy):
    """Merge the results of one step into the sums so far. A step without pairs has no results."""


class MergeForward(Merge):
    def run(self, state: Executor) -> None:
        if (part := state.tensors.get(self.reads[0])) is not None:
            total = state.total(self.writes[0])
            with state.transport.span(MERGE):
                total.add(*part)


@dataclass(frozen=True, kw_only=True)
class MergeBackward(Merge):
    """Add dq, and dk and dv, to their sums.

    begins: the sums that this operation overwrites, with 0 if the step has no results.
    """

    begins: tuple[Buffer, ...] = ()

    def run(self, state: Executor) -> None:
        tensors = state.tensors
        if self.reads[0] not in tensors:
            for total in self.begins:
                tensors[total].zero_()
            return
        dq, (dk, dv) = self.read(state)
        of_queries, of_keys = self.writes
        key_sums, keys_begin = tensors[of_keys], of_keys in self.begins
        with state.transport.span(MERGE):
            _add(tensors[of_queries], dq, of_queries in self.begins)
            _add(key_sums[0], dk, keys_begin)
            _add(key_sums[1], dv, keys_begin)


def _add(total: Tensor, part: Tensor, begins: bool) -> None:
    if begins:
        total.copy_(part)
    else:
        total += part


class Reduce(Copy):
    """Add a received gradient to this rank's own part of that gradient."""

    def run(self, state: Executor) -> None:
        state.tensors[self.writes[0]].add_(state.tensors[self.reads[0]])


@dataclass(frozen=True, kw_only=True)
class ReduceRows(Reduce):
    cast: int

    def run(self, state: Executor) -> None:
        total, arrived = state.tensors[self.writes[0]], state.tensors[self.reads[0]]
        state.rows.add_returned(self.cast, total, arrived)


@dataclass(frozen=True, kw_only=True)
class Arrange(Copy):
    """Copy tensors into another order, shape or dtype.

    timed: whether a profile shows the copy as a span, not as part of a gap.
    among: number of ranks per node if shards come from or go to a hierarchical collective, else 0.
    stage: copy only the rows of this stage of a group cast; None for all rows.
    """

    timed: ClassVar[bool] = True
    piece: Part = (0, 1)
    among: int = 0
    stage: int | None = None

    def run(self, state: Executor) -> None:
        with state.transport.span(ARRANGE) if self.timed else nullcontext():
            made = self.copy(state)
        state.tensors.update(zip(self.writes, made, strict=True))

    def copy(self, state: Executor) -> Sequence[Any]:
        """Return the tensors that the operation writes."""
        raise NotImplementedError


class Pack(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        return (torch.stack(self.read(state)),)


class Pick(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        assert state.columns is not None
        (packed,) = self.read(state)
        return (state.columns.pack(packed[0], packed[1]),)


class Delta(Arrange):
    """Sum out * dout over each row, and start the sum of dq at 0. Writes both, or one of them."""

    def copy(self, state: Executor) -> Sequence[Any]:
        q, dout, out = self.read(state)
        made = [row_delta(out, dout)] if buffers.DELTA in self.writes else []
        if buffers.DQ_SUM in self.writes:
            made.append(torch.zeros(q.shape, dtype=state.high, device=q.device))
        return made


class Message(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        q, dout, _, lse, delta = self.read(state)
        state.message, packed = QueryMessage.pack(q, dout, lse, delta)
        return (packed,)


class Round(Arrange):
    """Round gradients to the dtype in which they travel, into a buffer of the pool."""

    def copy(self, state: Executor) -> Sequence[Any]:
        (total,) = self.read(state)
        return (state.buffers.take_like(total, state.message_dtype).copy_(total),)


class AddShards(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        (shards,) = self.read(state)
        return (add_up(shards, state.high),)


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the first axis. On a CPU, torch's own sum would convert all parts at once."""
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


class Zero(Arrange):
    timed = False

    def copy(self, state: Executor) -> Sequence[Any]:
        (kept,) = self.read(state)
        return (state.buffers.take_like(kept, state.high).zero_(),)


class TakeSum(Arrange):
    """Take a buffer from the pool, which the next `MergeBackward` fills."""

    timed = False

    def copy(self, state: Executor) -> Sequence[Any]:
        return (state.buffers.take_like(state.tensors[self.reads[0]], state.high),)


class Result(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        q, total = state.tensors[self.reads[0]], state.tensors.get(self.reads[1])
        return (total or RunningAttention(part_of_heads(q, self.piece, 2))).result()


class ResultOfPart(Result):
    def copy(self, state: Executor) -> Sequence[Any]:
        return (super().copy(state),)


class Gradients(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        q, dq, keys = self.read(state)
        dk, dv = keys.to(q.dtype, copy=True)
        return dq.to(q.dtype), dk, dv


class Take(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        (packed,) = self.read(state)
        return ([part_of_heads(packed[i], self.piece, 2).contiguous() for i in (0, 1)],)


class Order(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        shards = state.tensors.pop(self.reads[0])
        if self.among:
            # [ranks of the node, nodes, ...] -> [ranks in order, ...]
            shards = shards.transpose(0, 1).flatten(0, 1)
        return ([state.tiles.placement.inside.to_sequence(shards[:, i]) for i in (0, 1)],)


class JoinOut(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        outs, lses = zip(*self.read(state), strict=True)
        return concatenate(outs, 2), concatenate(lses, 1)


class Cut(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        (lse,) = self.read(state)
        # With more than one sequence a part of the heads is not contiguous.
        return (part_of_heads(lse, self.piece, 1).contiguous(),)


class Place(Arrange):
    """Write one part's gradients into the whole tensors. The first part allocates them."""

    def copy(self, state: Executor) -> Sequence[Any]:
        q, packed, dq, keys = self.read(state)
        # If one part is all, its dq is the whole tensor.
        whole, whole_keys = map(state.tensors.get, self.writes)
        whole = torch.empty_like(q) if whole is None else whole
        whole_keys = torch.empty_like(packed) if whole_keys is None else whole_keys
        if whole is not dq:
            part_of_heads(whole, self.piece, 2).copy_(dq)
        for target, part in zip(part_of_heads(whole_keys, self.piece, 3), keys, strict=True):
            target.copy_(part)
        return whole, whole_keys


class Shards(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        ((dk, dv),) = self.read(state)
        layout = state.tiles.placement.inside
        shape = (layout.workers, 2, dk.shape[0], layout.tokens_per_worker, *dk.shape[2:])
        shards = torch.empty(shape, dtype=state.message_dtype, device=dk.device)
        layout.copy_to_shards(dk, shards[:, 0])
        layout.copy_to_shards(dv, shards[:, 1])
        if self.among:
            # [ranks in order, ...] -> [ranks of the node, nodes, ...]
            shards = contiguous(shards.unflatten(0, (-1, self.among)).transpose(0, 1))
        return (shards,)


class MergeRows(Arrange):
    """Bring own keys and those of a group cast into sequence order."""

    def copy(self, state: Executor) -> Sequence[Any]:
        own, *arrived = self.read(state)
        return (state.rows.merged(part_of_heads(own, self.piece, 3), arrived),)


class MergeStage(Arrange):
    """Bring the keys of one stage of a group cast into sequence order."""

    def copy(self, state: Executor) -> Sequence[Any]:
        return (state.rows.merged(None, self.read(state), self.stage),)


class ZeroRows(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        (own,) = self.read(state)
        return (state.rows.zeros(part_of_heads(own, self.piece, 3), state.high),)


class SplitRows(Arrange):
    """Bring key gradients into the order in which the rows arrived."""

    def copy(self, state: Executor) -> Sequence[Any]:
        # A step without pairs has no gradients.
        made, rows = (state.tensors.get(buffer) for buffer in (self.reads[0], self.writes[0]))
        if made is not None:
            dk, dv = made
            rows = state.rows.split(dk, dv, state.high, rows, self.stage)
        return (rows,)


class OwnRows(Arrange):
    """Take this rank's rows out of the summed gradients, and add those of its own keys, if read."""

    def copy(self, state: Executor) -> Sequence[Any]:
        total, *of_own = self.reads
        own = state.tensors[total][: state.rows.own].permute(1, 2, 0, 3, 4).contiguous()
        for dk, dv in (state.tensors[buffer] for buffer in of_own if buffer in state.tensors):
            own[0] += dk
            own[1] += dv
        return (own,)


class AddDq(Arrange):
    """Add the dq of a stage to the sum of earlier stages, if there is one."""

    def copy(self, state: Executor) -> Sequence[Any]:
        # A stage without pairs has no gradients.
        of_queries, of_stage, *sums = self.reads
        part, made = (
            part_of_heads(state.tensors[of_queries], self.piece, 2),
            of_stage in state.tensors,
        )
        if sums:
            total = state.tensors[sums[0]]
        else:
            total = torch.zeros(part.shape, dtype=state.high, device=part.device)
        return (total.add_(state.tensors[of_stage]) if made else total,)


class ResultOfDq(Arrange):
    def copy(self, state: Executor) -> Sequence[Any]:
        q, total = self.read(state)
        return (total.to(q.dtype, copy=True),)


class Own(Arrange):
    """Concatenate the key gradients that returned, one part of the heads after the other."""

    timed = False

    def copy(self, state: Executor) -> Sequence[Any]:
        own, *sums = self.reads
        packed = state.tensors[own]
        if len(sums) == 1:
            whole = state.tensors[sums[0]].to(packed.dtype)
            return whole[0], whole[1]
        whole = torch.empty_like(packed)
        for i, buffer in enumerate(sums):
            # Free each part after it is copied.
            part_of_heads(whole, (i, len(sums)), 3).copy_(state.tensors.pop(buffer))
        return whole[0], whole[1]


class Rename(Own):
    """Take over the key gradients that a lone rank has summed."""

    renames = True


class Join(Arrange):
    timed = False

    def copy(self, state: Executor) -> Sequence[Any]:
        return (concatenate(self.read(state), 2),)


class ToHeads(Arrange):
    """Copy the heads for each rank: [ranks, batch, tokens, heads per rank, head_dim]."""

    def copy(self, state: Executor) -> Sequence[Any]:
        parts = [split_heads(t, state.program.sharing) for t in self.read(state)]
        state.widths = [part.shape[3] for part in parts]
        return (torch.cat(parts, 3),)


class FromTokens(Arrange):
    """Sort the received tokens: [batch, tokens of all ranks, heads per rank, head_dim]."""

    def copy(self, state: Executor) -> Sequence[Any]:
        (arrived,) = self.read(state)
        order, _ = state.tiles.placement.token_order(state.exchange.own.number, arrived.device)
        whole = arrived.transpose(0, 1).flatten(1, 2).index_select(1, order)
        return [t.contiguous() for t in whole.split(state.widths, 2)]


class ToTokens(Arrange):
    """Copy the tokens for each rank: [ranks, batch, tokens, heads per rank, head_dim]."""

    def copy(self, state: Executor) -> Sequence[Any]:
        parts = self.read(state)
        state.widths = [part.shape[2] for part in parts]
        _, back = state.tiles.placement.token_order(state.exchange.own.number, parts[0].device)
        together = torch.cat(parts, 2).index_select(1, back)
        return (together.unflatten(1, (state.program.sharing, -1)).transpose(0, 1).contiguous(),)


class FromHeads(Arrange):
    """View the received heads as [batch, tokens, ranks, heads per rank, head_dim]."""

    def run(self, state: Executor) -> None:
        (arrived,) = self.read(state)
        views = arrived.permute(1, 2, 0, 3, 4).split(state.widths, 3)
        state.tensors.update(zip(self.writes, views, strict=True))


class AddHeads(Arrange):
    timed = False

    def copy(self, state: Executor) -> Sequence[Any]:
        rows, *keys = self.read(state)
        kv_heads = state.exchange.kv_heads
        return rows.flatten(2, 3), *(sum_repeated_heads(t, kv_heads) for t in keys)
