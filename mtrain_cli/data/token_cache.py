"""Tokenize a corpus at the start of a run, and cache the tokens for all workers and later runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.prepare import tokenise
from mtrain_cli.data.store import DOMAINS, VERSION, StoreWriter, TokenStore, Written
from mtrain_cli.data.tokenizers import Tokenizer, documents_identity
from mtrain_cli.launch.temporary_folders import lies_at


def cached_store(corpus: Corpus, tokenizer: Tokenizer) -> tuple[TokenStore, str]:
    """Return the token store of a corpus, and a phrase for messages that says where the store is.

    The first of several processes tokenizes the corpus into the cache folder; the others wait and
    map the files. If the cache folder cannot be written, for example because the disk is full, each
    process makes the store in its own memory.
    """
    facts = f"{VERSION} 3 {documents_identity(tokenizer)} {corpus.signature}"
    key = hashlib.sha256(facts.encode()).hexdigest()[:32]
    try:
        with locked_entry(key) as (entry, has_lock):
            store = _open_entry(entry, has_lock)
            if store is None:
                _write_entry(corpus, tokenizer, entry, has_lock)
                store = TokenStore.open(entry)
            # The entry may come from another path with the same corpus.
            left_out = {**corpus.left_out, **store.meta.left_out}
            meta = replace(store.meta, source=corpus.description, left_out=left_out)
            return replace(store, meta=meta), f"cached in {entry}"
    except OSError as error:
        writer = StoreWriter.in_memory(tokenizer, corpus.fields)
        deque(tokenise(corpus, tokenizer, writer), maxlen=0)
        reason = f"the cache folder cannot be written ({error.strerror or error})"
        return writer.memory_store(corpus), f"in memory, since {reason}"


@contextmanager
def locked_entry(name: str) -> Iterator[tuple[Path, bool]]:
    """Lock an entry of the cache. Yield its path, and whether the file system has locks."""
    # The XDG Base Directory Specification demands that a relative path is ignored.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        # Without a home folder this keeps the ~, while Path.expanduser would raise RuntimeError.
        cache = Path(os.path.expanduser("~/.cache"))
    if not cache.is_absolute():
        raise OSError("this user has no home folder")
    root = cache / "mtrain" / "tokens"
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f"{name.removesuffix('.npy')}.lock", root / name) as has_lock:
        yield root / name, has_lock


@contextmanager
def _lock(path: Path, entry: Path) -> Iterator[bool]:
    """Lock ``path`` exclusively. Yield False if the file system has no locks."""
    # Without locks, atomic renames still keep the cache intact.
    while True:
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                has_lock = True
            except OSError:
                has_lock = False
            # The previous holder may have removed the file. The next process would create a new
            # file and lock that, so try again.
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
    """Return the store in ``entry``; None if missing or damaged. Remove what is damaged."""
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
        names = Written().file_sizes(tokenizer, corpus.fields).keys() - {DOMAINS}
        with ExitStack() as stack:
            files = {name: stack.enter_context((folder / name).open("wb")) for name in names}
            writer = StoreWriter(files, tokenizer)
            deque(tokenise(corpus, tokenizer, writer), maxlen=0)
            writer.require_documents(corpus)
            writer.finish(folder, replace(corpus, left_out={}), {})
        try:
            os.rename(folder, entry)
        except OSError:
            # Without a lock, another worker may have finished the same content first.
            if has_lock or not entry.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
