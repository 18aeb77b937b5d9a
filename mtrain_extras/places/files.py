"""Copies of files behind URLs, by fsspec, in a cache folder that the processes of a node share.

    ~/.cache/mtrain/places/s3%3A%2F%2Fbucket%2Fbooks/@3f2a9c.../books/

The path says where the files came from: the quoted URL, then the version of the files, then the
last part of the URL. A copy gets its name after it is complete, and never changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.manifest import plain_name
from mtrain_cli.printable import one_line, printable

THREADS = 8
_PROGRESS_S = 10.0
_LONGEST_NAME = 200  # bytes of a file name; most file systems allow 255
_MOST_META = 64 << 20  # bytes of a meta.json
_HAVE_FOLDERS = {"file", "memory", "sftp", "ftp", "smb", "hdfs", "webhdfs"}
# What tells versions of a file apart, as the file systems of fsspec name it.
_VERSION = (
    "size", "ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified",
    "updated", "created",
)  # fmt: skip


def say(line: str) -> None:
    """Print a line on stderr, in one process of each node."""
    if (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0":
        print(printable(one_line(line)), file=sys.stderr, flush=True)


def why(error: BaseException) -> str:
    """Return one short line on an error of a library."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        file = error.filename2 or error.filename  # a failed copy has the file that it writes second
        text = f"{error.strerror}: {file}" if file else error.strerror
    return one_line(text.splitlines()[0])[:300]


def is_below(name: str) -> bool:
    """Return whether a name that a place gave stays below the folder that it is joined to."""
    # An empty part leads to an absolute path: "books//etc/x" is "/etc/x" below "books/".
    return "\\" not in name and not {"", ".", ".."} & {*name.split("/")}


