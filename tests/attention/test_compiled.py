"""Where FlashAttention-4 keeps what it compiles: a folder that only this user writes to, unless the user decided otherwise."""

import os
import tempfile
from pathlib import Path

import pytest

from mtrain_cli.attention import compiled

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")  # restored afterwards, as it was
        monkeypatch.delenv(name)
    return tmp_path / f"mtrain-{os.getuid()}"


def kept() -> str | None:
    compiled.keep_compiled.cache_clear()
    compiled.keep_compiled()
    return os.environ.get(FOLDER) if os.environ[ENABLED] == "1" else None


def test_kernels_are_kept_in_a_folder_of_the_user(temporary):
    first = kept()
    assert first is not None
    assert Path(first).parent == temporary
    assert temporary.stat().st_mode & 0o777 == 0o700
    for name in (ENABLED, FOLDER):
        del os.environ[name]
    assert kept() == first, "found again by the next run"


def test_another_version_of_what_kernels_are_made_of_has_another_folder(temporary, monkeypatch):
    assert temporary.name in (first := kept() or "")
    monkeypatch.delenv(ENABLED)
    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(compiled, "_version", lambda package: f"{package} 99")
    assert kept() not in (None, first)


@pytest.mark.usefixtures("temporary")
def test_what_the_user_says_stands(monkeypatch):
    monkeypatch.setenv(ENABLED, "0")
    assert kept() is None
    assert FOLDER not in os.environ
    monkeypatch.delenv(ENABLED)
    monkeypatch.setenv(FOLDER, "/somewhere")
    assert kept() == "/somewhere"


@pytest.mark.parametrize("spoiled", ["link", "file", "writable"])
def test_a_folder_that_others_may_write_to_is_not_used(temporary, spoiled):
    if spoiled == "link":
        (temporary.parent / "theirs").mkdir()
        temporary.symlink_to(temporary.parent / "theirs")
    elif spoiled == "file":
        temporary.write_text("")
    else:
        temporary.mkdir()
        temporary.chmod(0o777)
    assert kept() is None


def test_a_folder_of_another_user_is_not_used(temporary, monkeypatch):
    temporary.mkdir()
    os.environ.pop(ENABLED, None)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    temporary.rename(temporary.parent / f"mtrain-{theirs}")
    assert kept() is None
