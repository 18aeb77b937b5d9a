"""Temporary folders: a start removes what killed processes left behind, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import command
import pytest

import mtrain_cli
from mtrain_cli.launch.temporary_folders import (
    compiled,
    is_private,
    private_folder,
    remove_abandoned,
)

HOLDER = """
import time
from mtrain_cli.launch.temporary_folders import private_folder
with private_folder() as folder:
    (folder / "store").write_text("x")
    print(folder, flush=True)
    time.sleep(100)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start_holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    variables = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": command.python_path()}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_removed_at_the_end(temporary):
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_a_start_removes_the_folder_of_a_killed_process_and_keeps_that_of_a_live_one(temporary):
    killed, abandoned = start_holder(temporary)
    live, kept = start_holder(temporary)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (abandoned / "store").exists()
        with private_folder() as folder:
            assert {path.name for path in temporary.iterdir()} == {kept.name, folder.name}
        assert (kept / "store").exists()
    finally:
        live.kill()
        live.wait()


def test_a_folder_that_another_start_removes_before_it_is_locked_is_made_again(
    temporary, monkeypatch
):
    """Ranks that start together: one makes its folder, and another cleans up before the lock."""
    make_folder = tempfile.mkdtemp
    removed = []

    def make_folder_while_another_starts(**options):
        folder = make_folder(**options)
        if len(removed) < 2:
            remove_abandoned()
            removed.append(Path(folder))
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make_folder_while_another_starts)
    with private_folder() as folder:
        assert not any(path.exists() for path in removed), "the other start took them for abandoned"
        assert list(temporary.iterdir()) == [folder]
        remove_abandoned()
        assert folder.exists(), "the lock protects it"
    assert list(temporary.iterdir()) == []


def test_a_start_leaves_everything_else_alone(temporary):
    (temporary / f"mtrain-{os.getuid()}").mkdir()  # compiled kernels
    (temporary / "mtrain-run-mine").mkdir()
    (temporary / "mtrain-run-afile000").write_text("")
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "file").touch()
    (temporary / "mtrain-run-alink000").symlink_to(temporary / "elsewhere")
    if os.getuid() == 0:
        (temporary / "mtrain-run-another0").mkdir()
        os.chown(temporary / "mtrain-run-another0", 12345, 12345)
    before = {path.name for path in temporary.iterdir()}
    with private_folder():
        pass
    assert {path.name for path in temporary.iterdir()} == before
    assert (temporary / "elsewhere" / "file").exists()


@pytest.fixture
def no_cache(monkeypatch) -> str:
    """Return the name of the variable, which is not set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored at the end
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return "TORCHINDUCTOR_CACHE_DIR"


def test_compiled_code_lies_in_the_private_folder_of_the_user(temporary, no_cache):
    compiled(abs)
    assert Path(os.environ[no_cache]) == temporary / f"mtrain-{os.getuid()}/inductor"
    assert is_private(temporary / f"mtrain-{os.getuid()}")


def test_compiled_code_lies_in_a_new_folder_if_others_can_open_that_of_the_user(
    temporary, no_cache
):
    (temporary / f"mtrain-{os.getuid()}").mkdir(mode=0o755)
    compiled(abs)
    folder = Path(os.environ[no_cache]).parent
    assert folder.name != f"mtrain-{os.getuid()}"
    assert is_private(folder)
    remove_abandoned()
    assert folder.exists(), "this process has it locked"


def test_a_cache_that_the_user_chose_stays(no_cache, monkeypatch):
    monkeypatch.setenv(no_cache, "/chosen")
    compiled(abs)
    assert os.environ[no_cache] == "/chosen"


def test_nothing_compiles_without_the_private_cache():
    package = Path(mtrain_cli.__file__).parent
    files = [*package.rglob("*.py"), *(package.parent / "kernels").rglob("*.py")]
    callers = {path.name for path in files if "torch.compile(" in path.read_text()}
    assert callers == {"temporary_folders.py"}
