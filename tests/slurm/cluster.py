"""A real SLURM on one machine: a controller, and node daemons with a network of their own each.

Node 0 has the controller and runs the commands; nodes 1, 2 and so on run the jobs. For SLURM, each
has 64 cores and eight GPUs, so that `--gpus-per-task=1` means what it does elsewhere.
Needs Linux, root, network namespaces, and Debian's packages slurmctld, slurmd, slurm-client and
munge, or those of another distribution.

All files are in one temporary folder. The daemons and the jobs of a node are in a namespace of
processes, which the kernel ends with its first process, and that ends with this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from nodes import node_network
from nodes.node_network import Network

_TOOLS = (
    *("slurmctld", "slurmd", "slurmstepd", "munged"),
    *("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"),
)
_START_S = 30.0
GRACE_S = 30
# Lines of slurm.conf. {folder}: of this cluster. A requeued job may start again when the
# credentials of its last start have expired, by default after two minutes.
_CONFIGURATION = """
ClusterName=mtrain
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
KillWait=30
SlurmdTimeout=10
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
NodeName=DEFAULT CPUs=64 RealMemory=4096 Gres=gpu:8
{nodes}
PartitionName=DEFAULT Nodes=ALL PriorityTier=1 MaxTime=INFINITE
PartitionName=long Default=YES GraceTime=0
PartitionName=graceful GraceTime={grace}
PartitionName=urgent PriorityTier=2 PreemptMode=OFF
"""


class SlurmError(RuntimeError):
    """A daemon or a command of SLURM failed."""


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot run a cluster, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a cluster of SLURM needs Linux and root"
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=search) is None]:
        return f"a cluster of SLURM needs {', '.join(missing)}"
    with contextlib.suppress(KeyError):
        pwd.getpwnam("munge")
        return node_network.why_not()
    return "a cluster of SLURM needs the user munge"


class Cluster:
    """A context manager for a controller and nodes, with the partitions long, graceful and urgent.

    A job in urgent preempts one in the others: in graceful, `GRACE_S` after a first SIGTERM.
    SLURM sends SIGTERM to a job that it ends, and SIGKILL 30 s later.

    folder: of the jobs, which all nodes share.
    nodes: number of nodes that run jobs.
    """

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self.nodes = folder, range(1, 1 + nodes)
        self._network = Network(1 + nodes)
        self._daemons: list[subprocess.Popen[bytes]] = []
        # Not below `folder`: the user of munge may not enter the folders of pytest.
        self._files = Path(tempfile.mkdtemp(prefix="slurm-"))

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()  # its namespace of processes ends with it
            daemon.wait()
        with contextlib.suppress(SlurmError):
            wait_for(lambda: not any(self.processes(node) for node in (0, *self.nodes)), 10)
        self._network.close()
        shutil.rmtree(self._files)

    def run(self, *words: str, check: bool = True, **variables: str) -> str:
        """Run a command on node 0 in `folder`, and return its output.

        Raises:
            SlurmError: the command fails, and `check` is set.
        """
        done = subprocess.run(
            self._network.command(0, words, self.folder),
            env=self._environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise SlurmError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def submit(self, *words: str, **variables: str) -> str:
        """Run `sbatch WORDS`. Return the number of the job."""
        return self.run("sbatch", "--parsable", *words, **variables).strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` tells, such as ``JobState``; nothing without the job."""
        text = self.run("scontrol", "--oneliner", "show", "job", number, check=False)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, number: str, state: str, seconds: float = 120.0) -> dict[str, str]:
        """Wait until a job is in a state, such as ``COMPLETED``. Return what `job` returns."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.clear()
            found.update(self.job(number))
            return found.get("JobState") == state

        wait_for(reached, seconds, lambda: f"job {number} is not {state}: {found}")
        return found

    def processes(self, node: int, name: str = "") -> list[int]:
        """Return the processes of a node, but the one that holds its network.

        name: words of their command lines.
        """
        own, found = self._network.namespaces(node)[0].readlink(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if (process / "ns/net").readlink() == own and name in words:
                    found.append(int(process.name))
        return sorted(set(found) - {self._network.pid(node)})

    def is_idle(self) -> bool:
        """Return whether all nodes answer and have no job."""
        states = self.run("sinfo", "-ho", "%T %D", "-plong", check=False).strip()
        return states == f"idle {len(self.nodes)}"

    def kill_daemon(self, node: int) -> None:
        """Kill slurmd on a node. The tasks of its jobs go on."""
        (pid,) = [one for one in self.processes(node, "slurmd -D") if _is(one, "slurmd")]
        os.kill(pid, 9)

    def start_daemon(self, node: int) -> None:
        """Start slurmd on a node, again after `kill_daemon`."""
        self._start_on(node, f"slurmd -D -N node{node} -f {self._files}/slurm.conf")

    def lose_power(self, node: int) -> None:
        self._network.lose_power(node)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self._files.glob("*.log")))

    def _start(self) -> None:
        files = self._files
        files.chmod(0o755)
        (files / "munge").mkdir(mode=0o755)
        shutil.chown(files / "munge", "munge", "munge")
        key = files / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        shutil.chown(key, "munge", "munge")
        nodes = [
            f"NodeName={self._network.name(node)} NodeAddr={self._network.address(node)}"
            for node in self.nodes
        ]
        settings = _CONFIGURATION.format(folder=files, grace=GRACE_S, nodes="\n".join(nodes))
        (files / "slurm.conf").write_text(settings)
        for number in range(8):
            (files / f"gpu{number}").touch()
        (files / "gres.conf").write_text(f"Name=gpu File={files}/gpu[0-7]\n")
        self._network.__enter__()
        munge = f"{files}/munge"
        options = f"--socket={munge}/socket --key-file={key} --pid-file={munge}/pid"
        options += f" --log-file={munge}/log --seed-file={munge}/seed"
        who = "setpriv --reuid=munge --regid=munge --clear-groups"
        self._start_on(0, f"{who} munged --foreground {options}")
        wait_for((files / "munge/socket").exists, _START_S)
        self._start_on(0, f"slurmctld -D -i -f {files}/slurm.conf")
        for node in self.nodes:
            self.start_daemon(node)
        wait_for(self.is_idle, _START_S, self.log)

    def _start_on(self, node: int, command: str) -> None:
        """Start a daemon in the background, as a child of the first process of a namespace."""
        # The shell outlives the daemon, as the jobs do, and collects processes without a parent.
        space = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [*space, "bash", "-c", f"sleep infinity & {command} & wait"]
        out = (self._files / "daemons.log").open("ab")
        with out:
            self._daemons.append(
                subprocess.Popen(
                    self._network.command(node, words, self.folder),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def _environment(self, **variables: str) -> dict[str, str]:
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        return {**os.environ, "PATH": path, "SLURM_CONF": f"{self._files}/slurm.conf", **variables}


def wait_for(
    condition: Callable[[], Any], seconds: float = 60.0, why: Callable[[], str] = lambda: ""
) -> None:
    """Wait until a condition holds. Raise SlurmError after some seconds, with the end of `why`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SlurmError(f"waited longer than {seconds:g} s. {why()[-9000:]}")
        time.sleep(0.05)


def _is(pid: int, name: str) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == name
