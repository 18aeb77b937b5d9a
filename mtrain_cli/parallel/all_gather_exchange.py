"""All-gather exchanges: gather all KV of a context group by collectives, then compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.parallel.exchange import WHOLE_SEQUENCE, Exchange, Shards
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, BACKWARD, FORWARD
from mtrain_cli.parallel.schedule import ScheduleStep, Steps, Transfer
from mtrain_cli.parallel.transport import Transport
from mtrain_cli.parallel.wide_copy import contiguous


class AllGatherExchange(Exchange):
    """Gather KV in sequence order, one part of the heads after the other.

    While a part is computed, the next one arrives. Its gradients return in one reduce-scatter.
    """

    def needed_tiles(self, *, indexed, forward_only=False):  # noqa: ARG002 - always the same
        return {((self.group.rank,), WHOLE_SEQUENCE)}

    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:
        return step.queries, WHOLE_SEQUENCE

    def forward(self, q, k, v, shard_tiles, kernel, scale, label=""):
        parts = []
        with self._transport(label, FORWARD) as transport:
            with transport.span(ARRANGE):
                packed = torch.stack([k, v])
            for step, (keys, values) in self._gather_steps(transport, self.forward_steps, packed):
                tiles = shard_tiles.for_pair(*self._tile(step), self._part(step))
                with transport.span(ATTENTION):
                    parts.append(
                        kernel.forward(_heads_part(q, step.part, 2), keys, values, tiles, scale)
                    )
            outs, lses = zip(*parts, strict=True)
            with transport.span(ARRANGE):
                out, lse = _concatenate(outs, 2), _concatenate(lses, 1)
        return out, lse, (q, packed, out, lse)

    def backward(self, dout, saved, shard_tiles, kernel, scale, label=""):
        q, packed, out, lse = saved
        accumulate_dtype = accumulation_dtype(packed.dtype)
        queries, gradients = [], []
        whole: tuple[torch.Tensor, torch.Tensor] | None = None
        with self._transport(label, BACKWARD) as transport:
            for step, gathered in self._gather_steps(transport, self.backward_steps, packed):
                keys, values = gathered
                # Empty the generator's list: only `keys` and `values` hold the tensors now.
                gathered.clear()
                tiles = shard_tiles.for_pair(*self._tile(step), self._part(step))
                rows = (_heads_part(t, step.part, 2) for t in (dout, q))
                with transport.span(ARRANGE):
                    # With more than one sequence a part of the heads is not contiguous.
                    lse_part = _heads_part(lse, step.part, 1).contiguous()
                with transport.span(ATTENTION):
                    out_part = _heads_part(out, step.part, 2)
                    dq, dk, dv = kernel.backward(
                        *rows, keys, values, out_part, lse_part, None, tiles, scale
                    )
                    del out_part
                del keys, values, lse_part
                if not step.send:
                    # Gradients stay on this rank: copy them to their place.
                    with transport.span(ARRANGE):
                        whole = whole or (
                            dq if step.part[1] == 1 else torch.empty_like(q),
                            torch.empty_like(packed),
                        )
                        if step.part[1] > 1:
                            _heads_part(whole[0], step.part, 2).copy_(dq)
                        parts = zip(_heads_part(whole[1], step.part, 3), (dk, dv), strict=True)
                        for target, part in parts:
                            target.copy_(part)
                    del dq, dk, dv, target, part, parts
                    continue
                queries.append(dq)
                # Wait for the previous part's reduce-scatter, which overlapped with this kernel.
                # That frees its send buffer before this part allocates one of the same size.
                for number in step.collect:
                    transport.wait(number)
                with transport.span(ARRANGE):
                    gradients.append(
                        self._start_return(transport, step.send, dk, dv, accumulate_dtype)
                    )
                del dq, dk, dv
        if whole is not None:
            return whole[0], whole[1][0], whole[1][1]
        dk, dv = _join_gradients(gradients, packed)
        return _concatenate(queries, 2), dk, dv

    def _gather_steps(
        self, transport: Transport, steps: Steps, packed: torch.Tensor
    ) -> Iterator[tuple[ScheduleStep, list[torch.Tensor]]]:
        """Yield every step once its KV is complete.

        The KV is a list of two tensors [batch, padded_seq, kv_heads of the part, head_dim]. The
        caller may empty the list to free them; otherwise the generator's frame keeps them alive.
        """
        in_flight: dict[int, tuple[Transfer, torch.Tensor]] = {}
        for at, step in enumerate(steps):
            transport.begin_step(at)
            for transfer in step.post:
                # The second collective of a pair forwards what the first one delivers.
                own = (
                    _heads_part(packed, transfer.part, 3)
                    if transfer.after is None
                    else in_flight[transfer.after][1]
                )
                in_flight[transfer.number] = transfer, transport.start_gather(transfer, own)
                del own  # or this frame would keep it alive
            for number in step.wait:
                transport.wait(number)
            if not step.wait:
                with transport.span(ARRANGE):
                    kept = [_heads_part(packed[i], step.part, 2).contiguous() for i in (0, 1)]
                yield step, kept
                continue
            transfer, shards = in_flight.pop(step.wait[-1])
            with transport.span(ARRANGE):
                if transfer.after is not None:
                    # [ranks of the node, nodes, ...] -> [ranks in order, ...]
                    in_flight.pop(transfer.after)
                    shards = shards.transpose(0, 1).flatten(0, 1)
                gathered = [self.layout.to_sequence(shards[:, i]) for i in (0, 1)]
            del shards
            yield step, gathered

    def _start_return(
        self,
        transport: Transport,
        sends: tuple[Transfer, ...],
        dk: torch.Tensor,
        dv: torch.Tensor,
        accumulate_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Start the reduce-scatter of dk and dv. Returns this rank's sum, valid after the pass."""
        shape = (self.group.size, 2, dk.shape[0], self.layout.tokens_per_worker, *dk.shape[2:])
        shards = torch.empty(shape, dtype=accumulate_dtype, device=dk.device)
        self.layout.copy_to_shards(dk, shards[:, 0])
        self.layout.copy_to_shards(dv, shards[:, 1])
        if len(sends) > 1:
            # [ranks in order, ...] -> [ranks of the node, nodes, ...]
            shards = contiguous(shards.unflatten(0, (-1, len(sends[0].peers))).transpose(0, 1))
        for transfer in sends:
            shards = transport.start_scatter(transfer, shards)
        return shards


def _heads_part(tensor: torch.Tensor, part: tuple[int, int], dim: int) -> torch.Tensor:
    """Return a view of the i-th of n equal parts of dimension ``dim``."""
    i, n = part
    return tensor if n == 1 else tensor.unflatten(dim, (n, -1)).select(dim, i)


def _join_gradients(gradients: list[torch.Tensor], packed: torch.Tensor) -> torch.Tensor:
    """Join the gradients of the parts of the heads, in the shape and dtype of ``packed``.

    Empties the list on the way, so that each part is freed once it is copied.
    """
    if len(gradients) == 1:
        return gradients.pop().to(packed.dtype)
    whole, n = torch.empty_like(packed), len(gradients)
    for i in range(n):
        _heads_part(whole, (i, n), 3).copy_(gradients.pop(0))
    return whole


def _concatenate(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
