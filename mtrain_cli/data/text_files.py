"""Read the user's text from .txt, .md, .py, .jsonl, .json and .parquet files.

.jsonl, .json and .parquet files may hold token ids instead. A .txt, .md or .py file is one
document. Each line of a .jsonl file is one document, and so is each record of a .json file and each
row of a .parquet file. All but .parquet may be compressed: ``corpus.jsonl.gz``, ``book.txt.zst``.
A fault in a file raises a ConfigError of one line. To add a format, write a function of type
``Reader`` and add it to ``READERS``.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

from mtrain_cli import install_command
from mtrain_cli.config.problem import ConfigError, as_typed, cli_option
from mtrain_cli.config.schema import DataConfig
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text, stdlib_corpus
from mtrain_cli.data.filters import EMPTY, describe_left_out
from mtrain_cli.data.parquet_pages import rows_per_read
from mtrain_cli.data.record_key import RecordKey
from mtrain_cli.data.token_documents import TokenDocument, TokenFields
from mtrain_cli.data.unpacking import PACKED, Unpacked

_BLOCK = 1 << 22  # bytes of a plain file to read at once
# Key or column that names the domain of a record. Without it, the domain is the first folder in the
# path of the file, relative to the corpus.
DOMAIN = "domain"
LONGEST_LINE = 1 << 30  # bytes of a .jsonl line, or characters of a record of a .json file
_MOST_KINDS = 5  # kinds of files that a message names
_BETWEEN = re.compile(r"[ \t\r\n,]*")  # between the values of a .json file
_LITERAL = len("-Infinity")  # a cut literal or escape is reported at its start
_PLAIN_KIND = re.compile(r"(\.[a-z0-9_]{1,12}){1,2}")
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
            "data.path is not set: data=text needs a corpus. Give a .txt, .md, .py, .jsonl, .json "
            "or .parquet file, or a folder of them."
        )
    return text_corpus(data.path, data.text_key)


def text_corpus(
    path: str, text_key: str, path_option: str = "data.path", key_option: str = "data.text_key"
) -> Corpus:
    """Open the corpus of text in a file, or in all readable files of a folder and its subfolders.

    The files of a folder are sorted by relative path. Hidden files, files of other kinds and links
    to folders are left out and counted. The signature covers relative paths, sizes and modification
    times, so no file is read here.

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
    if text_key != TEXT_KEY and not any(_kind(unit.name) in _OF_RECORDS for unit in corpus.units):
        given, kinds = cli_option("text_key", text_key), _listed(_OF_RECORDS)
        why = f"{corpus.origin} has no {kinds} file, and other files have no keys; leave it out"
        raise ConfigError(f"{given}: {why}")


def token_corpus(path: str, fields: TokenFields, path_option: str = "SOURCE") -> Corpus:
    """Open the corpus of token ids in a .jsonl, .json or .parquet file, or in a folder of them.

    Args:
        fields: keys of the ids, the masks and the positions.
        path, path_option: as in `text_corpus`.

    Raises:
        ConfigError: the path is missing, or holds no such file.
    """
    readers = {suffix: READERS[suffix] for suffix in _OF_RECORDS}
    return replace(_open(path, path_option, fields, readers), fields=fields)


def _open(path: str, path_option: str, fields: Fields, readers: Mapping[str, Reader]) -> Corpus:
    """Open a corpus as `text_corpus` does. readers: by suffix, the kinds of files to read."""
    origin, root = as_typed(path_option, path), Path(path).expanduser()
    kinds, content = _listed(readers), "text" if readers is READERS else "token ids"
    left_out: dict[str, int] = {}
    if root.is_dir():
        reason = "not a text format" if readers is READERS else "holds no token ids"
        with explain_read_errors(f"{origin}:"):
            files, left_out = _scan(root, readers, reason)
        if not files:
            rest = f"; {describe_left_out(left_out)}" if left_out else ""
            raise ConfigError(f"{origin}: the folder holds no {kinds} file{rest}")
    elif _kind(root.name) in readers or not root.exists():
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
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever
            raise ConfigError(f"{origin}: {file} is not a regular file. Remove it.")
        name = file.relative_to(root).as_posix() if root.is_dir() else file.name
        facts = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode("utf-8", "surrogateescape"))
        reader = readers[_kind(file.name)]
        label = origin if file == root else f"{origin}: {file}"
        domain = name.partition("/")[0] if "/" in name else ""
        documents = partial(_read_guarded, reader, file, label, fields, domain, file == root)
        units.append(Unit(name, status.st_size, documents))
    return Corpus(str(path), origin, digest.hexdigest(), tuple(units), left_out=left_out)


