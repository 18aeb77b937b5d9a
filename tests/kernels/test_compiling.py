"""Triton compiles the kernels, of which its interpreter accepts more than its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def output(script: str, cache: Path) -> list[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    path = Path(__file__).with_name(script)
    run = subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.slow
def test_the_kernels_compile_and_a_cap_costs_nothing_where_there_is_none(tmp_path):
    exponentials = [int(line.split()[-1]) for line in output("compile_spans.py", tmp_path)]
    for without, capped in zip(exponentials[::2], exponentials[1::2], strict=True):
        assert 0 < without < capped


@pytest.mark.slow
def test_the_kernel_of_selections_compiles_and_its_share_is_float64(tmp_path):
    lines = [line.split() for line in output("compile_selection.py", tmp_path)]
    assert len(lines) == 9
    assert all(exact == str(share == "0.9") for _, share, exact in lines)
