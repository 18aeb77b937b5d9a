"""If a node loses its link or its power, the others stop and name it, and go on without it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from nodes import bytes_table, node_runs
from nodes.node_network import Network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
# Keepalive finds a lost machine after 25 s, and rank 0 then waits 10 s for ranks to answer.
MOST_S = 45


def steps(run_dir: Path) -> list[int]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.open()] if file.exists() else []


def lose(how: str, node: int, words: list[str], folder: Path) -> tuple[node_runs.Ended, float]:
    """Train on three nodes until one is lost. Return how the ranks ended, after how many seconds.

    how: a method of `Network`.
    """
    lost: list[float] = []
    ended = threading.Event()

    def lose_it() -> None:
        while len(steps(folder / "runs/run")) < 6 and not ended.wait(0.05):
            pass
        lost.append(time.monotonic())
        getattr(network, how)(node)

    with Network(3) as network:
        loser = threading.Thread(target=lose_it)
        loser.start()
        try:
            ranks = node_runs.train(network, words, folder, check=False)
        finally:
            ended.set()
            loser.join()
    return ranks, time.monotonic() - lost[0]


@pytest.fixture
def words(text):
    left_out = ("train.checkpoint_at_end", "seq=")
    kept = [w for w in bytes_table.settings("ring", text) if not w.startswith(left_out)]
    return [*kept, "seq=384", "train.checkpoint_every=2"]


@pytest.mark.parametrize("how", ["lose_power", "cut"])
@pytest.mark.parametrize("node", [0, 2])
def test_the_others_name_a_lost_node_long_before_the_timeout_and_resume(how, node, words, tmp_path):
    ended, seconds = lose(how, node, [*words, "train.steps=1000"], tmp_path)
    assert seconds < MOST_S
    teller = 1 if node == 0 else 0
    assert ended.codes[teller] == 1
    assert ended.errors(teller)[0] == (
        f"error: rank {node} on 10.77.0.{node + 1} is gone: its process was killed (host out of "
        "memory? see dmesg) or its machine or link failed"
    )
    if node != 0:
        assert f"run the same command with --resume {tmp_path / 'runs/run'}" in ended.outputs[0]
    before = steps(tmp_path / "runs/run")[-1]
    with Network(2) as network:
        more = ["--resume", "run", f"train.steps={before + 2}"]
        node_runs.train(network, more, tmp_path)
    assert steps(tmp_path / "runs/run") == list(range(1, before + 3))


def test_a_cut_link_ends_all_ranks_after_a_short_timeout(words, tmp_path):
    timeout = "topology.timeout_s=8"
    ended, seconds = lose("cut", 2, [*words, timeout, "train.steps=1000"], tmp_path)
    assert ended.codes == [1, 1, 1]
    assert seconds < MOST_S
    assert ended.errors(0)[0].startswith(f"error: {timeout}: rank ")
