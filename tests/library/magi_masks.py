"""Compute the masks that MagiAttention's tests list, and compare them with a float64 definition.

    PYTHONPATH=tests python tests/library/magi_masks.py FOLDER [--workers 2] [--tokens 4096]

FOLDER is a checkout of SandAI-org/MagiAttention. Its files are parsed, never executed: a mask is
what literals next to each other say. If both lengths differ, keys come first in a joint sequence,
as docs/library.md describes. A mask of more tokens than ``--tokens`` is divided by a number that
divides all its ranges, if there is one. No pytest collects this file."""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gloo
import numpy as np
import torch

from mtrain_cli import api
from mtrain_cli.attention.mask import IntArray
from mtrain_cli.library.slices import RANGES, read_slices

_TYPES = ("attn_type_map", "attn_type_mapping", "attn_mask_type")
_HEADS, _KV_HEADS, _DIM = 2, 1, 8
_ROWS = 512  # of a step of the definition
TOLERANCE = 4e-6  # float32 against float64, of the largest value


class Listed(NamedTuple):
    """A mask as it is listed: the tokens are divided by ``divisor``."""

    place: str
    slices: IntArray
    queries: int
    keys: int
    divisor: int

    @property
    def joint(self) -> tuple[int, IntArray]:
        """The tokens of one sequence for queries and keys, and the slices in it."""
        if self.queries == self.keys:
            return self.queries, self.slices
        return self.keys + self.queries, self.slices + np.array([self.keys] * 2 + [0] * 3)


