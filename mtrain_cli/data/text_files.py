"""Read the user's text from .txt, .md, .py, .jsonl and .parquet files.

.jsonl and .parquet files may hold token ids instead.
A .txt, .md or .py file is one document. Each line of a .jsonl file is one document, and so is each
row of a .parquet file. A fault in a file raises a ConfigError of one line. To add a format, write a
function of type ``Reader`` and add it to ``READERS``.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, Protocol

from mtrain_cli import install_command
from mtrain_cli.config.problem import ConfigError, Problem, cli_option
from mtrain_cli.config.schema import DataConfig
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text, stdlib_corpus
from mtrain_cli.data.parquet_pages import rows_per_read
from mtrain_cli.data.record_key import RecordKey
from mtrain_cli.data.token_documents import TokenDocument, TokenFields

_BLOCK = 1 << 22  # bytes of a plain file to read at once
# Key or column that names the domain of a record. Without it, the domain is the first folder in the
# path of the file, relative to the corpus.
DOMAIN = "domain"
LONGEST_LINE = 1 << 30  # bytes of a .jsonl line
_MAX_ROWS = 1024  # parquet rows to turn into Python strings at once


class Fields(Protocol):
    """What a record must hold, and how it becomes the content of a document.

    keys: keys that a record must have.
    identity: text that differs between readers that may read other documents from the same file.
    """

    @property
    def keys(self) -> tuple[RecordKey, ...]: ...
    @property
    def identity(self) -> str: ...
    def read(
        self, record: Mapping[str, Any], location: str
    ) -> Iterable[str] | TokenDocument | None: ...


@dataclass(frozen=True)
class TextField:
    """Reads text from records. key: key of the text."""

    key: RecordKey

    @property
    def keys(self) -> tuple[RecordKey, ...]:
        return (self.key,)

    @property
    def identity(self) -> str:
        return self.key.name

    def read(self, record: Mapping[str, Any], location: str) -> Iterable[str]:
        """Return the pieces of one record's text. A text of None has no pieces.

        Args:
            location: file and record, for messages.

        Raises:
            ConfigError: the value is neither text nor None.
        """
        text = record[self.key.name]
        if text is None:
            return ()
        if not isinstance(text, str):
            raise self.key.value_error(location, f"holds {_json_kind(text)}, not text")
        if not text.isascii():
            # JSON can hold half of a surrogate pair, which cannot be encoded as UTF-8. Replace it.
            text = text.encode("utf-8", "replace").decode("utf-8")
        return split_text([text])


def open_corpus(data: DataConfig) -> Corpus:
    """Open the corpus of ``data=stdlib`` or ``data=text``.

    Raises:
        ConfigError: the corpus is missing.
    """
    if data.kind == "stdlib":
        return stdlib_corpus()
    assert data.kind == "text"
    if not data.path:
        raise ConfigError(
            "data.path is not set: data=text needs a corpus. Give a .txt, .md, .py, .jsonl or "
            ".parquet file, or a folder of them."
        )
    return text_corpus(data.path, data.text_key)


def text_corpus(
    path: str, text_key: str, path_option: str = "data.path", key_option: str = "data.text_key"
) -> Corpus:
    """Open the corpus of text in a file, or in all readable files of a folder and its subfolders.

    The files of a folder are sorted by relative path. Hidden files and folders are skipped. The
    signature covers relative paths, sizes and modification times, so no file is read here.

    Args:
        path: the file or folder.
        text_key: name of the key or column that holds the text.
        path_option, key_option: names of the settings that gave ``path`` and ``text_key``, for
            messages.

    Raises:
        ConfigError: the path is missing, or holds no file of a readable kind.
    """
    return _open(path, path_option, TextField(RecordKey(text_key, key_option)), READERS)


def refuse_unread_key(corpus: Corpus, text_key: str) -> None:
    """Raise ConfigError if a key other than the usual one is given, but no file has keys.

    Args:
        text_key: value of --text-key.
    """
    if text_key != TEXT_KEY and not any(
        unit.name.lower().endswith(_OF_RECORDS) for unit in corpus.units
    ):
        given, kinds = cli_option("text_key", text_key), " or ".join(_OF_RECORDS)
        line = f": {corpus.origin} has no {kinds} file, and other files have no keys; leave it out"
        raise ConfigError(Problem(given, line))


def token_corpus(path: str, fields: TokenFields, path_option: str = "SOURCE") -> Corpus:
    """Open the corpus of token ids in a .jsonl or .parquet file, or in a folder of them.

    Args:
        fields: keys of the ids, the masks and the positions.
        path, path_option: as in `text_corpus`.

    Raises:
        ConfigError: the path is missing, or holds no .jsonl or .parquet file.
    """
    readers = {suffix: READERS[suffix] for suffix in _OF_RECORDS}
    return replace(_open(path, path_option, fields, readers), fields=fields)


def _open(path: str, path_option: str, fields: Fields, readers: Mapping[str, Reader]) -> Corpus:
    """Open a corpus as `text_corpus` does. readers: by suffix, the kinds of files to read."""
    origin, root = f"{path_option}={path}", Path(path).expanduser()
    *first, last = readers
    kinds, content = f"{', '.join(first)} or {last}", "text" if readers is READERS else "token ids"
    if root.is_dir():
        found = _files_below(root, readers)
        files = sorted(found, key=lambda file: file.relative_to(root).parts)
        if not files:
            raise ConfigError(f"{origin}: the folder holds no {kinds} file")
    elif root.suffix.lower() in readers or not root.exists():
        files = [root]
    else:
        kind = f"a {root.suffix} file" if root.suffix else "a file without a suffix"
        raise ConfigError(
            f"{origin}: cannot read {kind} as {content}. Give a {kinds} file, or a folder of them."
        )
    digest = hashlib.sha256(fields.identity.encode())
    units = []
    for file in files:
        hint = "" if file == root else f" as {file}"
        missing = f"{origin}: no such file{hint}. Give a {kinds} file, or a folder of them."
        with explain_read_errors(f"{origin}: {file}", missing):
            status = file.stat()
        name = file.relative_to(root).as_posix() if root.is_dir() else file.name
        facts = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode("utf-8", "surrogateescape"))
        reader = readers[file.suffix.lower()]
        label = origin if file == root else f"{origin}: {file}"
        domain = name.partition("/")[0] if "/" in name else ""
        documents = partial(_read_guarded, reader, file, label, fields, domain)
        units.append(Unit(name, status.st_size, documents))
    return Corpus(str(path), origin, digest.hexdigest(), tuple(units))


def _files_below(root: Path, suffixes: Container[str]) -> Iterator[Path]:
    def is_visible(name: str) -> bool:
        return not name.startswith(".") and name != "__pycache__"

    for folder, folders, names in os.walk(root):
        folders[:] = filter(is_visible, folders)
        files = (Path(folder, name) for name in filter(is_visible, names))
        yield from (file for file in files if file.suffix.lower() in suffixes)


def _read_guarded(
    reader: Reader, path: Path, label: str, fields: Fields, domain: str, skip: int
) -> Iterator[Document]:
    """Yield the documents of a file. A document without a domain gets ``domain``.

    Args:
        reader: reads this kind of file.
        label: name of the input, with which error messages begin.
        skip: number of records to skip.

    Raises:
        ConfigError, RunError: the file cannot be read.
    """
    with explain_read_errors(f"{label}:"):
        for document in reader(path, label, fields, skip):
            yield document if document.domain or not domain else replace(document, domain=domain)


def _read_plain(path: Path, label: str, _fields: Fields, skip: int) -> Iterator[Document]:
    if skip == 0:
        pieces = split_text(_decode_blocks(path, label))
        yield Document(path.name, pieces, record=1, end=path.stat().st_size)


def _decode_blocks(path: Path, label: str) -> Iterator[str]:
    """Yield the text of a file block by block, without its byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    try:
        with explain_read_errors(f"{label}:"), path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield decoder.decode(block)
                position += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # The decoder's offset counts from the first of the bytes that the previous block left over,
        # so the sum is a few bytes too large.
        byte, offset = error.object[error.start], position + error.start
        raise ConfigError(
            f"{label}: not UTF-8 text (byte {byte:#04x} near offset {offset:,}). Convert it first, "
            "for example with iconv -t UTF-8."
        ) from None


