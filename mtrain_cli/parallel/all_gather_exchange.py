"""All keys and values of a context group brought together by collectives, before what they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mtrain_cli.attention.kernel import accumulation_dtype
from mtrain_cli.parallel.exchange import WHOLE_SEQUENCE, Exchange, Shards
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, BACKWARD, FORWARD
from mtrain_cli.parallel.schedule import ScheduleStep, Steps, Transfer
from mtrain_cli.parallel.transport import Transport
from mtrain_cli.parallel.wide_copy import contiguous


class AllGatherExchange(Exchange):
    """Keys and values are gathered in sequence order, one part of the heads after the other; their gradients return by reduce-scatter."""

    def named_tiles(
        self, *, indexed: bool, forward_only: bool = False
    ) -> set[tuple[Shards, Shards]]:
        return {((self.group.rank,), WHOLE_SEQUENCE)}

    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:
        return step.queries, WHOLE_SEQUENCE

    def forward(self, q, k, v, work, kernel, scale, what=""):
        parts = []
        with self._mail(what, FORWARD) as mail:
            with mail.span(ARRANGE):
                packed = torch.stack([k, v])
            for step, (keys, values) in self._gathered(mail, self.forward_steps, packed):
                tiles = work.of(*self._tile(step), self._part(step))
                with mail.span(ATTENTION):
                    parts.append(
                        kernel.forward(_heads(q, step.part, 2), keys, values, tiles, scale)
                    )
            outs, lses = zip(*parts, strict=True)
            with mail.span(ARRANGE):
                out, lse = _joined(outs, 2), _joined(lses, 1)
        return out, lse, (q, packed, out, lse)

    def backward(self, dout, saved, work, kernel, scale, what=""):
        q, packed, out, lse = saved
        high = accumulation_dtype(packed.dtype)
        queries, gradients = [], []
        whole: tuple[torch.Tensor, torch.Tensor] | None = None
        with self._mail(what, BACKWARD) as mail:
            for step, gathered in self._gathered(mail, self.backward_steps, packed):
                keys, values = gathered
                gathered.clear()
                tiles = work.of(*self._tile(step), self._part(step))
                rows = (_heads(t, step.part, 2) for t in (dout, q))
                with mail.span(ARRANGE):
                    lse_part = _heads(
                        lse, step.part, 1
                    ).contiguous()  # a copy where there are several sequences
                with mail.span(ATTENTION):
                    dq, dk, dv = kernel.backward(
                        *rows, keys, values, _heads(out, step.part, 2), lse_part, None, tiles, scale
                    )
                del keys, values, lse_part
                if not step.send:
                    # Nothing leaves: what is made is put where it belongs at once.
                    with mail.span(ARRANGE):
                        whole = whole or (
                            dq if step.part[1] == 1 else torch.empty_like(q),
                            torch.empty_like(packed),
                        )
                        if step.part[1] > 1:
                            _heads(whole[0], step.part, 2).copy_(dq)
                        for own, made in zip(_heads(whole[1], step.part, 3), (dk, dv), strict=True):
                            own.copy_(made)
                    del dq, dk, dv, own, made
                    continue
                queries.append(dq)
                # What the part before is sent from is as large as what is made now. It left while this part was computed.
                for number in step.collect:
                    mail.wait(number)
                with mail.span(ARRANGE):
                    gradients.append(self._returned(mail, step.send, dk, dv, high))
                del dq, dk, dv
        if whole is not None:
            return whole[0], whole[1][0], whole[1][1]
        dk, dv = _own(gradients, packed)
        return _joined(queries, 2), dk, dv

    def _gathered(
        self, mail: Transport, steps: Steps, packed: torch.Tensor
    ) -> Iterator[tuple[ScheduleStep, list[torch.Tensor]]]:
        """-> every step with its keys and values [batch, padded_seq, kv_heads of the part, head_dim], once they are complete. In a list,
        which may be emptied, since what is yielded would live on here.
        """
        coming: dict[int, tuple[Transfer, torch.Tensor]] = {}
        for at, step in enumerate(steps):
            mail.begin(at)
            for transfer in step.post:
                # The second collective of a pair sends on what the first one brought.
                mine = (
                    _heads(packed, transfer.part, 3)
                    if transfer.after is None
                    else coming[transfer.after][1]
                )
                coming[transfer.number] = transfer, mail.gather(transfer, mine)
                del mine  # or it would live on here
            for number in step.wait:
                mail.wait(number)
            if not step.wait:
                with mail.span(ARRANGE):
                    kept = [_heads(packed[i], step.part, 2).contiguous() for i in (0, 1)]
                yield step, kept
                continue
            transfer, shards = coming.pop(step.wait[-1])
            with mail.span(ARRANGE):
                if transfer.after is not None:
                    # [ranks of the node, nodes, ...] -> rank order
                    coming.pop(transfer.after)
                    shards = shards.transpose(0, 1).flatten(0, 1)
                gathered = [self.layout.to_sequence(shards[:, i]) for i in (0, 1)]
            del shards
            yield step, gathered

    def _returned(
        self,
        mail: Transport,
        sends: tuple[Transfer, ...],
        dk: torch.Tensor,
        dv: torch.Tensor,
        high: torch.dtype,
    ) -> torch.Tensor:
        """Begins to add up the gradients of all ranks; -> this rank's shard, complete when the pass has ended."""
        shape = (self.group.size, 2, dk.shape[0], self.layout.tokens_per_worker, *dk.shape[2:])
        shards = torch.empty(shape, dtype=high, device=dk.device)
        self.layout.copy_to_shards(dk, shards[:, 0])
        self.layout.copy_to_shards(dv, shards[:, 1])
        if len(sends) > 1:
            # rank order -> [ranks of the node, nodes, ...]
            shards = contiguous(shards.unflatten(0, (-1, len(sends[0].peers))).transpose(0, 1))
        for transfer in sends:
            shards = mail.scatter(transfer, shards)
        return shards


def _heads(tensor: torch.Tensor, part: tuple[int, int], dim: int) -> torch.Tensor:
    """The i-th of n equal parts along the dimension of heads, a view."""
    i, n = part
    return tensor if n == 1 else tensor.unflatten(dim, (n, -1)).select(dim, i)


def _own(gradients: list[torch.Tensor], packed: torch.Tensor) -> torch.Tensor:
    """The gradients of the parts of the heads -> one like ``packed``. The list is emptied on the way."""
    if len(gradients) == 1:
        return gradients.pop().to(packed.dtype)
    whole, n = torch.empty_like(packed), len(gradients)
    for i in range(n):
        _heads(whole, (i, n), 3).copy_(gradients.pop(0))
    return whole


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
