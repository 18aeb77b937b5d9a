"""The kernels there are, and the choice among them. A kernel is added by one class and one entry here."""

from __future__ import annotations

from collections.abc import Callable

from mtrain_cli.attention.cupy_kernels import cupy_unsupported_reason
from mtrain_cli.attention.flash4 import Flash4Kernel
from mtrain_cli.attention.kernel import Kernel, KernelRequest
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.triton_kernel import TritonKernel
from mtrain_cli.config.schema import ConfigError

# In order of preference: `auto` takes the first that can serve the run. The oracle is never chosen on its own.
_KERNELS: dict[str, Callable[[], Kernel]] = {
    "flash4": Flash4Kernel,
    "triton": TritonKernel,
    "sdpa": SdpaKernel,
    "reference": ReferenceKernel,
}


def make_kernel(name: str) -> Kernel:
    """The kernel of that name, whether it can run here or not."""
    return _KERNELS[name]()


def survey(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Every kernel with the reason why it cannot serve the request; None where it can."""
    return [(name, make().unsupported_reason(request)) for name, make in _KERNELS.items()]


def choose(name: str, request: KernelRequest) -> tuple[Kernel, str]:
    """The kernel of a run and why. name: one of them, or ``auto``.

    Raises ConfigError if the named one cannot serve the run, naming one that can. Nothing is ever replaced silently.
    """
    found = survey(request)
    usable = [n for n, reason in found if reason is None]
    if name == "auto":
        best = usable[0]
        if best == "reference":
            raise ConfigError(
                f"train.kernel=auto: no fast kernel serves this run ({'; '.join(f'{n}: {r}' for n, r in found if r)}); "
                "train.kernel=reference computes it slowly and exactly"
            )
        passed = [
            f"{n}: {reason}" for n, reason in found[: [n for n, _ in found].index(best)] if reason
        ]
        return _explained(
            best,
            "the fastest that serves this run" + (f" ({'; '.join(passed)})" if passed else ""),
            request,
        )
    if name not in _KERNELS:
        raise ConfigError(
            f"train.kernel={name}: no such kernel; allowed: auto, {', '.join(_KERNELS)}"
        )
    reason = dict(found)[name]
    if reason is not None:
        raise ConfigError(f"train.kernel={name}: {reason}; usable here: {', '.join(usable)}")
    return _explained(name, "as configured", request)


def _explained(name: str, reason: str, request: KernelRequest) -> tuple[Kernel, str]:
    """The kernel, and the reason with what is to be known of the way in which it serves a dynamic index."""
    kernel = make_kernel(name)
    if request.index is None:
        return kernel, reason
    if not kernel.skips:
        return kernel, f"{reason}; computes every pair and hides what the index leaves out"
    absent = cupy_unsupported_reason() if request.device == "cuda" else None
    return (
        kernel,
        f"{reason}; columns and lists of blocks by PyTorch, since {absent}" if absent else reason,
    )
