"""`mtrain doctor`: show devices, versions, missing packages, and which kernels are usable."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from mtrain_cli import install_command
from mtrain_cli.commands.options import Json
from mtrain_cli.config.documents import json_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.text import Text

    from mtrain_cli.profiling.diagnosis import Diagnosis


def doctor(as_json: Json = False) -> None:
    """Show devices and versions, and why each attention kernel is or is not usable.

    [bold]Examples[/bold]

      [cyan]mtrain doctor[/cyan]
          Show what is installed and what is missing

    Args:
        as_json: Print one JSON object instead of tables.
    """
    from mtrain_cli.profiling.diagnosis import diagnose

    diagnosis = diagnose()
    if as_json:
        typer.echo(json_text(asdict(diagnosis), indent=2))
    else:
        from mtrain_cli.console import Console

        Console().print(render(diagnosis))


def render(diagnosis: Diagnosis) -> RenderableType:
    """Return the diagnosis as tables for a terminal, at most 80 columns wide."""
    from rich.console import Group

    from mtrain_cli.console import grid

    parts = {
        "Devices": _devices(diagnosis),
        "\nVersions": _versions(diagnosis),
        "\nAttention kernels": _kernels(diagnosis),
    }
    return Group(
        *(grid([(n.ljust(14), v) for n, v in rows], title=title) for title, rows in parts.items())
    )


def _devices(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    memory = f", {diagnosis.cpu_memory_gib:.0f} GiB" if diagnosis.cpu_memory_gib is not None else ""
    yield "cpu", f"{diagnosis.cpu_cores} cores{memory}, {diagnosis.system}"
    for gpu in diagnosis.gpus:
        capability = ".".join(map(str, gpu.capability))
        state = f"{gpu.memory_gib:.0f} GiB ({gpu.free_gib:.0f} free)"
        yield f"cuda:{gpu.index}", f"{gpu.name}, {state}, compute capability {capability}"
    if not diagnosis.gpus:
        no_cuda = "" if diagnosis.cuda else "; this torch is built without CUDA"
        yield "cuda", f"no GPU visible{no_cuda}"


def _versions(diagnosis: Diagnosis) -> Iterator[tuple[str, str | Text]]:
    from rich.text import Text

    yield "python", diagnosis.python
    libraries = (("cuda", diagnosis.cuda), ("driver", diagnosis.driver), ("nccl", diagnosis.nccl))
    for name, version in libraries:
        if version is not None:
            yield name, version
    for package in diagnosis.packages:
        if package.version is not None:
            yield package.name, package.version
        elif package.extra is not None:
            remedy = f"not installed: {install_command(package.extra)}  ({package.purpose})"
            yield package.name, Text(remedy, style="yellow")
        else:
            remedy = "not installed, but required: reinstall mtrain"
            yield package.name, Text(remedy, style="red")


def _kernels(diagnosis: Diagnosis) -> Iterator[tuple[str, Text]]:
    from rich.text import Text

    for kernel in diagnosis.kernels:
        where = f"{kernel.device}, {kernel.dtype}"
        state = ("usable", "green")
        if kernel.reason is not None:
            state = (f"no: {kernel.reason}", "yellow")
        yield kernel.name, Text.assemble(f"{where:<15}  ", state)
