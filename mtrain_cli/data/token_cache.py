"""Cache corpora that are tokenised on the fly, for all workers and later runs of a user."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.prepare import tokenise
from mtrain_cli.data.store import DOCUMENTS, TOKENS, VERSION, StoreWriter, TokenStore
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_cli.launch.temporary_folders import lies_at


def cached_store(corpus: Corpus, tokenizer: Tokenizer) -> tuple[TokenStore, str]:
    """Return the token store of a corpus, from the cache if present, and describe its location.

    Any number of processes may call this at once: one tokenises, the others wait and map the same
    files. If the cache folder cannot be written (read-only, full, no home), the store is made in
    this process's memory.

    Raises:
        ConfigError: the corpus is broken.
    """
    facts = f"{VERSION} {tokenizer.identity} {corpus.signature}"
    key = hashlib.sha256(facts.encode()).hexdigest()[:32]
    try:
        with _locked_entry(key) as (entry, has_lock):
            store = _open_entry(entry, has_lock)
            if store is None:
                _write_entry(corpus, tokenizer, entry, has_lock)
                store = TokenStore.open(entry)
            # Another path may hold the same corpus.
            meta = replace(store.meta, source=corpus.description)
            return replace(store, meta=meta), f"cached in {entry}"
    except OSError as error:
        location = (
            f"in memory, since the cache folder cannot be written ({error.strerror or error})"
        )
        return _memory_store(corpus, tokenizer), location


def cached_array(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array from the cache folder. If it is missing, make and cache it.

    ``key`` identifies the content.
    """
    try:
        with _locked_entry(f"{key}.npy") as (entry, _):
            try:
                return np.load(entry, allow_pickle=False)
            except (FileNotFoundError, ValueError, EOFError):
                array = make()
                with tempfile.NamedTemporaryFile(
                    dir=entry.parent, prefix=f"{key}.tmp", delete=False
                ) as file:
                    np.save(file, array)
                os.replace(file.name, entry)
                return array
    except OSError:
        return make()


@contextmanager
def _locked_entry(name: str) -> Iterator[tuple[Path, bool]]:
    """Lock an entry of the cache. Yield its path, and whether the file system has locks."""
    root = _cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f"{name.removesuffix('.npy')}.lock", root / name) as has_lock:
        yield root / name, has_lock


def _cache_root() -> Path:
    """Return ``$XDG_CACHE_HOME/mtrain/tokens``.

    The variable counts only if it is absolute (XDG Base Directory Specification).
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not chosen.is_absolute():
        # Unlike Path.expanduser, this keeps ~ if there is no home.
        chosen = Path(os.path.expanduser("~/.cache"))
    if not chosen.is_absolute():
        raise OSError("this user has no home folder")
    return chosen / "mtrain" / "tokens"


@contextmanager
def _lock(path: Path, entry: Path) -> Iterator[bool]:
    """Wait for an exclusive lock and hold it. Yield False if the file system has no locks.

    Without locks, atomic renames alone keep the cache intact. If no ``entry`` was made, for example
    from a broken corpus, remove the lock file.
    """
    while True:
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                has_lock = True
            except OSError:
                has_lock = False
            # The previous holder may have removed the file. A lock on a removed file excludes
            # nobody.
            if has_lock and not lies_at(path, lock.fileno()):
                continue
            try:
                yield has_lock
            finally:
                if has_lock and not entry.exists():
                    with suppress(OSError):
                        path.unlink()
            return


def _open_entry(entry: Path, has_lock: bool) -> TokenStore | None:
    """Open the entry if it is there and intact.

    The holder of the lock removes broken entries and what killed processes left behind.
    """
    if has_lock:
        for leftover in entry.parent.glob(f"{entry.name}.tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if not entry.exists():
        return None
    try:
        return TokenStore.open(entry)
    except ConfigError:
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _write_entry(corpus: Corpus, tokenizer: Tokenizer, entry: Path, has_lock: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp", dir=entry.parent))
    try:
        with (folder / TOKENS).open("wb") as tokens, (folder / DOCUMENTS).open("wb") as offsets:
            writer = StoreWriter(tokens, offsets, tokenizer)
            _tokenise_all(corpus, tokenizer, writer)
            writer.finish(folder, corpus.description, {})
        try:
            os.rename(folder, entry)
        except OSError:
            # Without a lock, another worker may have finished the same content first.
            if has_lock or not entry.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory_store(corpus: Corpus, tokenizer: Tokenizer) -> TokenStore:
    tokens, offsets = io.BytesIO(), io.BytesIO()
    writer = StoreWriter(tokens, offsets, tokenizer)
    _tokenise_all(corpus, tokenizer, writer)
    return writer.memory_store(tokens.getbuffer(), offsets.getbuffer(), corpus.description)


def _tokenise_all(corpus: Corpus, tokenizer: Tokenizer, writer: StoreWriter) -> None:
    for _ in tokenise(corpus, tokenizer, writer):
        pass
    if writer.written.documents == 0:
        raise ConfigError(f"{corpus.origin}: holds no text")
