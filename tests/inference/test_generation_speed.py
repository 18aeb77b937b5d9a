"""The script that times generation beside transformers gives each row, with the same ids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from inference.small_models import write_hf

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[2] / "profiles/generation_speed.py"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_table_has_a_row_for_each_length_and_implementation(tmp_path, workers):
    write_hf(tmp_path / "hf", init_std=0.2)
    words = ["--tokens", "64,200", "--new", "4", "--device", "cpu", "--workers", str(workers)]
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "hf", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    shared = "" if workers == 1 else f", {workers} workers"
    sparse = f"mtrain, sparse{shared}"
    names = ["transformers, dense", f"mtrain, dense{shared}", sparse]
    assert [row[:2] for row in rows] == [[n, name] for n in ("64", "200") for name in names]
    for length, name, seconds, speed, token, equal, *_ in rows:
        assert float(speed.replace(",", "")) == pytest.approx(
            int(length) / float(seconds), rel=0.3, abs=int(length) / 0.0005
        )
        assert float(token) > 0
        assert equal == "4 of 4" or name == sparse
