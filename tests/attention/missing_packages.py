"""Hide the optional packages of the kernels, as if they were not installed."""

from __future__ import annotations

import importlib.util

import pytest

_KERNEL_PACKAGES = ("triton", "flash_attn", "cupy")


def hide_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `importlib.util.find_spec` find none of the kernels' packages."""
    find = importlib.util.find_spec

    def find_others(name: str, *rest):
        return None if name.partition(".")[0] in _KERNEL_PACKAGES else find(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", find_others)
