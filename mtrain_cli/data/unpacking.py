"""Read files that gzip or zstd compressed, piece by piece, in bounded memory."""

from __future__ import annotations

import io
import zlib
from typing import IO, Any

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError

PACKED = {".gz": "gz", ".zst": "zstd"}  # the compression that a suffix stands for
# Bytes to unpack at once. They give at most 16 MiB from gzip, and 32 MiB from zstd.
_FEED = {"gz": 1 << 14, "zstd": 1 << 10}
# Text shrinks to a third or a tenth, and only files that are made to fill memory or disk shrink to
# less than a 256th. Below 64 MiB of content, any ratio is allowed.
_MOST_RATIO, _ANY_RATIO_BYTES = 256, 1 << 26


class Unpacked(io.RawIOBase):
    """The content of a compressed file, as a stream.

    Raises:
        ConfigError: the compression is unknown or its Python package is missing; or, when reading,
            the file is damaged or ends early, or unpacks to far more than its size.
    """

    def __init__(self, packed: IO[bytes], compression: str, place: str, *, any_ratio: bool = False):
        """Begin at the start of ``packed``.

        Args:
            compression: gz or zstd, perhaps with a level such as zstd:7.
            place: name of the file, with which messages begin.
            any_ratio: whether the content may be more than 256 times as large as the file.
        """
        kind = " ".join(compression.partition(":")[0].split())
        self._make, self._error = _decompressor(kind, place)
        self._packed, self._place, self._feed = packed, place, _FEED[kind]
        self._stream = self._make()
        self._most_ratio = 0 if any_ratio else _MOST_RATIO
        self._fed = self._given = 0  # bytes read from the file, and bytes of content
        self._content = memoryview(b"")
        self._left = b""  # what follows the end of a frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content and self._unpack():
            pass
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size

    def _unpack(self) -> bool:
        """Unpack the next bytes of the file into ``_content``. Return False at the file's end."""
        given, self._left = self._left, b""
        if not given:
            given = self._packed.read(self._feed)
            self._fed += len(given)
            if not given and not self._stream.eof:
                raise self._damaged("it ends early")
            if not given:
                return False
        if self._stream.eof:
            given = given.lstrip(b"\0")  # gzip allows padding between and after its members
            if not given:
                return True
            self._stream = self._make()
        try:
            content = self._stream.decompress(given)
        except self._error as error:
            raise self._damaged(error) from None
        self._left = self._stream.unused_data if self._stream.eof else b""
        self._content = memoryview(content)
        self._given += len(content)
        if _ANY_RATIO_BYTES < self._given > self._most_ratio * self._fed > 0:
            raise ConfigError(
                f"{self._place}: unpacks to more than {_MOST_RATIO} times its size. The file is "
                "damaged, or crafted to fill memory and disk. If it is neither, unpack it first."
            )
        return True

    def _damaged(self, reason: object) -> ConfigError:
        return ConfigError(f"{self._place} cannot be unpacked ({reason}). Copy it again.")


def _decompressor(kind: str, place: str) -> tuple[Any, type[Exception]]:
    """Return a function that makes a decompressor of one frame, and the error it raises."""
    if kind == "gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    if kind != "zstd":
        raise ConfigError(f"{place}: is compressed with {kind}. Only zstd and gz can be read.")
    try:  # Python's own module, from 3.14 on
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{place}: needs the zstandard package: {install_command('data')}"
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