def _document(
    fields: Fields, record: Mapping[str, Any], path: Path, number: int, end: int, kind: str
) -> Document:
    """Return the document of record ``number`` of a file. kind: what the file calls a record."""
    content, name = fields.read(record, f"{path} {kind} {number}"), f"{path.name}:{number}"
    domain = _domain(record.get(DOMAIN))
    if content is None or isinstance(content, TokenDocument):
        return Document(name, (), number, end, domain, content)
    return Document(name, content, number, end, domain)


def _read_jsonl(path: Path, label: str, fields: Fields, skip: int) -> Iterator[Document]:
    with path.open("rb") as file:
        lines = _read_lines(file, label)
        end = sum(len(line) for line in islice(lines, skip))
        for number, line in enumerate(lines, skip + 1):
            end += len(line)
            if not line.strip():
                continue
            record = _parse_record(line, f"{label} line {number}", fields.keys[0])
            for key in fields.keys:
                if key.name not in record:
                    raise key.missing_error(f"{path} line {number}", record)
            yield _document(fields, record, path, number, end, "line")


def _parse_record(line: bytes, location: str, key: RecordKey) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location}: not UTF-8 text at byte {error.start} of the line") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{location}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{location}: is {_json_kind(record)}, not a JSON object with the key {key.name}"
        )
    return record