def _listed(kinds: Iterable[str]) -> str:
    *first, last = kinds
    return f"{', '.join(first)} or {last}"


def _kind(name: str) -> str:
    """Return the suffix of a file that says what it holds: .jsonl of a.jsonl and of a.jsonl.gz."""
    stem, suffix = os.path.splitext(name.lower())
    inner = os.path.splitext(stem)[1]
    if suffix not in PACKED or inner == ".parquet":  # parquet cannot be read as a stream
        return inner + suffix if suffix in PACKED else suffix
    return inner if inner in READERS else inner + suffix


def _scan(
    root: Path, readers: Mapping[str, Reader], reason: str
) -> tuple[list[Path], dict[str, int]]:
    """Return the files that can be read, and the number of others by kind, with the reason."""
    files: list[Path] = []
    kinds, others = Counter[str](), Counter[str]()

    def fail(error: OSError) -> None:
        raise error

    def is_visible(name: str) -> bool:
        others["hidden"] += name.startswith(".")
        return not name.startswith(".") and name != "__pycache__"

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = filter(is_visible, folders)
        links = sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        others["linked (links to folders are not followed)"] += links
        present = set(names)
        for name in sorted(filter(is_visible, names)):
            kind, (plain, suffix) = _kind(name), os.path.splitext(name)
            if kind not in readers:
                kinds[kind if _PLAIN_KIND.fullmatch(kind) else "of other kinds"] += 1
            elif suffix.lower() in PACKED and plain in present:
                others[f"{kind}{suffix.lower()} (another copy is read)"] += 1
            else:
                files.append(Path(folder, name))
                present.add(plain)  # of files that are packed twice, the first is read
    most = dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:_MOST_KINDS])
    if rest := kinds.total() - sum(most.values()):
        most["of other kinds"] = most.get("of other kinds", 0) + rest
    left_out = {f"{kind} ({reason})": count for kind, count in most.items()} | +others
    return sorted(files, key=lambda file: file.relative_to(root).parts), left_out


def _read_guarded(
    reader: Reader, path: Path, label: str, fields: Fields, domain: str, alone: bool, skip: int
) -> Iterator[Document]:
    """Yield the documents of a file after the first ``skip`` records; an empty one if none."""
    # ``alone``: the user named this file. A folder may hold .json files of settings.
    is_empty = skip == 0
    with explain_read_errors(f"{label}:"):
        for document in reader(path, label, fields, skip, alone):
            is_empty = False
            yield document if document.domain or not domain else replace(document, domain=domain)
        if is_empty:
            yield Document(path.name, (), 1, path.stat().st_size, domain, left_out=EMPTY)


@contextlib.contextmanager
def _opened(path: Path, label: str) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Yield the unpacked content, and a function that counts the bytes read of the file."""
    compression = PACKED.get(path.suffix.lower())
    with path.open("rb") as file:
        if compression is None:
            yield file, file.tell
        else:
            yield io.BufferedReader(Unpacked(file, compression, label), 1 << 16), file.tell


def _read_plain(
    path: Path, label: str, _fields: Fields, skip: int, _alone: bool
) -> Iterator[Document]:
    if skip == 0:
        pieces = split_text(text for text, _ in _decode_blocks(path, label))
        yield Document(path.name, pieces, record=1, end=path.stat().st_size)


def _decode_blocks(path: Path, label: str) -> Iterator[tuple[str, int]]:
    """Yield blocks of text without a byte order mark, and the bytes of the file read so far."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    try:
        with explain_read_errors(f"{label}:"), _opened(path, label) as (file, tell):
            while block := file.read(_BLOCK):
                yield decoder.decode(block), tell()
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


