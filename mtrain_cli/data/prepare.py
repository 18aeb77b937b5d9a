"""Tokenize a corpus into a token store. After an interruption, the next call resumes.

The unfinished store is the folder ``OUT.partial``. A journal in this folder records the position in
the corpus up to which the arrays are complete. The next call cuts the arrays back to that position
and continues. The last step renames the folder to ``OUT``, so ``OUT`` is complete or missing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import EMPTY, EVERYTHING, Corpus, Document, Filters
from mtrain_cli.data.sampler import mix64
from mtrain_cli.data.store import (
    META,
    TOKENIZER,
    StoreMeta,
    StoreWriter,
    TokenStore,
    Written,
    write_json,
)
from mtrain_cli.data.tokenizers import (
    NO_BEGIN,
    SMALLEST_BPE,
    FileTokenizer,
    Tokenizer,
    choose_begin,
    no_begin_token,
    open_tokenizer,
    train_bpe,
)
from mtrain_cli.launch.failures import write_failure

_JOURNAL, _LOCK = "journal.json", "lock"
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 22, 1 << 13
_COMMIT_TOKENS, _COMMIT_SECONDS = 1 << 24, 2.0
# Characters to train a BPE on. More text does not improve the merges, and training keeps every
# distinct word in memory.
_BPE_CHARACTERS = 1 << 30
DEFAULT_BPE_VOCABULARY = 8192


@dataclass(frozen=True)
class CorpusPosition:
    """The position in a corpus before record ``record`` of unit ``unit``.

    read: approximate number of bytes of the corpus before this position.
    """

    unit: int = 0
    record: int = 0
    read: int = 0


@dataclass(frozen=True)
class PreparationProgress:
    """Values for a progress bar.

    stage: name of the current stage, such as tokenizing.
    read, size: number of bytes of the corpus read so far, and in total.
    tokens, documents: numbers written so far.
    """

    stage: str
    read: int
    size: int
    tokens: int = 0
    documents: int = 0


Reporter = Callable[[PreparationProgress], None]


@dataclass(frozen=True)
class _Journal:
    """Where the files of an unfinished store are complete. Its file is one flat JSON object."""

    recipe: dict[str, str]
    position: CorpusPosition = CorpusPosition()
    written: Written = field(default_factory=Written)

    @classmethod
    def read(cls, partial: Path) -> _Journal:
        try:
            content = documents.read_json(partial / _JOURNAL)
            position = documents.checked(CorpusPosition, content)
            return cls(content["recipe"], position, documents.checked(Written, content))
        except (ValueError, KeyError):
            raise ConfigError(
                f"{partial}: {_JOURNAL} in it is damaged. Delete the folder to start again."
            ) from None

    def write(self, partial: Path) -> None:
        content = {"recipe": self.recipe, **asdict(self.position), **asdict(self.written)}
        write_json(partial / _JOURNAL, content)


# A piece of a document's text, or its token ids; or, after that, the position after the document
# and the document.
_Item = str | np.ndarray | tuple[CorpusPosition, Document]


def tokenise(
    corpus: Corpus,
    tokenizer: Tokenizer,
    writer: StoreWriter,
    start: CorpusPosition = CorpusPosition(),
) -> Iterator[CorpusPosition]:
    """Tokenize the documents of ``corpus`` from ``start`` on, and write the tokens in batches.

    Yields:
        After each batch, the position after the last completely written document. The position's
        ``read`` also counts the pieces of the next document that are already written.
    """
    base = sum(unit.size for unit in corpus.units[: start.unit])
    batch: list[_Item] = []
    position, characters = start, 0
    for number, unit in enumerate(corpus.units[start.unit :], start.unit):
        for document in unit.documents(start.record if number == start.unit else 0):
            end = CorpusPosition(number, document.record, base + document.end), document
            for item in chain[_Item](_content(document, tokenizer, writer), [end]):
                batch.append(item)
                characters += len(item) if isinstance(item, str | np.ndarray) else 0
                if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
                    position = _write_batch(batch, tokenizer, writer, position)
                    yield position
                    batch, characters = [], 0
        base += unit.size
    yield _write_batch(batch, tokenizer, writer, position)


def _write_batch(
    batch: Sequence[_Item], tokenizer: Tokenizer, writer: StoreWriter, start: CorpusPosition
) -> CorpusPosition:
    pieces = [item for item in batch if isinstance(item, str)]
    encoded = iter(tokenizer.encode(pieces))
    position = replace(start, read=start.read + sum(map(len, pieces)))
    for item in batch:
        if isinstance(item, tuple):
            position, document = item
            writer.end_document(document.domain, document.tokens)
        else:
            writer.append(next(encoded) if isinstance(item, str) else item)
    writer.flush()
    return position


def prepare_store(
    corpus: Corpus,
    out: Path,
    tokenizer: str,
    vocab_size: int | None,
    report: Reporter,
    filters: Filters = EVERYTHING,
    bos: bool | str = "auto",
) -> TokenStore:
    """Tokenize ``corpus`` into the folder ``out``, or continue an interrupted call.

    If ``out`` is already the complete store of the same arguments, open it and change nothing.

    Args:
        tokenizer: ``bytes``, the path of a tokenizer.json, or ``bpe`` to train one on ``corpus``.
        vocab_size: maximum number of ids of a ``bpe``; None for the default.
        bos: as in `choose_begin`.

    Raises:
        ConfigError: the arguments or the corpus are wrong, or ``out`` holds something else or is
            not writable.
        RunError: the disk is full or fails. The next call continues.
    """
    given = None if tokenizer == "bpe" else open_tokenizer(tokenizer, "--tokenizer", ("bpe",))
    if corpus.fields is not None:
        _require_ids(given, bos)
    elif given is not None:
        choose_begin(given, bos, "--bos ")
    elif bos is True:
        raise no_begin_token("--bos ", tokenizer)
    if given is not None and vocab_size is not None:
        raise ConfigError(
            f"--vocab-size {vocab_size}: only for --tokenizer bpe. The tokenizer {tokenizer} has "
            "its own vocabulary."
        )
    bpe_size = DEFAULT_BPE_VOCABULARY if vocab_size is None else vocab_size
    if bpe_size < SMALLEST_BPE:
        raise ConfigError(
            f"--vocab-size {bpe_size}: a byte-level BPE needs at least {SMALLEST_BPE} ids"
        )
    identity = given.identity if given else f"bpe {bpe_size}"
    recipe = {"corpus": corpus.signature, "tokenizer": identity, **filters.recipe}
    if given is not None and given.begin:
        recipe["begin token"] = str(given.begin)
    out = Path(os.path.abspath(out.expanduser()))
    if store := _open_finished(out, recipe):
        return store
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for path in (partial, *partial.iterdir()):  # writing to a link could change files elsewhere
            if path.is_symlink():
                raise ConfigError(f"{path}: is a symbolic link. Remove it, or give another OUT.")
        with _lock(partial):
            if store := _open_finished(out, recipe):  # another process has just finished it
                shutil.rmtree(partial)
                return store
            _fill(partial, corpus, recipe, given, bpe_size, filters, report)
            os.rename(partial, out)
            for leftover in (_JOURNAL, _LOCK):
                (out / leftover).unlink(missing_ok=True)
    except OSError as error:
        raise write_failure(
            error,
            f"OUT={out}: cannot be written ({error.strerror or error}). Run the same command again "
            "to continue where it stopped.",
        ) from None
    return TokenStore.open(out)


def _require_ids(tokenizer: Tokenizer | None, bos: bool | str) -> None:
    """Check the settings for documents of token ids, which hold their own begin and end tokens."""
    wrong = None
    if tokenizer is None:
        wrong = "--tokenizer bpe: give the tokenizer that made them, bytes or a tokenizer.json"
    elif bos != "auto":
        wrong = f"--bos {str(bos).lower()}: the ids stay as they are; leave it out"
    if wrong:
        raise ConfigError(f"{wrong}, since SOURCE holds token ids (--tokens-key)")
    assert tokenizer is not None
    tokenizer.eos, tokenizer.begin = None, NO_BEGIN


def _fill(
    partial: Path,
    corpus: Corpus,
    recipe: dict[str, str],
    given: Tokenizer | None,
    bpe_size: int,
    filters: Filters,
    report: Reporter,
) -> None:
    journal = _open_journal(partial, recipe)
    try:
        tokenizer = given or _open_bpe(corpus, bpe_size, partial, report)
        if isinstance(given, FileTokenizer):
            (partial / TOKENIZER).write_bytes(given.content)
        _write_arrays(corpus, tokenizer, partial, journal, filters, report)
    except ConfigError:
        if _Journal.read(partial).written.documents == 0:
            shutil.rmtree(partial)
        raise


def _content(
    document: Document, tokenizer: Tokenizer, writer: StoreWriter
) -> Iterator[str | np.ndarray]:
    """Yield a document's token ids or pieces of its text; nothing if the filters leave it out."""
    if document.left_out:
        writer.reject(document.left_out)
    elif document.tokens is not None:
        ids = document.tokens.ids
        if wrong := ids[(ids < 0) | (ids >= tokenizer.vocab_size)].tolist():
            raise ConfigError(
                f"{document.name}: token {wrong[0]} is not one of the {tokenizer.vocab_size:,} ids "
                f"of {tokenizer.name}. Give the tokenizer that made these tokens with --tokenizer."
            )
        if not writer.leaves_out(document.domain):
            yield ids
    elif not writer.leaves_out(document.domain):
        pieces = iter(document.pieces)
        if not tokenizer.exact_pieces:
            pieces = filter(None, iter(["".join(pieces)]))
        piece = ""
        for piece in pieces:
            yield piece
        if not piece:
            writer.reject(EMPTY)


