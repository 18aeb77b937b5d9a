"""torchrun and srun jobs listen where the user says, and a secret keeps strangers out."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
from test_failure_channel import connected, is_dropped
from test_job import SimulatedJob, here  # noqa: F401

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import failure_channel
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch.failure_channel import _Hub, _port_and_token, _server
from mtrain_cli.launch.job import PORT, SECRET, Job, _seal, _unseal, listen


def job_at(address: str, nodes: int = 2) -> Job:
    return Job("slurm", 0, 2 * nodes, 0, 2, address, 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_ranks_of_one_machine_meet_on_loopback_whatever_the_address():
    with listen(job_at("192.0.2.1", nodes=1), 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"


def test_several_machines_meet_at_the_address_that_the_user_names(monkeypatch):
    monkeypatch.setattr(
        jobs.ipaddress, "ip_address", lambda _: type("Address", (), {"is_loopback": False})
    )
    with listen(job_at("127.0.0.2"), 0) as server:
        assert server.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize(
    "address", ["localhost", "192.0.2.1"], ids=["loopback", "of another machine"]
)
def test_an_unreachable_address_means_all_interfaces(address):
    with listen(job_at(address), 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_the_user_can_set_the_hubs_port(monkeypatch):
    port = free_port()
    monkeypatch.setenv(PORT, str(port))
    with _server(job_at("127.0.0.1", nodes=1)) as server:
        assert server.getsockname()[1] == port
        with pytest.raises(
            ConfigError, match=rf"{PORT}={port}: rank 0 cannot listen there .*\. Give a free port"
        ):
            _server(job_at("127.0.0.1", nodes=1))
    monkeypatch.setenv(PORT, "http")
    with pytest.raises(ConfigError, match=f"{PORT}=http: must be a port"):
        _server(job_at("127.0.0.1", nodes=1))


def test_decisions_of_rank_0_need_the_secret(monkeypatch):
    assert _unseal("decision/1", _seal("decision/1", "a\nb").encode()) == "a\nb"
    without = _seal("decision/1", "text").encode()
    monkeypatch.setenv(SECRET, "one")
    sealed = _seal("decision/1", "a\nb").encode()
    assert _unseal("decision/1", sealed) == "a\nb"
    for stranger in (without, sealed + b"c", b"", b"\xff\n"):
        with pytest.raises(ConfigError, match=f"{SECRET}: .* Give all ranks the same one"):
            _unseal("decision/1", stranger)
    with pytest.raises(ConfigError):
        _unseal("decision/2", sealed)
    monkeypatch.setenv(SECRET, "two")
    with pytest.raises(ConfigError):
        _unseal("decision/1", sealed)


def test_with_a_secret_the_store_does_not_hold_the_hubs_token(monkeypatch):
    monkeypatch.setenv(SECRET, "one")
    hub = _Hub(2, on_mistake=lambda: None)
    assert _port_and_token(f"{hub.port} -".encode()) == (hub.port, hub.token)
    with connected(hub) as stranger, contextlib.suppress(OSError):
        stranger.sendall(b"- 1\n")
        assert is_dropped(stranger)
    for entry in (b"1234 abcdef", b"", b"port -"):
        with pytest.raises(
            ConfigError, match=f"{SECRET}: this rank and rank 0 do not have the same secret"
        ):
            _port_and_token(entry)
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigError, match=SECRET):
        _port_and_token(f"{hub.port} -".encode())
    assert failure_channel.shared_key("x") is None


def test_a_job_under_srun_with_a_secret_and_a_port_listens_on_loopback_and_ends_well(monkeypatch):
    port = free_port()
    monkeypatch.setenv(SECRET, "of this job")
    monkeypatch.setenv(PORT, str(port))
    assert [code for code, _ in SimulatedJob("attacks_its_ports", 2, "run.dir=run").ends()] == [
        0,
        0,
    ]
    found = [line.split() for line in Path("run/listening-0").read_text().split("\n")]
    assert {address for _, address, _ in found} == {"127.0.0.1"}
    assert str(port) in {number for _, _, number in found}
