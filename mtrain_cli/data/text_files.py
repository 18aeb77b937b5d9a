"""Read the user's text from .txt, .md, .py, .jsonl, .json and .parquet files.

.jsonl, .json and .parquet files may hold token ids instead. A .txt, .md or .py file is one
document, and so is each line of a .jsonl file, each record in the array of a .json file and each
row of a .parquet file. All but .parquet may be compressed: ``corpus.jsonl.gz``, ``book.txt.zst``.
To add a format, write a function of type ``Reader`` and add it to ``READERS``.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

from mtrain_cli.config.problem import ConfigError, as_typed, cli_option, setting
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.data.corpora import EMPTY, Corpus, Document, Unit, describe_left_out, split_text
from mtrain_cli.data.token_documents import Fields, RecordKey, TokenDocument, TokenFields
from mtrain_cli.launch.environment import host_memory

_BLOCK = 1 << 22  # bytes of a plain file to read at once
# Key or column that names the domain of a record. Without it, the domain is the first folder in the
# path of the file, relative to the corpus.
DOMAIN = "domain"
LONGEST_LINE = 1 << 30  # bytes of a .jsonl line, or characters of a .json file
_MAX_ROWS = 1024  # parquet rows to turn into Python strings at once
PACKED = {".gz": "gz", ".zst": "zstd"}  # the compression that a suffix stands for


@dataclass(frozen=True)
class TextField(Fields):
    """Reads text from records, as `TokenFields` reads token ids. key: key of the text."""

    key: RecordKey

    @property
    def keys(self) -> tuple[RecordKey, ...]:
        return (self.key,)

    @property
    def identity(self) -> str:
        return self.key.name

    def read(self, record: Mapping[str, Any], location: str) -> Iterable[str]:
        text = record[self.key.name]
        if text is None:
            return ()
        if not isinstance(text, str):
            raise self.key.value_error(location, f"holds {_json_kind(text)}, not text")
        if not text.isascii():
            # JSON can hold half of a surrogate pair, which cannot be encoded as UTF-8. Replace it.
            text = text.encode("utf-8", "replace").decode("utf-8")
        return split_text([text])


def text_corpus(
    path: str, text_key: str, path_option: str = "data.path", key_option: str = "data.text_key"
) -> Corpus:
    """Open the corpus of text in a file, or in all readable files of a folder and its subfolders.

    The files of a folder are sorted by relative path. Hidden files, files of other kinds and links
    to folders are left out and counted. The signature covers relative paths, sizes and modification
    times, so no file is read here.

    Args:
        text_key: name of the key or column that holds the text.
        path_option, key_option: names of the settings that gave ``path`` and ``text_key``, for
            messages.
    """
    return _open(path, path_option, TextField(RecordKey(text_key, key_option)), READERS)


def refuse_unread_key(corpus: Corpus, text_key: str) -> None:
    """Raise ConfigError if ``text_key`` is not the usual one, but no file has keys."""
    if text_key != TEXT_KEY and not any(_kind(unit.name) in _OF_RECORDS for unit in corpus.units):
        given, kinds = cli_option("text_key", text_key), _listed(_OF_RECORDS)
        why = f"{corpus.origin} has no {kinds} file, and other files have no keys; leave it out"
        raise ConfigError(f"{given}: {why}")


def token_corpus(path: str, fields: TokenFields) -> Corpus:
    """Open the corpus of token ids in a file of records, or in a folder of them."""
    return replace(record_corpus(path, "SOURCE", fields), fields=fields)


def record_corpus(
    path: str, path_option: str, fields: Fields, others: Mapping[str, Reader] | None = None
) -> Corpus:
    """Open a file of records, or a folder of them, as `text_corpus` does. others: more readers."""
    readers = {suffix: READERS[suffix] for suffix in _OF_RECORDS} | dict(others or {})
    return _open(path, path_option, fields, readers)


def _open(path: str, path_option: str, fields: Fields, readers: Mapping[str, Reader]) -> Corpus:
    """Open a corpus as `text_corpus` does. readers: by suffix, the kinds of files to read."""
    origin, root = as_typed(setting(path_option), path), Path(path).expanduser()
    kinds, content = _listed(readers), "text" if readers is READERS else "records"
    left_out: dict[str, int] = {}
    if root.is_dir():
        with explain_read_errors(f"{origin}:"):
            files, left_out = _scan(root, readers)
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


def _scan(root: Path, readers: Mapping[str, Reader]) -> tuple[list[Path], dict[str, int]]:
    """Return the files that can be read, and the number of others by kind, with the reason."""
    files: list[Path] = []
    others = Counter[str]()

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
                others["of other kinds"] += 1
            elif suffix.lower() in PACKED and plain in present:
                others[f"{kind}{suffix.lower()} (another copy is read)"] += 1
            else:
                files.append(Path(folder, name))
                present.add(plain)  # of files that are packed twice, the first is read
    return sorted(files, key=lambda file: file.relative_to(root).parts), dict(+others)


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
def unpacked(packed: IO[bytes], compression: str, place: str) -> Iterator[IO[bytes]]:
    """Yield the content of a file that gzip or zstd compressed, as a stream in bounded memory.

    Args:
        compression: gz or zstd, perhaps with a level such as zstd:7.
        place: name of the file, with which messages begin.
    """
    kind = " ".join(compression.partition(":")[0].split())
    try:
        if kind in PACKED.values() and not packed.read(1):  # gzip takes it for an empty text
            raise EOFError
        packed.seek(0)
        if kind == "gz":
            yield cast(IO[bytes], gzip.GzipFile(fileobj=packed))
        elif kind == "zstd":
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), kind)
            yield cast(IO[bytes], io.BufferedReader(stream, 1 << 16))
        else:
            raise ConfigError(f"{place}: is compressed with {kind}. Only zstd and gz can be read.")
    except (EOFError, zlib.error, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk failed
            raise
        early = isinstance(error, EOFError) or "Truncated" in str(error)
        reason = "it ends early" if early else error
        raise ConfigError(f"{place} cannot be unpacked ({reason}). Copy it again.") from None


@contextlib.contextmanager
def _opened(path: Path, label: str) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Yield the unpacked content, and a function that counts the bytes read of the file."""
    compression = PACKED.get(path.suffix.lower())
    with path.open("rb") as file:
        if compression is None:
            yield file, file.tell
        else:
            with unpacked(file, compression, label) as content:
                yield content, file.tell


