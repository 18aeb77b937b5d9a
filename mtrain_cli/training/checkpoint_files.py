"""Read the files of torch.distributed.checkpoint (DCP) without executing code in them.

Checksums show that a file is unchanged, not that it is harmless. So loading the pickle `.metadata`
creates only classes that DCP writes, tensors and other values are read with `weights_only=True`,
file names stay inside the folder, and no entry unpacks to more bytes than the files hold.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mtrain_cli.grouping import grouped
from mtrain_cli.launch import safe_pickle
from mtrain_cli.launch.manifest import plain_name

METADATA = ".metadata"
Offsets = tuple[int, ...]  # of a part along each dimension, or its sizes


class ForeignFileError(ValueError):
    """A checkpoint file holds data that DCP does not write. The message names file or tensor."""


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader for one checkpoint folder, with the checks of this module."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read and check `.metadata`. Raise ForeignFileError or OSError."""
        super().__init__(folder)
        self._folder = Path(folder)
        with (self._folder / METADATA).open("rb") as file:
            try:
                self.metadata = _checked(safe_pickle.load_metadata(file), self._folder)
            except ValueError as error:
                raise ForeignFileError(f"{METADATA} {error}") from error

    # Without arguments: the signature tells DCP that ranks have no metadata files.
    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self.metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        section = io.BufferedReader(_FileSection(file, sinfo.offset, sinfo.length))
        name, length = sinfo.relative_path, sinfo.length
        try:
            with zipfile.ZipFile(section) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError) as error:
            raise ForeignFileError(f"{name} holds data that is not a tensor") from error
        if unpacked > length:
            raise ForeignFileError(
                f"{name} holds an entry that unpacks to more than its {length:,} bytes"
            )
        return super()._slice_file(file, sinfo)

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        holds = f"a file of {self._folder.name} holds"
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise ForeignFileError(f"{holds} data other than tensors and plain values") from error
        except (IndexError, TypeError, AttributeError, KeyError, RuntimeError) as error:
            problem = f"{holds} a tensor whose shape differs from {METADATA}"
            raise ForeignFileError(problem) from error


class CheckpointPlanner(DefaultLoadPlanner):
    """DCP's planner, except that values other than tensors also load with `weights_only=True`."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in plan.items:
            name = item.dest_index.fqn
            expects_tensor = isinstance(self.state_dict.get(name), torch.Tensor)
            if (item.type == LoadItemType.BYTE_IO) == expects_tensor:
                stored, wanted = ("no", "a") if expects_tensor else ("a", "no")
                raise ForeignFileError(
                    f"{METADATA} says that {name} is {stored} tensor; expected {wanted} tensor"
                )
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            value_read = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ForeignFileError(f"{name} holds data other than plain values") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], value_read)
        else:
            self.state_dict[name] = value_read


class _FileSection(io.RawIOBase):
    """A section of an open file, readable as a file. DCP's own class cannot seek from the end."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        content = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def tensors_of(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    """Return the tensors whose names start with `prefix`."""
    entries = metadata.state_dict_metadata.items()
    tensors = {name: e for name, e in entries if isinstance(e, TensorStorageMetadata)}
    return {name: entry for name, entry in tensors.items() if name.startswith(prefix)}


def _checked(metadata: Any, folder: Path) -> Metadata:
    """Return `metadata`, or raise ValueError ("names the file ...") for what DCP does not write."""
    try:
        return _with_valid_parts(metadata, folder)
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError("describes its tensors in a format that DCP does not write") from error


def _with_valid_parts(metadata: Any, folder: Path) -> Metadata:
    """Check what `_checked` checks. Raise TypeError and the like for parts of another type."""
    kinds, sizes, claimed = (TensorStorageMetadata, BytesStorageMetadata), {}, 0
    _require(isinstance(metadata, Metadata) and isinstance(metadata.storage_data, dict))
    _require(all(isinstance(e, kinds) for e in metadata.state_dict_metadata.values()))
    for index, info in metadata.storage_data.items():
        name, begin, length = info.relative_path, info.offset, info.length
        _require(isinstance(index, MetadataIndex) and isinstance(info, _StorageInfo))
        _require(type(begin) is type(length) is int and min(begin, length) >= 0)
        _require(not info.__dict__.get("transform_descriptors"))  # such as compression
        if not plain_name(name):
            raise ValueError(f"names the file {name!r}, which is not in this folder")
        if name not in sizes:
            path = folder / name
            sizes[name] = path.stat().st_size if path.is_file() else 0
        if begin + length > sizes[name]:
            raise ValueError(f"refers to data beyond the {sizes[name]:,} bytes of {name}")
    for name, entry in tensors_of(metadata, "").items():
        dtype, parts = entry.properties.dtype, []
        _require(isinstance(dtype, torch.dtype) and not dtype.is_complex)
        for chunk in entry.chunks:
            _require(len(chunk.offsets) == len(chunk.sizes) == len(entry.size))
            places = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            _require(all(at >= 0 and size >= 0 and at + size <= n for at, size, n in places))
            if chunk.sizes.numel():
                parts.append((tuple(chunk.offsets), tuple(chunk.sizes)))
        located = all(MetadataIndex(name, c.offsets) in metadata.storage_data for c in entry.chunks)
        covered = _tiles(parts, tuple(entry.size)) or not entry.size.numel()
        if not located or not covered:
            raise ValueError(f"does not say where all parts of {name} are")
        claimed += entry.size.numel() * dtype.itemsize
    # DCP writes tensors uncompressed, so the tensors cannot take more bytes than the files.
    if claimed > (stored := sum(sizes.values())):
        raise ValueError(f"claims {claimed:,} bytes of tensors, but the files hold {stored:,}")
    if not isinstance(metadata.storage_meta, StorageMeta):
        metadata.storage_meta = StorageMeta()
    return metadata


def _require(holds: bool) -> None:
    if not holds:
        raise TypeError


def _tiles(parts: Sequence[tuple[Offsets, Offsets]], size: Offsets) -> bool:
    """Return whether the parts (offsets, sizes) of a grid tile a tensor of this size."""
    if not size:
        return len(parts) == 1
    columns = grouped(parts, lambda part: (part[0][1:], part[1][1:]))
    for column in columns.values():
        rows = 0
        for offsets, sizes in sorted(column):
            if offsets[0] != rows:
                return False
            rows += sizes[0]
        if rows != size[0]:
            return False
    return _tiles(list(columns), size[1:])
