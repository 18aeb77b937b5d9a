"""Rank 0's hub: what strangers on its port may not do."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from mtrain_cli.launch.lifeline import _Hub


def connected(hub: _Hub) -> socket.socket:
    return socket.create_connection(("localhost", hub.port), timeout=10)


def is_dropped(connection: socket.socket) -> bool:
    """Whether the other end closes it; what it had not read then comes back as a reset."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: node1\r\nAccept: */*\r\n\r\n",
        b'{"token": \n{"token": 1}\n',
        b'{"token": "\xc3\xa9", "rank": 1}\n',
        '{"token": "é", "rank": 1}\n'.encode(),
        "é 1\né 1\n".encode(),
        b"\xff\xfe\x00\n\n\n",
        b"\n\n",
        b"x" * 100_000,
        b'{"done": true}\n{"failure": {}}\n',
    ],
    ids=["http", "broken JSON", "bytes", "not ASCII", "greeting not ASCII", "binary", "empty lines", "endless line", "orders"],
)
def test_a_stranger_is_dropped_and_the_workers_are_heard_on(said):
    hub = _Hub(2, on_mistake=lambda: None)
    workers = [connected(hub) for _ in range(2)]
    workers[0].sendall(f"{hub.token} 0\n".encode())
    with connected(hub) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(said)
        assert is_dropped(stranger)
    with connected(hub) as wrong:
        wrong.sendall(f"{'0' * len(hub.token)} 1\n".encode())
        assert is_dropped(wrong)
    with connected(hub) as nameless:
        nameless.sendall(f"{hub.token} \n".encode())
        assert is_dropped(nameless)
    with connected(hub):  # one that says nothing and leaves
        pass
    # A greeting in pieces, and a word right behind it.
    for piece in (hub.token[:5], hub.token[5:], " 1\n" + json.dumps({"done": True}) + "\n"):
        workers[1].sendall(piece.encode())
    assert hub._thread.is_alive()
    workers[0].sendall(json.dumps({"done": True}).encode() + b"\n")
    hub._thread.join(10)
    assert not hub._thread.is_alive()
    assert hub._expected == set()
    assert hub._failures == []
    for worker in workers:
        worker.close()
