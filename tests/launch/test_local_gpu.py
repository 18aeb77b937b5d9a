"""Launcher and checkpoints on GPUs: NCCL does not see a peer die, and a save copies before it
returns.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from command import python_path

from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.local import launch
from mtrain_cli.training.checkpointer import Checkpointer, load_model_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_killed_worker_ends_a_run_that_waits_in_nccl(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
    run = run_dir.create(
        compose.compose(
            [f"run.dir={tmp_path / 'run'}", "topology.device=cuda", "topology.workers=2"]
        ),
        [],
    )
    killed_at = []

    def kill() -> None:
        while not (run.path / "pid-1").exists():
            time.sleep(0.1)
        time.sleep(2)
        os.kill(int((run.path / "pid-1").read_text()), signal.SIGKILL)
        killed_at.append(time.monotonic())

    threading.Thread(target=kill).start()
    code = launch(
        run,
        resolve_environment(resolved_file.load(run.resolved)),
        False,
        target="worker_targets:rank_0_waits_in_nccl",
    )
    assert (code, time.monotonic() - killed_at[0] < 30) == (1, True)
    assert capfd.readouterr().err.startswith(
        "error: rank 1 was killed by SIGKILL (host out of memory? see dmesg)"
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gloo_and_nccl_listen_on_loopback_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")  # for jobs of several machines
    run = run_dir.create(
        compose.compose(
            [f"run.dir={tmp_path / 'run'}", "topology.device=cuda", "topology.workers=2"]
        ),
        [],
    )
    assert (
        launch(
            run,
            resolve_environment(resolved_file.load(run.resolved)),
            False,
            target="worker_targets:attacks_its_ports",
        )
        == 0
    )
    sockets = [
        line for rank in (0, 1) for line in (run.path / f"listening-{rank}").read_text().split("\n")
    ]
    print("\n".join(sockets))
    assert {line.split()[1] for line in sockets} == {"127.0.0.1"}


def test_a_save_in_the_background_does_not_see_later_changes_on_the_gpu(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    weight = torch.arange(1 << 22, device="cuda", dtype=torch.float32)
    expected = weight.cpu()
    checkpointer.save(1, {"model": {"weight": weight}})
    weight.fill_(-1)
    checkpointer.wait()
    assert torch.equal(load_model_state(tmp_path)[1]["weight"], expected)
    assert checkpointer.load({"model": {"weight": weight}}) == 1
    assert torch.equal(weight.cpu(), expected)
