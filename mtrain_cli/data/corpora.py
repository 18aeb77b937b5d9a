"""Corpora: where documents come from. Each one lists its units (a file, or a package) in a fixed order and streams their documents.

A document streams as pieces of text, so that a book of many gigabytes never stands in memory whole. Reading may start behind the first
documents of a unit, which is how an interrupted `mtrain data prepare` goes on.
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

from mtrain_cli.config.schema import ConfigError, DataConfig

PIECE = 1 << 16  # characters: small enough that a batch of pieces keeps many cores busy
# Folders of the standard library that slim images leave out, or that hold tests and machine-specific files.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


@dataclass(frozen=True)
class Document:
    """One document. ``pieces`` joined give its text; ``record`` counts the unit's records up to and with this one, empty ones included;
    ``end`` is how many of the unit's bytes are behind once it is read (for progress); ``domain`` is empty where none is known."""

    name: str
    pieces: Iterable[str]
    record: int
    end: int
    domain: str = ""


@dataclass(frozen=True)
class Unit:
    """A file or a package: ``documents(skip)`` streams what follows its first ``skip`` records. ``size`` in bytes."""

    name: str
    size: int
    documents: Callable[[int], Iterator[Document]]


@dataclass(frozen=True)
class Corpus:
    """``signature`` changes whenever the documents may have changed; ``origin`` is how the user named the corpus, for messages."""

    description: str
    origin: str
    signature: str
    units: tuple[Unit, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(unit.size for unit in self.units)


def open_corpus(data: DataConfig) -> Corpus:
    """The corpus of ``data=stdlib`` or ``data=text``; ConfigError when there is none."""
    from mtrain_cli.data.text_files import text_corpus

    if data.kind == "stdlib":
        return stdlib_corpus()
    assert data.kind == "text"
    if not data.path:
        raise ConfigError(
            "data.path=null: data=text needs a corpus; give a .txt, .md, .py, .jsonl or .parquet file or a folder of them"
        )
    return text_corpus(data.path, data.text_key)


def stdlib_corpus(folder: str | None = None, origin: str = "data=stdlib") -> Corpus:
    """The sources of the running Python's standard library, without tests: one document per top-level package or module.

    A document is the package's files in order of their relative paths, each after a comment line with its path. The signature is over
    paths and contents, since both differ between versions of Python. Raises ConfigError where no source is installed.
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
        raise ConfigError(
            f"{origin}: no Python sources in {root}; give your own text with data=text data.path=..."
        )
    units = tuple(_package_unit(name, files) for name, files in packages.items())
    return Corpus(
        f"standard library of Python {platform.python_version()}", origin, digest.hexdigest(), units
    )


def split_text(blocks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Join ``blocks`` and cut the text into pieces of at most ``size`` characters, where tokenizers would cut too.

    A cut comes after a single line break between two lines that do not begin or end with space: no usual pre-tokenizer has a token that
    goes across it. A piece without such a place grows, and is cut anyway at 16 sizes.
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
    """The largest position in text[start:end] where it may be cut, but not at its beginning."""
    position = text.rfind("\n", start + 1, end - 1)
    while position > 0:
        if not text[position - 1].isspace() and not text[position + 1].isspace():
            return position + 1
        position = text.rfind("\n", start + 1, position)
    return None


def _python_sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        yield from (
            Path(folder, name)
            for name in files
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES)
        )


def _decode_source(path: Path) -> str | None:
    """Text of a Python file in the encoding that it declares; None for the few that are unreadable on purpose."""
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
