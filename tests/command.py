"""Run `mtrain` as a user does: in its own process and folder, without a test's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import warm

import mtrain_cli


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH with this mtrain, ``folders`` and this process's own PYTHONPATH."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.pathsep.join(
        [str(Path(mtrain_cli.__file__).parents[1]), *map(str, folders), *inherited]
    )


def mtrain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # `auto` would pick Triton's interpreter
    return warm.run("mtrain_cli.__main__", arguments, folder, environment, timeout=250)
