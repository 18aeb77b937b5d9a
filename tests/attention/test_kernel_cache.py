"""FlashAttention-4's cache is a private folder of the user, unless the user decides otherwise."""

import contextlib
import fcntl
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from mtrain_cli.attention import flash4
from mtrain_cli.attention.flash4 import ENABLED, FOLDER, persistent_kernel_cache

DENSE = "mtrain_cli.kernels.flash4.dense"


@pytest.fixture
def user_folder(monkeypatch, tmp_path):
    """This user's folder in a new temporary folder."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv(ENABLED, raising=False)
    monkeypatch.delenv(FOLDER, raising=False)
    flash4._usable.cache_clear()
    return tmp_path / f"mtrain-{os.getuid()}"


def cache_in_use() -> str | None:
    """Return the cache folder in effect, or None."""
    before = dict(os.environ)
    with persistent_kernel_cache():
        cache = os.environ.get(FOLDER) if os.environ.get(ENABLED) == "1" else None
    assert dict(os.environ) == before
    return cache


def test_the_cache_is_a_private_folder_of_the_user(user_folder):
    first = cache_in_use()
    assert first is not None
    assert Path(first).parent == user_folder
    assert user_folder.stat().st_mode & 0o777 == 0o700
    assert Path(first).stat().st_mode & 0o777 == 0o700
    assert cache_in_use() == first, "the next run finds it again"
    other = os.open(first, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


@pytest.mark.parametrize("changed", ["masks", *flash4._COMPILERS, "cuda", "gpu"])
def test_every_input_of_compilation_changes_the_folder(user_folder, monkeypatch, changed):
    first = cache_in_use()
    assert first is not None
    version = flash4._version
    if changed == "masks":
        (user_folder / "flash4").mkdir()
        (user_folder / "flash4/dense.py").write_text("masks")
        monkeypatch.setattr(flash4, "resource_dir", lambda name: user_folder)  # noqa: ARG005
    elif changed == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "99")
    elif changed == "gpu":
        monkeypatch.setattr(flash4, "_gpu", lambda: ["NVIDIA B200", "10.0", "148"])
    else:
        monkeypatch.setattr(
            flash4,
            "_version",
            lambda package: "99" if package == changed else version(package),
        )
    assert cache_in_use() not in (None, first)


@pytest.mark.usefixtures("user_folder")
def test_the_users_settings_take_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    assert cache_in_use() == str(tmp_path / "mine")
    monkeypatch.setenv(ENABLED, "0")
    assert cache_in_use() is None


@pytest.mark.parametrize("spoiled", ["link", "file", 0o777, 0o770, 0o707, 0o750])
def test_a_folder_open_to_others_is_not_used(user_folder, spoiled):
    if spoiled == "link":
        (user_folder.parent / "theirs").mkdir(mode=0o700)
        user_folder.symlink_to(user_folder.parent / "theirs")
    elif spoiled == "file":
        user_folder.write_text("")
    else:
        user_folder.mkdir()
        user_folder.chmod(spoiled)
    assert cache_in_use() is None


def test_a_folder_of_another_user_is_not_used(user_folder, monkeypatch):
    user_folder.mkdir(mode=0o700)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    user_folder.rename(user_folder.parent / f"mtrain-{theirs}")
    assert cache_in_use() is None


@pytest.mark.usefixtures("user_folder")
@pytest.mark.parametrize("refused", ["locks", "files", "temporary folder"])
def test_no_cache_on_a_file_system_without_locks(monkeypatch, refused):
    def refuse(*args, **words):  # noqa: ARG001
        raise OSError

    if refused == "locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    elif refused == "files":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert cache_in_use() is None


def test_the_cache_is_enabled_before_flash_attention_is_imported(user_folder, monkeypatch):
    """FlashAttention-4 reads both variables at import."""
    settings_at_import = []

    class Finder:
        def find_spec(self, name, path=None, target=None):  # noqa: ARG002
            return ModuleSpec(name, self) if name == DENSE else None

        def create_module(self, spec):  # noqa: ARG002
            return None

        def exec_module(self, module):  # noqa: ARG002
            settings_at_import.append((os.environ.get(ENABLED), os.environ.get(FOLDER, "")))

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
    ((enabled, folder),) = settings_at_import
    assert enabled == "1"
    assert Path(folder).parent == user_folder
