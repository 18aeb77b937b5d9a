"""A message of queries arrives as it was packed, with aligned parts."""

from __future__ import annotations

import torch

from mtrain_cli.parallel.executor import QueryMessage


def test_parts_of_a_message_start_at_multiples_of_256_bytes():
    q, dout, out = (torch.randn(1, 5, 3, 7) for _ in range(3))
    lse, delta = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    for needs_out in (False, True):
        rows = q, dout, out, lse, delta
        message, packed = QueryMessage.pack(rows, needs_out=needs_out)
        base = packed.data_ptr()
        parts = [t for t in message.unpack(packed) if t is not None]
        assert all((t.data_ptr() - base) % 256 == 0 for t in parts)
        got_q, got_dout, _, got_lse, _ = message.unpack(packed)
        assert got_q.equal(q)
        assert got_dout.equal(dout)
        assert got_lse.equal(lse)