def _read_plain(
    path: Path, label: str, _fields: Fields, skip: int, _alone: bool
) -> Iterator[Document]:
    if skip == 0:
        pieces = split_text(_decode_blocks(path, label))
        yield Document(path.name, pieces, record=1, end=path.stat().st_size)


def _decode_blocks(path: Path, label: str) -> Iterator[str]:
    """Yield blocks of text without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    try:
        with explain_read_errors(f"{label}:"), _opened(path, label) as (file, _):
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


def document_of(
    fields: Fields,
    get: Callable[[], Mapping[str, Any]],
    path: Path,
    number: int,
    end: int,
    kind: str,
) -> Document:
    """Return the document of record ``number`` of a file. kind: what the file calls a record.

    get: returns the record, or raises ConfigError if it cannot be read.
    """
    name = f"{path.name}:{number}"
    try:
        content = fields.read(record := get(), f"{path} {kind} {number}")
    except ConfigError:
        if not fields.skips:
            raise
        return Document(name, (), number, end, left_out="not readable (data.on_error=skip)")
    domain = value if isinstance(value := record.get(DOMAIN), str) else ""
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
            get = partial(_parsed, line, label, path, f"line {number}", fields)
            yield document_of(fields, get, path, number, tell(), "line")


def _parsed(line: bytes, label: str, path: Path, place: str, fields: Fields) -> dict[str, Any]:
    return _record(_parse(line, f"{label} {place}"), label, path, place, fields)


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
    if key := fields.absent(value):
        raise key.missing_error(f"{path} {place}", value)
    return value


def _read_json(
    path: Path, label: str, fields: Fields, skip: int, alone: bool
) -> Iterator[Document]:
    """Yield a .json file's documents. In a folder, leave out a file whose first value is none."""
    size = path.stat().st_size
    text = ""
    for block in _decode_blocks(path, label):
        text += block
        if len(text) > LONGEST_LINE:
            most = f"{LONGEST_LINE:,} characters"
            raise ConfigError(f"{label}: is longer than {most}. Convert it to .jsonl.")
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):  # JSON lines often have this suffix, too
        lines = enumerate(text.split("\n"), 1)  # a text may hold what else `splitlines` cuts at
        values = [_parse(line.encode(), f"{label} line {n}") for n, line in lines if line.strip()]
    values = values if isinstance(values, list) else [values]
    for number, value in enumerate(values, 1):
        get = partial(_record, value, label, path, f"record {number}", fields)
        if number == 1 and not alone:
            try:
                get()
            except ConfigError:
                if not skip:  # a resumed preparation counts it once
                    left_out = f".json (without the key {fields.keys[0].name})"
                    yield Document(path.name, (), 1, size, left_out=left_out)
                return
        if number > skip:
            yield document_of(fields, get, path, number, size * number // len(values), "record")


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
    import pyarrow
    import pyarrow.parquet

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
    if key := fields.absent(names):
        raise key.missing_error(str(path), names)
    wanted = dict.fromkeys([*(key.name for key in fields.keys), *fields.others, DOMAIN])
    columns = [name for name in wanted if name in names]
    row = 0
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if row + group.num_rows <= skip:
            row += group.num_rows
            continue
        chunks = map(group.column, range(group.num_columns))
        read = (chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns)
        size_of_group = sum(chunk.total_uncompressed_size for chunk in read)
        if size_of_group > host_memory() // 2:
            raise ConfigError(
                f"{label}: row group {number} unpacks to {size_of_group / 2**30:,.1f} GiB, more "
                "than half of this machine's memory. Write smaller row groups."
            )
        for batch in file.iter_batches(_MAX_ROWS, row_groups=[number], columns=columns):
            values = [values_of(batch.column(name)) for name in columns]
            for cells in zip(*values, strict=True):
                row += 1
                if row > skip:
                    get = partial(dict[str, Any], zip(columns, cells, strict=True))
                    yield document_of(fields, get, path, row, size * row // rows, "row")


def values_of(column: Any) -> Iterable[Any]:
    """Return the values of a parquet column. Lists of integers become arrays, which are faster."""
    from pyarrow import types

    if types.is_list(column.type) and types.is_integer(column.type.value_type):
        cells = (cell.values for cell in column)
        return (None if cell is None else cell.to_numpy(zero_copy_only=False) for cell in cells)
    return column.to_pylist()


def _json_kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    names |= {dict: "an object", str: "a string", bytes: "bytes", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


Reader = Callable[[Path, str, Fields, int, bool], Iterator[Document]]
TEXT_KEY = "text"  # the usual key of the text
READERS: dict[str, Reader] = dict.fromkeys((".txt", ".md", ".py"), _read_plain)
READERS |= {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
_OF_RECORDS = (".jsonl", ".json", ".parquet")  # kinds of files that can hold token ids