def _open_finished(out: Path, recipe: dict[str, str]) -> TokenStore | None:
    """Return the complete store of ``recipe`` in ``out``; None if ``out`` is missing or empty."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / META).is_file():
        raise ConfigError(f"OUT={out}: exists and is not a token store. Give a new folder.")
    meta = StoreMeta.read(out, f"OUT={out}")
    if meta.recipe != recipe:
        raise ConfigError(
            f"OUT={out}: holds another token store ({meta.source}, tokenizer {meta.tokenizer}, "
            f"{meta.num_tokens:,} tokens), which differs in {_difference(meta.recipe, recipe)}. "
            "Give another folder, or delete this one."
        )
    return TokenStore.open(out, f"OUT={out}")


def _difference(stored: dict[str, str], wanted: dict[str, str]) -> str:
    return ", ".join(part for part in wanted | stored if stored.get(part) != wanted.get(part))


def _open_journal(partial: Path, recipe: dict[str, str]) -> _Journal:
    """Return the journal of an unfinished store, or write and return an empty one."""
    if (partial / _JOURNAL).exists():
        journal = _Journal.read(partial)
        if journal.recipe == recipe:
            # A process that was killed may have left a journal that it had not finished.
            (partial / f"{_JOURNAL}.tmp").unlink(missing_ok=True)
            return journal
        if journal.written.documents:
            raise ConfigError(
                f"{partial}: holds an unfinished store, which differs in "
                f"{_difference(journal.recipe, recipe)}. Delete it to start again, or give another "
                "OUT."
            )
        (partial / TOKENIZER).unlink(missing_ok=True)
    elif {entry.name for entry in partial.iterdir()} - {_LOCK, f"{_JOURNAL}.tmp"}:
        advice = "Delete or rename it, or give another OUT."
        raise ConfigError(f"{partial}: exists and is not an unfinished token store. {advice}")
    journal = _Journal(recipe)
    journal.write(partial)
    return journal


def _write_arrays(
    corpus: Corpus,
    tokenizer: Tokenizer,
    partial: Path,
    journal: _Journal,
    filters: Filters,
    report: Reporter,
) -> None:
    """Write the documents after the journal's position to the arrays, then write the metadata."""
    written = journal.written
    sizes = written.file_sizes(tokenizer, corpus.fields)
    with ExitStack() as stack:
        files = {n: stack.enter_context(_open_array(partial / n, s)) for n, s in sizes.items()}
        writer = StoreWriter(files, tokenizer, written, filters)

        def show(stage: str, read: int) -> None:
            counts = written.tokens, written.documents
            report(PreparationProgress(stage, read, corpus.size, *counts))

        committed_tokens, committed_at = written.tokens, time.monotonic()
        for position in tokenise(corpus, tokenizer, writer, journal.position):
            show("tokenizing", position.read)
            if (
                written.tokens - committed_tokens >= _COMMIT_TOKENS
                or time.monotonic() - committed_at >= _COMMIT_SECONDS
            ):
                writer.sync()
                _Journal(journal.recipe, position, written).write(partial)
                committed_tokens, committed_at = written.tokens, time.monotonic()
        show("checking", corpus.size)
        writer.finish(partial, corpus, journal.recipe)


