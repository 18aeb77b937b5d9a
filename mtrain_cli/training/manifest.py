"""What makes a folder a complete checkpoint: a manifest with the size and checksum of every file, itself checksummed.

`manifest.json` is written last, into a folder that gets its final name `step-N` only afterwards. No torch here.
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
    """A folder is no complete checkpoint; the text says why, without the folder's name."""


@dataclass(frozen=True)
class FileEntry:
    """Size and zlib crc32 of one file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint. ``trainer`` is the trainer's own small state; ``workers`` how many ranks wrote it."""

    step: int
    workers: int
    torch: str
    files: Mapping[str, FileEntry]
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write into ``folder`` and force to disk.

        Raises:
            OSError: the disk is full or gone.
        """
        body = {"schema": SCHEMA, **asdict(self)}
        text = json.dumps({**body, "crc32": _crc_of(body)}, indent=2)
        with (folder / NAME).open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of ``folder``.

        Raises:
            ManifestError: missing, unreadable, altered, or of another schema.
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
                f"{NAME} has schema {schema}, this version of mtrain reads {SCHEMA}"
            )
        if crc32 != _crc_of({"schema": schema, **asdict(manifest)}):
            raise ManifestError(f"{NAME} was altered (its checksum differs)")
        if outside := next((name for name in manifest.files if not plain_name(name)), None):
            raise ManifestError(
                f"{NAME} names the file {outside!r}, which does not lie in this folder"
            )
        return manifest

    def problems(self, folder: Path, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with the files that fall to reader ``part`` of ``parts``: each reads its share of them, largest first."""
        names = sorted(self.files, key=lambda name: (-self.files[name].bytes, name))
        found = (_problem(folder / name, self.files[name]) for name in names[part::parts])
        return [problem for problem in found if problem]


def checksum(path: Path) -> FileEntry:
    """Size and crc32 of the file as it can be read now."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileEntry(size, crc)


def plain_name(name: object) -> bool:
    """Whether ``name`` is that of a file in the same folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def committed_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in ``directory``, newest first; a folder without a manifest is none."""
    if not directory.is_dir():
        return []
    steps = ((_STEP.fullmatch(folder.name), folder) for folder in directory.iterdir())
    return sorted(
        (int(match[1]) for match, folder in steps if match and (folder / NAME).is_file()),
        reverse=True,
    )


def manifest_file(directory: Path, step: int) -> Path:
    """The file that is written last, before a checkpoint is committed."""
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
