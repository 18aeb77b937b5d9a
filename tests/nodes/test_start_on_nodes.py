"""torchrun, and ranks that a scheduler starts, train on several nodes as one process does."""

from __future__ import annotations

import os
import re
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
    assert not (tmp_path / "runs").exists()
    assert ended.errors(0) == [
        "mtrain: optim.lr=0.001: rank 1 was started with this value, rank 0 with auto. Start all "
        "ranks with the same settings."
    ]
    assert ended.errors(1) == []


def test_a_refused_start_leaves_nothing_on_disks_that_the_nodes_do_not_share(text, tmp_path):
    words, runs = [*bytes_table.settings("ring", text), STEPS], tmp_path / "runs"
    runs.mkdir()

    def on_second(*command: str) -> str:
        done = subprocess.run(network.command(1, command), capture_output=True, text=True)
        return done.stdout + done.stderr

    with Network(2) as network:
        assert on_second("mount", "-t", "tmpfs", "tmpfs", str(runs)) == ""
        each = [words, [*words, "optim.lr=1e-3"]]
        ended = node_runs.train(network, each, tmp_path, check=False)
        assert ended.codes == [2, 2]
        assert on_second("find", str(runs), "-mindepth", "1") == ""
        assert [*runs.iterdir()] == []
        node_runs.train(network, words, tmp_path)


def test_a_node_with_other_data_is_refused_in_one_line(text, tmp_path):
    words, file = [*bytes_table.settings("ring", text), STEPS], Path(text.partition("=")[2])
    (tmp_path / "other.txt").write_text(file.read_text()[:-9] + "different")
    with Network(2) as network:
        network.replace_file(1, file, tmp_path / "other.txt")
        ended = node_runs.train(network, words, tmp_path, 2, check=False)
    assert ended.codes == [2] * 4
    assert ended.errors(0) == [
        "mtrain: data.kind=text: rank 2 reads a different corpus than rank 0. Give all machines "
        "the same data."
    ]
    assert ended.errors(1) == ended.errors(2) == ended.errors(3) == []


SECRET_OF_RANK_0 = {"MTRAIN_SECRET": "a" * 32}
A_FILE = {"MTRAIN_SECRET": __file__}


def printed(ended: node_runs.Ended, rank: int = 0) -> list[str]:
    """Return the lines of a rank, without the warnings of torch's store."""
    return [line for line in ended.outputs[rank].splitlines() if not line.startswith("[W")]


def assert_refused(ended: node_runs.Ended, expected: str, began: float) -> None:
    """Assert that all ranks end with 2, soon, and the first prints one line."""
    assert set(ended.codes) == {2}
    assert time.monotonic() - began < 60
    (line,) = printed(ended)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({1: {"MTRAIN_SECRET": "b" * 32}}, "mtrain: MTRAIN_SECRET: an entry in the job's store"),
        ({0: A_FILE, 1: A_FILE}, "mtrain: MTRAIN_SECRET: is the name of a file, which others can"),
        (
            {1: {"GLOO_SOCKET_IFNAME": "eth7"}},
            "mtrain: GLOO_SOCKET_IFNAME=eth7: node1 has no such network interface; it has lo, eth0",
        ),
        (
            {1: {"WORLD_SIZE": "3"}},
            "mtrain: rank 1: WORLD_SIZE=3: rank 1 on node1 was started with this value, rank 0 "
            "with 2",
        ),
        (
            {1: {"LOCAL_WORLD_SIZE": "2"}},
            "mtrain: rank 1: LOCAL_WORLD_SIZE=2: this is process 0 of its node, and rank 1 of 2",
        ),
    ],
    ids=["secret", "secret file", "interface", "world size", "workers of a node"],
)
def test_a_node_that_is_started_wrongly_is_named_on_the_first(own, expected, text, tmp_path):
    words = [*bytes_table.settings("ring", text), STEPS]
    variables = {rank: {**SECRET_OF_RANK_0, **own.get(rank, {})} for rank in range(2)}
    began = time.monotonic()
    with Network(2) as network:
        ended = node_runs.train(network, words, tmp_path, own=variables, check=False)
    assert_refused(ended, expected, began)


