"""Where FlashAttention-4 keeps the kernels that it compiles."""

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
def kernels_kept() -> Iterator[None]:
    """Around the first import of FlashAttention-4: has it keep the kernels that it compiles, and find them again in later runs on this
    machine; 8 s to the first step of Qwen2.5-3B instead of 21 (profiles/notes.md).

    Not where the user has decided (``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED``), nor where the folder cannot be used, see `folder`. It
    reads both variables when it is imported; they are as before afterwards, since each process decides for itself.
    """
    if ENABLED in os.environ:
        yield
        return
    given = os.environ.get(FOLDER)
    found = Path(given) if given else folder()
    if found is None or not _usable(found):
        yield
        return
    os.environ[ENABLED], os.environ[FOLDER] = "1", str(found)
    try:
        yield
    finally:
        del os.environ[ENABLED]
        if given is None:
            del os.environ[FOLDER]


def folder() -> Path | None:
    """One folder per version of our masks, of the compiler's libraries and of the GPU, not all of which the names of kernels tell apart;
    for its own sources FlashAttention-4 does that. Old ones are not removed. None where others than this user could write there: what
    lies in it is run as code.
    """
    base = own_folder()
    if base is None:
        return None
    made_of = [
        (resource_dir("kernels") / "flash4/dense.py").read_text(),
        *map(_version, _COMPILERS),
        str(torch.version.cuda),
        *_gpu(),
    ]
    return base / f"flash4-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"


def _gpu() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [found.name, f"{found.major}.{found.minor}", str(found.multi_processor_count)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def _usable(path: Path) -> bool:
    """Whether files can be made and locked there, as FlashAttention-4 does with every kernel. The lock on the folder stays as long as this
    process: while it is held, systemd-tmpfiles does not clean the folder up.
    """
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
