"""Every promise of `mission_rows.py` holds for the installed wheel, as a user runs it."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from built_wheel import REPOSITORY, build, copy_sources
from mission_rows import ROWS, Row, Seen
from promises import difference, promised

HERE = Path(__file__).parent
TIMEOUT = 900  # seconds; the longest row takes two minutes on two idle cores


def cases() -> list:
    return [
        pytest.param(
            row,
            id=row.id,
            marks=[
                *([] if row.fast else [pytest.mark.slow]),
                *([pytest.mark.xfail(strict=True, reason=row.not_yet)] if row.not_yet else []),
            ],
        )
        for row in ROWS
    ]


def install(folder: Path) -> None:
    """Install the wheel into a virtual environment whose other packages are those of this one.

    The path file names folders, whose own path files Python ignores. So an editable mtrain of this
    environment does not count.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv/lib").glob("python3*/site-packages")
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "environment.pth").write_text("\n".join(shared))
    (folder / "out").mkdir()
    wheel = build(copy_sources(folder / "source"), folder / "out")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--ignore-installed", wheel], check=True, timeout=120)
    (folder / "installed").touch()


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """The folder of `mtrain` and `python` of the wheel, which the processes of a session share."""
    pytest.importorskip("hatchling")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "mission"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            install(folder)
    found = folder / "venv/bin"
    command = "import mtrain_cli; print(mtrain_cli.__file__)"
    imported = subprocess.run(
        [found / "python", "-c", command], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(imported).is_relative_to(folder / "venv"), "not the wheel"
    return found


def run(row: Row, programs: Path, folder: Path) -> tuple[int, str]:
    """Run the command of a row; return its exit code, and all that it printed."""
    for script in HERE.glob("*.py"):
        if script.stem.startswith(("planted", "slices")):
            (folder / script.name).symlink_to(script)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST") and name not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    environment = {
        **inherited,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CHECKOUT": str(REPOSITORY),
        "CHECKOUT_PYTHON": sys.executable,
        "COLUMNS": "120",
    }
    result = subprocess.run(
        ["bash", "-c", f"source {HERE / 'prelude.sh'}\n{row.command}"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    return result.returncode, result.stdout


def sees(wanted: Seen, output: str) -> bool:
    if callable(wanted):
        return wanted(output)
    return re.search(wanted, output, re.MULTILINE) is not None


def unseen(row: Row, code: int, output: str) -> list[str]:
    """Return what is wrong with the output of a row."""
    wrong = [] if code == row.exit else [f"exit code {code}, not {row.exit}"]
    wrong += ["a traceback"] if "Traceback (most recent call last)" in output else []
    missing = [wanted for wanted in row.seen if not sees(wanted, output)]
    return wrong + [f"not seen: {getattr(wanted, '__name__', wanted)}" for wanted in missing]


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("row", cases())
def test_the_promise_holds(row: Row, programs: Path, tmp_path: Path):
    code, output = run(row, programs, tmp_path)
    (tmp_path / "output.txt").write_text(output)
    wrong = unseen(row, code, output)
    assert not wrong, f"{row.id}: {row.promise}\n{row.command}\n{'; '.join(wrong)}\n{output}"


def test_the_check_of_every_row_fails_without_output():
    for row in ROWS:
        assert unseen(row, row.exit, ""), row.id
        assert unseen(row, row.exit + 1, ""), row.id


def test_a_promise_without_a_test_is_named():
    assert difference(["A1", "B2"], ["A1", "B2"]) == ""
    assert difference(["A1", "B2", "B3"], ["A1", "C1"]) == (
        "without a test: B2, B3; without a promise: C1"
    )
    assert difference(["A1", "A1"], ["A1"]) == "twice: A1"
    assert promised("| row | x |\n|---|---|\n| C1a | [A1] |\n| N15 | y |\nC3 | z |") == [
        "C1a",
        "N15",
    ]
