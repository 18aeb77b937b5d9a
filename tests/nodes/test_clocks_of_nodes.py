"""Nothing compares the clocks of two nodes: one of them may be hours ahead or behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrain_cli.launch import run_status
from mtrain_cli.launch.run_dir import RunDir
from mtrain_extras.watch import flight_record
from nodes import bytes_table, node_runs
from nodes.node_network import Network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
# Python imports this module when it starts.
_SHIFT = """
import os, time
real, ahead = time.time, float(os.environ["CLOCK_AHEAD_S"])
time.time = lambda: real() + ahead
"""


def start(network: Network, words: list[str], folder: Path, ahead: float) -> list:
    """Start a rank on each node. The clock of the second is ``ahead`` seconds fast."""
    (folder / "sitecustomize.py").write_text(_SHIFT)
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "GLOO_SOCKET_IFNAME": "eth0",
            "CLOCK_AHEAD_S": str(ahead * rank),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(node_runs.PORT),
        }
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "mtrain_cli", "train", *words]
        with (folder / f"rank-{rank}.txt").open("w") as output:
            ranks.append(
                subprocess.Popen(
                    network.command(rank, command, folder),
                    env=environment,
                    stdout=output,
                    stderr=output,
                )
            )
    return ranks


def wait_for_steps(folder: Path) -> None:
    metrics = folder / "runs/run/metrics.jsonl"
    until = time.monotonic() + 100
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert time.monotonic() < until, (folder / "rank-0.txt").read_text()
        time.sleep(0.01)


def assert_ages_are_true(said: str) -> None:
    where = said.partition("Where each worker was:\n")[2]
    ages = [int(seconds) for seconds in re.findall(r"\((-?\d+) s ago\)", where)]
    assert all(0 < age < 100 for age in ages), where
    assert "training step" in where


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
def test_a_run_with_a_node_whose_clock_is_wrong_ends_and_resumes_as_usual(
    ahead, text, alone, tmp_path
):
    words = [*bytes_table.settings("ring", text), "train.checkpoint_every=1"]
    metrics = tmp_path / "runs/run/metrics.jsonl"
    with Network(2) as network:
        first = start(network, [*words, "train.steps=1000"], tmp_path, ahead)
        wait_for_steps(tmp_path)
        first[1].send_signal(signal.SIGKILL)
        assert [rank.wait(60) for rank in first] == [1, -signal.SIGKILL]
        said = (tmp_path / "rank-0.txt").read_text()
        assert "error: rank 1 on 10.77.0.2 is gone" in said
        assert_ages_are_true(said)
        last = metrics.read_text().count("\n")
        again = [*words, "--resume", "run", f"train.steps={last + 1}"]
        second = start(network, again, tmp_path, ahead)
        assert [rank.wait(100) for rank in second] == [0, 0], (tmp_path / "rank-0.txt").read_text()
    losses = node_runs.losses(tmp_path / "runs/run")
    assert len(losses) == last + 1
    assert bytes_table.largest_difference(losses[: len(alone)], alone) < 1e-6


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
def test_a_rank_that_tells_of_the_loss_of_rank_0_dates_it_by_rank_0s_clock(ahead, text, tmp_path):
    words = [*bytes_table.settings("ring", text), "train.steps=1000"]
    with Network(2) as network:
        ranks = start(network, words, tmp_path, ahead)
        wait_for_steps(tmp_path)
        ranks[1].send_signal(signal.SIGSTOP)  # so that rank 0 waits for a while
        time.sleep(3)
        ranks[0].send_signal(signal.SIGKILL)
        ranks[1].send_signal(signal.SIGCONT)
        assert [rank.wait(60) for rank in ranks] == [-signal.SIGKILL, 1]
    said = (tmp_path / "rank-1.txt").read_text()
    assert "error: rank 0 on 10.77.0.1 is gone" in said
    assert_ages_are_true(said)
    run = RunDir(tmp_path / "runs/run")
    written = run_status.read_state(run)
    kept = flight_record.read(run.logs, written.began)
    assert kept is not None, "it is dated before the run began"
    assert kept.time == pytest.approx(time.time(), abs=60)
    assert all(-60 < ages[-1][0] <= 0 for ages in kept.ranks.values())
    named, *_ = flight_record.lines(run, "lost", written, {}, time.time())
    assert named.startswith("rank 0 (node0, cpu) keeps others waiting. It shows no sign of life")
