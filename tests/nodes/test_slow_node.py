"""A slow node is named in the log, the run's records and its status, and can be left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrain_cli.launch import run_status
from mtrain_cli.launch.run_dir import RunDir
from nodes import bytes_table, node_runs
from nodes.node_network import Network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 30
SLOW = {1: {node_runs.SLEEP: "0.03"}}


def words(text: str, steps: int, *more: str) -> list[str]:
    kept = [w for w in bytes_table.settings("ring", text) if not w.startswith(("seq=", "train.c"))]
    return [*kept, "seq=384", "run.straggler=1", f"train.steps={steps}", *more]


def notes(run: RunDir, label: str) -> list[str]:
    return [line for name, line in run_status.read_status(run).notes if name == label]


def hosts(run: RunDir) -> list[str]:
    return [place.partition(", ")[0] for place in run_status.read_status(run).written.workers]


def test_a_slow_node_is_named_and_left_out_at_the_next_start_only(text, tmp_path):
    run = RunDir(tmp_path / "runs/run")
    name = "rank 1 (node1, cpu)"
    with Network(3) as network:
        ended = node_runs.train(network, words(text, STEPS), tmp_path, own=SLOW)
        assert f"{name} is a straggler: it takes " in ended.outputs[0]
        assert f"{name} is a straggler: it takes " in run.log.read_text()
        (entry,) = map(json.loads, run.stragglers.open())
        assert (entry["rank"], entry["place"]) == (1, "node1, cpu")
        assert entry["ratio"] > 2
        (line,) = notes(run, "stragglers")
        assert line.startswith(f"{name} took ")

        # It stays unless the option is set, and if the others do not fit.
        more = ["--resume", "run", f"train.steps={STEPS + 2}"]
        node_runs.train(network, more, tmp_path)
        assert hosts(run) == ["node0", "node1", "node2"]
        out = "run.leave_out_stragglers=true"
        more = ["--resume", "run", f"train.steps={STEPS + 4}", out, "topology.workers=3"]
        ended = node_runs.train(network, more, tmp_path)
        assert hosts(run) == ["node0", "node1", "node2"]
        assert "all nodes stay. Without node1, topology.workers=3: " in ended.outputs[0]

        more = ["--resume", "run", f"train.steps={STEPS + 6}", out, "topology.workers=auto"]
        ended = node_runs.train(network, more, tmp_path)
        assert hosts(run) == ["node0", "node2"]
        assert f"restarts without node1 (rank 1 until now): {name} took " in ended.outputs[0]
        assert "rank 1 is left out, because its node has a straggler" in ended.outputs[1]
        (line,) = notes(run, "stragglers")
        assert line.endswith("; node1 is left out")
    rows = [json.loads(row) for row in run.metrics.open()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 7))


def test_a_node_that_was_left_out_ends_with_the_others(text, tmp_path):
    with Network(3) as network:
        node_runs.train(network, words(text, STEPS), tmp_path, own=SLOW)
        more = ["--resume", "run", "run.leave_out_stragglers=true", f"train.steps={STEPS + 2}"]
        # A rank that fails in the smaller run.
        wrong = [more, more, [*more, "optim.lr=1e-3"]]
        ended = node_runs.train(network, wrong, tmp_path, check=False)
        assert ended.codes == [2, 2, 2]


def test_the_node_of_rank_0_stays(text, tmp_path):
    run = RunDir(tmp_path / "runs/run")
    with Network(2) as network:
        node_runs.train(network, words(text, STEPS), tmp_path, own={0: SLOW[1]})
        more = ["--resume", "run", "run.leave_out_stragglers=true", f"train.steps={STEPS + 2}"]
        ended = node_runs.train(network, more, tmp_path)
    assert "node0 stays, because its rank 0 serves the job" in ended.outputs[0]
    assert hosts(run) == ["node0", "node1"]


def test_of_two_nodes_one_is_left(text, tmp_path):
    run = RunDir(tmp_path / "runs/run")
    with Network(2) as network:
        node_runs.train(network, words(text, STEPS), tmp_path, own=SLOW)
        more = ["--resume", "run", "run.leave_out_stragglers=true", f"train.steps={STEPS + 2}"]
        ended = node_runs.train(network, more, tmp_path)
    assert "rank 1 is left out, because its node has a straggler" in ended.outputs[1]
    assert hosts(run) == ["node0"]


SCRIPT = """
import os, sys
from golden import reach
from nodes import node_runs
if seconds := float(os.environ.get(node_runs.SLEEP, 0)):
    reach.slow_down(seconds)
reach.main(sys.argv[1:])
"""


def test_torchrun_restarts_without_the_slow_node(text, tmp_path):
    run, script = RunDir(tmp_path / "runs/run"), tmp_path / "train.py"
    script.write_text(SCRIPT)
    more = "train.checkpoint_every=5", "run.leave_out_stragglers=true"
    torchrun = f"""
        {sys.executable} -m torch.distributed.run --nnodes 3 --nproc-per-node 1 --max-restarts 2
        --rdzv-backend static --master-addr {Network.address(0)} --master-port 29500 --node-rank
    """.split()
    paths = [str(Path(__file__).parents[1]), *sys.path]
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.pathsep.join(paths)}
    variables.pop("TRITON_INTERPRET", None)
    with Network(3) as network:
        agents = []
        for node in range(3):
            command = [*torchrun, str(node), str(script), "train", *words(text, 60, *more)]
            own = {node_runs.SLEEP: SLOW[1][node_runs.SLEEP]} if node == 1 else {}
            agents.append(
                subprocess.Popen(
                    network.command(node, command, tmp_path),
                    env={**variables, **own},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        killed = False
        while not killed and agents[0].poll() is None:
            time.sleep(0.1)
            if run.stragglers.exists() and (run.last_step() or 0) >= 25:
                (worker,) = network.workers(2, script)
                os.kill(worker, signal.SIGKILL)
                killed = True
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0, 0], outputs
    assert "restarts without node1 (rank 1 until now): rank 1 (node1, cpu) took " in outputs[0]
    assert "rank 1 is left out, because its node has a straggler" in outputs[1]
    assert "restart 1, on 2 workers" in outputs[0]
    assert hosts(run) == ["node0", "node2"]
    assert [json.loads(row)["step"] for row in run.metrics.open()] == list(range(1, 61))
