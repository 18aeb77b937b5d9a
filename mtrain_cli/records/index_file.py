"""`index.npz`: the dynamic indices of one profiled iteration, to replay with other settings.

The file is an archive of NumPy arrays, written layer by layer:
- ``about``: JSON with the schema, the recorded setup and the list of entries
- ``lengths``, ``padded``: number of tokens of each sequence, without and with padding
- ``mask<i>``: the mask of sequence i. If a query sees one interval of keys up to itself, the starts
  and values of the runs of `SequenceMask.first`, int64 [2, runs]. Otherwise the differences of low
  and high along the positions, int32 [intervals, 2, positions]
- ``full<i>``: the same in the ``full_layers`` of ``about`` (schema 2), if they have another mask
- ``<i>.slashes``, ``<i>.columns`` of a vertical-slash index i: uint8, one bit per diagonal, and
  int32, positions of the single columns
- ``<i>.bits``, ``<i>.rows`` of a bitmap i: uint8, one bit per block pair, packed along the key
  blocks, and int32, numbers of its query blocks. ``<i>.gates``, ``<i>.chunk`` of a `GatedBitmap`;
  ``<i>.starts`` of a `StartBitmap`
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, Index, StartBitmap, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import FullLayers
from mtrain_cli.config.documents import replacing
from mtrain_cli.config.schema import ConfigError

INDEX_SCHEMA = 1
# Schema of a file whose layers have different masks. A reader of schema 1 alone would give all
# layers the masks ``mask<i>``, so it must refuse the file.
MIXED_SCHEMA = 2
_READ = INDEX_SCHEMA, MIXED_SCHEMA
_KIND = "mtrain indices"
_FORMER_COLUMNS = ".bars"  # the name of ".columns" in files of version 0.1.0
# Errors that NumPy, zipfile, json and constructors raise for a damaged or foreign file.
_FOREIGN = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, OSError),
    *(RuntimeError, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True)
class RecordedSetup:
    """Settings of the recorded run that a replay needs.

    seq: number of tokens of a sequence before padding.
    chunk: topology.balanced_chunk; None means auto.
    columns: largest number of single columns per head, by pattern label; None without a bound
        (`exchange_selection.ExchangeNeeds`). If a label is missing, a replay counts the columns of
        the index.
    """

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    workers: int
    per_node: int
    layout: str
    exchange: str
    block_size: int = 128
    chunk: int | None = None
    columns: Mapping[str, int | None] = field(default_factory=dict)
    iteration: int = 0


@dataclass(frozen=True)
class RecordedIndices:
    """An open index file.

    masks: one mask per sequence of the batch, padded as in the recorded run.
    full: the layers with other masks than ``masks``; None if all layers are alike.
    entries: a (pattern label, layer) pair for each index, in recorded order.
    """

    path: Path
    setup: RecordedSetup
    masks: tuple[SequenceMask, ...]
    entries: tuple[tuple[str, int], ...]
    full: FullLayers | None
    _stored: dict[tuple[str, int], tuple[dict[str, Any], ...]] = field(repr=False, compare=False)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for label, _ in self.entries))

    def layers(self, pattern: str) -> tuple[int, ...]:
        """Return the numbers of the layers with an index of a pattern, in ascending order."""
        return tuple(sorted(layer for label, layer in self.entries if label == pattern))

    def block(self, pattern: str) -> int | None:
        """Return the block size of a pattern's indices in tokens; None for dense attention."""
        return next(
            self._stored[entry][0].get("block") for entry in self.entries if entry[0] == pattern
        )

    def index(self, pattern: str, layer: int) -> Index | None:
        """Read one index, of joined parts if each worker has its own; None for dense attention.

        Raises:
            ConfigError: the file is damaged.
        """
        parts = self._stored[pattern, layer]
        if parts[0]["kind"] == "dense":
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                indices = [_unpacked(part, file) for part in parts]
            return indices[0] if len(indices) == 1 else _joined(indices)
        except _FOREIGN as error:
            raise ConfigError(
                f"{self.path}: layer {layer} of {pattern} is damaged; record it again"
            ) from error


