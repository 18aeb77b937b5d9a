"""torchrun, and ranks that a scheduler starts, train on several nodes as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodes import bytes_table, node_runs
from nodes.node_network import Network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
STEPS = "train.steps=4"
PLACES = ("10.77.0.1", "fd77::1", "node0")


def assert_equal(run_dir: Path, alone: list[float]) -> None:
    assert bytes_table.largest_difference(node_runs.losses(run_dir), alone) < 1e-6


@pytest.mark.parametrize("place", PLACES)
def test_torchrun_on_two_nodes_gives_the_losses_of_one_process(place, text, alone, tmp_path):
    words = [*bytes_table.settings("hierarchical_ring", text), STEPS]
    torchrun = f"""
        {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --max-restarts 3
        --rdzv-backend static --master-addr {place} --master-port 29500 --node-rank
    """.split()
    variables = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    variables.pop("TRITON_INTERPRET", None)
    with Network(2) as network:
        agents = []
        for node in range(2):
            command = [*torchrun, str(node), "-m", "mtrain_cli", "train", *words]
            agents.append(
                subprocess.Popen(
                    network.command(node, command, tmp_path),
                    env=variables,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert_equal(tmp_path / "runs/run", alone)


@pytest.mark.parametrize(
    ("place", "interface"), [("node0", None), ("fd77::1", "eth0"), ("fd77::1", None)]
)
def test_ranks_find_each_other_by_name_and_in_ipv6(place, interface, text, alone, tmp_path):
    words = [*bytes_table.settings("hierarchical_ring", text), STEPS]
    with Network(2) as network:
        node_runs.train(network, words, tmp_path, 2, master=place, interface=interface)
    assert_equal(tmp_path / "runs/run", alone)


def test_a_node_with_other_settings_is_refused_in_one_line(text, tmp_path):
    words = [*bytes_table.settings("ring", text), STEPS]
    with Network(2) as network:
        each = [words, [*words, "optim.lr=1e-3"]]
        ended = node_runs.train(network, each, tmp_path, check=False)
    assert ended.codes == [2, 2]
    assert ended.errors(0) == [
        "error: optim.lr=0.001: rank 1 was started with this value, rank 0 with auto. Start all "
        "ranks with the same settings."
    ]
    assert ended.errors(1) == []


def test_a_node_with_other_data_is_refused_in_one_line(text, tmp_path):
    words, file = [*bytes_table.settings("ring", text), STEPS], Path(text.partition("=")[2])
    (tmp_path / "other.txt").write_text(file.read_text()[:-9] + "different")
    with Network(2) as network:
        network.replace_file(1, file, tmp_path / "other.txt")
        ended = node_runs.train(network, words, tmp_path, 2, check=False)
    assert ended.codes == [2] * 4
    assert ended.errors(0) == [
        "error: data.kind=text: rank 2 reads a different corpus than rank 0. Give all machines "
        "the same data."
    ]
    assert ended.errors(1) == ended.errors(2) == ended.errors(3) == []


SECRET_OF_RANK_0 = {"MTRAIN_SECRET": "a" * 32}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"MTRAIN_SECRET": "b" * 32}, "mtrain: MTRAIN_SECRET: "),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "error: GLOO_SOCKET_IFNAME=eth7: node1 has no such "),
        ({"WORLD_SIZE": "3"}, "mtrain: rank 1: WORLD_SIZE=3: rank 1 on node1 was started with "),
    ],
    ids=["secret", "interface", "world size"],
)
def test_a_node_that_is_started_wrongly_is_named_on_the_first(own, expected, text, tmp_path):
    words = [*bytes_table.settings("ring", text), STEPS]
    variables = {0: SECRET_OF_RANK_0, 1: {**SECRET_OF_RANK_0, **own}}
    started = time.monotonic()
    with Network(2) as network:
        ended = node_runs.train(network, words, tmp_path, own=variables, check=False)
    assert ended.codes == [2, 2]
    assert time.monotonic() - started < 60
    lines = [line for line in ended.outputs[0].splitlines() if not line.startswith("[W")]
    assert len(lines) == 1
    assert lines[0].startswith(expected)
