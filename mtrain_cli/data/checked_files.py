"""Read the files of a corpus with errors of one line, and checksums: of a sample, or all bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import read_failure

# A sample takes milliseconds for any size. Chunks let threads and processes share the work.
_PLACES, _BLOCK, _CHUNK = 64, 1 << 12, 1 << 26
_READ = 1 << 22
_MOST_THREADS = 16
_SECONDS_BEFORE_LINES, _SECONDS_PER_LINE = 2.0, 10.0

Report = Callable[[int, int], None]
"""Function that receives the number of bytes checked so far, and of all bytes."""


@contextlib.contextmanager
def explain_read_errors(subject: str, missing: str = "") -> Iterator[None]:
    """Replace an OSError in the ``with`` block by an error of one line about ``subject``.

    missing: the whole line for a missing file.

    Raises:
        RunError: the disk or its network failed.
        ConfigError: any other OSError.
    """
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise ConfigError(missing) from None
        reason = error.strerror or " ".join(str(error).split())[:200]
        raise read_failure(error, f"{subject} cannot be read ({reason})") from None


def require_folder(folder: Path, origin: str, wanted: str) -> None:
    """Raise ConfigError, a line that begins with ``origin``, unless ``folder`` is a folder.

    wanted: description of the right folder, to follow "Give a folder".
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{origin}: {problem}. Give a folder {wanted}.")


def read_metadata(path: Path, origin: str, version: int, advice: str) -> dict[str, Any]:
    """Return the JSON object in ``path``, whose key ``version`` must have this value.

    Args:
        origin: how the user named the folder of the file. Every message begins with it.
        advice: end of every message.
    """
    place = f"{origin}: {path.name}"
    with explain_read_errors(place, f"{origin}: no {path.name} in it. {advice}"):
        try:
            content = documents.read_json(path)
        except ValueError as error:
            why = f"is not JSON ({documents.reason(error)})"
            raise ConfigError(f"{place} {why}. {advice}") from None
    given = content.get("version") if isinstance(content, dict) else None
    if given != version:
        raise ConfigError(
            f"{place} has version {given}, but mtrain reads version {version}. {advice}"
        )
    return content


@dataclass(frozen=True)
class FileSums:
    """Checksums of a file: sha256, cut to 32 hexadecimal digits.

    bytes: size of the file.
    sample: checksum of the size and of 64 blocks of 4 KiB, evenly spaced from start to end.
    chunks: checksum of each 64 MiB.
    """

    bytes: int
    sample: str
    chunks: list[str]

    @classmethod
    def of(cls, path: Path) -> FileSums:
        """Read a whole file."""
        size = path.stat().st_size
        with ThreadPoolExecutor(_threads(1)) as pool:
            chunks = pool.map(lambda start: _hash(path, start), range(0, size, _CHUNK))
            return cls(size, sample_of(path), list(chunks))


def sample_of(path: Path) -> str:
    """Return the checksum `FileSums.sample` of a file."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for place in range(_PLACES):
            file.seek(max(0, size - _BLOCK) * place // (_PLACES - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:32]


def check_all(
    folder: Path,
    files: Mapping[str, FileSums],
    origin: str,
    advice: str,
    part: int,
    parts: int,
    report: Report,
) -> None:
    """Compare all bytes of files, by name, with their checksums.

    Args:
        origin, advice: beginning and end of messages.
        part, parts: this caller checks every ``parts``-th chunk, from chunk ``part`` on.

    Raises:
        ConfigError: a file has changed or cannot be read.
        RunError: the disk failed.
    """
    chunks = [(n, i) for n, sums in files.items() for i in range(len(sums.chunks))][part::parts]
    sizes = [min(_CHUNK, files[name].bytes - i * _CHUNK) for name, i in chunks]
    done, total = 0, sum(sizes)
    with ThreadPoolExecutor(_threads(parts)) as pool:
        try:
            digests = pool.map(lambda chunk: _hash(folder / chunk[0], chunk[1] * _CHUNK), chunks)
            for (name, i), size in zip(chunks, sizes, strict=True):
                with explain_read_errors(f"{origin}: {name}"):
                    digest = next(digests)
                if digest != files[name].chunks[i]:
                    start = i * _CHUNK
                    how = f"bytes {start:,} to {start + size:,} have another checksum"
                    raise changed(origin, name, how, advice)
                report(done := done + size, total)
        finally:
            pool.shutdown(cancel_futures=True)


def changed(origin: str, name: str, how: str, advice: str) -> ConfigError:
    """Return the error for a file whose bytes have changed. how: what shows it."""
    return ConfigError(f"{origin}: {name} has changed since it was written: {how}. {advice}")


def lines(say: Callable[[str], None], remark: str) -> Report:
    """Return a function that calls ``say`` with a line every 10 seconds, from second 2 on.

    remark: the end of the first line.
    """
    shown, remarks = time.monotonic() + _SECONDS_BEFORE_LINES - _SECONDS_PER_LINE, [remark]

    def report(done: int, size: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_PER_LINE:
            shown = time.monotonic()
            end = f" ({remarks.pop()})" if remarks else ""
            say(f"checking the data: {done / 2**30:,.1f} of {size / 2**30:,.1f} GiB{end}")

    return report


def _hash(path: Path, start: int) -> str:
    """Return the checksum of the chunk of a file that begins at byte ``start``."""
    digest, end = hashlib.sha256(), start + _CHUNK
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while piece := file.read(min(_READ, end - file.tell())):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _threads(parts: int) -> int:
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // parts))