def save_indices(
    path: Path,
    setup: RecordedSetup,
    masks: Sequence[SequenceMask],
    indices: Iterable[tuple[str, int, Index | None]],
    full: FullLayers | None = None,
) -> None:
    """Write an index file atomically.

    Args:
        indices: (pattern label, layer, index) of each index. The index is None for dense attention.
            An iterator needs memory for only one index at a time. If each worker has only a part
            of a bitmap's query blocks, give one index per worker.
        full: the layers with other masks than ``masks``; None if all layers are alike.
    """
    entries: list[dict[str, Any]] = []
    with replacing(Path(path)) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for number, (pattern, layer, index) in enumerate(indices):
            entry: dict[str, Any] = {"pattern": pattern, "layer": layer, "kind": "dense"}
            if index is not None:
                size = {"block": index.block, "blocks": index.blocks}
                entry |= {"kind": type(index).__name__, **size}
                for name, values in _packed(index).items():
                    _write(file, f"{number}.{name}", values)
            entries.append(entry)
        kinds = {"mask": masks, "full": () if full is None else full.masks}
        for name, of_kind in kinds.items():
            for row, mask in enumerate(of_kind):
                _write(file, f"{name}{row}", _packed_mask(mask))
        _write(file, "lengths", np.array([mask.length for mask in masks], np.int64))
        _write(file, "padded", np.array([mask.padded for mask in masks], np.int64))
        about = {"kind": _KIND, "schema": INDEX_SCHEMA, "setup": dataclasses.asdict(setup)}
        if full is not None:
            layers = {"full_layers": sorted(full.layers), "layers": full.of}
            about |= {"schema": MIXED_SCHEMA, **layers}
        _write(file, "about", np.array(json.dumps({**about, "entries": entries})))


def _write(file: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, values, allow_pickle=False)


