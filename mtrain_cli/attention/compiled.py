"""Where FlashAttention-4 keeps the kernels that it compiles."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from mtrain_cli import resource_dir

_ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@cache
def keep_compiled() -> None:
    """Has FlashAttention-4 keep the kernels that it compiles, and find them again in later runs of this machine: 8 s to the first step of
    Qwen2.5-3B instead of 21 (profiles/notes.md). Not where the user has decided (``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED``), nor where
    others could write to the folder, whose files are loaded as code.

    A folder for each version of what the kernels are made of, beside FlashAttention-4's own sources, which it looks after itself. On a
    local disk, since it locks files.
    """
    if _ENABLED in os.environ:
        return
    os.environ[_ENABLED] = "0"
    base = Path(tempfile.gettempdir()) / f"mtrain-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return
    sources = hashlib.sha256((resource_dir("kernels") / "flash4/dense.py").read_bytes())
    for package in ("nvidia-cutlass-dsl", "quack-kernels"):
        sources.update(_version(package).encode())
    os.environ[_ENABLED] = "1"
    os.environ.setdefault(_FOLDER, str(base / f"flash4-{sources.hexdigest()[:16]}"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
