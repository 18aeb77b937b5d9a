"""What a worker checks and explains before and around its target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mtrain_cli
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import worker
from mtrain_cli.launch.failures import PeerLostError
from mtrain_cli.launch.job import Job
from mtrain_cli.launch.manifest import NAME
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.worker import (
    _explain_timeouts,
    _require_interfaces,
    _require_same_cluster,
    _require_same_config,
    _require_same_size,
    _require_same_versions,
    _resume_hint,
)


def test_ranks_with_other_settings_are_named_key_by_key():
    agreed = compose(["seq=512", "train.steps=4", "run.name=a"])
    _require_same_config(None, agreed, 1)
    _require_same_config(compose(["seq=512", "train.steps=4", "run.name=b"]), agreed, 1)
    with pytest.raises(ConfigError) as caught:
        _require_same_config(compose(["seq=1024", "train.steps=5"]), agreed, 3)
    assert {line.partition(":")[0] for line in caught.value.problems} >= {
        "seq=1024",
        "train.steps=5",
    }
    assert all("rank 3 was started with this value" in line for line in caught.value.problems)


def test_a_node_with_another_number_of_ranks_is_named():
    job = Job("torchrun", 3, 4, 0, 1, "node0", 1)
    _require_same_size(1, job)
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE=1: rank 3 on .*, rank 0 with 2\."):
        _require_same_size(2, job)


def test_a_machine_with_another_cluster_file_is_named(tmp_path):
    text, mine = cluster.shipped()["h100_4x8"].read_text(), tmp_path / "mine.yaml"
    mine.write_text(text)
    expected = repr(cluster.cluster_of(str(mine)))
    _require_same_cluster(str(mine), expected, 3)
    _require_same_cluster("auto", "None", 3)
    other = tmp_path / "other.yaml"
    other.write_text(text.replace("gpus_per_node: 8", "gpus_per_node: 4", 1))
    with pytest.raises(ConfigError, match=r"topology\.cluster=.*: rank 3 on .* than rank 0\."):
        _require_same_cluster(str(other), expected, 3)


def test_only_a_timeout_becomes_a_line_that_names_the_setting():
    config = compose(["topology.timeout_s=60"])
    with (
        pytest.raises(PeerLostError, match=r"topology\.timeout_s=60: rank 2 waited longer"),
        _explain_timeouts(config, 2),
    ):
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")
    with pytest.raises(RuntimeError, match="something else"), _explain_timeouts(config, 2):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("launcher", "restarts", "limit", "hint"),
    [
        ("torchrun", 1, 3, "torchrun restarts the workers (restart 2 of 3)"),
        ("torchrun", 3, 3, "run the same command with --resume"),
        ("slurm", 0, None, "run the same command with --resume"),
    ],
)
def test_the_hint_on_resuming_fits_the_launcher(tmp_path, launcher, restarts, limit, hint):
    run = RunDir(tmp_path)
    job = Job(launcher, 0, 2, 0, 2, "127.0.0.1", 1, restarts, limit)
    assert _resume_hint(run, job) == ""
    (run.checkpoints / "step-6").mkdir(parents=True)
    (run.checkpoints / "step-6" / NAME).touch()
    assert hint in _resume_hint(run, job)
    assert "checkpoint of step 6" in _resume_hint(run, job)


def test_a_worker_whose_launcher_is_gone_exits(tmp_path):
    command = [sys.executable, "-m", "mtrain_cli.launch.worker", str(tmp_path), "--target=a:b"]
    done = subprocess.run(
        [*command, f"--store={tmp_path}", "--launcher-pid=1"],
        env={**os.environ, "PYTHONPATH": str(Path(mtrain_cli.__file__).parents[1]), "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert not re.search("Traceback", done.stderr)
    assert not any(tmp_path.iterdir()), "it exits before it writes anything"


def test_a_package_that_one_machine_lacks_is_another_version(monkeypatch):
    monkeypatch.setattr(worker, "package_versions", lambda: {"mtrain": "1", "flash-attn-4": "4"})
    _require_same_versions({"mtrain": "1", "flash-attn-4": "4"}, 1)
    with pytest.raises(ConfigError, match=r"^flash-attn-4=4: rank 1 on .* rank 0 has none\."):
        _require_same_versions({"mtrain": "1"}, 1)


def test_an_alias_of_an_interface_is_one(monkeypatch):
    for name in ("lo", "lo:1", "lo,lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        _require_interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME=eth7: "):
        _require_interfaces()
