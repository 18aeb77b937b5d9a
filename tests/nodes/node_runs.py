"""Run mtrain on the nodes of a `Network`: as ranks of a job, or under torchrun on each node.

Ranks are forked from a process that has imported everything: a start takes one second, not five.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from golden import reach

from nodes.node_network import Network

_TESTS = Path(__file__).parents[1]
_libc = ctypes.CDLL(None, use_errno=True)
PORT = 29500  # on node 0, whose ports nobody else uses
SLEEP = "SLEEP_IN_LAYERS_S"  # variable of a rank: seconds that it sleeps in each layer


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run ended: exit codes by rank, and what each printed."""

    codes: list[int]
    outputs: list[str]

    def errors(self, rank: int) -> list[str]:
        return [line for line in self.outputs[rank].splitlines() if line.startswith("error:")]


class RanksError(RuntimeError):
    """A rank failed."""


def train(
    network: Network,
    words: Sequence[str] | Sequence[Sequence[str]],
    folder: Path,
    per_node: int = 1,
    *,
    master: str | None = None,
    interface: str | None = "eth0",
    own: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
    check: bool = True,
    command: Sequence[str] = ("train",),
) -> Ended:
    """Run `mtrain train WORDS` in `folder` with `per_node` ranks on each node.

    words: of all ranks, or a list for each rank.
    command: another command of mtrain.
    master: MASTER_ADDR; by default, the IPv4 address of node 0.
    interface: GLOO_SOCKET_IFNAME; None leaves the choice to gloo.
    own: more variables of a rank.

    Raises:
        RanksError: a rank fails, and `check` is set.
    """
    world = network.count * per_node
    each = (
        [list(words)] * world if isinstance(words[0], str) else [list(of_rank) for of_rank in words]
    )
    ranks = []
    for rank, of_rank in enumerate(each):
        node = rank // per_node
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": rank % per_node,
            "LOCAL_WORLD_SIZE": per_node,
            "MASTER_ADDR": master or network.address(0),
            "MASTER_PORT": PORT,
            "TORCHELASTIC_RUN_ID": "nodes",
        }
        variables |= {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
        variables |= own.get(rank, {})
        ranks.append(
            {
                "words": [*command, *of_rank],
                "variables": {name: str(value) for name, value in variables.items()},
                "namespaces": list(map(str, network.namespaces(node))),
                "logs": str(folder / f"rank-{rank}"),
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    codes = _server().run(ranks, folder)
    outputs = [(folder / f"rank-{rank}" / "output").read_text() for rank in range(world)]
    ended = Ended(codes, outputs)
    if check and any(codes):
        raise RanksError(f"exit codes {codes}: " + "\n".join(text[-2000:] for text in outputs))
    return ended


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (run_dir / "metrics.jsonl").open())]


class _Server:
    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        # With it, mtrain would take the interpreter for a kernel.
        environment.pop("TRITON_INTERPRET", None)
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "nodes.node_runs"],
            cwd=_TESTS,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, ranks: list[dict[str, Any]], folder: Path) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([ranks, str(folder)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RanksError("the server of ranks ended")
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    reach.warm_up()
    for line in sys.stdin:
        ranks, folder = json.loads(line)
        running = [_fork(rank, folder) for rank in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
        print(json.dumps(codes), file=answers, flush=True)


def _fork(rank: dict[str, Any], folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        _libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        _enter(rank["namespaces"])
        os.chdir(folder)
        logs = Path(rank["logs"])
        logs.mkdir(exist_ok=True)
        # Ranks that start together may take each other's temporary folder for abandoned.
        tempfile.tempdir = str(logs)
        os.environ |= rank["variables"]
        output = os.open(logs / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        if seconds := float(rank["variables"].get(SLEEP, 0)):
            reach.slow_down(seconds)
        reach.main(rank["words"])
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _enter(namespaces: Sequence[str]) -> None:
    files = [os.open(path, os.O_RDONLY) for path in namespaces]
    for file in files:
        if _libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(file)


if __name__ == "__main__":
    _serve()
