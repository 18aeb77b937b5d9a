"""Build a wheel of this checkout from a copy of its sources, so that building leaves no files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = ("conf", "kernels", "profiles")
PACKAGES = ("mtrain_cli", "mtrain_extras")


def copy_sources(folder: Path) -> Path:
    """Copy what a build reads to a folder, and return the folder."""
    for name in (*PACKAGES, *SHIPPED, "tests"):
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "hatch_build.py", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / name)
    readme = REPOSITORY / "README.md"
    (folder / "README.md").write_text(readme.read_text() if readme.is_file() else "mtrain\n")
    return folder


def build(source: Path, out: Path, kind: str = "build_wheel") -> Path:
    """Build a wheel with the backend of pyproject.toml, and return it.

    kind: ``build_wheel`` or ``build_editable``.
    """
    code = f"import hatchling.build as backend; print(backend.{kind}({str(out)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return out / result.stdout.split()[-1]
