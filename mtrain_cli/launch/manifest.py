"""The manifest that makes a folder a complete checkpoint: size and checksum of every file.

The checkpoint's writer writes `manifest.json` last and then gives the folder its final name
`step-N`. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import read_json, reason

SCHEMA = 1
NAME = "manifest.json"
_CHUNK_BYTES = 8 << 20
_STEP = re.compile(r"step-(\d+)")


class ManifestError(ValueError):
    """A folder is not a complete checkpoint; the message omits the folder's name."""


@dataclass(frozen=True)
class FileEntry:
    """Size and zlib crc32 of one file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint.

    step: completed optimizer steps.
    workers: number of ranks that wrote it.
    torch: version of PyTorch that wrote it.
    files: size and checksum of each file, by name.
    trainer: the trainer's own small state; empty for an import, which holds only weights.
    """

    step: int
    workers: int
    torch: str
    files: Mapping[str, FileEntry]
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder` and fsync it.

        Raises:
            OSError: the disk is full or fails.
        """
        body = {"schema": SCHEMA, **asdict(self)}
        text = json.dumps({**body, "crc32": _crc_of(body)}, indent=2)
        with (folder / NAME).open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of `folder`.

        Raises:
            ManifestError: it is missing, unreadable, altered, or has another schema.
        """
        try:
            body = read_json(folder / NAME)
            crc32 = body.pop("crc32")
            schema = body.pop("schema")
            files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
            manifest = cls(files=files, **body)
        except FileNotFoundError:
            raise ManifestError(f"{NAME} is missing") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(f"{NAME} cannot be read ({reason(error)})") from error
        if schema != SCHEMA:
            raise ManifestError(
                f"{NAME} has schema {schema}; this version of mtrain reads {SCHEMA}"
            )
        if crc32 != _crc_of({"schema": schema, **asdict(manifest)}):
            raise ManifestError(f"{NAME} was altered (its checksum differs)")
        if outside := next((name for name in manifest.files if not plain_name(name)), None):
            raise ManifestError(f"{NAME} names the file {outside!r}, which is not in this folder")
        return manifest

    def problems(self, folder: Path, part: int = 0, parts: int = 1) -> list[str]:
        """Check the files ``part::parts``, ordered by size. Return a line for each problem."""
        names = sorted(self.files, key=lambda name: (-self.files[name].bytes, name))
        checked = (_problem(folder / name, self.files[name]) for name in names[part::parts])
        return [problem for problem in checked if problem]


def checksum(path: Path) -> FileEntry:
    """Read a file and compute its size and crc32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileEntry(size, crc)


def plain_name(name: object) -> bool:
    """Return whether `name` is a plain file name, without a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def committed_steps(directory: Path) -> list[int]:
    """List the steps of the checkpoints in `directory`, newest first."""
    if not directory.is_dir():
        return []
    committed = (folder.name for folder in directory.iterdir() if (folder / NAME).is_file())
    matches = filter(None, map(_STEP.fullmatch, committed))
    return sorted((int(match[1]) for match in matches), reverse=True)


def manifest_file(directory: Path, step: int) -> Path:
    """Return the file that is written last, just before a checkpoint is committed."""
    return directory / f"step-{step}" / NAME


def _problem(path: Path, expected: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes instead of {expected.bytes}"
        if checksum(path) != expected:
            return f"{path.name} was altered (its checksum differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
