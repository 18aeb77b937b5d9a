"""While a rank of another node is stopped, and after the run failed, the status names the rank."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from mtrain_cli.launch import run_status
from mtrain_cli.launch.run_dir import RunDir
from nodes import bytes_table, node_runs
from nodes.node_network import Network
from nodes.test_lost_nodes import steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("timeout_s", [20, 100])
def test_the_status_names_a_stopped_rank_and_what_the_others_wait_for(timeout_s, text, tmp_path):
    words = [w for w in bytes_table.settings("ring", text) if not w.startswith("seq=")]
    words += ["seq=384", "train.steps=100000", f"topology.timeout_s={timeout_s}"]
    run, seen = tmp_path / "runs/run", []

    def stop_and_look() -> None:
        while len(steps(run)) < 4:
            time.sleep(0.05)
        network.kill(1, signal.SIGSTOP)
        end = time.monotonic() + run_status.SILENT_S + 30
        while time.monotonic() < end and not seen:
            time.sleep(1)
            status = run_status.read_status(RunDir(run))
            # It stalls once it takes long enough, and some seconds later the rank counts as silent.
            seen.extend([status] * ("no sign of life" in str(status.notes)))
        while run_status.read_status(RunDir(run)).what == "stalled" and time.monotonic() < end + 60:
            time.sleep(1)
        network.kill(1)  # it would stay stopped

    with Network(2) as network:
        other = threading.Thread(target=stop_and_look)
        other.start()
        ended = node_runs.train(network, words, tmp_path, check=False)
        other.join()
    assert seen, "the status explained nothing while the rank was stopped"
    assert seen[0].what == "stalled"
    assert seen[0].step == len(steps(run)) >= 4
    after = run_status.read_status(RunDir(run))
    assert after.written.phase == "failed"
    for status in (seen[0], after):
        named, last, waiting = [line for label, line in status.notes if label == "waits"][:3]
        assert named.startswith("rank 1 (node1, cpu) keeps others waiting. It shows no sign of ")
        assert last.startswith("its last activity: training step ")
        assert waiting.startswith("rank 0 (node0, cpu), for ")
        assert "waits for " in waiting
    assert "rank 1 kept the others waiting longer than this" in ended.errors(0)[0]
