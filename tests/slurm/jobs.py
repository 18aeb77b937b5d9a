"""Jobs of `examples/slurm.sbatch` on a `Cluster`, and what is left of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from commands.test_entry_points import install
from docs.blocks import ROOT
from nodes import bytes_table

from slurm.cluster import Cluster, wait_for

SCRIPT = str(ROOT / "examples/slurm.sbatch")
WORDS = [
    "model=tiny",
    "model.num_layers=2",
    "topology.device=cpu",
    "seq=256",
    "data=text",
    "optim.schedule_steps=1000",  # so that runs of any length have the same losses
    "train.checkpoint_every=20",
]
# A callback that makes a step take longer until the job is requeued, on machines of any speed.
_PACE = """
import os, time
from mtrain_cli.training.callback import Callback

class Pace(Callback):
    def before_step(self):
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(float(os.environ.get("PACE_S", "0")))

def pace(trainer, run_dir, message):
    return Pace()
"""


class Jobs:
    """Submits jobs on a cluster.

    folder: of the jobs; gets a text to train on, and the programs that a machine has.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder
        self._words = [*WORDS, bytes_table.write_text(self.folder), "train.callbacks=[pace]"]
        programs, packages = self.folder / "bin", self.folder / "packages"
        for made in (programs, packages):
            made.mkdir()
        (programs / "mtrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m mtrain_cli "$@"\n')
        (programs / "mtrain").chmod(0o755)
        (packages / "pace.py").write_text(_PACE)
        install(
            packages, "pace", "1", **{"entry-points": {"mtrain.callbacks": {"pace": "pace:pace"}}}
        )
        self._variables = {
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"], "/usr/sbin"]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
            "MTRAIN_EXAMPLE_SMALL": "1",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    def submit(
        self,
        steps: int,
        *words: str,
        options: Sequence[str] = (),
        script: str = SCRIPT,
        **variables: str,
    ) -> str:
        """Submit the script on two nodes with a task of each. Return the number of the job."""
        given = [*self._words, f"train.steps={steps}", *words]
        shape = ["--nodes=2", "--ntasks-per-node=1", *options]
        return self.cluster.submit(*shape, script, *given, **{**self._variables, **variables})

    def run_dir(self, job: str) -> Path:
        return self.folder / f"runs/slurm-{job}"

    def losses(self, job: str) -> list[float]:
        """Return the losses of steps 1, 2 and so on."""
        file = self.run_dir(job) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.open()] if file.exists() else []
        assert [row["step"] for row in rows] == list(range(1, 1 + len(rows)))
        return [row["loss"] for row in rows]

    def checkpoints(self, job: str) -> list[str]:
        folder = self.run_dir(job) / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def phase(self, job: str) -> str:
        return json.loads((self.run_dir(job) / "state.json").read_text())["phase"]

    def output(self, job: str) -> str:
        return (self.folder / f"slurm-{job}.out").read_text()

    def wait_for_steps(self, job: str, number: int) -> None:
        file = self.run_dir(job) / "metrics.jsonl"
        wait_for(
            lambda: file.exists() and file.read_text().count("\n") >= number,
            90,
            lambda: self.output(job),
        )

    def seconds_until_saved(self, job: str) -> float:
        """Wait until a run has stopped and saved. Return how long it took."""
        began = time.monotonic()
        wait_for(lambda: self.phase(job) == "stopped", 60, lambda: self.output(job))
        return time.monotonic() - began

    def tasks(self) -> list[int]:
        """Return the processes of mtrain on all nodes."""
        nodes = self.cluster.nodes
        return [pid for node in nodes for pid in self.cluster.processes(node, "mtrain_cli")]
