"""Nodes are apart: own names, addresses and loopback, and links that are counted and limited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodes.node_network import Network

MIB = 1 << 20
RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print(socket.gethostname(), flush=True)
connection, _ = server.accept()
print(sum(iter(lambda: len(connection.recv(1 << 16)), 0)))
"""
SEND = """
import socket, sys
socket.create_connection(("node1", 5000), timeout=5).sendall(bytes(int(sys.argv[1])))
"""


def start(network: Network, node: int, script: str, word: str) -> subprocess.Popen[str]:
    words = network.command(node, [sys.executable, "-c", script, word])
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_kernel_counts_what_one_node_sends_to_another_by_name_and_a_rate_slows_it():
    with Network(3, rate="40mbit") as network, Network(2) as other:
        receiver = start(network, 1, RECEIVE, "10.77.0.2")
        assert receiver.stdout.readline() == "node1\n"
        before, begun = network.counted(), time.monotonic()
        sender = start(network, 0, SEND, str(MIB))
        assert receiver.communicate(timeout=20)[0] == f"{MIB}\n"
        assert time.monotonic() - begun > 0.8 * 8 * MIB / 40e6
        sender.communicate()
        sent, received = [
            [now[way] - then[way] for now, then in zip(network.counted(), before, strict=True)]
            for way in (0, 1)
        ]
        assert MIB < sent[0] < 1.1 * MIB
        assert MIB < received[1] < 1.1 * MIB
        assert max(sent[2], received[2]) < 0.01 * MIB
        assert max(map(max, other.counted())) < 0.01 * MIB


@pytest.mark.parametrize("listens", ["loopback", "cut"])
def test_a_node_reaches_neither_anothers_loopback_nor_a_node_whose_link_is_cut(listens):
    with Network(2) as network:
        receiver = start(network, 1, RECEIVE, "127.0.0.1" if listens == "loopback" else "10.77.0.2")
        assert receiver.stdout.readline()
        if listens == "cut":
            network.cut(1)
        sender = start(network, 0, SEND.replace("timeout=5", "timeout=0.5"), "1")
        error = sender.communicate(timeout=20)[1]
        assert ("Connection refused" if listens == "loopback" else "timed out") in error
        receiver.kill()
        receiver.communicate()


def test_a_process_that_is_killed_leaves_no_nodes():
    script = """
import time
from nodes.node_network import Network
with Network(2) as network:
    print(network.pid(0), network.pid(1), flush=True)
    time.sleep(60)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    holders = [Path(f"/proc/{pid}/ns/net") for pid in owner.stdout.readline().split()]
    assert len({holder.readlink() for holder in holders}) == 2
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    end = time.monotonic() + 5
    while any(holder.exists() for holder in holders):
        assert time.monotonic() < end
        time.sleep(0.01)
