"""Turn a corpus and a tokenizer into a token store, and survive an interruption at any moment.

The unfinished store is the folder ``OUT.partial``. Its journal records how far the arrays are
complete. A rerun cuts the arrays back to that point and continues there. The last step renames the
folder to ``OUT``, so ``OUT`` is complete or absent.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Corpus, Document
from mtrain_cli.data.filters import EVERYTHING, Filters
from mtrain_cli.data.permutation import mix64
from mtrain_cli.data.store import (
    DOCUMENTS,
    DOMAINS,
    META,
    TOKENIZER,
    TOKENS,
    StoreMeta,
    StoreWriter,
    TokenStore,
    array_sizes,
    write_json,
)
from mtrain_cli.data.tokenizers import (
    SMALLEST_BPE,
    FileTokenizer,
    Tokenizer,
    open_tokenizer,
    train_bpe,
)
from mtrain_cli.launch.failures import write_failure

_JOURNAL, _LOCK = "journal.json", "lock"
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 22, 1 << 13
_COMMIT_TOKENS, _COMMIT_SECONDS = 1 << 24, 2.0
# Merges from this much text are as good as from more. BPE training holds every distinct word in
# memory.
_BPE_CHARACTERS = 1 << 30
DEFAULT_BPE_VOCABULARY = 8192


@dataclass(frozen=True)
class CorpusPosition:
    """Position before a record of a unit. ``read`` is about how many bytes precede it."""

    unit: int = 0
    record: int = 0
    read: int = 0


@dataclass(frozen=True)
class PreparationProgress:
    """Values for a progress bar: bytes ``read`` of ``size``, and what was written."""

    stage: str
    read: int
    size: int
    tokens: int = 0
    documents: int = 0


@dataclass(frozen=True)
class _Journal:
    """How far the files of an unfinished store are complete."""

    recipe: dict[str, str]
    unit: int = 0
    record: int = 0
    read: int = 0
    tokens: int = 0
    documents: int = 0
    domains: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    cut: int = 0


def tokenise(
    corpus: Corpus,
    tokenizer: Tokenizer,
    writer: StoreWriter,
    start: CorpusPosition = CorpusPosition(),
) -> Iterator[CorpusPosition]:
    """Write the documents of ``corpus`` from ``start`` on.

    Yields:
        The position after the last complete document, once per batch.
    """
    base = sum(unit.size for unit in corpus.units[: start.unit])
    pieces: list[str] = []
    # One entry per document end: number of pieces before it, position reached, and domain.
    ends: list[tuple[int, CorpusPosition, str]] = []
    position, characters = start, 0

    def flush() -> CorpusPosition:
        written = 0
        encoded = tokenizer.encode(pieces)
        for count, _, domain in ends:
            for ids in encoded[written:count]:
                writer.append(ids)
            writer.end_document(domain)
            written = count
        for ids in encoded[written:]:
            writer.append(ids)
        writer.flush()
        reached = (
            ends[-1][1]
            if ends
            else CorpusPosition(position.unit, position.record, position.read + characters)
        )
        pieces.clear()
        ends.clear()
        return reached

    for number, unit in enumerate(corpus.units[start.unit :], start.unit):
        for document in unit.documents(start.record if number == start.unit else 0):
            for piece in _pieces_to_encode(document, tokenizer, writer):
                pieces.append(piece)
                characters += len(piece)
                if characters >= _BATCH_CHARACTERS or len(pieces) >= _BATCH_PIECES:
                    position = flush()
                    characters = 0
                    yield position
            ends.append(
                (
                    len(pieces),
                    CorpusPosition(number, document.record, base + document.end),
                    document.domain,
                )
            )
            if len(ends) >= _BATCH_PIECES:
                position, characters = flush(), 0
                yield position
        base += unit.size
    yield flush()


def prepare_store(
    corpus: Corpus,
    out: Path,
    tokenizer: str,
    vocab_size: int | None,
    report: Callable[[PreparationProgress], None],
    filters: Filters = EVERYTHING,
) -> TokenStore:
    """Tokenise ``corpus`` into the folder ``out``, or continue an interrupted call.

    A complete store with the same arguments is opened and left alone.

    Args:
        tokenizer: ``bytes``, ``bpe`` (trained here, with at most ``vocab_size`` ids), or the path
            of a tokenizer.json.

    Raises:
        ConfigError: the arguments or the corpus are wrong, or ``out`` holds anything else or is not
            writable.
        RunError: the disk is full or fails. What is done stays for a rerun.
    """
    given_tokenizer = (
        None if tokenizer == "bpe" else open_tokenizer(tokenizer, option="--tokenizer")
    )
    if given_tokenizer is not None and vocab_size is not None:
        raise ConfigError(
            f"--vocab-size {vocab_size}: only for --tokenizer bpe. The tokenizer {tokenizer} has "
            "its own vocabulary."
        )
    bpe_size = DEFAULT_BPE_VOCABULARY if vocab_size is None else vocab_size
    if bpe_size < SMALLEST_BPE:
        raise ConfigError(
            f"--vocab-size {bpe_size}: a byte-level BPE needs at least {SMALLEST_BPE} ids"
        )
    recipe = {
        "corpus": corpus.signature,
        "tokenizer": given_tokenizer.identity if given_tokenizer else f"bpe {bpe_size}",
        **filters.recipe,
    }
    out = Path(os.path.abspath(out.expanduser()))
    if store := _open_finished(out, recipe):
        return store
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _lock(partial):
            if store := _open_finished(out, recipe):  # another process has just finished it
                shutil.rmtree(partial)
                return store
            journal = _open_journal(partial, recipe)
            try:
                opened = given_tokenizer or _open_bpe(corpus, bpe_size, partial, report)
                if isinstance(given_tokenizer, FileTokenizer):
                    (partial / TOKENIZER).write_bytes(given_tokenizer.content)
                _write_arrays(corpus, opened, partial, journal, filters, report)
            except ConfigError:
                if _read_journal(partial).documents == 0:
                    shutil.rmtree(partial)
                raise
            os.rename(partial, out)
            for leftover in (_JOURNAL, _LOCK):
                (out / leftover).unlink(missing_ok=True)
    except OSError as error:
        raise write_failure(
            error,
            f"OUT={out}: cannot be written ({error.strerror or error}). What is done stays: run "
            "the same command again to continue.",
        ) from None
    return TokenStore.open(out)


def _pieces_to_encode(
    document: Document, tokenizer: Tokenizer, writer: StoreWriter
) -> Iterator[str]:
    """Yield non-empty pieces that can be encoded one by one.

    A document that the filters reject for its domain or length yields none.
    """
    filters = writer.filters
    if filters.domains and document.domain not in filters.domains:
        writer.reject("of another domain")
        return
    pieces = iter(document.pieces)
    if filters.min_chars:
        pending: list[str] = []
        while (
            sum(map(len, pending)) < filters.min_chars and (piece := next(pieces, None)) is not None
        ):
            pending.append(piece)
        if sum(map(len, pending)) < filters.min_chars:
            writer.reject("shorter than --min-chars")
            return
        pieces = chain(pending, pieces)
    if tokenizer.exact_pieces:
        yield from pieces
    elif text := "".join(pieces):
        yield text


def _open_finished(out: Path, recipe: dict[str, str]) -> TokenStore | None:
    """Open a complete store at ``out`` with the same recipe, or return None if nothing is there.

    Raises:
        ConfigError: anything else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / META).is_file():
        raise ConfigError(f"OUT={out}: exists and is not a token store. Give a new folder.")
    meta = StoreMeta.read(out, f"OUT={out}")
    if meta.recipe != recipe:
        raise ConfigError(
            f"OUT={out}: holds another token store ({meta.source}, tokenizer {meta.tokenizer}, "
            f"{meta.num_tokens:,} tokens)"
            f"{_describe_difference(meta.recipe, recipe)}. Give another folder, or delete this one."
        )
    return TokenStore.open(out, f"OUT={out}")


