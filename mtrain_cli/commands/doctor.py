"""`mtrain doctor`: show devices, versions, missing packages, and which kernels are usable.

Needs neither a GPU nor an optional package.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from mtrain_cli import install_command
from mtrain_cli.launch.environment import host_memory, loopback_variables

if TYPE_CHECKING:
    from rich.console import RenderableType

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
# The path classes of `nvidia-smi topo -m`.
_LINKS = {
    "X": "itself",
    "SYS": "PCIe and the link between sockets",
    "NODE": "PCIe host bridges of one socket",
    "PHB": "PCIe host bridge",
    "PXB": "several PCIe switches",
    "PIX": "one PCIe switch",
}


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU.

    memory_gib: GiB in total.
    free_gib: GiB that no process uses now.
    capability: compute capability, (major, minor).
    """

    index: int
    name: str
    memory_gib: float
    free_gib: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class DetectedLink:
    """The path from GPU ``a`` to GPU ``b``.

    kind: NV and the number of NVLinks, a PCIe path class of nvidia-smi, or ``peer`` / ``no peer``.
    """

    a: int
    b: int
    kind: str


@dataclass(frozen=True)
class Package:
    """A Python package that mtrain can use.

    version: None if it is not installed.
    extra: mtrain's extra that installs it.
    purpose: what needs it.
    """

    name: str
    version: str | None
    extra: str | None
    purpose: str


@dataclass(frozen=True)
class KernelState:
    """Whether a kernel can serve a run on a device.

    reason: why it cannot; None if it can.
    """

    name: str
    device: str
    dtype: str
    reason: str | None


@dataclass(frozen=True)
class CheckResult:
    """The result of something that was run.

    detail: what was observed, or the error.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `mtrain doctor` finds; the object of ``--json``."""

    python: str
    system: str
    cpu_cores: int
    cpu_memory_gib: float | None
    cuda: str | None
    driver: str | None
    nccl: str | None
    gpus: list[DetectedGpu]
    links: list[DetectedLink]
    packages: list[Package]
    kernels: list[KernelState]
    checks: list[CheckResult]


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
    check: bool = typer.Option(
        False,
        "--check",
        help="Also run two processes over gloo, and each usable kernel against the reference. "
        "Exit code 1 if a check fails.",
    ),
) -> None:
    """Show devices, links, versions, and which attention kernels are usable here, and why not.

    [bold]Examples[/bold]

      [cyan]mtrain doctor[/cyan]
          Show what is installed and what is missing
      [cyan]mtrain doctor --check[/cyan]
          Also run each usable kernel
    """
    diagnosis = diagnose(check)
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        from mtrain_cli.console import Console

        Console().print(render(diagnosis))
    if not all(result.passed for result in diagnosis.checks):
        raise typer.Exit(1)


def diagnose(check: bool) -> Diagnosis:
    """Inspect this machine; with ``check``, also run processes and kernels on it."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name, capability = (
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
        )
        gpus.append(
            DetectedGpu(index, name, round(total / 2**30, 1), round(free / 2**30, 1), capability)
        )
    nccl = torch.cuda.nccl.version() if gpus and torch.distributed.is_nccl_available() else None
    kernels = _kernels(gpus)
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        cpu_memory_gib=_cpu_memory(),
        cuda=torch.version.cuda,
        driver=_driver() if gpus else None,
        nccl=".".join(map(str, nccl)) if nccl else None,
        gpus=gpus,
        links=_links(len(gpus)),
        packages=[
            Package(name, _version(names), extra, purpose)
            for name, names, extra, purpose in _PACKAGES
        ],
        kernels=kernels,
        checks=[
            _check_gloo(),
            *(_check_kernel(kernel) for kernel in kernels if kernel.reason is None),
        ]
        if check
        else [],
    )


def _cpu_memory() -> float | None:
    try:
        return round(host_memory() / 2**30, 1)
    except (ValueError, OSError):
        return None


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, or None if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None


def _driver() -> str | None:
    text = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return text.split()[0] if text and text.split() else None


def _links(gpus: int) -> list[DetectedLink]:
    if gpus < 2:
        return []
    if (text := _nvidia_smi("topo", "-m")) and len(links := parse_topology(text)) == gpus * (
        gpus - 1
    ):
        return links
    import torch

    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    return [
        DetectedLink(a, b, "peer" if torch.cuda.can_device_access_peer(a, b) else "no peer")
        for a, b in pairs
    ]


def parse_topology(text: str) -> list[DetectedLink]:
    """Parse the GPU part of `nvidia-smi topo -m`: every ordered pair of different GPUs."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = {
        int(words[0][3:]): words[1:]
        for words in lines
        if words and re.fullmatch(r"GPU\d+", words[0])
    }
    return [
        DetectedLink(a, b, row[b])
        for a, row in sorted(rows.items())
        for b in sorted(rows)
        if a != b and b < len(row)
    ]


def describe_links(links: list[DetectedLink]) -> list[str]:
    """Return one line per kind of link with its GPU pairs, or "every pair" if all are equal."""
    kinds: dict[str, list[str]] = {}
    for link in links:
        if link.a < link.b:
            kinds.setdefault(link.kind, []).append(f"{link.a}-{link.b}")
    lines = []
    for kind, pairs in sorted(kinds.items()):
        if kind.startswith("NV"):
            path = f"{kind}: NVLink, {kind[2:]} links"
        elif kind in ("peer", "no peer"):
            path = (
                "direct access between the two GPUs"
                if kind == "peer"
                else "no direct access, through host memory"
            )
        else:
            path = f"{kind}: {_LINKS.get(kind, 'unknown path')}"
        lines.append(f"{path} ({'every pair' if len(kinds) == 1 else ', '.join(pairs)})")
    return lines


