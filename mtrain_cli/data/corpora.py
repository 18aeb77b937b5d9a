"""Sources of documents. A corpus lists its units (files or packages) in a fixed order.

A unit streams its documents, and a document streams as pieces of text, so a book of many gigabytes
is never in memory as a whole. Reading may skip the first documents of a unit: an interrupted
`mtrain data prepare` resumes that way.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mtrain_cli.config.schema import ConfigError

PIECE = 1 << 16  # characters; small enough that a batch of pieces occupies many cores
# Folders of the standard library that slim images omit, or that hold tests or machine-specific
# files.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


@dataclass(frozen=True)
class Document:
    """One document.

    name: file or record, for messages.
    pieces: parts of its text, in order.
    record: number of records in the unit up to and including this one. Empty records count.
    end: bytes of the unit up to the end of this document, for a progress bar.
    domain: empty if unknown.
    """

    name: str
    pieces: Iterable[str]
    record: int
    end: int
    domain: str = ""


@dataclass(frozen=True)
class Unit:
    """A file or a package of ``size`` bytes.

    ``documents(skip)`` streams the documents after its first ``skip`` records.
    """

    name: str
    size: int
    documents: Callable[[int], Iterator[Document]]


@dataclass(frozen=True)
class Corpus:
    """A list of units.

    description: source named in a store's metadata.
    origin: how the user named the corpus, for messages.
    signature: changes whenever the documents may have changed.
    """

    description: str
    origin: str
    signature: str
    units: tuple[Unit, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(unit.size for unit in self.units)


def stdlib_corpus(folder: str | None = None, origin: str = "data=stdlib") -> Corpus:
    """Open the sources of the running Python's standard library, without tests.

    Each top-level package or module is one document: its files in order of their relative paths,
    each after a comment line with its path. The signature covers paths and contents, since both
    differ between versions of Python.

    Raises:
        ConfigError: no sources are installed.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    packages: dict[str, list[tuple[str, str]]] = {}
    digest = hashlib.sha256()
    for path in sorted(_python_sources(root), key=lambda path: path.relative_to(root).parts):
        text = _decode_source(path)
        if text is None:
            continue
        relative = path.relative_to(root).as_posix()
        digest.update(f"{relative}\n{len(text)}\n{text}".encode("utf-8", "replace"))
        packages.setdefault(relative.split("/")[0].removesuffix(".py"), []).append((relative, text))
    if not packages:
        advice = "Give your own text with data=text data.path=..."
        raise ConfigError(f"{origin}: no Python sources in {root}. {advice}")
    units = tuple(_package_unit(name, files) for name, files in packages.items())
    description = f"standard library of Python {platform.python_version()}"
    return Corpus(description, origin, digest.hexdigest(), units)


def split_text(blocks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Join ``blocks`` and cut the text into pieces of at most ``size`` characters.

    Cut only after a single line break that has no space on either side. No usual pre-tokenizer has
    a token across such a break. A piece without one grows up to 16 times ``size``.
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
    """Return the largest position in text[start:end], except its start, where a cut is allowed."""
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
    """Return the text of a Python file in its declared encoding, or None if it cannot be decoded.

    Some files of the standard library are unreadable on purpose.
    """
    try:
        content = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding).replace("\r\n", "\n")
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _package_unit(name: str, files: list[tuple[str, str]]) -> Unit:
    size = sum(len(text.encode("utf-8")) for _, text in files)

    def pieces() -> Iterator[str]:
        return split_text(f"# {relative}\n{text.rstrip()}\n" for relative, text in files)

    def documents(skip: int) -> Iterator[Document]:
        if skip == 0:
            yield Document(name, pieces(), record=1, end=size)

    return Unit(name, size, documents)