def listed(folder: Path, most: int) -> Iterator[Listed | str]:
    """Yield each mask of the tests, or the place of one that is not written out or too long."""
    for path in sorted(folder.glob("tests/**/*.py")):
        for node, values in _groups(ast.parse(path.read_text())):
            name = _constant(values.get("name") or values.get("NAME"))
            place = f"{path.relative_to(folder)}:{node.lineno} {name or ''}".rstrip()
            types = next(values[key] for key in _TYPES if key in values)
            try:
                q_ranges, k_ranges = (_value(values[key], {}) for key in ("q_ranges", "k_ranges"))
                kinds = _value(types, {"q_ranges": q_ranges})
            except KeyError:
                yield place
                continue
            kinds = kinds if isinstance(kinds, list) else [kinds] * len(q_ranges)
            given = dict(zip(RANGES, (q_ranges, k_ranges, kinds), strict=True))
            (table,) = read_slices(place, given, 2**20)
            longest = _constant(values.get("seqlen")) or int(table[:, [1, 3]].max(initial=0))
            totals = ("total_seqlen_q", "total_seqlen_k")
            lengths = [_constant(values.get(key)) or longest for key in totals]
            divisor = int(np.gcd.reduce([*lengths, *table[:, :4].ravel()]))
            divisor = next((n for n in range(1, divisor + 1)
                            if divisor % n == 0 and sum(lengths) <= 2 * n * most), 0)  # fmt: skip
            if not divisor:
                yield place
                continue
            table[:, :4] //= divisor
            yield Listed(place, table, lengths[0] // divisor, lengths[1] // divisor, divisor)


def _groups(tree: ast.AST) -> Iterator[tuple[Any, Mapping[str, ast.expr]]]:
    """Yield the values by name of dicts, calls and functions that name ranges and types."""
    for node in ast.walk(tree):
        groups: list[tuple[Any, Mapping[str, ast.expr]]] = []
        if isinstance(node, ast.Dict):
            keys = [getattr(key, "value", getattr(key, "id", None)) for key in node.keys]
            groups = [(node, dict(zip(keys, node.values, strict=True)))]
        elif isinstance(node, ast.Call):
            groups = [(node, {k.arg: k.value for k in node.keywords if k.arg})]
        elif isinstance(node, ast.FunctionDef):
            found: dict[str, ast.expr] = {}
            for one in node.body:
                if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                    found[one.targets[0].id] = one.value
                    if {"q_ranges", "k_ranges"} <= found.keys() and set(_TYPES) & found.keys():
                        groups.append((one, found))
                        found = {}
        for place, values in groups:
            names = {"q_ranges", "k_ranges"} <= values.keys() and set(_TYPES) & values.keys()
            # Names alone pass a mask on that is listed elsewhere.
            if names and not isinstance(values["q_ranges"], ast.Name | ast.Subscript):
                yield place, values


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return ranges, types or numbers that are written out, with the values of some names.

    Raises KeyError for others.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=ast.Name(id="AttnMaskType"), attr=name):
            return {"INVCAUSAL": "inv_causal", "BICAUSAL": "bi_causal"}.get(name, name.lower())
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, names) for item in items]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            one, other = _value(left, names), _value(right, names)
            return one + other if isinstance(op, ast.Add) else one * other
        case ast.Call(func=ast.Attribute(attr="from_ranges")):
            given = [*node.args, *(k.value for k in node.keywords if k.arg == "ranges")]
            return _value(given[0], names)
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            return list(range(*(_value(bound, names) for bound in bounds)))
        case ast.Call(func=ast.Name(id="len"), args=[one]):
            return len(_value(one, names))
        case ast.ListComp(elt=element, generators=[first, *rest]):
            assert isinstance(first.target, ast.Name)
            inner = ast.ListComp(element, rest) if rest else None
            found = []
            for value in _value(first.iter, names):
                known = {**names, first.target.id: value}
                found += _value(inner, known) if inner else [_value(element, known)]
            return found
    raise KeyError(type(node).__name__)


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def tensors(seq: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    heads = (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
    return [torch.randn(1, seq, n, _DIM, generator=generator, dtype=torch.float64) for n in heads]


def by_library(_rank: int, _world: int, seq: int, slices: IntArray) -> Any:
    """out, dq, dk and dv of whole sequences, or the message of an error."""
    torch.set_num_threads(1)
    cp = api.context_parallel(
        None, "topology.block_size=16", seq=seq, layout="balanced", exchange="group_cast"
    )
    try:
        batch = cp.batch(slices=slices)
        *qkv, dout = batch.shard(*(tensor.float() for tensor in tensors(seq)))
        for tensor in qkv:
            tensor.requires_grad_()
        out = batch.attention(*qkv, layer=0)
    except api.ConfigError as error:
        return str(error)
    out.backward(dout)
    return [batch.gather(tensor.detach()) for tensor in (out, *(t.grad for t in qkv))]


def by_definition(seq: int, slices: IntArray) -> list[torch.Tensor]:
    """The same in float64 by autograd, a few rows at a time."""
    *qkv, dout = tensors(seq)
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    outs = []
    for first in range(0, seq, _ROWS):
        rows, keys = torch.arange(first, min(seq, first + _ROWS))[:, None], torch.arange(seq)
        seen = torch.zeros(len(rows), seq, dtype=torch.bool)
        for q_start, q_stop, k_start, k_stop, kind in slices.tolist():
            here = (rows >= q_start) & (rows < q_stop) & (keys >= k_start) & (keys < k_stop)
            if kind in (1, 3):
                here &= keys - k_stop <= rows - q_stop
            if kind in (2, 3):
                here &= keys - k_start >= rows - q_start
            seen |= here
        some = seen.any(-1, keepdim=True)
        scores = torch.einsum("bqhd,bkgd->bhqk", q[:, rows[:, 0]], k) / _DIM**0.5
        weights = scores.masked_fill(~(seen | ~some), -torch.inf).softmax(-1) * some
        out = torch.einsum("bhqk,bkgd->bqhd", weights, v)
        out.backward(dout[:, rows[:, 0]])
        outs.append(out.detach())
    return [torch.cat(outs, 1), *(tensor.grad for tensor in qkv)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    tally: Counter[str] = Counter()
    worst, known = 0.0, set()
    for mask in listed(options.folder, options.tokens):
        if isinstance(mask, str):
            tally["not written out, or too long"] += 1
            print(f"not written out, or too long: {mask}", flush=True)
            continue
        seq, slices = mask.joint
        key = seq, slices.tobytes()
        if key in known:
            tally["listed before"] += 1
            continue
        known.add(key)
        found = gloo.run(options.workers, by_library, seq, slices)[0]
        if isinstance(found, str):
            result = f"refused: {found}"
            tally["refused"] += 1
        else:
            pairs = zip(found, by_definition(seq, slices), strict=True)
            error = max(float((a.double() - b).abs().max() / (1 + b.abs().max())) for a, b in pairs)
            worst, result = max(worst, error), f"{error:.1e}"
            tally["equal" if error < TOLERANCE else "different"] += 1
        shape = f"{mask.queries} x {mask.keys}" + (f" (1/{mask.divisor})" * (mask.divisor > 1))
        print(f"{result}  {shape}, {len(slices)} slices: {mask.place}", flush=True)
    print(", ".join(f"{number} {name}" for name, number in tally.items()), f"; worst {worst:.1e}")


if __name__ == "__main__":
    main()