def test_a_node_with_fewer_workers_is_named(text, tmp_path):
    words, began = [*bytes_table.settings("ring", text), STEPS], time.monotonic()
    own = {rank: {"LOCAL_WORLD_SIZE": "1"} for rank in (2, 3)}
    with Network(2) as network:
        ended = node_runs.train(network, words, tmp_path, 2, own=own, check=False)
    assert time.monotonic() - began < 60
    assert (ended.codes[0], ended.codes[3]) == (2, 2)
    assert 0 not in ended.codes
    assert printed(ended) == ["mtrain: rank 3: LOCAL_RANK=1: must be below LOCAL_WORLD_SIZE=1"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("topology.workers=8", "mtrain: topology.workers=8: torchrun started 2 processes. Use "),
        (
            "topology.gpus_per_node=2",
            "mtrain: topology.gpus_per_node=2: torchrun started 1 on each node. Use auto or one",
        ),
        ("MTRAIN_SECRET=abc", "mtrain: MTRAIN_SECRET: belongs in the environment; others can "),
    ],
)
def test_settings_that_contradict_the_nodes_are_refused(word, expected, text, tmp_path):
    words, began = [*bytes_table.settings("ring", text), STEPS, word], time.monotonic()
    with Network(2) as network:
        ended = node_runs.train(network, words, tmp_path, check=False)
    assert_refused(ended, expected, began)
    assert "abc" not in ended.outputs[0]


@pytest.mark.parametrize(
    ("port", "own", "expected"),
    [
        (
            node_runs.PORT,
            {},
            "mtrain: MASTER_ADDR=10.77.0.1 MASTER_PORT=29500: rank 0 cannot reach the job's store "
            "there ([Errno 98] Address already in use",
        ),
        (
            29777,
            {0: {"MTRAIN_PORT": "29777"}},
            "mtrain: MTRAIN_PORT=29777: rank 0 cannot listen on this port (Address already in use",
        ),
    ],
)
def test_a_port_of_another_program_is_named(port, own, expected, text, tmp_path):
    words = [*bytes_table.settings("ring", text), STEPS]
    other = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(1000)"
    with Network(2) as network:
        program = subprocess.Popen(network.command(0, [sys.executable, "-c", other]))
        wait_for_port(network, port)
        began = time.monotonic()
        ended = node_runs.train(network, words, tmp_path, own=own, check=False)
        program.kill()
        program.wait()
    assert_refused(ended, expected, began)
    assert (printed(ended, 1) == []) == bool(own)  # it knows only that nobody answers there
    assert not (tmp_path / "runs").exists()


def wait_for_port(network: Network, port: int) -> None:
    file = Path(f"/proc/{network.pid(0)}/net/tcp")
    until = time.monotonic() + 30
    while f":{port:04X} 00000000:0000 0A" not in file.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("remote", "reason"),
    [
        (
            "s3://bucket/runs",
            r"(does not answer for 30 seconds|cannot be used \(Could not connect)",
        ),
        ("file:///{0}/full", r"cannot be used \(No space left on device"),
        ("file:///proc/nowhere", r"cannot be used \(No such file or directory: /proc/nowhere"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_before_the_first_step(
    remote, reason, text, tmp_path, small_disk
):
    url = remote.format(tmp_path)
    words = [*bytes_table.settings("ring", text), STEPS, f"run.remote={url}"]
    nobody = {"AWS_ENDPOINT_URL": "http://10.77.0.1:9", "AWS_ACCESS_KEY_ID": "a"}
    own = {rank: {**nobody, "AWS_SECRET_ACCESS_KEY": "b"} for rank in range(2)}
    (small_disk / "filler").write_bytes(b"x" * (128 << 10))
    began = time.monotonic()
    with Network(2) as network:
        ended = node_runs.train(network, words, tmp_path, own=own, check=False)
    assert ended.codes == [2, 2]
    assert time.monotonic() - began < 60
    (line,) = ended.errors(0)
    assert re.match(f"mtrain: run.remote={url}: {reason}", line)
    assert not (tmp_path / "runs/run").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of 128 KiB before a test makes nodes, which see it."""
    disk = tmp_path / "full"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
