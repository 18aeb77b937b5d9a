"""Triton compiles the kernels, of which its interpreter accepts more than its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_the_kernels_compile_and_a_cap_costs_nothing_where_there_is_none(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parent / "compile_spans.py"
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    exponentials = [int(line.split()[-1]) for line in run.stdout.splitlines()]
    for without, capped in zip(exponentials[::2], exponentials[1::2], strict=True):
        assert 0 < without < capped