def load_indices(path: Path) -> RecordedIndices:
    """Open an index file. `RecordedIndices.index` reads the indices on demand.

    Raises:
        ConfigError: the file is missing, damaged, not an index file, or has another schema.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["kind"] != _KIND:
                raise ValueError(about["kind"])
            if about["schema"] not in _READ:
                raise ConfigError(
                    f"{path}: has schema {about['schema']}, this version of mtrain reads "
                    f"{' and '.join(map(str, _READ))}; update mtrain, or record it again"
                )
            about["setup"].pop("needs_out", None)  # written by versions before 0.2
            setup = RecordedSetup(**about["setup"])
            masks, full = _masks(file, "mask"), None
            if "full_layers" in about:
                numbers = frozenset(map(int, about["full_layers"]))
                full = FullLayers(_masks(file, "full"), numbers, int(about["layers"]))
            stored: dict[tuple[str, int], list[dict[str, Any]]] = {}
            for number, entry in enumerate(about["entries"]):
                stored.setdefault((str(entry["pattern"]), int(entry["layer"])), []).append(
                    entry | {"number": number}
                )
            present = {name.replace(_FORMER_COLUMNS, ".columns") for name in file.files}
            _check(setup, masks, stored, present)
    except ConfigError:
        raise
    except _FOREIGN as error:
        raise ConfigError(f"{path}: not an index file of mtrain, or damaged") from error
    parts = {key: tuple(entries) for key, entries in stored.items()}
    return RecordedIndices(path, setup, masks, tuple(stored), full, parts)


def _check(
    setup: RecordedSetup,
    masks: Sequence[SequenceMask],
    stored: Mapping[tuple[str, int], Sequence[dict[str, Any]]],
    present: set[str],
) -> None:
    numbers = (
        *(setup.seq, setup.heads, setup.kv_heads, setup.head_dim, setup.dtype_bytes),
        *(setup.workers, setup.per_node, setup.block_size),
        *([] if setup.chunk is None else [setup.chunk]),
    )
    if not all(isinstance(n, int) and n >= 1 for n in numbers) or setup.heads % setup.kv_heads:
        raise ValueError("shapes")
    fit = all(mask.length <= setup.seq <= mask.padded for mask in masks)
    if not (masks and stored and fit):
        raise ValueError("masks")
    for parts in stored.values():
        for part in parts:
            names = {
                "dense": (),
                "VerticalSlash": ("slashes", "columns"),
                "BlockBitmap": ("bits", "rows"),
                "GatedBitmap": ("bits", "rows", "gates", "chunk"),
                "StartBitmap": ("bits", "rows", "starts"),
            }[part["kind"]]
            if not {f"{part['number']}.{name}" for name in names} <= present:
                raise ValueError("arrays")
            if names and part["block"] * part["blocks"] < masks[0].padded:
                raise ValueError("blocks")


def _packed_mask(mask: SequenceMask) -> np.ndarray:
    if not mask.is_causal_interval:
        bounds = np.stack([mask.low, mask.high], 1)
        return np.diff(bounds, axis=-1, prepend=0).astype(np.int32)  # compresses well
    starts = np.flatnonzero(np.diff(mask.first, prepend=-1))
    return np.stack([starts, mask.first[starts]])


def _masks(file: Any, name: str) -> tuple[SequenceMask, ...]:
    sizes = zip(file["lengths"], file["padded"], strict=True)
    return tuple(
        _mask(file[f"{name}{row}"], int(length), int(padded))
        for row, (length, padded) in enumerate(sizes)
    )


def _mask(packed: np.ndarray, length: int, padded: int) -> SequenceMask:
    if packed.ndim == 3:
        low, high = packed.astype(np.int64).cumsum(-1).transpose(1, 0, 2)
        inside = (low >= 0).all() and (high <= length).all() and 0 <= length <= padded
        ascend = (low <= high).all() and ((high[:-1] <= low[1:]) | (low[1:] == high[1:])).all()
        if low.shape[1] != padded or not (inside and ascend) or (high > low)[:, length:].any():
            raise ValueError("masks")
        return SequenceMask(low, high, length)
    starts, values = packed
    counts = np.diff(starts, append=padded)
    ordered = (counts >= 0).all() and counts.sum() == padded and not starts[:1].any()
    if not (ordered and 0 <= length <= padded):
        raise ValueError("masks")
    first = np.repeat(values, counts)
    if (first < 0).any() or (first[:length] > np.arange(length)).any():
        raise ValueError("masks")
    return SequenceMask.from_first(first, length)


def _packed(index: Index) -> dict[str, np.ndarray]:
    index = index.per_head() if isinstance(index, StartBitmap) else index
    arrays = {name: tensor.cpu().numpy() for name, tensor in index.tensors().items()}
    packed: dict[str, np.ndarray] = {
        name: np.packbits(a, axis=-1) if a.dtype == np.bool_ else a for name, a in arrays.items()
    }
    if isinstance(index, VerticalSlash):
        used = int((arrays["columns"] < index.blocks * index.block).sum(-1).max(initial=0))
        packed["columns"] = packed["columns"][..., :used]
    if isinstance(index, GatedBitmap):
        packed["chunk"] = np.array(index.chunk)
    return packed


def _unpacked(part: Mapping[str, Any], file: Any) -> Index:
    block, blocks, number = int(part["block"]), int(part["blocks"]), part["number"]
    if part["kind"] == "VerticalSlash":
        slashes = file[f"{number}.slashes"]
        name = f"{number}.columns"
        columns = file[name if name in file else f"{number}{_FORMER_COLUMNS}"]
        shapes = columns.shape[:2] == slashes.shape[:2], slashes.shape[2:] == (-(-blocks // 8),)
        if not all(shapes) or columns.dtype != np.int32 or (columns < 0).any():
            raise ValueError("columns")
        return VerticalSlash(block, blocks, _bits(slashes, blocks), torch.from_numpy(columns))
    bits, rows = file[f"{number}.bits"], file[f"{number}.rows"]
    if bits.shape[2:] != (len(rows), -(-blocks // 8)) or not ((rows >= 0) & (rows < blocks)).all():
        raise ValueError("rows")
    whole = BlockBitmap(block, blocks, _bits(bits, blocks), torch.from_numpy(rows))
    if part["kind"] == "BlockBitmap":
        return whole
    if part["kind"] == "StartBitmap":
        starts = file[f"{number}.starts"]
        if starts.dtype != np.uint8 or starts.shape != whole.bits.shape:
            raise ValueError("starts")
        return StartBitmap(block, blocks, whole.bits, whole.rows, torch.from_numpy(starts))
    gates, chunk = file[f"{number}.gates"], int(file[f"{number}.chunk"])
    whole_blocks = chunk >= block and chunk % block == 0
    shaped = gates.dtype == np.int32 and gates.shape[:3] == (*whole.heads, len(rows) * block)
    if not (whole_blocks and shaped and gates.shape[3] >= -(-blocks * block // chunk) / 32):
        raise ValueError("gates")
    return GatedBitmap(block, blocks, whole.bits, whole.rows, torch.from_numpy(gates), chunk)


def _bits(packed: np.ndarray, blocks: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(packed, axis=-1, count=blocks).view(np.bool_))


def _joined(parts: Sequence[Index]) -> BlockBitmap:
    bitmaps = [part for part in parts if isinstance(part, BlockBitmap)]
    if len(bitmaps) < len(parts):
        raise ValueError("an index has one form")
    rows = torch.cat([part.rows for part in bitmaps])
    if len(rows.unique()) < len(rows):
        raise ValueError("a query block was recorded twice")
    order, first = rows.argsort(), bitmaps[0]
    if len({(type(part), part.block, getattr(part, "chunk", 0)) for part in bitmaps}) > 1:
        raise ValueError("an index has one form")
    tensors = {
        name: torch.cat([getattr(part, name) for part in bitmaps], 2)
        .unflatten(2, (len(rows), -1))
        .index_select(2, order)
        .flatten(2, 3)
        for name in first.by_head
    }
    return replace(first, rows=rows[order], **tensors)
