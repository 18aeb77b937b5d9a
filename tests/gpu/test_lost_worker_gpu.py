"""A hung or killed GPU worker: NCCL's wait becomes an error in time, and the run restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import python_path
from launch.faulty_train import HANGS, Fault

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more"),
]
LAUNCH = Path(__file__).parents[1] / "launch"
TIMEOUT_S = 20
MARGIN_S = 60  # time to start, end NCCL and start again
RUN = [
    *(
        "seq=4k",
        "model.hidden_size=256",
        "model.num_layers=2",
        "model.head_dim=64",
        "model.intermediate_size=512",
        "train.compile=false",
    ),
    *(
        "train.kernel=sdpa",
        "train.steps=12",
        "train.checkpoint_every=2",
        "topology.device=cuda",
        "topology.workers=2",
    ),
    *("topology.exchange=ring", f"topology.timeout_s={TIMEOUT_S}", "run.dir=run"),
]


def train(fault: Fault, *overrides: str) -> tuple[int, str]:
    paths = python_path(LAUNCH)
    command = [sys.executable, str(LAUNCH / "faulty_train.py"), "train", *RUN, *overrides]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, **fault.variable()},
        capture_output=True,
        text=True,
        timeout=2 * (TIMEOUT_S + MARGIN_S),
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, signal.SIGSTOP, HANGS], ids=["killed", "stopped", "hangs"]
)
def test_a_worker_lost_in_nccl_is_named_and_the_run_restarts_from_its_checkpoint(
    tmp_path, monkeypatch, signum
):
    monkeypatch.chdir(tmp_path)
    code, stderr = train(Fault(1, signum, 7, "ring, layer 1, forward", "step 1 of 2", once=True))
    lines = stderr.splitlines()
    assert code == 0, stderr
    if signum == signal.SIGKILL:
        assert lines[0] == "error: rank 1 was killed by SIGKILL (host out of memory? see dmesg)"
    else:
        assert lines[0].startswith(
            f"error: topology.timeout_s={TIMEOUT_S}: rank 1 kept the others "
            "waiting longer than this"
        ), stderr
    assert any(line.startswith("  rank 0: training step 7") for line in lines), (
        "the report says where the other worker was"
    )
    assert any(
        line.startswith("restart 1: resumes from the checkpoint of step") for line in lines
    ), stderr
    assert [
        json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()
    ] == list(range(1, 13))
    (restart,) = [json.loads(line) for line in Path("run/restarts.jsonl").read_text().splitlines()]
    assert (restart["reached"], restart["step"]) in ((6, 4), (6, 6))


def test_out_of_memory_lists_the_tensors(tmp_path, monkeypatch):
    """The process may use half a GiB: the second layer's activations do not fit."""
    monkeypatch.chdir(tmp_path)
    paths = python_path(LAUNCH)
    total = torch.cuda.get_device_properties(0).total_memory
    command = [
        sys.executable,
        str(LAUNCH / "full_memory.py"),
        str(0.5 * 2**30 / total),
        "train",
        *RUN,
        "seq=128k",
        "topology.workers=1",
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stderr
    lines = ended.stderr.splitlines()
    lines = [line for line in lines if "comes later" not in line]  # seq and workers are given twice
    assert lines[0].startswith("error: rank 0 ran out of GPU memory in training step 1"), (
        ended.stderr
    )
    assert "tried to allocate" in lines[0]
    assert any("activations: " in line for line in lines)
    report = json.loads(Path("run/oom-rank-0.json").read_text())
    # The list covers everything that is allocated, named or not.
    assert sum(group["bytes"] for group in report["tensors"]) == pytest.approx(
        report["allocated"], rel=0.05
    )
    assert Path("run/oom-rank-0.pickle").stat().st_size
