"""What a run on one machine exposes: loopback only, and nothing that unpickles foreign bytes."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from test_local import launched, run  # noqa: F401
from worker_targets import listening

from mtrain_cli.config import resolved_file
from mtrain_cli.launch import local
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.run_dir import RunDir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_run_listens_on_loopback_only_and_unpickles_no_foreign_bytes(
    run: RunDir,  # noqa: F811
    tmp_path: Path,
    monkeypatch,
) -> None:
    """A stranger sends every port a message that sets the state of torch's elastic rendezvous to a
    bomb.
    """
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    marker = tmp_path / "code-ran"
    (run.path / "bomb").write_bytes(pickle.dumps(Bomb(marker)))
    folders: list[Path] = []
    started = local._wait

    def wait(agent: Any, run_dir: RunDir, folder: Path, *others: Any) -> Any:
        folders.append(folder)
        assert folder.stat().st_mode & 0o077 == 0  # the store is in it
        return started(agent, run_dir, folder, *others)

    monkeypatch.setattr(local, "_wait", wait)
    of_other_tests = {f"{pid} {address} {port}" for pid, address, port in listening([os.getpid()])}
    code = launched(run, "attacks_its_ports")
    assert not marker.exists()
    assert code == 0
    sockets = [
        line for rank in (0, 1) for line in (run.path / f"listening-{rank}").read_text().split("\n")
    ]
    sockets = [line for line in sockets if line not in of_other_tests]
    assert sockets, "gloo listens"
    assert {line.split()[1] for line in sockets} == {"127.0.0.1"}
    # The launcher itself listens nowhere: its rendezvous would unpickle what it gets.
    assert str(os.getpid()) not in {line.split()[0] for line in sockets}
    assert [folder.exists() for folder in folders] == [False]


def test_network_interfaces_for_several_machines_are_ignored_on_one(
    run: RunDir,  # noqa: F811
    monkeypatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    environment = resolve_environment(resolved_file.load(run.resolved))
    variables = local._variables(environment, run, 60.0)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
