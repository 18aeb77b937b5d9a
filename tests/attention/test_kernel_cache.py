"""Where FlashAttention-4 keeps what it compiles: a folder that only this user writes to, unless the user decided otherwise."""

import contextlib
import fcntl
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from mtrain_cli.attention import flash4, kernel_cache
from mtrain_cli.attention.kernel_cache import ENABLED, FOLDER, persistent_kernel_cache

DENSE = "mtrain_cli.kernels.flash4.dense"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder of this user in a new temporary folder."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv(ENABLED, raising=False)
    monkeypatch.delenv(FOLDER, raising=False)
    kernel_cache._usable.cache_clear()
    return tmp_path / f"mtrain-{os.getuid()}"


def kept() -> str | None:
    """Where kernels would be kept."""
    before = dict(os.environ)
    with persistent_kernel_cache():
        found = os.environ.get(FOLDER) if os.environ.get(ENABLED) == "1" else None
    assert dict(os.environ) == before
    return found


def test_kernels_are_kept_in_a_folder_of_the_user(temporary):
    first = kept()
    assert first is not None
    assert Path(first).parent == temporary
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert Path(first).stat().st_mode & 0o777 == 0o700
    assert kept() == first, "found again by the next run"
    other = os.open(first, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


@pytest.mark.parametrize("what", ["masks", *kernel_cache._COMPILERS, "cuda", "gpu"])
def test_another_version_of_what_kernels_are_made_of_has_another_folder(
    temporary, monkeypatch, what
):
    first = kept()
    assert first is not None
    version = kernel_cache._version
    if what == "masks":
        (temporary / "flash4").mkdir()
        (temporary / "flash4/dense.py").write_text("masks")
        monkeypatch.setattr(kernel_cache, "resource_dir", lambda name: temporary)  # noqa: ARG005
    elif what == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "99")
    elif what == "gpu":
        monkeypatch.setattr(kernel_cache, "_gpu", lambda: ["NVIDIA B200", "10.0", "148"])
    else:
        monkeypatch.setattr(
            kernel_cache, "_version", lambda package: "99" if package == what else version(package)
        )
    assert kept() not in (None, first)


@pytest.mark.usefixtures("temporary")
def test_what_the_user_says_stands(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    assert kept() == str(tmp_path / "mine")
    monkeypatch.setenv(ENABLED, "0")
    assert kept() is None


@pytest.mark.parametrize("spoiled", ["link", "file", 0o777, 0o770, 0o707, 0o750])
def test_a_folder_that_others_can_enter_is_not_used(temporary, spoiled):
    if spoiled == "link":
        (temporary.parent / "theirs").mkdir(mode=0o700)
        temporary.symlink_to(temporary.parent / "theirs")
    elif spoiled == "file":
        temporary.write_text("")
    else:
        temporary.mkdir()
        temporary.chmod(spoiled)
    assert kept() is None


def test_a_folder_of_another_user_is_not_used(temporary, monkeypatch):
    temporary.mkdir(mode=0o700)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    temporary.rename(temporary.parent / f"mtrain-{theirs}")
    assert kept() is None


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("refused", ["locks", "files", "temporary folder"])
def test_a_file_system_that_does_not_serve_leaves_kernels_unkept(monkeypatch, refused):
    def refuse(*args, **words):  # noqa: ARG001
        raise OSError

    if refused == "locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    elif refused == "files":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert kept() is None


def test_flash_attention_is_told_before_it_is_imported(temporary, monkeypatch):
    """It reads both variables at its import."""
    told = []

    class Finder:
        def find_spec(self, name, path=None, target=None):  # noqa: ARG002
            return ModuleSpec(name, self) if name == DENSE else None

        def create_module(self, spec):  # noqa: ARG002
            return None

        def exec_module(self, module):  # noqa: ARG002
            told.append((os.environ.get(ENABLED), os.environ.get(FOLDER, "")))

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for name in (DENSE, "mtrain_cli.kernels.flash4"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        assert flash4._load_dense() is sys.modules[DENSE]
        flash4._load_dense()
    finally:
        for name in (DENSE, "mtrain_cli.kernels.flash4"):
            sys.modules.pop(name, None)
        with contextlib.suppress(AttributeError, KeyError):
            del sys.modules["mtrain_cli.kernels"].flash4
    ((enabled, folder),) = told
    assert enabled == "1"
    assert Path(folder).parent == temporary