def _open_array(path: Path, size: int) -> BinaryIO:
    """Open a file for appending. First cut the file to the ``size`` bytes of the journal."""
    file = path.open("ab")
    if path.stat().st_size < size:
        raise ConfigError(
            f"{path.parent}: {path.name} is shorter than {_JOURNAL} claims. Delete the folder to "
            "start again."
        )
    file.truncate(size)
    return file


def _open_bpe(corpus: Corpus, vocab_size: int, partial: Path, report: Reporter) -> Tokenizer:
    """Open the BPE that an interrupted call has trained in ``partial``, or else train a BPE."""
    path = partial / TOKENIZER
    if not path.exists():
        train_bpe(_sample_pieces(corpus, report), vocab_size, path)
    trained = open_tokenizer(str(path), option="tokenizer of the store")
    trained.name = f"bpe {vocab_size}"
    return trained


def _sample_pieces(corpus: Corpus, report: Reporter) -> Iterator[str]:
    """Yield the pieces of a corpus. Sample a large corpus evenly to about `_BPE_CHARACTERS`."""
    share_of_2_64 = min(1.0, _BPE_CHARACTERS / max(1, corpus.size)) * 2.0**64
    number, base = 0, 0
    for unit in corpus.units:
        for document in unit.documents(0):
            for piece in document.pieces:
                number += 1
                if mix64(number) < share_of_2_64:
                    yield piece
            report(PreparationProgress("training the tokenizer", base + document.end, corpus.size))
        base += unit.size


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock ``folder``. If the process is killed, the operating system releases the lock."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another `mtrain data prepare` is writing this store"
            ) from None
        yield
