"""Temporary folders: what killed processes left goes at the next start, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import command
import pytest

from mtrain_cli.launch.temporary_folders import private_folder

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


def holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    variables = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": command.python_path()}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_goes_at_the_end(temporary):
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_a_living_one_keeps_its_folder(temporary):
    killed, left = holder(temporary)
    living, kept = holder(temporary)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "store").exists()
        with private_folder() as folder:
            assert {path.name for path in temporary.iterdir()} == {kept.name, folder.name}
        assert (kept / "store").exists()
    finally:
        living.kill()
        living.wait()


def test_what_is_not_ours_stays(temporary):
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
