"""The registry of kernels, and the choice of a run's kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from mtrain_cli.attention.flash4 import Flash4Kernel
from mtrain_cli.attention.kernel import Kernel, KernelRequest
from mtrain_cli.attention.partials import cupy_unsupported_reason
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.triton_kernel import TritonKernel
from mtrain_cli.config.schema import ConfigError

# In the order of `_preferred`, `auto` takes the first kernel that can serve the run. It takes
# the reference only for capped scores on the CPU, which no other kernel computes.
_KERNELS: dict[str, Callable[[], Kernel]] = {
    "flash4": Flash4Kernel,
    "triton": TritonKernel,
    "sdpa": SdpaKernel,
    "reference": ReferenceKernel,
}


def make_kernel(name: str, softcap: float = 0.0) -> Kernel:
    """Return the kernel called ``name``, even if it cannot run on this machine."""
    kernel = _KERNELS[name]()
    kernel.softcap = softcap
    return kernel


def survey(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Return (name, reason) of every kernel, in order of preference."""
    reasons = survey_with_all_packages(request)
    return [(name, why or make_kernel(name).missing_package(request)) for name, why in reasons]


def survey_with_all_packages(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Survey as `survey` does, for a machine on which all packages are installed and load."""
    return [(name, make_kernel(name).unsupported_reason(request)) for name in _preferred(request)]


def _preferred(request: KernelRequest) -> list[str]:
    # Under one interval of keys per query PyTorch's kernel is faster than Triton; under several it
    # takes a call per slice on a GPU. Triton's interpreter comes last on the CPU.
    names = list(_KERNELS)
    if request.index is None and (request.device != "cuda" or request.intervals == 1):
        names.remove("triton")
        names.insert(names.index("sdpa") + 1, "triton")
    return names


def choose(name: str, request: KernelRequest) -> tuple[Kernel, str]:
    """Return the kernel for a run and the reason for the choice."""
    reasons = dict(survey(request))
    usable = [n for n, reason in reasons.items() if reason is None]
    why = "as configured"
    if name == "auto":
        faster = itertools.takewhile(lambda item: item[1] is not None, reasons.items())
        skipped = "; ".join(f"{n}: {reason}" for n, reason in faster)
        if usable[0] == "reference" and not (request.softcap and request.device == "cpu"):
            raise ConfigError(
                f"train.kernel=auto: no fast kernel serves this run ({skipped}); "
                "set train.kernel=reference to compute it slowly and exactly"
            )
        name, why = usable[0], "the fastest that serves this run"
        why += f" ({skipped})" if skipped else ""
    elif name not in _KERNELS:
        raise ConfigError(
            f"train.kernel={name}: no such kernel; allowed: auto, {', '.join(_KERNELS)}"
        )
    elif (reason := reasons[name]) is not None:
        raise ConfigError(f"train.kernel={name}: {reason}; usable here: {', '.join(usable)}")
    kernel = make_kernel(name, request.softcap)
    if request.index is None:
        return kernel, why
    if not kernel.skips:
        return kernel, f"{why}; computes every pair and masks what the index leaves out"
    if request.device == "cuda" and (missing := cupy_unsupported_reason()):
        why += f"; PyTorch packs columns and lists blocks, since {missing}"
    return kernel, why
