"""Messages of gradients in bfloat16: their error, their bytes, and float32 sums.

`PYTHONPATH=tests python -m parallel.test_gradient_messages WORKERS [WAY ...]` prints the errors.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache

import gloo
import pytest
import torch
from parallel.ways import Way, group_of, make_attention

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.recording import Recorder

WAYS = {
    "ring": Way("ring"),
    "ring, queries": Way("ring", circulates="queries"),
    "hierarchical_ring": Way("hierarchical_ring", per_node=2),
    "hierarchical_ring, queries": Way("hierarchical_ring", per_node=2, circulates="queries"),
    "all_gather": Way("all_gather"),
    "hierarchical_all_gather": Way("hierarchical_all_gather", per_node=2, chunks=2),
    "group_cast": Way("group_cast"),
    "group_cast, stages": Way("group_cast", stages=1),
    "hierarchical_group_cast": Way("hierarchical_group_cast", per_node=2, stages=2),
}
TOKENS, HEADS, KV_HEADS, DIM = 32, 4, 2, 16


def gradients(
    rank: int, world: int, way: Way, dtype: torch.dtype, counts: list[float] | None = None
) -> list[torch.Tensor]:
    """Return this rank's dq, dk and dv. All ways and dtypes begin with the same numbers.

    counts: appends the bytes that backward sends, as recorded and as planned.
    """
    group = _group(rank, world, way.per_node)
    layout = make_layout("striped", world, TOKENS * world, 16)
    exchange = make_exchange(way.exchange, layout, group, **way.options)
    mask = SequenceMask.causal(TOKENS * world, TOKENS * world)
    attend = make_attention(exchange, SdpaKernel(), [mask], "cpu")
    drawn = torch.Generator().manual_seed(rank)
    *qkv, dout = (
        torch.randn(1, TOKENS, n, DIM, generator=drawn).bfloat16().to(dtype)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    qkv = [t.requires_grad_() for t in qkv]
    recorder = Recorder(torch.device("cpu"))
    if counts is not None:
        exchange.set_recorder(recorder)
        recorder.start()
    with recorder.iteration() if counts is not None else nullcontext():
        made = list(torch.autograd.grad(attend(*qkv, 0), qkv, dout))
    if counts is not None:
        sent = [s for s in recorder.read() if (s.kind, s.direction) == ("send", "backward")]
        rows = exchange.cast_rows([mask], layout, None)
        shares = rows[1].shares if rows else ()
        sizes = ShardSizes(TOKENS, HEADS, KV_HEADS, DIM, dtype.itemsize, casts=shares)
        counts += [sum(s.message.size for s in sent), exchange.program(backward=True).sent(sizes)]
    return made


@cache
def _group(rank: int, world: int, per_node: int):
    return group_of(rank, world, per_node=per_node)


def squares(rank: int, world: int, names: list[str], dtype: torch.dtype) -> list[list[list[float]]]:
    """Return by way, with and without rounding, and gradient: squares of error and reference."""
    exact = gradients(rank, world, Way("ring"), torch.float64)
    found = []
    for name in names:
        for rounds in (False, True):
            way = Way(**{**vars(WAYS[name]), "rounds": rounds})
            made = gradients(rank, world, way, dtype)
            pairs = zip(made, exact, strict=True)
            found.append([[float(((a - b) ** 2).sum()), float((b**2).sum())] for a, b in pairs])
    return found


def errors(world: int, names: list[str], dtype: torch.dtype) -> dict[tuple[str, bool], list[float]]:
    """Return relative errors of dq, dk and dv over all ranks, in the norm."""
    total = torch.tensor(gloo.run(world, squares, names, dtype)).double().sum(0)
    keys = [(name, rounds) for name in names for rounds in (False, True)]
    return dict(zip(keys, (total[..., 0] / total[..., 1]).sqrt().tolist(), strict=True))


# Rounding once has an error of 2^-9 / sqrt(3) = 0.11 % to 2^-8 / sqrt(3), by the leading bits.
ONCE = 0.0030


@pytest.mark.parametrize(
    ("world", "names", "most"),
    [
        (2, [*WAYS], ONCE),
        pytest.param(4, [*WAYS], 1.5 * ONCE, marks=pytest.mark.slow),
        pytest.param(8, [*WAYS], 2 * ONCE, marks=pytest.mark.slow),
    ],
)
def test_rounded_messages_have_small_errors_and_others_none(world, names, most):
    found = errors(world, names, torch.float64)
    for name in names:
        exact, rounded = found[name, False], found[name, True]
        assert max(exact) < 1e-14, name
        by_rank = "queries" in name
        assert max(rounded[1:] if by_rank else rounded[:1]) < 1e-14, "these gradients stay"
        moved = rounded[:1] if by_rank else rounded[1:]
        once = "group_cast" in name or "all_gather" in name
        least = 2.0**-9 / 3
        assert least < min(moved) <= max(moved) < (ONCE * 1.5 if once else most), (name, rounded)


def counted(rank: int, world: int) -> list[tuple[list[float], list[float]]]:
    found = []
    for way in WAYS.values():
        counts: tuple[list[float], list[float]] = [], []
        for rounds, of in zip((False, True), counts, strict=True):
            changed = Way(**{**vars(way), "rounds": rounds})
            gradients(rank, world, changed, torch.bfloat16, of)
        found.append(counts)
    return found


def test_recorded_bytes_are_the_planned_ones_and_fewer_if_rounded():
    for of_rank in gloo.run(4, counted):
        for name, (exact, rounded) in zip(WAYS, of_rank, strict=True):
            assert exact[0] == exact[1], name
            assert rounded[0] == rounded[1], name
            assert rounded[0] < exact[0] or exact[0] == 0, name


if __name__ == "__main__":
    for dtype in (torch.float64, torch.bfloat16):
        of_all = errors(int(sys.argv[1]), sys.argv[2:] or [*WAYS], dtype)
        for (name, rounds), of in of_all.items():
            print(dtype, name, rounds, " ".join(f"{100 * e:.3f} %" for e in of), flush=True)
