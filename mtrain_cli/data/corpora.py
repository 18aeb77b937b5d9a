"""Sources of text, and filters. A corpus is a list of units (files, packages) in a fixed order.

A unit yields its documents one by one, and a document yields its text in pieces, so a document of
many gigabytes is never in memory as a whole. A reader can skip the first documents of a unit, which
lets an interrupted `mtrain data prepare` resume.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.token_documents import TokenDocument, TokenFields

# Characters in a piece. Small enough that a tokenizer spreads a batch of pieces over many cores.
PIECE = 1 << 16
# Folders of the standard library that are not read: slim images omit them, or they hold tests or
# files that differ between machines.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


@dataclass(frozen=True)
class Document:
    """One document.

    name: the file, or the file and the record, for messages.
    pieces: parts of the text, in order.
    record: number of records in the unit up to the end of this document, including empty records.
    end: number of bytes in the unit up to the end of this document, for a progress bar.
    domain: such as code; "" if unknown.
    tokens: the document's token ids, which replace its text; None for text.
    left_out: what the document is and why it is left out, as in `describe_left_out`; "" to keep it.
    """

    name: str
    pieces: Iterable[str]
    record: int
    end: int
    domain: str = ""
    tokens: TokenDocument | None = None
    left_out: str = ""


@dataclass(frozen=True)
class Unit:
    """A file or a package.

    size: size in bytes.
    documents: function (n) that yields the documents after the unit's first n records.
    """

    name: str
    size: int
    documents: Callable[[int], Iterator[Document]]


@dataclass(frozen=True)
class Corpus:
    """A list of units.

    description: name of the corpus in the metadata of a token store.
    origin: how the user named the corpus, for messages.
    signature: hash that changes whenever the documents may have changed.
    fields: keys of documents that come as token ids; None for text.
    left_out: number of files that are not read, by kind and reason, as in `describe_left_out`.
    """

    description: str
    origin: str
    signature: str
    units: tuple[Unit, ...]
    fields: TokenFields | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Total size of all units in bytes."""
        return sum(unit.size for unit in self.units)


@dataclass(frozen=True)
class Filters:
    """Conditions that a document must meet.

    domains: allowed domains; empty allows all.
    min_tokens, max_tokens: limits of the number of tokens, with the end token; 0 sets no limit.
    """

    domains: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if 0 < self.max_tokens < self.min_tokens:
            raise ConfigError(
                f"--max-tokens {self.max_tokens}: is below --min-tokens {self.min_tokens}, so no "
                "document would be left"
            )

    @property
    def recipe(self) -> dict[str, str]:
        """The entry for the filters in `StoreMeta.recipe`, or an empty dict without any filter."""
        if self == Filters():
            return {}
        # Earlier versions had two more filters.
        earlier = {"min_chars": 0, "truncate": False}
        return {"filters": repr(sorted((asdict(self) | earlier).items()))}


EVERYTHING = Filters()
EMPTY = "empty or null"  # documents without text or tokens


def describe_left_out(counts: Mapping[str, int]) -> str:
    """Return ``left out: 1 .html (not a text format), 3 empty or null``; "" without counts."""
    shown = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    return f"left out: {shown}" if counts else ""


def stdlib_corpus(folder: str | None = None, origin: str = "data=stdlib") -> Corpus:
    """Open the source files of the running Python's standard library, or of ``folder``.

    A document is a top-level package or module, without its tests: its files sorted by relative
    path, each after a comment line with this path. The signature covers paths and contents.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    packages: dict[str, list[tuple[str, str]]] = {}
    digest = hashlib.sha256()
    for path in sorted(_python_sources(root), key=lambda path: path.relative_to(root).parts):
        if (text := _decode_source(path)) is not None:
            relative = path.relative_to(root).as_posix()
            digest.update(f"{relative}\n{len(text)}\n{text}".encode("utf-8", "replace"))
            package = relative.split("/")[0].removesuffix(".py")
            packages.setdefault(package, []).append((relative, text))
    if not packages:
        advice = "Give your own text with data=text data.path=..."
        raise ConfigError(f"{origin}: no Python sources in {root}. {advice}")
    units = tuple(_package_unit(name, files) for name, files in packages.items())
    description = f"standard library of Python {platform.python_version()}"
    return Corpus(description, origin, digest.hexdigest(), units)


def split_text(blocks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Join ``blocks`` and yield the text in pieces of at most ``size`` characters.

    A piece ends after a line break that has no other white space next to it. No usual pre-tokenizer
    puts both sides of such a line break into one token, so the pieces can be tokenized one by one.
    If the text has no such line break, a piece can have up to 16 times ``size`` characters.
    """
    pending = ""
    for block in blocks:
        pending += block
        start, limit = 0, size
        while len(pending) - start >= limit:
            cut = _find_last_cut(pending, start, start + limit)
            if cut is None and limit < 16 * size:
                limit += size
                continue
            end = start + limit if cut is None else cut
            yield pending[start:end]
            start, limit = end, size
        pending = pending[start:]
    if pending:
        yield pending


def _find_last_cut(text: str, start: int, end: int) -> int | None:
    """Return the last position after ``start`` and up to ``end`` where `split_text` may cut."""
    position = text.rfind("\n", start + 1, end - 1)
    while position > 0:
        if not text[position - 1].isspace() and not text[position + 1].isspace():
            return position + 1
        position = text.rfind("\n", start + 1, position)
    return None


def _python_sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        kept = [name for name in folders if not name.startswith(_SKIPPED_PREFIXES)]
        folders[:] = [name for name in kept if name not in _SKIPPED_FOLDERS]
        sources = (name for name in files if name.endswith(".py"))
        yield from (Path(folder, s) for s in sources if not s.startswith(_SKIPPED_PREFIXES))


def _decode_source(path: Path) -> str | None:
    """Return a Python file's text; None if it cannot be decoded, as a few are on purpose."""
    try:
        content = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding).replace("\r\n", "\n")
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _package_unit(name: str, files: list[tuple[str, str]]) -> Unit:
    size = sum(len(text.encode("utf-8")) for _, text in files)

    def documents(skip: int) -> Iterator[Document]:
        if skip == 0:
            texts = (f"# {relative}\n{text.rstrip()}\n" for relative, text in files)
            yield Document(name, split_text(texts), record=1, end=size)

    return Unit(name, size, documents)
