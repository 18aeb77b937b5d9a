"""Find devices, versions, packages and usable kernels for `mtrain doctor`, whatever is missing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import numpy as np
import torch

from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.kernel_registry import choose, survey
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.launch.environment import cpu_cores, host_memory, loopback_variables
from mtrain_cli.profiling.timing import installed_version
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
    ("tensorboard", ("tensorboard",), "tensorboard", "run.tensorboard=true"),
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
class CheckResult:
    """The result of one check. detail: what it observed, or its error."""

    name: str
    passed: bool
    detail: str


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
    checks: list[CheckResult]


def diagnose(check: bool) -> Diagnosis:
    """Inspect this machine. check: also start two processes over gloo, and run usable kernels."""
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if gpus and torch.distributed.is_nccl_available() else None
    kernels = _kernels(gpus)
    checks = []
    if check:
        usable = [kernel for kernel in kernels if kernel.reason is None]
        checks = [_check_gloo(), *map(_check_kernel, usable)]
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
        kernels=kernels,
        checks=checks,
    )


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


_GLOO = """
import os, sys, torch, torch.distributed as dist
rank, meet = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
number = torch.tensor([rank + 1.0])
dist.all_reduce(number)
dist.destroy_process_group()
print(int(number.item()))
"""


def _check_gloo() -> CheckResult:
    name = "two processes over gloo"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **loopback_variables(), "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", _GLOO, str(rank), os.path.join(folder, "meet")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        try:
            answers = [worker.communicate(timeout=60) for worker in workers]
        except subprocess.TimeoutExpired:
            problem = "no answer within 60 s; is the loopback network interface blocked?"
            return CheckResult(name, False, problem)
        finally:
            for worker in workers:
                worker.kill()
    if all(out.strip() == "3" for out, _ in answers):
        return CheckResult(name, True, "all_reduce gave the right sum")
    errors = [err.strip().splitlines()[-1] for _, err in answers if err.strip()]
    return CheckResult(name, False, errors[0] if errors else "wrong sum")


def _check_kernel(state: KernelState) -> CheckResult:
    """Run one small causal forward pass and compare its output with the float64 reference."""
    name = f"kernel {state.name} on {state.device}"
    tokens, dtype = 256, getattr(torch, state.dtype)
    positions = np.arange(tokens, dtype=np.int64)
    spans = SequenceMask.causal(tokens, tokens).spans(positions, positions)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, generator=generator).to(dtype) for heads in (16, 2, 2)
    )
    exact, _ = ReferenceKernel().forward(
        q.double(), k.double(), v.double(), Tiles.make([spans]), 128**-0.5
    )
    try:
        capability = torch.cuda.get_device_capability() if state.device == "cuda" else None
        request = KernelRequest(state.device, capability, state.dtype, 128, 16, 2)
        kernel, _ = choose(state.name, request)
        q, k, v = (tensor.to(state.device) for tensor in (q, k, v))
        out, _ = kernel.forward(q, k, v, Tiles.make([spans], state.device), 128**-0.5)
    except Exception as error:  # a third-party kernel may raise anything; report it
        first = str(error).partition("\n")[0]
        return CheckResult(name, False, f"{type(error).__name__}: {first}")
    worst = (out.cpu().double() - exact).abs().max().item()
    close = worst <= max(8 * torch.finfo(dtype).eps, 1e-5)
    return CheckResult(name, close, f"largest difference from float64 {worst:.1e}")
