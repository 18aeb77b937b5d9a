"""`examples/skypilot.yaml` has keys that SkyPilot knows, and a lost job continues elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command import python_path
from docs.blocks import ROOT
from docs.test_examples import losses

from mtrain_cli.launch.job import current_job

TASK = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
# From `get_task_schema` and `get_resources_schema` in sky/utils/schemas.py of SkyPilot 0.14.1, the
# keys that an example may use. SkyPilot itself has too many requirements for our tests.
KEYS = {
    "name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets",
    "volumes",
}  # fmt: skip
OF_RESOURCES = {
    "infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size", "image_id",
    "job_recovery", "network_tier",
}  # fmt: skip
ID = "sky-managed-2026-11-30-01-02-03-000004_mtrain_7-0"
VARIABLES = {  # of SkyPilot's documentation of environment variables
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "10.0.0.5",
    "SKYPILOT_NUM_NODES": str(TASK["num_nodes"]),
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": ID,
}


def start(
    machine: Path, words: str = TASK["envs"]["WORDS"], **changes: str
) -> subprocess.Popen[str]:
    """Start `run` as SkyPilot does, in an empty folder for a new machine."""
    machine.mkdir()
    programs = machine.parent / "bin"
    return subprocess.Popen(
        ["bash", "-c", TASK["run"]],
        cwd=machine,
        env={
            **VARIABLES,
            "STORE": f"file://{machine.parent}/store",
            "WORDS": words,
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "PYTHONPATH": python_path(),
            "HOME": str(machine.parent),
            "OMP_NUM_THREADS": "1",
            **changes,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_program(folder: Path, text: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin/mtrain").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin/mtrain").chmod(0o755)


def test_skypilot_knows_all_keys():
    assert TASK.keys() <= KEYS
    assert TASK["resources"].keys() <= OF_RESOURCES
    assert all(isinstance(value, str | None) for value in TASK["envs"].values())


def test_skypilot_itself_takes_the_task(monkeypatch):
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml_config({**TASK}, env_overrides={"STORE": "s3://bucket/runs"})
    assert task.num_nodes == TASK["num_nodes"]


def test_mtrain_gets_the_name_and_the_store_and_starts_the_workers_itself(tmp_path):
    write_program(tmp_path, 'printf "%s\\n" "$@"')
    output, _ = start(tmp_path / "machine").communicate(timeout=30)
    assert output.split() == [
        "train",
        *TASK["envs"]["WORDS"].split(),
        *(f"run.name={ID}", f"run.remote=file://{tmp_path}/store", "--resume", "auto"),
    ]
    assert current_job(VARIABLES) is None
    assert TASK["num_nodes"] == 1


@pytest.mark.slow
def test_a_job_whose_machine_is_lost_continues_on_another(tmp_path):
    pytest.importorskip("fsspec")
    write_program(tmp_path, f'exec {sys.executable} -m mtrain_cli "$@"')
    words = "seq=512 topology.device=cpu train.steps=40 train.checkpoint_every=5"
    first = start(tmp_path / "first", words)
    while not list(tmp_path.glob("store/*/checkpoints/step-*/manifest.json")):
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    shutil.rmtree(tmp_path / "first")
    second = start(tmp_path / "second", words)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    assert "resumed from the checkpoint of step " in output
    undisturbed = start(tmp_path / "undisturbed", words, SKYPILOT_TASK_ID="another")
    assert undisturbed.wait(120) == 0
    assert losses(tmp_path / "second", ID) == losses(tmp_path / "undisturbed", "another")
