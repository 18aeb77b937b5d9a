"""`examples/kubernetes.yaml` fits Kubernetes' schema, and its pods train, stop and go on as one."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import python_path
from docs.blocks import ROOT
from docs.test_examples import free_port, losses

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.job import current_job

MANIFEST = ROOT / "examples/kubernetes.yaml"
SERVICE, JOB = yaml.safe_load_all(MANIFEST.read_text())
SPEC = JOB["spec"]
POD = SPEC["template"]["spec"]
(CONTAINER,) = POD["containers"]
NODES = SPEC["completions"]


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, "1.31", strict=True)


def start_pod(index: int, folder: Path, *words: str, **changes: str) -> subprocess.Popen[str]:
    """Start the program of a pod as Kubernetes does, with folders and variables of this machine."""
    environment = {"JOB_COMPLETION_INDEX": str(index)}  # as in each pod of an indexed Job
    for variable in CONTAINER["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert field in (None, "metadata.labels['batch.kubernetes.io/controller-uid']")
        environment[variable["name"]] = variable["value"] if field is None else "0af8-11"
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    script = [part.replace("/secrets/mtrain", str(folder)) for part in CONTAINER["command"]]
    return subprocess.Popen(
        [*script, *(words or CONTAINER["args"])],
        cwd=folder,
        env={"PATH": path, "PYTHONPATH": python_path(), **environment, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_program(folder: Path, text: str) -> None:
    (folder / "bin").mkdir()
    program = folder / "bin/mtrain"
    program.write_text(text)
    program.chmod(0o755)
    (folder / "secret").write_text("a secret\n")


def test_both_documents_fit_the_schema():
    for document in (SERVICE, JOB):
        validate(document)


def test_a_wrong_key_does_not_fit_the_schema():
    wrong = copy.deepcopy(JOB)
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 300
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(wrong)


def test_the_names_of_the_documents_fit_each_other():
    labels = {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}
    assert SERVICE["spec"]["selector"] == labels
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    (address,) = (v["value"] for v in CONTAINER["env"] if v["name"] == "MASTER_ADDR")
    assert address == f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}
    (secret,) = (v["secret"] for v in POD["volumes"] if "secret" in v)
    assert secret["defaultMode"] == 0o400


def test_mtrain_reads_the_ranks_of_two_pods(tmp_path):
    keep = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[2:]]))"
    answer = """[[ $1 == train ]] || exec echo '"what": "finished"'"""
    write_program(tmp_path, f"#!/bin/bash\n{answer}\n{sys.executable} -c '{keep}' \"$@\"\n")
    jobs, words = [], set()
    for index in range(NODES):
        pod = start_pod(index, tmp_path)
        output, _ = pod.communicate(timeout=30)
        assert pod.returncode == 0, output
        for line in output.splitlines():
            variables, given = json.loads(line)
            assert variables["MTRAIN_SECRET"] == "a secret"
            words.add(tuple(given))
            jobs.append(current_job(variables))
    jobs.sort(key=lambda job: job.rank)
    assert [job.rank for job in jobs] == list(range(16))
    assert [job.local_rank for job in jobs] == [*range(8), *range(8)]
    assert {(job.world_size, job.local_world_size) for job in jobs} == {(16, 8)}
    assert {(job.address, job.master_port) for job in jobs} == {("mtrain-0.mtrain", 29500)}
    assert {job.name for job in jobs} == {"torchrun 0af8-11"}
    assert words == {("run.name=mtrain", *CONTAINER["args"], "--resume", "auto")}
    config = compose([*CONTAINER["args"], "topology.device=cpu"])
    assert resolve_environment(config, job=jobs[9]).nodes == NODES


def end(pods: list[subprocess.Popen[str]], seconds: float = 120) -> tuple[list[int], str]:
    """Return the exit codes of pods, and what they printed."""
    deadline, outputs = time.monotonic() + seconds, []
    try:
        for pod in pods:
            outputs.append(pod.communicate(timeout=deadline - time.monotonic())[0])
    finally:
        for pod in pods:
            pod.kill()
    return [pod.returncode for pod in pods], "".join(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [0, 1])
def test_sigterm_to_a_pod_stops_all_which_go_on_when_they_start_again(signalled, tmp_path):
    write_program(tmp_path, f'#!/bin/sh\nexec {sys.executable} -m mtrain_cli "$@"\n')
    words = ["seq=512", "topology.device=cpu", "train.steps=40", "data.document_mask=false"]

    def start(**changes: str) -> list[subprocess.Popen[str]]:
        one_process = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        one_process |= {"MASTER_PORT": free_port(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        one_process |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"} | changes
        return [start_pod(index, tmp_path, *words, **one_process) for index in range(NODES)]

    codes, output = end(start(RUN="undisturbed"))
    assert codes == [0, 0], output
    pods = start()
    metrics = tmp_path / "runs/mtrain/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        assert [pod.poll() for pod in pods] == [None, None]
        time.sleep(0.1)
    pods[signalled].send_signal(signal.SIGTERM)
    codes, output = end(pods)
    assert codes[1 - signalled] == 75, output
    assert codes[signalled] in (75, 143), output
    stopped = len(losses(tmp_path, "mtrain"))
    assert stopped < 40
    assert (tmp_path / f"runs/mtrain/checkpoints/step-{stopped}").is_dir()
    codes, output = end(start())
    assert codes == [0, 0], output
    assert losses(tmp_path, "mtrain") == losses(tmp_path, "undisturbed")
