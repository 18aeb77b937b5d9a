"""Runs `mtrain` as a user does: in a process of its own, in a folder, with an environment that no test has set up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mtrain_cli


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that shall find this mtrain, what is in ``folders``, and whatever this process was told of."""
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.pathsep.join([str(Path(mtrain_cli.__file__).parents[1]), *map(str, folders), *given])


def mtrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # `auto` would take its interpreter for a kernel
    command = [sys.executable, "-m", "mtrain_cli", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