def _kernels(gpus: list[DetectedGpu]) -> list[KernelState]:
    """Ask the registry about a typical request per device: head_dim 128, float32 on the CPU."""
    from mtrain_cli.attention.kernel import KernelRequest
    from mtrain_cli.attention.kernel_registry import survey

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
    """Sum a number over gloo in two processes, as CPU workers do."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, "-c", _GLOO, str(rank), os.path.join(folder, "meet")]
            for rank in range(2)
        ]
        environment = {**os.environ, **loopback_variables(), "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            for command in commands
        ]
        try:
            answers = [worker.communicate(timeout=60) for worker in workers]
        except subprocess.TimeoutExpired:
            return CheckResult(
                "two processes over gloo",
                False,
                "no answer within 60 s; is the loopback network interface blocked?",
            )
        finally:
            for worker in workers:
                worker.kill()
    if all(out.strip() == "3" for out, _ in answers):
        return CheckResult("two processes over gloo", True, "all_reduce gave the right sum")
    errors = [err.strip().splitlines()[-1] for _, err in answers if err.strip()]
    return CheckResult("two processes over gloo", False, errors[0] if errors else "wrong sum")


def _check_kernel(state: KernelState) -> CheckResult:
    """Compare one small causal call with the float64 reference, within the dtype's rounding."""
    import numpy as np
    import torch

    from mtrain_cli.attention.kernel import KernelRequest
    from mtrain_cli.attention.kernel_registry import choose
    from mtrain_cli.attention.mask import SequenceMask
    from mtrain_cli.attention.reference import ReferenceKernel
    from mtrain_cli.attention.tiles import Tiles

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
        kernel, _ = choose(
            state.name, KernelRequest(state.device, capability, state.dtype, 128, 16, 2)
        )
        tiles = Tiles.make([spans], state.device)
        out, _ = kernel.forward(
            q.to(state.device), k.to(state.device), v.to(state.device), tiles, 128**-0.5
        )
    except Exception as error:  # a third-party kernel may raise anything; report it
        return CheckResult(
            name,
            False,
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    worst = (out.cpu().double() - exact).abs().max().item()
    return CheckResult(
        name,
        worst <= max(8 * torch.finfo(dtype).eps, 1e-5),
        f"largest difference from float64 {worst:.1e}",
    )


def render(diagnosis: Diagnosis) -> RenderableType:
    """Return the diagnosis as tables for a terminal, at most 80 columns wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def section(title: str) -> Table:
        table = Table(
            box=None,
            show_header=False,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            title=title,
            title_justify="left",
        )
        table.title_style = "bold"
        table.add_column(style="dim", no_wrap=True, min_width=14)
        table.add_column(overflow="fold")
        return table

    devices = section("Devices")
    memory = f", {diagnosis.cpu_memory_gib:.0f} GiB" if diagnosis.cpu_memory_gib is not None else ""
    devices.add_row("cpu", f"{diagnosis.cpu_cores} cores{memory}, {diagnosis.system}")
    for gpu in diagnosis.gpus:
        capability = ".".join(map(str, gpu.capability))
        state = f"{gpu.memory_gib:.0f} GiB ({gpu.free_gib:.0f} free)"
        devices.add_row(
            f"cuda:{gpu.index}", f"{gpu.name}, {state}, compute capability {capability}"
        )
    if not diagnosis.gpus:
        no_cuda = "" if diagnosis.cuda else "; this torch is built without CUDA"
        devices.add_row("cuda", f"no GPU visible{no_cuda}")
    for number, line in enumerate(describe_links(diagnosis.links)):
        devices.add_row("" if number else "links", line)

    versions = section("\nVersions")
    versions.add_row("python", diagnosis.python)
    libraries = (("cuda", diagnosis.cuda), ("driver", diagnosis.driver), ("nccl", diagnosis.nccl))
    for name, version in libraries:
        if version is not None:
            versions.add_row(name, version)
    for package in diagnosis.packages:
        if package.version is not None:
            versions.add_row(package.name, package.version)
        elif package.extra is not None:
            remedy = f"not installed: {install_command(package.extra)}  ({package.purpose})"
            versions.add_row(package.name, Text(remedy, style="yellow"))
        else:
            versions.add_row(
                package.name,
                Text("not installed, but required: reinstall mtrain", style="red"),
            )

    kernels = section("\nAttention kernels")
    for kernel in diagnosis.kernels:
        where = f"{kernel.device}, {kernel.dtype}"
        state_text = (
            Text("usable", style="green")
            if kernel.reason is None
            else Text(f"no: {kernel.reason}", style="yellow")
        )
        kernels.add_row(kernel.name, Text.assemble(f"{where:<15}  ", state_text))

    parts = [devices, versions, kernels]
    if diagnosis.checks:
        checks = section("\nChecks")
        checks.columns[0].min_width = 26
        for result in diagnosis.checks:
            word = Text("passed", style="green") if result.passed else Text("FAILED", style="red")
            checks.add_row(result.name, Text.assemble(word, f"  {result.detail}"))
        parts.append(checks)
    return Group(*parts)