def _read_jsonl(
    path: Path, label: str, fields: Fields, skip: int, _alone: bool
) -> Iterator[Document]:
    with _opened(path, label) as (file, tell):
        for number, line in enumerate(_read_lines(file, label), 1):
            if number <= skip or not line.strip():
                continue
            place = f"line {number}"
            record = _record(_parse(line, f"{label} {place}"), label, path, place, fields)
            yield _document(fields, record, path, number, tell(), "line")


def _parse(line: bytes, location: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location}: not UTF-8 text at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{location}: not JSON ({error})") from None


def _record(value: Any, label: str, path: Path, place: str, fields: Fields) -> dict[str, Any]:
    """Return the value at a place of a file if it is an object with the keys of ``fields``."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{label} {place}: is {_json_kind(value)}, not a JSON object with the key "
            f"{fields.keys[0].name}"
        )
    for key in fields.keys:
        if key.name not in value:
            raise key.missing_error(f"{path} {place}", value)
    return value


def _read_json(
    path: Path, label: str, fields: Fields, skip: int, alone: bool
) -> Iterator[Document]:
    """Yield a .json file's documents. In a folder, leave out a file in which none is a record."""
    unfit: ConfigError | None = None
    values = _json_values(_decode_blocks(path, label), label)
    for number, (value, end) in enumerate(values, 1):
        try:
            record = _record(value, label, path, f"record {number}", fields)
        except ConfigError as error:
            if alone or (number > 1 and unfit is None):
                raise
            unfit = unfit or error
            continue
        if unfit is not None:
            raise unfit
        if number > skip:
            yield _document(fields, record, path, number, end, "record")
    if unfit is not None and not skip:
        packed = path.suffix.lower() if path.suffix.lower() in PACKED else ""
        reason = f"the first value is no record with the key {fields.keys[0].name}"
        left_out = f"{_kind(path.name)}{packed} ({reason})"
        yield Document(path.name, (), 1, path.stat().st_size, left_out=left_out)


def _json_values(blocks: Iterator[tuple[str, int]], label: str) -> Iterator[tuple[Any, int]]:
    """Yield the elements of one array or a row of values, and the bytes of the file read so far."""
    scan = json.JSONDecoder().raw_decode
    text, at, end, number = "", 0, 0, 1
    in_array: bool | None = None  # unknown before the first value
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            if (block := next(blocks, None)) is not None:
                (text, end), at = block, 0
                continue
            if in_array:
                raise ConfigError(f"{label}: ends within its array. Copy the file again.")
            return
        if (in_array is None and text[at] == "[") or (in_array and text[at] == "]"):
            in_array = not in_array
            at += 1
            continue
        in_array = bool(in_array)
        try:
            value, at = scan(text, at)
        except (ValueError, RecursionError) as error:
            parts, size = [text[at:]], len(text) - at
            reason, limit = str(error), min(2 * size, LONGEST_LINE)
            if isinstance(error, json.JSONDecodeError):
                reason = error.msg
                # Without this, a fault would read the rest of the file into memory.
                is_cut = reason.startswith("Unterminated") or error.pos > len(text) - _LITERAL
                while is_cut and size < limit and (block := next(blocks, None)):
                    parts.append(block[0])
                    size, end = size + len(block[0]), block[1]
            if len(parts) == 1:
                if size >= LONGEST_LINE:
                    reason = f"it is longer than {LONGEST_LINE:,} characters"
                raise ConfigError(f"{label} record {number}: not JSON ({reason})") from None
            text, at = "".join(parts), 0
            continue
        yield value, end
        number += 1


def _read_lines(file: IO[bytes], label: str) -> Iterator[bytes]:
    """Yield the lines of a file. Refuse one beyond ``LONGEST_LINE`` without reading its rest."""
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


def _read_parquet(
    path: Path, label: str, fields: Fields, skip: int, _alone: bool
) -> Iterator[Document]:
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


Reader = Callable[[Path, str, Fields, int, bool], Iterator[Document]]
TEXT_KEY = "text"  # the usual key of the text
READERS: dict[str, Reader] = dict.fromkeys((".txt", ".md", ".py"), _read_plain)
READERS |= {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
_OF_RECORDS = (".jsonl", ".json", ".parquet")  # kinds of files that can hold token ids