@dataclass(frozen=True)
class Place:
    """A file or folder behind a URL. path: as its file system names it."""

    url: str
    fs: Any
    path: str

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each file by path below the folder; by "" of the file itself.

        Empty if nothing is there. Raises what the file system raises.
        """
        self.fs.invalidate_cache()
        root = self.path.rstrip("/")
        found = self.fs.find(root, detail=True)
        if root in found:
            return {"": found[root]}
        inside = {name: facts for name, facts in found.items() if name.startswith(f"{root}/")}
        entries = {name.removeprefix(f"{root}/"): facts for name, facts in inside.items()}
        entries = {name: facts for name, facts in entries.items() if name and name[-1] != "/"}
        for name in entries:
            if not is_below(name):
                raise ValueError(f"the name {name!r} leads out of the folder")
        return entries

    def at(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def put(self, file: Path, name: str) -> None:
        """Write a file. Object stores show it when it is complete."""
        self.fs.put_file(str(file), self._writable(name))

    def write(self, name: str, content: bytes) -> None:
        self.fs.pipe_file(self._writable(name), content)

    def remove_empty(self, name: str) -> None:
        """Remove an empty folder. An object store has none."""
        if self._has_folders:
            self.fs.rmdir(self.at(name))

    @property
    def _has_folders(self) -> bool:
        protocol = self.fs.protocol
        return bool(_HAVE_FOLDERS & {*([protocol] if isinstance(protocol, str) else protocol)})

    def _writable(self, name: str) -> str:
        target = self.at(name)
        if self._has_folders:  # on an object store, this would make a missing bucket
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        return target


def open_place(subject: str, url: str, *, own_client: bool = False) -> Place:
    """Return the place of a URL. subject: begins messages, such as ``data.path=s3://bucket/a``.

    own_client: without it, all places of a kind share a client and its connections.

    Raises ConfigError without the package for it, or if the URL is wrong.
    """
    if "@" in urlsplit(url).netloc and ":" in urlsplit(url).netloc:
        raise ConfigError(f"{subject}: give user and password in the environment, not in the URL")
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=own_client)
    except ImportError as error:
        raise ConfigError(f"{subject}: {why(error)}; {install_command('places')}") from error
    except Exception as error:  # each file system raises errors of its own
        raise ConfigError(f"{subject}: cannot be opened ({why(error)})") from error
    return Place(url, fs, path)


def cache_root() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = cache if cache.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return cache / "mtrain" / "places"


def cached(subject: str, url: str, version: str, base: str, fill: Callable[[Path], None]) -> Path:
    """Return the path of a copy in the cache. ``fill`` makes what is missing, in one process.

    Raises ConfigError if the disk is full or cannot be written, and what ``fill`` raises.
    """
    quoted = quote(url, safe="")
    parts = [quoted[i : i + _LONGEST_NAME] for i in range(0, len(quoted), _LONGEST_NAME)]
    entry = cache_root().joinpath(*parts, f"@{version}")
    if not (entry / base).exists():
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with locked(entry.parent / f".{version}.lock"):
                if not (entry / base).exists():
                    partial = Path(tempfile.mkdtemp(prefix=f".{version}.tmp", dir=entry.parent))
                    try:
                        fill(partial / base)
                        _date(partial, version)
                        _rename(partial, entry, base)
                    finally:
                        shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            if error.filename is None:
                raise
            raise ConfigError(f"{subject}: cannot be copied to {entry} ({why(error)})") from error
    return entry / base


def _rename(partial: Path, entry: Path, base: str) -> None:
    """Give a copy its name, unless another process was faster, as can happen without locks."""
    try:
        os.rename(partial, entry)
    except OSError:
        if not (entry / base).exists():
            raise


def origin(path: str) -> tuple[str, str, str] | None:
    """Return the URL, the version and the last part of a path that `cached` returned, or None."""
    _, found, rest = path.rpartition("/mtrain/places/")
    parts = rest.split("/")
    number = next((i for i, part in enumerate(parts) if part.startswith("@")), None)
    if not found or not number:
        return None
    return unquote("".join(parts[:number])), parts[number][1:], "/".join(parts[number + 1 :])


def copy_here(option: str, url: str) -> Path:
    """Return the path of a copy of the file or folder behind a URL, made once per node.

    Of a token store, only the files that its meta.json names are copied.

    Raises ConfigError if nothing is there, or the place or the cache fails.
    """
    subject = f"{option}{url}"
    place = open_place(subject, url)
    try:
        entries = place.entries()
        if "meta.json" in entries:
            entries = _of_store(place, entries)
    except ConfigError:
        raise
    except FileNotFoundError:
        entries = {}
    except Exception as error:  # of any file system
        raise ConfigError(f"{subject}: cannot be read ({why(error)})") from error
    if not entries:
        raise ConfigError(f"{subject}: no such file or folder, or an empty one")
    facts = [[n, *(str(e.get(key, "")) for key in _VERSION)] for n, e in sorted(entries.items())]
    version = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    base = PurePosixPath(urlsplit(url).path.rstrip("/")).name or urlsplit(url).netloc or "files"
    base = base if is_below(base) else "files"

    def fill(target: Path) -> None:
        sizes = {name: int(facts["size"]) for name, facts in entries.items()}
        get(subject, place, sizes, target)

    return cached(subject, url, version, base, fill)


def get(subject: str, place: Place, sizes: dict[str, int], target: Path) -> None:
    """Copy files of a place to ``target``, and compare their sizes. Raises ConfigError."""
    total = sum(sizes.values())
    target.parent.mkdir(parents=True, exist_ok=True)
    if total > (free := shutil.disk_usage(target.parent).free):
        raise ConfigError(
            f"{subject}: needs {format_bytes(total)}, and {target.parent} has {format_bytes(free)} "
            "free; make room, or set XDG_CACHE_HOME to another disk"
        )
    say(f"{subject}: copying {len(sizes):,} files, {format_bytes(total)}")
    shown, done = time.monotonic(), 0

    def copy(name: str) -> int:
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        place.fs.get_file(place.at(name), str(path))
        if path.stat().st_size != sizes[name]:
            raise ValueError(f"{name or place.url} has {path.stat().st_size} bytes, not "
                             f"{sizes[name]}; it changed during the copy")  # fmt: skip
        return sizes[name]

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(copy, name) for name in sizes]
        try:
            for number, job in enumerate(jobs, start=1):
                done += job.result()
                if time.monotonic() - shown > _PROGRESS_S:
                    shown = time.monotonic()
                    say(
                        f"{subject}: {number:,} of {len(jobs):,} files, {format_bytes(done)} copied"
                    )
        except Exception as error:  # of any file system
            pool.shutdown(cancel_futures=True)
            raise ConfigError(f"{subject}: cannot be copied ({why(error)})") from error


def _of_store(place: Place, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that a token store consists of; all if it is none."""
    if int(entries["meta.json"]["size"]) > _MOST_META:
        return entries
    try:
        named = json.loads(place.fs.cat_file(place.at("meta.json")))["files"]
    except (ValueError, KeyError, TypeError):
        return entries
    if not isinstance(named, dict) or not named:
        return entries
    wanted = {"meta.json", "tokenizer.json", *filter(plain_name, named)}
    if missing := sorted(wanted - entries.keys() - {"tokenizer.json"}):
        raise ConfigError(f"{place.url}: meta.json names {missing[0]}, which is not there")
    return {name: facts for name, facts in entries.items() if name in wanted}


def _date(folder: Path, version: str) -> None:
    """Give files a time that follows from the version, so that a copy made later is the same.

    The identity of a corpus has the times of its files.
    """
    seconds = int(version[:7], 16)
    for path in folder.rglob("*"):
        os.utime(path, (seconds, seconds))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        with suppress(OSError):  # some network file systems have no locks, and a rename is atomic
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def format_bytes(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 1 << 26 else f"{count / 2**20:,.2f} MiB"
