"""FlashAttention-4 (CuTe DSL) on Hopper and later.

A mask of a few rectangles takes one call per rectangle, any other mask one call with block lists.
Under a dynamic index, the single columns are more key blocks of that call (`column_blocks`), or
Triton kernels add them to the same softmax, without a merge.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from mtrain_cli import install_command, resource_dir
from mtrain_cli.attention.block_lists import index_lists, mask_lists, mask_words
from mtrain_cli.attention.column_blocks import Front
from mtrain_cli.attention.kernel import KernelRequest, Saved
from mtrain_cli.attention.packed_columns import add_column_gradients, local_columns, pack_columns
from mtrain_cli.attention.partials import Pair, Triple
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.attention.triton_kernel import TritonColumns, ensure_delta, make_tile_plan
from mtrain_cli.launch.temporary_folders import own_folder

# With more rectangles per sequence, one call with block lists is faster.
_MAX_RECTANGLES = 4
_BLOCK = 128


class Flash4Kernel(TritonColumns):
    name = "flash4"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.device != "cuda":
            return "needs a CUDA GPU"
        if request.softcap:
            return f"does not cap scores (softcap={request.softcap:g})"
        if request.capability is None or request.capability[0] < 9:
            return "needs compute capability 9.0 (Hopper) or later"
        if request.dtype != "bfloat16":
            return f"computes bfloat16, not {request.dtype}"
        if request.head_dim not in (64, 128):
            return f"head_dim {request.head_dim} is not 64 or 128"
        if request.deterministic:
            return "its block-sparse backward is not bitwise repeatable"
        if request.index is not None and request.index.block != _BLOCK:
            return (
                f"computes blocks of {_BLOCK}, not sparsity.block={request.index.block}, "
                "which train.kernel=triton computes"
            )
        if request.index is not None and request.index.chunk:
            return "computes whole blocks, not sparsity.gate=query"
        if request.index is not None and request.index.starts:
            return "computes whole blocks, not blocks that are seen from one of their queries on"
        return None

    def missing_package(self, request: KernelRequest) -> str | None:
        if request.index is not None and importlib.util.find_spec("triton") is None:
            return f"needs triton for the columns of an index ({install_command('cuda')})"
        # Looking for a module imports its package, so look for the package first.
        if not all(map(importlib.util.find_spec, ("flash_attn", "flash_attn.cute"))):
            return f"flash-attn-4 is not installed ({install_command('hopper')})"
        if error := _load_error():
            return f"flash-attn-4 is installed, but does not load: {error}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair:
        dense = _load_dense()
        if tiles.index is not None:
            return _sparse_forward(q, k, v, tiles, scale)
        if not _is_few_rectangles(tiles):
            spans, lists = (tiles.low, tiles.high), mask_lists(tiles, _BLOCK)[0]
            return dense.spans_forward(q, k, v, spans, lists, scale, _words(tiles)[0])
        if _is_one_rectangle(tiles):
            (s,) = tiles.slices[0]
            keys = slice(s.k_start, s.k_stop)
            return dense.forward(q, k[:, keys], v[:, keys], s.causal, scale)
        out = torch.zeros_like(q)
        batch, queries, heads, _ = q.shape
        lse = q.new_full((batch, heads, queries), float("-inf"), dtype=torch.float32)
        for s in tiles.slices[0]:
            rows, keys = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            out[:, rows], lse[:, :, rows] = dense.forward(
                q[:, rows], k[:, keys], v[:, keys], s.causal, scale
            )
        return out, lse

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple:
        dense = _load_dense()
        if tiles.index is not None:
            return _sparse_backward(dout, saved, tiles, scale)
        q, k, v, out, lse, delta = saved
        if not _is_few_rectangles(tiles):
            spans, lists = (tiles.low, tiles.high), mask_lists(tiles, _BLOCK)[1]
            return dense.spans_backward(dout, *saved, spans, lists, scale, _words(tiles)[1])
        if _is_one_rectangle(tiles):
            (s,) = tiles.slices[0]
            if s.k_stop - s.k_start == k.shape[1]:
                return dense.backward(dout, *saved, s.causal, scale)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
        for s in tiles.slices[0]:
            rows, keys = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            part_out = None if out is None else out[:, rows]
            part_delta = None if delta is None else delta[:, :, rows]
            inputs = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], part_out, lse[:, :, rows]
            dq[:, rows], part_dk, part_dv = dense.backward(*inputs, part_delta, s.causal, scale)
            dk[:, keys] += part_dk
            dv[:, keys] += part_dv
        return dq, dk, dv


def _load_dense() -> ModuleType:
    # FlashAttention-4 decides at import whether and where it caches compiled kernels.
    loaded = "mtrain_cli.kernels.flash4.dense" in sys.modules
    with nullcontext() if loaded else persistent_kernel_cache():
        from mtrain_cli.kernels.flash4 import dense
    return dense


@cache
def _load_error() -> str | None:
    try:
        _load_dense()
    except Exception as error:  # mismatched libraries raise all kinds of errors
        first_line = (str(error) or "no message").splitlines()[0]
        return f"{type(error).__name__}: {first_line}"[:200]
    return None


def _sparse_forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair:
    from mtrain_cli.kernels.triton import sparse

    dense = _load_dense()
    front = Front.of(tiles, k.shape[2], backward=False)
    if front is not None and dense.takes_columns(q.device):
        lists, words = index_lists(tiles, False, front), front.words(tiles)
        return dense.spans_forward(q, *front.join(k, v, tiles), None, lists, scale, columns=words)
    blocks = dense.spans_forward(
        q, k, v, _spans(tiles), index_lists(tiles, transposed=False), scale
    )
    columns = pack_columns(k, v, tiles)
    if columns is None:
        return blocks
    return sparse.forward(
        q, k, v, columns, make_tile_plan(tiles, slashes=False), scale, slashes=False, partial=blocks
    )


def _sparse_backward(dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple:
    from mtrain_cli.kernels.triton import sparse

    dense = _load_dense()
    q, k, v, out, lse, delta = saved
    front = Front.of(tiles, k.shape[2], backward=True)
    if front is not None and dense.takes_columns(q.device):
        lists, words = index_lists(tiles, True, front), front.words(tiles)
        k, v = front.join(k, v, tiles)
        dq, dk, dv = dense.spans_backward(
            dout, q, k, v, out, lse, delta, None, lists, scale, columns=words
        )
        del k, v, lists, words  # before the gradients of the columns take memory
        return dq, *front.add_gradients(dk, dv, tiles)
    lists = index_lists(tiles, transposed=True)
    dq, dk, dv = dense.spans_backward(dout, *saved, _spans(tiles), lists, scale)
    columns = pack_columns(k, v, tiles)
    if columns is None:
        return dq, dk, dv
    plan = make_tile_plan(tiles, slashes=False)
    delta = ensure_delta(out, dout, delta)
    dq = sparse.backward_queries(
        dout, q, k, v, columns, lse, delta, plan, scale, slashes=False, partial=dq
    )
    columns_dk, columns_dv = sparse.backward_columns(dout, q, columns, lse, delta, plan, scale)
    add_column_gradients(dk, dv, columns_dk, columns_dv, local_columns(tiles)[1])
    return dq, dk, dv


def _spans(tiles: Tiles) -> Pair | None:
    """Return (low, high) of the tiles, or None if the mask is causal only, without documents."""
    assert tiles.geometry is not None
    return None if tiles.geometry.tables.plain else (tiles.low, tiles.high)


def _words(tiles: Tiles) -> tuple[Pair | None, Pair | None]:
    words = mask_words(tiles)
    if words is None:
        return None, None
    return (words.ids, words.of_queries), (words.ids, words.of_keys)


def _is_few_rectangles(tiles: Tiles) -> bool:
    """Return whether the mask consists of a few slices that are full or causal."""
    # A band or an inverse slice goes to the block lists: FlashAttention-4's own windows were not
    # checked with them. So do several intervals per query, whose slices would need a merge.
    few = tiles.same_for_batch and len(tiles.slices[0]) <= _MAX_RECTANGLES
    return few and tiles.intervals == 1 and not any(s.inverse for s in tiles.slices[0])


def _is_one_rectangle(tiles: Tiles) -> bool:
    """Return whether one rectangle covers every query row."""
    slices = tiles.slices[0]
    return len(slices) == 1 and slices[0].q_stop - slices[0].q_start == tiles.num_queries


ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_COMPILERS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "quack-kernels",
)


@contextmanager
def persistent_kernel_cache() -> Iterator[None]:
    """Enable FlashAttention-4's on-disk kernel cache during its first import.

    It reads environment variables then, which are restored for child processes. Do nothing if the
    user has set ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED``, or without a usable `cache_folder`.
    """
    if ENABLED in os.environ:
        yield
        return
    user_folder = os.environ.get(FOLDER)
    path = Path(user_folder) if user_folder else cache_folder()
    if path is None or not _usable(path):
        yield
        return
    os.environ[ENABLED], os.environ[FOLDER] = "1", str(path)
    try:
        yield
    finally:
        del os.environ[ENABLED]
        if user_folder is None:
            del os.environ[FOLDER]


def cache_folder() -> Path | None:
    """Return the folder for compiled kernels, or None if other users could write to it.

    Cached files are run as code.
    """
    base = own_folder()
    if base is None:
        return None
    inputs = [
        (resource_dir("kernels") / "flash4/dense.py").read_text(),
        *map(_version, _COMPILERS),
        str(torch.version.cuda),
        *_gpu(),
    ]
    return base / f"flash4-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"


def _gpu() -> list[str]:
    if not torch.cuda.is_available():
        return []
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [
        properties.name,
        f"{properties.major}.{properties.minor}",
        str(properties.multi_processor_count),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def _usable(path: Path) -> bool:
    """Return whether files can be created and locked in the folder."""
    # FlashAttention-4 locks one file per kernel. The lock of the folder, until the process exits,
    # keeps systemd-tmpfiles from cleaning it.
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = os.open(path / "probe.lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(probe)
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
