"""Read the files of torch.distributed.checkpoint (DCP) without executing code in them.

Checksums show that a file is unchanged, not that it is harmless. Therefore:

- `.metadata` is a pickle. Loading it creates only classes that DCP writes.
- Tensors and other values are read with `weights_only=True`.
- File names in `.metadata` must stay inside the checkpoint's folder.
- No entry may unpack to more bytes than the files hold.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mtrain_cli.grouping import grouped
from mtrain_cli.launch import safe_pickle
from mtrain_cli.launch.manifest import plain_name

METADATA = ".metadata"
Offsets = tuple[int, ...]  # of a part along each dimension, or its sizes


class ForeignFileError(ValueError):
    """A checkpoint file holds data that DCP does not write.

    The message is one line that begins with the name of the file or the tensor.
    """


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader for one checkpoint folder, with the checks of this module.

    `read_metadata` takes no arguments. The signature tells DCP that ranks have no metadata files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read and check `.metadata`.

        Raises:
            ForeignFileError: `.metadata` holds data that DCP does not write.
            OSError: `.metadata` cannot be read.
        """
        super().__init__(folder)
        self._folder = Path(folder)
        with (self._folder / METADATA).open("rb") as file:
            try:
                self.metadata = _checked(safe_pickle.load_metadata(file), self._folder)
            except ValueError as error:
                raise ForeignFileError(f"{METADATA} {error}") from error

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
    """Return `metadata` if every part has the type that DCP writes.

    Raises:
        ValueError: a part has another type. The message starts with a verb ("names the file ...").
            The caller prepends the name of the metadata file.
    """
    if not isinstance(metadata, Metadata) or not isinstance(
        metadata.__dict__.get("storage_data"), dict
    ):
        raise ValueError("does not describe a checkpoint")
    described: Any = metadata.__dict__.get("state_dict_metadata")
    if not isinstance(described, dict) or not all(
        isinstance(name, str) and _is_entry(entry) for name, entry in described.items()
    ):
        raise ValueError("describes its tensors in a format that DCP does not write")
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not _is_info(info):
            raise ValueError("describes its files in a format that DCP does not write")
        name = info.relative_path
        if not plain_name(name):
            raise ValueError(f"names the file {name!r}, which is not in this folder")
        if name not in sizes:
            path = folder / name
            sizes[name] = path.stat().st_size if path.is_file() else 0
        if info.offset + info.length > sizes[name]:
            raise ValueError(f"refers to data beyond the {sizes[name]:,} bytes of {name}")
    tensors = tensors_of(metadata, "")
    for name, entry in tensors.items():
        located = all(MetadataIndex(name, c.offsets) in metadata.storage_data for c in entry.chunks)
        if not located or not _covers(entry):
            raise ValueError(f"does not say where all parts of {name} are")
    # DCP writes tensors uncompressed, so the tensors cannot take more bytes than the files.
    claimed = sum(e.size.numel() * e.properties.dtype.itemsize for e in tensors.values())
    if claimed > (stored := sum(sizes.values())):
        raise ValueError(f"claims {claimed:,} bytes of tensors, but the files hold {stored:,}")
    if not isinstance(metadata.__dict__.get("storage_meta"), StorageMeta):
        metadata.storage_meta = StorageMeta()
    return metadata


def _is_entry(entry: object) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    if not isinstance(entry, TensorStorageMetadata):
        return False
    fields = entry.__dict__
    properties, chunks = fields.get("properties"), fields.get("chunks")
    return (
        isinstance(properties, TensorProperties)
        and isinstance(properties.__dict__.get("dtype"), torch.dtype)
        and not properties.dtype.is_complex
        and _is_size(fields.get("size"))
        and isinstance(chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata) and _is_part(chunk.__dict__, entry.size)
            for chunk in chunks
        )
    )


def _covers(entry: TensorStorageMetadata) -> bool:
    """Return whether the chunks, which form a grid, cover each element of the tensor once."""
    filled = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if c.sizes.numel()]
    return _tiles(filled, tuple(entry.size)) or not entry.size.numel()


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


def _is_part(chunk: Mapping[str, Any], whole: torch.Size) -> bool:
    offsets, sizes = chunk.get("offsets"), chunk.get("sizes")
    if not (_is_size(offsets) and _is_size(sizes) and len(offsets) == len(sizes) == len(whole)):
        return False
    return all(offset + size <= n for offset, size, n in zip(offsets, sizes, whole, strict=True))


def _is_size(size: object) -> TypeGuard[torch.Size]:
    return isinstance(size, torch.Size) and all(n >= 0 for n in size)


def _is_info(info: object) -> bool:
    if not isinstance(info, _StorageInfo):
        return False
    fields = info.__dict__
    counts = (fields.get("offset"), fields.get("length"))
    # mtrain writes no transforms such as compression.
    transformed = bool(fields.get("transform_descriptors"))
    return all(type(count) is int and count >= 0 for count in counts) and not transformed
