"""The manifest of a checkpoint: size and checksum of every file.

`manifest.json` is written last, then the folder gets its name `step-N`. So a folder of that name
with a manifest is a complete checkpoint. This module does not import torch.
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
    """A folder is not a complete checkpoint. The message says why, but does not name the folder."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and checksum (zlib crc32) of one file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint contains."""

    step: int  # number of completed optimizer steps
    workers: int  # number of ranks that wrote it
    torch: str  # version
    files: Mapping[str, FileEntry]
    trainer: Mapping[str, Any] = field(default_factory=dict)  # empty for imported weights

    def write(self, folder: Path) -> None:
        body = {"schema": SCHEMA, **asdict(self)}
        text = json.dumps({**body, "crc32": _crc_of(body)}, indent=2)
        with (folder / NAME).open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of `folder`, or raise ManifestError."""
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
            raise ManifestError(f"{NAME} has schema {schema}; this mtrain reads {SCHEMA}")
        if crc32 != _crc_of({"schema": schema, **asdict(manifest)}):
            raise ManifestError(f"{NAME} was altered (its checksum differs)")
        if outside := next((name for name in manifest.files if not plain_name(name)), None):
            raise ManifestError(f"{NAME} names the file {outside!r}, which is not in this folder")
        return manifest

    def problems(self, folder: Path, part: int = 0, parts: int = 1) -> list[str]:
        """Check size and checksum of every ``parts``-th file. Return a line for each problem."""
        names = sorted(self.files, key=lambda name: (-self.files[name].bytes, name))
        problems = (_problem(folder / name, self.files[name]) for name in names[part::parts])
        return list(filter(None, problems))

    def wrong_sizes(self, folder: Path) -> list[str]:
        """Check that files exist and have their sizes, without reading them."""
        problems = (_problem(folder / name, file, read=False) for name, file in self.files.items())
        return list(filter(None, problems))


def checksum(path: Path) -> FileEntry:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileEntry(size, crc)


def plain_name(name: object) -> bool:
    """Return whether `name` is a file name without a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def committed_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `directory`, newest first."""
    if not directory.is_dir():
        return []
    committed = (folder.name for folder in directory.iterdir() if (folder / NAME).is_file())
    matches = filter(None, map(_STEP.fullmatch, committed))
    return sorted((int(match[1]) for match in matches), reverse=True)


def incomplete_after(folder: Path) -> list[Path]:
    """Return the newer checkpoints beside a checkpoint that have no manifest."""
    steps = {f: int(m[1]) for f in folder.parent.iterdir() if (m := _STEP.fullmatch(f.name))}
    own = steps.get(folder)
    newer = [f for f in sorted(steps, key=steps.__getitem__) if own is not None and steps[f] > own]
    return [f for f in newer if not (f / NAME).is_file()]


def is_kept(step: int, every: int) -> bool:
    """Return whether a checkpoint stays for good. every: `train.keep_every`."""
    return bool(step and every) and step % every == 0


def manifest_file(directory: Path, step: int) -> Path:
    return directory / f"step-{step}" / NAME


def _problem(path: Path, expected: FileEntry, *, read: bool = True) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes instead of {expected.bytes}"
        if read and checksum(path) != expected:
            return f"{path.name} was altered (its checksum differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
