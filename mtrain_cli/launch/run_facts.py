"""The facts in `environment.json`: command, machine, versions and revision of a run."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import mtrain_cli
from mtrain_cli.launch.job import current_job


def environment_facts() -> dict[str, object]:
    """Return the facts that somebody needs to repeat the run, by name."""
    versions = {"mtrain": mtrain_cli.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    job = current_job()
    return {
        "command": ["mtrain", *sys.argv[1:]],
        "job": job.name if job else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "gpus": _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "versions": versions,
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """Return the commit of the git checkout that mtrain runs from, None if it is not a checkout.

    If files have changes that are not committed, the result ends in ``+changes``.
    """
    checkout = Path(mtrain_cli.__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None
    git = ("git", "-C", str(checkout))
    revision = _output_of(*git, "rev-parse", "HEAD")
    changes = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return revision + "+changes" * bool(changes) if revision else None


def _output_of(*command: str) -> str:
    """Return what a command prints, empty if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
