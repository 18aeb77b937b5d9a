"""Sizes of the pages of a parquet file, read before anything is unpacked: a small file may claim little and unpack to more than memory has.

The head of a page is a struct in Thrift's compact encoding. Of its fields 1 is the kind, 2 and 3 are the sizes unpacked and packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.environment import host_memory

_HEAD_BYTES = (
    1 << 12,
    1 << 24,
)  # statistics in a head repeat the least and the greatest value, whatever their length
_DICTIONARY = 2  # the kind of a page
_EXPANDED_BYTES = 1 << 28  # bytes that rows which refer to values of a dictionary may take at once
# Types of a field in the compact encoding.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12


def rows_per_read(
    path: Path, group: Any, columns: Sequence[str], location: str, max_rows: int
) -> int:
    """How many rows of a row group can be read at once.

    Raises:
        ConfigError: a column unpacks to more than the file says, or to more than memory has. ``place`` begins the message.
    """
    allowed = host_memory() // 2
    largest_dictionary = 1
    with path.open("rb") as file:
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.partition(".")[0] not in columns:
                continue
            claimed, unpacked = column.total_uncompressed_size, 0
            for kind, size in _read_pages(file, column, location):
                unpacked += size
                if unpacked > claimed:
                    raise ConfigError(
                        f"{location}: column {column.path_in_schema} unpacks to more than the {claimed:,} bytes that the file says; "
                        "the file is damaged, or made to fill memory"
                    )
                if kind == _DICTIONARY:
                    largest_dictionary = max(largest_dictionary, size)
            if claimed > allowed:
                raise ConfigError(
                    f"{location}: column {column.path_in_schema} unpacks to {claimed / 2**30:,.1f} GiB, more than half of this machine's "
                    "memory; write smaller row groups"
                )
    return max(1, min(max_rows, _EXPANDED_BYTES // largest_dictionary))


def _read_pages(file: IO[bytes], column: Any, location: str) -> Iterator[tuple[int, int]]:
    """Kind and bytes unpacked of every page, without its head."""
    at = min(
        column.data_page_offset, column.dictionary_page_offset or column.data_page_offset
    )  # 0: there is none
    end = at + column.total_compressed_size
    while at < end:
        found = _read_head(file, at, end)
        if found is None:
            raise ConfigError(
                f"{location}: column {column.path_in_schema} is corrupt: it has a page without a head"
            )
        kind, unpacked, behind = found
        yield kind, unpacked
        at = behind


def _read_head(file: IO[bytes], at: int, end: int) -> tuple[int, int, int] | None:
    """Kind and bytes unpacked of the page at ``at``, and where it ends; None where no head stands there."""
    for max_rows in _HEAD_BYTES:
        file.seek(at)
        head = _Head(file.read(min(max_rows, end - at)))
        with contextlib.suppress(IndexError, KeyError, ValueError, RecursionError):
            fields = head.read_integers()
            if fields[2] >= 0 and fields[3] >= 0:
                return fields[1], fields[2], at + head.at + fields[3]
    return None


class _Head:
    """Reads one struct; ``at`` is then where it ends."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def read_integers(self) -> dict[int, int]:
        """The integer fields of the struct by number; others are passed over."""
        found: dict[int, int] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_signed()
            kind = head & 15
            if _BYTE < kind < _DOUBLE:
                found[number] = self._read_signed()
            elif kind not in (_TRUE, _FALSE):
                self._skip(kind)
        return found

    def _skip(self, kind: int) -> None:
        if kind in (_TRUE, _FALSE, _BYTE):
            self.at += 1
        elif kind < _DOUBLE:
            self._read_unsigned()
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            length = self._read_unsigned()
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
            raise ValueError(f"no type has the number {kind}")
        if self.at > len(self._content):
            raise ValueError("the end is missing")

    def _read_byte(self) -> int:
        found = self._content[self.at]
        self.at += 1
        return found

    def _read_unsigned(self) -> int:
        found = shift = 0
        while True:
            byte = self._read_byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7

    def _read_signed(self) -> int:
        found = self._read_unsigned()
        return (found >> 1) ^ -(found & 1)
