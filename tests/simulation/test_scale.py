"""Plans and predictions of up to 16,384 workers take seconds and little memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_CASES = [
    (exchange, workers, pairs)
    for workers in (64, 1024, 16384)
    for exchange in ("ring", "hierarchical_ring", "all_gather", "group_cast")
    for pairs in ([], ["density=5%"])
]
_MEASURED = """
import resource, sys, time
from mtrain_cli.__main__ import main
try:
    main()
finally:
    print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def measured(*words: str) -> tuple[str, float, float]:
    """Return what a command prints, its CPU seconds and its peak memory in GB."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *words],
        env=environment, text=True, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    seconds, kib = done.stderr.split()[-2:]
    return done.stdout, float(seconds), int(kib) * 1024 / 1e9


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "workers", "pairs"), _CASES)
def test_a_prediction_takes_less_than_ten_seconds_and_two_gigabytes(exchange, workers, pairs):
    shown, seconds, memory = measured(
        "simulate", "model=qwen3b", "seq=4m", "cluster=h100_4x8", f"nodes={workers // 8}",
        "layout=striped", f"exchange={exchange}", *pairs, "--no-files",
    )  # fmt: skip
    assert re.search(rf"striped +{exchange}\b.* yes ", shown)
    assert seconds < 10
    assert memory < 2


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ring", "hierarchical_ring", "all_gather", "group_cast"])
def test_a_plan_takes_less_than_ten_seconds_and_two_gigabytes(exchange):
    """The plan includes the predicted time of a step and the longest sequence that fits."""
    shown, seconds, memory = measured(
        "train", "model=qwen3b", "seq=4m", "topology=h100_4x8", "topology.workers=16384",
        f"topology.exchange={exchange}", "--dry-run",
    )  # fmt: skip
    assert re.search(r"time +[\d.]+ s per step", shown)
    assert seconds < 10
    assert memory < 2
