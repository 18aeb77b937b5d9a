"""Run mtrain on the nodes of a `Network`: as ranks of a job, or under torchrun on each node.

Ranks are forked from a process that has imported everything: a start takes one second, not five.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
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
        return [
            line
            for line in self.outputs[rank].splitlines()
            if line.startswith(("error:", "mtrain:"))
        ]


class RanksError(RuntimeError):
    """A rank failed."""


@dataclass(frozen=True)
class Started:
    """The ranks of a run that has begun: the process of each, and the file of what it prints."""

    pids: list[int]
    outputs: list[Path]

    def wait(self, timeout: float | None = None) -> list[int] | None:
        """Return the exit codes when all have ended, or None after ``timeout`` seconds."""
        return _server().codes(timeout)


def start(
    network: Network,
    words: Sequence[str] | Sequence[Sequence[str]],
    folder: Path,
    per_node: int = 1,
    *,
    master: str | None = None,
    interface: str | None = "eth0",
    own: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
    again: str = "",
    temporary: Path | None = None,
    command: Sequence[str] = ("train",),
) -> Started:
    """Start `mtrain train WORDS` in `folder` with `per_node` ranks on each node. One run at a time.

    words: of all ranks, or a list for each rank.
    command: another command of mtrain.
    master: MASTER_ADDR; by default, the IPv4 address of node 0.
    interface: GLOO_SOCKET_IFNAME; None leaves the choice to gloo.
    own: more variables of a rank.
    again: begins the names of the files of outputs, to keep those of an earlier run in the folder.
    temporary: the temporary folder of all ranks; by default, each has one of its own.
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
        logs = folder / f"{again}rank-{rank}"
        ranks.append(
            {
                "words": [*command, *of_rank],
                "variables": {name: str(value) for name, value in variables.items()},
                "namespaces": list(map(str, network.namespaces(node))),
                "logs": str(logs),
                "temporary": str(temporary or logs),
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    pids = _server().start(ranks, folder)
    return Started(pids, [folder / f"{again}rank-{rank}" / "output" for rank in range(world)])


def train(
    network: Network,
    words: Sequence[str] | Sequence[Sequence[str]],
    folder: Path,
    per_node: int = 1,
    *,
    check: bool = True,
    **options: Any,
) -> Ended:
    """Run `mtrain train WORDS` to its end. options: of `start`.

    Raises:
        RanksError: a rank fails, and `check` is set.
    """
    started = start(network, words, folder, per_node, **options)
    codes = started.wait()
    assert codes is not None
    outputs = [output.read_text() for output in started.outputs]
    if check and any(codes):
        raise RanksError(f"exit codes {codes}: " + "\n".join(text[-2000:] for text in outputs))
    return Ended(codes, outputs)


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

        self._answers: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def start(self, ranks: list[dict[str, Any]], folder: Path) -> list[int]:
        assert self._process.stdin is not None
        print(json.dumps([ranks, str(folder)]), file=self._process.stdin, flush=True)
        pids = self.codes(None)
        assert pids is not None
        return pids

    def codes(self, timeout: float | None) -> list[int] | None:
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            return None
        if answer is None:
            raise RanksError("the server of ranks ended")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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
        print(json.dumps(running), file=answers, flush=True)
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
        tempfile.tempdir = rank["temporary"]
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
