"""Find devices, versions, packages and usable kernels for `mtrain doctor`, whatever is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass

import torch

from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.kernel_registry import survey
from mtrain_cli.launch.environment import cpu_cores, host_memory
from mtrain_cli.training.memory import GIB

# (name to show, distributions that provide it, extra that installs it, purpose)
_PACKAGES: tuple[tuple[str, tuple[str, ...], str | None, str], ...] = (
    ("torch", ("torch",), None, ""),
    ("numpy", ("numpy",), None, ""),
    ("hydra-core", ("hydra-core",), None, ""),
    ("omegaconf", ("omegaconf",), None, ""),
    ("typer", ("typer",), None, ""),
    ("rich", ("rich",), None, ""),
    ("safetensors", ("safetensors",), None, ""),
    ("triton", ("triton",), "cuda", "train.compile on GPUs"),
    ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "cuda", "CUDA kernels"),
    ("flash-attn-4", ("flash-attn-4",), "hopper", "kernel flash4"),
    ("tokenizers", ("tokenizers",), "data", "tokenizer.json files, mtrain data prepare"),
    ("pyarrow", ("pyarrow",), "data", "parquet corpora"),
    ("transformers", ("transformers",), "hf", "mtrain checkpoint verify"),
    ("tensorboard", ("tensorboard",), "tensorboard", "run.loggers=[tensorboard]"),
)


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU. free_gib: memory that no process uses, in GiB."""

    index: int
    name: str
    memory_gib: float
    free_gib: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class Package:
    """A Python package that mtrain can use.

    version: None if the package is not installed.
    extra: extra of mtrain that installs the package; None if mtrain always installs it.
    purpose: feature that needs the package; empty if all of mtrain needs it.
    """

    name: str
    version: str | None
    extra: str | None
    purpose: str


@dataclass(frozen=True)
class KernelState:
    """Whether a kernel can run on a device. reason: why not; None if it can."""

    name: str
    device: str
    dtype: str
    reason: str | None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `mtrain doctor` finds and prints with ``--json``."""

    python: str
    system: str
    cpu_cores: int
    cpu_memory_gib: float | None
    cuda: str | None
    driver: str | None
    nccl: str | None
    gpus: list[DetectedGpu]
    packages: list[Package]
    kernels: list[KernelState]


def diagnose() -> Diagnosis:
    """Inspect this machine."""
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if gpus and torch.distributed.is_nccl_available() else None
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_cores=cpu_cores(),
        cpu_memory_gib=_cpu_memory(),
        cuda=torch.version.cuda,
        driver=_driver() if gpus else None,
        nccl=".".join(map(str, nccl)) if nccl else None,
        gpus=gpus,
        packages=[
            Package(name, next(filter(None, map(installed_version, names)), None), extra, purpose)
            for name, names, extra, purpose in _PACKAGES
        ],
        kernels=_kernels(gpus),
    )


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> DetectedGpu:
    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return DetectedGpu(index, name, round(total / GIB, 1), round(free / GIB, 1), capability)


def _cpu_memory() -> float | None:
    try:
        return round(host_memory() / GIB, 1)
    except (ValueError, OSError):
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return next(iter(found.split()), None)


def _kernels(gpus: list[DetectedGpu]) -> list[KernelState]:
    """Return which kernels run a typical model, for each compute capability and the CPU."""
    requests = [
        KernelRequest("cuda", capability, "bfloat16", 128, 16, 2)
        for capability in sorted({gpu.capability for gpu in gpus})
    ]
    requests.append(KernelRequest("cpu", None, "float32", 128, 16, 2))
    return [
        KernelState(name, request.device, request.dtype, reason)
        for request in requests
        for name, reason in survey(request)
    ]