def _read_lines(file: IO[bytes], label: str) -> Iterator[bytes]:
    """Yield the lines of a file.

    Args:
        label: name of the input, with which error messages begin.

    Raises:
        ConfigError: a line has more than ``LONGEST_LINE`` bytes. The rest of the line is not read.
    """
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise ConfigError(
                f"{label} line {number}: is longer than {LONGEST_LINE:,} bytes. Put one document "
                "on each line."
            )
        if not line:
            return
        yield line


def _read_parquet(path: Path, label: str, fields: Fields, skip: int) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{label}: reading parquet needs the pyarrow package: {install_command('data')}"
        ) from None
    row = skip
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for document in _parquet_documents(file, path, label, fields, skip):
                yield document
                row = document.record
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{label}: not UTF-8 text in the {_MAX_ROWS} rows after row {row} (byte "
            f"{error.object[error.start]:#04x})"
        ) from None
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{label}: not a readable parquet file ({reason})") from None


def _parquet_documents(
    file: Any, path: Path, label: str, fields: Fields, skip: int
) -> Iterator[Document]:
    names, size, rows = file.schema_arrow.names, path.stat().st_size, file.metadata.num_rows
    for key in fields.keys:
        if key.name not in names:
            raise key.missing_error(str(path), names)
    columns = list(dict.fromkeys([*(key.name for key in fields.keys), *({DOMAIN} & set(names))]))
    row = 0
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if row + group.num_rows <= skip:
            row += group.num_rows
            continue
        batch_rows = rows_per_read(path, group, columns, f"{label}: row group {number}", _MAX_ROWS)
        for batch in file.iter_batches(batch_rows, row_groups=[number], columns=columns):
            values = [_values(batch.column(name)) for name in columns]
            for cells in zip(*values, strict=True):
                row += 1
                if row > skip:
                    record = dict(zip(columns, cells, strict=True))
                    yield _document(fields, record, path, row, size * row // rows, "row")


def _values(column: Any) -> Iterable[Any]:
    """Return the values of a parquet column. Lists of integers become arrays, which are faster."""
    from pyarrow import types

    if types.is_list(column.type) and types.is_integer(column.type.value_type):
        cells = (cell.values for cell in column)
        return (None if cell is None else cell.to_numpy(zero_copy_only=False) for cell in cells)
    return column.to_pylist()


def _domain(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _json_kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    names |= {dict: "an object", str: "a string", bytes: "bytes", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


Reader = Callable[[Path, str, Fields, int], Iterator[Document]]
TEXT_KEY = "text"  # the usual key of the text
READERS: dict[str, Reader] = dict.fromkeys((".txt", ".md", ".py"), _read_plain)
READERS |= {".jsonl": _read_jsonl, ".parquet": _read_parquet}
_OF_RECORDS = (".jsonl", ".parquet")  # kinds of files that can hold token ids
