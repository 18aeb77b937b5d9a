"""Find and read calibration files. This module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import read_json, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import find_shipped, no_such

NON_ATTENTION_FILE = "non_attention"
KINDS_OF_FILES = ("kernels", "worker_calls", NON_ATTENTION_FILE)


def calibration_files(files: str) -> list[Path]:
    """Return the paths of ``FILE,...``, files or names of shipped ones such as kernels-h200.

    Raises:
        ConfigError: an item is empty, or see `read_calibration`.
    """
    names = [file.strip() for file in files.split(",")]
    if not all(names):
        raise ConfigError(f"--calibration {files!r}: empty item; give FILE or FILE,FILE")
    paths = [find_shipped(Path(name)) for name in names]
    for path in paths:
        read_calibration(path)
    return paths


def read_calibration(path: Path) -> dict[str, Any]:
    """Read a calibration file, without checking its times.

    Raises:
        ConfigError: the file is missing, not JSON or of another kind.
    """
    try:
        document = read_json(path)
    except FileNotFoundError:
        names = [file.stem for files in shipped_files().values() for file in files]
        why = no_such(
            "calibration", str(path), names, "a file that `mtrain profile kernels --out FILE` wrote"
        )
        raise ConfigError(f"--calibration {path}: {why}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--calibration {path}: not readable as JSON ({reason(error)})"
        ) from error
    known = isinstance(document, dict) and document.get("kind") in KINDS_OF_FILES
    if not (known and document.get("times") and "device" in document):
        raise ConfigError(
            f"--calibration {path}: holds no times; `mtrain profile kernels` and `mtrain profile "
            "non-attention` write such files with --out FILE"
        )
    return document


def shipped_files() -> dict[str, list[Path]]:
    """Find the calibration files that ship with mtrain, by measured device."""
    by_device: dict[str, list[Path]] = {}
    for path in sorted(resource_dir("profiles").glob("*.json")):
        try:
            document = read_calibration(path)
        except ConfigError:
            continue
        by_device.setdefault(str(document["device"]), []).append(path)
    return by_device
