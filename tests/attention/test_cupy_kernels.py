"""Why mtrain's CUDA kernels cannot run, for each way in which CuPy can fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from mtrain_cli.attention import partials
from mtrain_cli.attention.partials import cuda_kernels_usable, cupy_unsupported_reason


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the reason that other tests found."""
    cupy_unsupported_reason.cache_clear()
    yield
    cupy_unsupported_reason.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, check) -> None:
    """Pretend that CuPy is installed and that ``check`` compiles the smallest kernel."""
    monkeypatch.setattr(partials.importlib.util, "find_spec", lambda name: name)
    module = ModuleType("nvrtc")
    if check is not None:
        module.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mtrain_cli.kernels.cuda.nvrtc", module)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(partials.importlib.util, "find_spec", lambda _: None)
    assert cupy_unsupported_reason() == "CuPy is not installed"


def test_a_broken_installation_is_one_line(monkeypatch):
    install(monkeypatch, None)
    reason = cupy_unsupported_reason()
    assert reason is not None
    assert reason.startswith("CuPy cannot be imported: ")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("error", "shown"), [(RuntimeError("no nvrtc\nat all"), "no nvrtc"), (OSError(), "OSError")]
)
def test_a_failing_compiler_is_one_line(monkeypatch, error, shown):
    def check() -> None:
        raise error

    install(monkeypatch, check)
    assert cupy_unsupported_reason() == f"CuPy cannot compile here: {shown}"


def test_the_kernels_are_usable_for_tensors_on_a_gpu_only(monkeypatch):
    compiled = []
    install(monkeypatch, lambda: compiled.append(1))
    assert cupy_unsupported_reason() is None
    assert not cuda_kernels_usable(torch.zeros(1))

    class OnGpu:
        is_cuda = True

    assert cuda_kernels_usable(OnGpu())
    assert compiled == [1], "the check runs once"
