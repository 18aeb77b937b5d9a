"""Check the page sizes of a parquet file before decompressing the file.

A small file could otherwise decompress to more than the machine's memory.

A page header is a struct in Thrift's compact encoding. Field 1 is the kind of page. Fields 2 and 3
are the uncompressed and the compressed size of the page in bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.environment import host_memory

# Bytes to read for a header: at first, and if the header is longer. A header contains the smallest
# and the largest value of its page, so it can be long.
_HEAD_BYTES = (1 << 12, 1 << 24)
_DICTIONARY = 2  # the kind of a dictionary page
# A row may refer to an entry of a dictionary. Limit of the bytes of one read if every row refers to
# the largest entry.
_EXPANDED_BYTES = 1 << 28
# Field types of the compact encoding.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_FIXED_BYTES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}  # as elements of a list or map


def rows_per_read(
    path: Path, group: Any, columns: Sequence[str], location: str, max_rows: int
) -> int:
    """Return how many rows of a row group to read at a time.

    Args:
        path: the parquet file.
        group: pyarrow's metadata of the row group.
        columns: names of the columns to read.
        location: name of the input, with which error messages begin.
        max_rows: upper limit of the result.

    Raises:
        ConfigError: a column decompresses to more than the file claims, or to more than half of
            this machine's memory.
    """
    allowed = host_memory() // 2
    largest_dictionary = 1
    with path.open("rb") as file:
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.partition(".")[0] not in columns:
                continue
            place = f"{location}: column {column.path_in_schema}"
            claimed, unpacked = column.total_uncompressed_size, 0
            for kind, size in _read_pages(file, column, place):
                unpacked += size
                if unpacked > claimed:
                    raise ConfigError(
                        f"{place} unpacks to more than the {claimed:,} bytes that the file claims. "
                        "The file is damaged, or crafted to exhaust memory. Write it again."
                    )
                if kind == _DICTIONARY:
                    largest_dictionary = max(largest_dictionary, size)
            if claimed > allowed:
                raise ConfigError(
                    f"{place} unpacks to {claimed / 2**30:,.1f} GiB, more than half of this "
                    "machine's memory. Write smaller row groups."
                )
    return max(1, min(max_rows, _EXPANDED_BYTES // largest_dictionary))


def _read_pages(file: IO[bytes], column: Any, place: str) -> Iterator[tuple[int, int]]:
    """Yield (kind, uncompressed size in bytes without the header) of every page."""
    # A dictionary offset of 0 means that there is none.
    at = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    end = at + column.total_compressed_size
    while at < end:
        page = _read_head(file, at, end)
        if page is None:
            raise ConfigError(f"{place} is corrupt: it has a page without a header")
        kind, unpacked, next_page = page
        yield kind, unpacked
        at = next_page


def _read_head(file: IO[bytes], at: int, end: int) -> tuple[int, int, int] | None:
    """Return (kind, uncompressed size in bytes, end offset) of the page that begins at ``at``.

    Return None if there is no page header at this offset.
    """
    for max_bytes in _HEAD_BYTES:
        file.seek(at)
        head = _Head(file.read(min(max_bytes, end - at)))
        with contextlib.suppress(IndexError, KeyError, ValueError, RecursionError):
            fields = head.read_integers()
            if fields[2] >= 0 and fields[3] >= 0:
                return fields[1], fields[2], at + head.at + fields[3]
    return None


class _Head:
    """Reader of one struct in Thrift's compact encoding.

    at: offset of the next byte to read. After `read_integers`, the offset of the struct's end.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def read_integers(self) -> dict[int, int]:
        """Return the integer fields of the struct by field number. Skip all other fields."""
        fields: dict[int, int] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_signed()
            kind = head & 15
            if _BYTE < kind < _DOUBLE:
                fields[number] = self._read_signed()
            elif kind not in (_TRUE, _FALSE):
                self._skip(kind)
        return fields

    def _skip(self, kind: int) -> None:
        if kind in _FIXED_BYTES:
            self.at += _FIXED_BYTES[kind]
        elif kind < _DOUBLE:
            self._read_unsigned()
        elif kind == _BINARY:
            length = self._read_unsigned()  # moves self.at
            self.at += length
        elif kind in (_LIST, _SET):
            head = self._read_byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._read_unsigned()):
                self._skip(head & 15)
        elif kind == _MAP:
            if count := self._read_unsigned():
                kinds = self._read_byte()
                for _ in range(count):
                    self._skip(kinds >> 4)
                    self._skip(kinds & 15)
        elif kind == _STRUCT:
            self.read_integers()
        else:
            raise ValueError(f"unknown field type {kind}")
        if self.at > len(self._content):
            raise ValueError("the struct is truncated")

    def _read_byte(self) -> int:
        byte = self._content[self.at]
        self.at += 1
        return byte

    def _read_unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _read_signed(self) -> int:
        value = self._read_unsigned()
        return (value >> 1) ^ -(value & 1)
