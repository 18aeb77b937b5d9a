"""Choose where FlashAttention-4 caches its compiled kernels."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from mtrain_cli import resource_dir
from mtrain_cli.launch.temporary_folders import own_folder

ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_COMPILERS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "quack-kernels",
)


@contextmanager
def persistent_kernel_cache() -> Iterator[None]:
    """Enable FlashAttention-4's on-disk kernel cache during its first import.

    Do nothing if the user has set ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED``, or if no folder is
    usable (see `cache_folder`). FlashAttention-4 reads its environment variables at import. Restore
    these variables after the ``with`` block, so that child processes decide for themselves.
    """
    if ENABLED in os.environ:
        yield
        return
    user_folder = os.environ.get(FOLDER)
    path = Path(user_folder) if user_folder else cache_folder()
    if path is None or not _usable(path):
        yield
        return
    os.environ[ENABLED], os.environ[FOLDER] = "1", str(path)
    try:
        yield
    finally:
        del os.environ[ENABLED]
        if user_folder is None:
            del os.environ[FOLDER]


def cache_folder() -> Path | None:
    """Return the folder for compiled kernels, or None if other users could write to that folder.

    Cached files are run as code, so only this user may write them.
    """
    base = own_folder()
    if base is None:
        return None
    inputs = [
        (resource_dir("kernels") / "flash4/dense.py").read_text(),
        *map(_version, _COMPILERS),
        str(torch.version.cuda),
        *_gpu(),
    ]
    return base / f"flash4-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"


def _gpu() -> list[str]:
    if not torch.cuda.is_available():
        return []
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [
        properties.name,
        f"{properties.major}.{properties.minor}",
        str(properties.multi_processor_count),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def _usable(path: Path) -> bool:
    """Return whether files can be created and locked in the folder."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = os.open(path / "probe.lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(probe)
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
