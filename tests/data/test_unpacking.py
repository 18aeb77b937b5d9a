"""Hostile and damaged compressed files: one line, in bounded memory."""

import gzip
import io

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.text_files import Unpacked

zstandard = pytest.importorskip("zstandard")
PACK = {"gz": gzip.compress, "zstd": zstandard.compress}


def _read(content: bytes, kind: str) -> bytes:
    return io.BufferedReader(Unpacked(io.BytesIO(content), kind, "file")).read()


@pytest.mark.parametrize("kind", PACK)
def test_frames_one_after_another_give_the_whole_content(kind: str) -> None:
    parts = [b"", b"one", bytes(range(256)) * 5000, b"last"]
    assert _read(b"".join(map(PACK[kind], parts)), kind) == b"".join(parts)


def test_padding_after_a_gzip_file_is_ignored() -> None:
    assert _read(gzip.compress(b"x") + bytes(5000), "gz") == b"x"


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_file_is_refused(kind: str, keep: float) -> None:
    """zstandard's own stream ends silently there."""
    whole = PACK[kind](b"".join(str(number).encode() for number in range(20_000)))
    with pytest.raises(ConfigError, match=r"^file cannot be unpacked \(it ends early\)"):
        _read(whole[: int(len(whole) * keep)], kind)


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("where", ["start", "after"])
def test_garbage_is_refused(kind: str, where: str) -> None:
    content = b"garbage" if where == "start" else PACK[kind](b"x" * 99) + b"garbage"
    with pytest.raises(ConfigError, match=r"^file cannot be unpacked") as caught:
        _read(content, kind)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_compression_is_named() -> None:
    with pytest.raises(ConfigError, match=r"is compressed with br\. Only zstd and gz"):
        Unpacked(io.BytesIO(b""), "br:11", "file")


def test_without_its_package_a_zst_file_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"needs the zstandard package: .*install"):
        Unpacked(io.BytesIO(b""), "zstd", "a.txt.zst")
