"""The operations that send, compute and add up, and how each runs on tensors.

k and v travel as one message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and gradients
are summed in float32 (float64 for float64 inputs). Gradients also travel in the dtype of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mtrain_cli.attention.kernel import Saved
from mtrain_cli.parallel.buffers import Buffer
from mtrain_cli.parallel.head_parts import part_of_heads
from mtrain_cli.parallel.program import Compute, ComputeColumns, Copy, Post
from mtrain_cli.parallel.recording import ATTENTION, COLUMNS, MERGE
from mtrain_cli.parallel.schedule import GROUP_CAST, GROUP_REDUCE, SUM
from mtrain_cli.parallel.wide_copy import contiguous

if TYPE_CHECKING:
    from mtrain_cli.attention.tiles import Tiles
    from mtrain_cli.parallel.executor import Executor


class PostHop(Post):
    """Send a shard to one rank, and receive another shard into a buffer of the pool."""

    def run(self, state: Executor) -> None:
        leaving = state.tensors[self.reads[0]]
        arriving = state.buffers.take_like(leaving)
        state.transport.start_hop(self.transfer, leaving, arriving)
        state.tensors[self.writes[0]] = arriving


class PostGather(Post):
    """Gather a part of the heads. If a copy of the part leaves, the operation writes it, too."""

    def run(self, state: Executor) -> None:
        arriving, *copy = self.writes
        own = contiguous(part_of_heads(state.tensors[self.reads[0]], self.piece, 3))
        state.tensors.update(dict.fromkeys(copy, own))
        state.tensors[arriving] = state.transport.start_gather(self.transfer, own)


class PostScatter(Post):
    def run(self, state: Executor) -> None:
        shards = state.tensors[self.reads[0]]
        state.tensors[self.writes[0]] = state.transport.start_scatter(self.transfer, shards)


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

        def leaving() -> torch.Tensor:
            return rows.picked(self.cast, part_of_heads(own, self.piece, 3), arrived)

        row_bytes = own[:, :, 0].nbytes // self.piece[1]
        sending, arriving = state.transport.start_rows(
            self.transfer, leaving, row_bytes, cast.sent, cast.received
        )
        state.tensors.update(zip(self.writes, (arriving, sending), strict=True))


class PostReturn(Post):
    """Send gradients of rows to their owners.

    The second buffer that the operation reads, if any, returned what the last cast forwarded.
    """

    def run(self, state: Executor) -> None:
        gradients, *returned = self.read(state)
        rows, cast = state.rows, state.rows.casts[self.cast]

        def leaving() -> torch.Tensor:
            for tensor in returned:
                rows.add_returned(len(rows.casts) - 1, gradients, tensor)
            return gradients[rows.arriving(self.cast)]

        _, state.tensors[self.writes[0]] = state.transport.start_rows(
            self.transfer, leaving, gradients[0].nbytes, cast.received, cast.sent
        )


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
        if (tiles := self.tiles(state)) is None:
            return
        q, keys = self.read(state)
        q = part_of_heads(q, self.piece, 2)
        with state.transport.span(ATTENTION):
            part = state.kernel.forward(q, keys[0], keys[1], tiles, state.scale)
        state.tensors[self.writes[0]] = part


class ComputeBackward(Compute):
    """Read q, dout, out, lse, delta and keys. Write dq, and one buffer with dk and dv.

    Without delta, the kernel computes delta from out.
    """

    def run(self, state: Executor) -> None:
        if (tiles := self.tiles(state)) is not None:
            q, dout, out, lse, *delta, keys = self.read(state)
            if self.piece[1] > 1:
                q, dout, out = (part_of_heads(t, self.piece, 2) for t in (q, dout, out))
            saved = Saved(q, keys[0], keys[1], out, lse, delta[0] if delta else None)
            self._call(state, dout, saved, tiles)

    def _call(self, state: Executor, dout: torch.Tensor, saved: Saved, tiles: Tiles) -> None:
        with state.transport.span(ATTENTION):
            dq, dk, dv = state.kernel.backward(dout, saved, tiles, state.scale)
        state.tensors[self.writes[0]], state.tensors[self.writes[1]] = dq, (dk, dv)


class ComputeMessage(ComputeBackward):
    """Read a message with another rank's queries, and keys. Write as `ComputeBackward` does."""

    def run(self, state: Executor) -> None:
        if (tiles := self.tiles(state)) is not None:
            message, keys = self.read(state)
            assert state.message is not None
            q, dout, out, lse, delta = state.message.unpack(message)
            self._call(state, dout, Saved(q, keys[0], keys[1], out, lse, delta), tiles)


class ColumnsForward(ComputeColumns):
    """Read q, the gathered columns and the output so far, and merge them."""

    def run(self, state: Executor) -> None:
        q, columns = (state.tensors[buffer] for buffer in self.reads[:2])
        total = state.total(self.writes[0])
        assert state.columns is not None
        with state.transport.span(COLUMNS):
            partial = state.kernel.forward_columns(
                q, columns, state.columns, state.scale, total.partial()
            )
            total.replace_partial(*partial)


class ColumnsBackward(ComputeColumns):
    """Read q, dout, out, lse, delta and the gathered columns. Write dq and their gradients."""

    def run(self, state: Executor) -> None:
        q, dout, _, lse, delta, columns = self.read(state)
        assert state.columns is not None
        with state.transport.span(COLUMNS):
            gradients = state.kernel.backward_columns(
                dout, q, columns, lse, delta, state.columns, state.scale
            )
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

    begins: the sums that this operation overwrites instead of adding to them. If the step has no
        results, the operation sets these sums to 0.
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


def _add(total: torch.Tensor, part: torch.Tensor, begins: bool) -> None:
    if begins:
        total.copy_(part)
    else:
        total += part


class Reduce(Copy):
    """Add a received gradient to this rank's own part of that gradient."""

    def run(self, state: Executor) -> None:
        total = state.tensors[self.writes[0]]
        total += state.tensors[self.reads[0]]


@dataclass(frozen=True, kw_only=True)
class ReduceRows(Reduce):
    cast: int

    def run(self, state: Executor) -> None:
        total, arrived = state.tensors[self.writes[0]], state.tensors[self.reads[0]]
        state.rows.add_returned(self.cast, total, arrived)