def _describe_difference(stored: dict[str, str], wanted: dict[str, str]) -> str:
    differing = [part for part in wanted if stored.get(part) != wanted[part]]
    return (
        f": its {' and '.join(differing)} differ{'s' if len(differing) == 1 else ''}"
        if differing
        else ""
    )


def _read_journal(partial: Path) -> _Journal:
    try:
        return _Journal(**json.loads((partial / _JOURNAL).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(
            f"{partial}: its {_JOURNAL} is broken. Delete the folder to start again."
        ) from None


def _open_journal(partial: Path, recipe: dict[str, str]) -> _Journal:
    """Return the journal to continue from.

    Raises:
        ConfigError: the folder holds something else, or documents of another recipe.
    """
    path = partial / _JOURNAL
    if not path.exists():
        if {entry.name for entry in partial.iterdir()} - {_LOCK, f"{_JOURNAL}.tmp"}:
            raise ConfigError(
                f"{partial}: exists and is not an unfinished token store. Delete or rename it, or "
                "give another OUT."
            )
        write_json(path, asdict(_Journal(recipe)))
    journal = _read_journal(partial)
    if journal.recipe != recipe and journal.documents == 0:
        (partial / TOKENIZER).unlink(missing_ok=True)
        journal = _Journal(recipe)
        write_json(path, asdict(journal))
    if journal.recipe != recipe:
        raise ConfigError(
            f"{partial}: holds an unfinished store made with other "
            f"settings{_describe_difference(journal.recipe, recipe)}. "
            f"Delete it to start again, or give another OUT."
        )
    return journal


def _write_arrays(
    corpus: Corpus,
    tokenizer: Tokenizer,
    partial: Path,
    journal: _Journal,
    filters: Filters,
    report: Callable[[PreparationProgress], None],
) -> None:
    """Write the arrays from where ``journal`` stands to the end, then the metadata."""
    sizes = (
        array_sizes(journal.tokens, journal.documents, tokenizer)
        if journal.documents
        else (0, 0, 0)
    )
    for name, size in zip((TOKENS, DOCUMENTS, DOMAINS), sizes, strict=True):
        path = partial / name
        path.touch()
        if path.stat().st_size < size:
            raise ConfigError(
                f"{partial}: {name} is shorter than its {_JOURNAL} claims. Delete the folder to "
                "start again."
            )
        os.truncate(path, size)
    start = CorpusPosition(journal.unit, journal.record, journal.read)
    with (
        (partial / TOKENS).open("ab") as tokens,
        (partial / DOCUMENTS).open("ab") as offsets,
        (partial / DOMAINS).open("ab") as labels,
    ):
        writer = StoreWriter(
            tokens,
            offsets,
            tokenizer,
            journal.tokens,
            journal.documents,
            labels=labels,
            domains=journal.domains,
            filters=filters,
            left_out=journal.left_out,
            cut=journal.cut,
        )
        committed_tokens, committed_at = journal.tokens, time.monotonic()
        for position in tokenise(corpus, tokenizer, writer, start):
            report(
                PreparationProgress(
                    "tokenising",
                    position.read,
                    corpus.size,
                    writer.num_tokens,
                    writer.num_documents,
                )
            )
            if (
                writer.num_tokens - committed_tokens >= _COMMIT_TOKENS
                or time.monotonic() - committed_at >= _COMMIT_SECONDS
            ):
                writer.sync()
                reached = _Journal(
                    journal.recipe,
                    **asdict(position),
                    tokens=writer.num_tokens,
                    documents=writer.num_documents,
                    domains=writer.domains,
                    left_out=writer.left_out,
                    cut=writer.cut,
                )
                write_json(partial / _JOURNAL, asdict(reached))
                committed_tokens, committed_at = writer.num_tokens, time.monotonic()
        if writer.num_documents == 0:
            rejected = ", ".join(f"{count:,} {reason}" for reason, count in writer.left_out.items())
            raise ConfigError(
                f"{corpus.origin}: holds no text"
                + (f" that the filters keep: {rejected}" if rejected else "")
            )
        report(
            PreparationProgress(
                "checking", corpus.size, corpus.size, writer.num_tokens, writer.num_documents
            )
        )
        writer.finish(partial, corpus.description, journal.recipe)


def _open_bpe(
    corpus: Corpus, vocab_size: int, partial: Path, report: Callable[[PreparationProgress], None]
) -> Tokenizer:
    """Open the BPE that an earlier, interrupted call trained, or train one."""
    path = partial / TOKENIZER
    if not path.exists():
        train_bpe(_sample_pieces(corpus, report), vocab_size, path)
    trained = open_tokenizer(str(path), option="tokenizer of the store")
    trained.name = f"bpe {vocab_size}"
    return trained


def _sample_pieces(corpus: Corpus, report: Callable[[PreparationProgress], None]) -> Iterator[str]:
    """Yield all pieces of a corpus, or about ``_BPE_CHARACTERS`` evenly from a large one."""
    kept_of_2_64 = min(1.0, _BPE_CHARACTERS / max(1, corpus.size)) * 2.0**64
    number, base = 0, 0
    for unit in corpus.units:
        for document in unit.documents(0):
            for piece in document.pieces:
                number += 1
                if mix64(number) < kept_of_2_64:
                    yield piece
            report(PreparationProgress("training the tokenizer", base + document.end, corpus.size))
        base += unit.size


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``. The kernel releases it when its holder ends.

    Raises:
        ConfigError: another process holds it.
    """
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another `mtrain data prepare` is writing this store"
            ) from None
        yield
