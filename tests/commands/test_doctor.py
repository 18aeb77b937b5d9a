"""`mtrain doctor` works on any machine and says what is missing and how to install it."""

import io
import json
from dataclasses import replace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from mtrain_cli import install_command
from mtrain_cli.commands.doctor import doctor, render
from mtrain_cli.profiling import diagnosis
from mtrain_cli.profiling.diagnosis import (
    DetectedGpu,
    KernelState,
    diagnose,
)


def run(*arguments):
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def here():
    return diagnose()


def text(found, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(found))
    return console.file.getvalue()


def test_doctor_succeeds_here_and_shows_every_section(here):
    printed = text(here)
    for word in ("Devices", "cpu ", "Versions", "torch ", "Attention kernels", "reference"):
        assert word in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_json_is_one_object_with_the_same_facts():
    result = run("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["cpu_cores"] >= 1
    assert {"torch", "triton", "flash-attn-4"} <= {package["name"] for package in found["packages"]}
    assert {"name": "reference", "device": "cpu", "dtype": "float32", "reason": None} in found[
        "kernels"
    ]


def test_a_missing_package_is_shown_with_its_extra(monkeypatch):
    monkeypatch.setattr(
        diagnosis, "installed_version", lambda name: None if name == "tokenizers" else "1.0"
    )
    printed = text(diagnose(), width=120)
    (line,) = [line for line in printed.splitlines() if line.startswith("tokenizers")]
    assert f"not installed: {install_command('data')}  (" in line
    assert printed.count("not installed") == 1


def test_gpus_and_reasons_are_shown(here):
    gpus = [DetectedGpu(index, "NVIDIA H200", 139.8, 120.2, (9, 0)) for index in range(2)]
    kernels = [
        KernelState("flash4", "cuda", "bfloat16", "flash-attn-4 is not installed"),
        KernelState("sdpa", "cuda", "bfloat16", None),
    ]
    printed = text(
        replace(
            here,
            gpus=gpus,
            kernels=kernels,
        )
    )
    assert "cuda:1          NVIDIA H200, 140 GiB (120 free), compute capability 9.0" in printed
    assert "no: flash-attn-4 is not installed" in printed
