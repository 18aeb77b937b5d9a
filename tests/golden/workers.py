"""Run mtrain on several CPU workers, forked from a process that has imported everything.

A start then takes one second instead of five.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from golden import reach

_TESTS = Path(__file__).parents[1]


class Server:
    """A process that workers are forked from."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        environment.pop(
            "TRITON_INTERPRET", None
        )  # otherwise mtrain would take the interpreter for a kernel
        self._process = subprocess.Popen(
            [sys.executable, "-m", "golden.workers"],
            cwd=_TESTS,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, words: Sequence[str], workers: int, folder: Path) -> None:
        """Run `mtrain WORDS` in `folder` as `workers` processes, like torchrun.

        Raises:
            reach.CommandError: a worker fails.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([list(words), workers, str(folder)]), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline() or "[-1]")
        if any(codes):
            logs = "".join(
                path.read_text()[-1500:] for path in sorted(folder.glob("logs-*/output"))
            )
            raise reach.CommandError(
                f"mtrain {' '.join(words)}: exit codes {codes} of {workers} workers: {logs}"
            )

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def server() -> Server:
    """Return this process's server, which ends with it."""
    server_process = Server()
    atexit.register(server_process.close)
    return server_process


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    reach.warm_up()
    for line in sys.stdin:
        words, workers, folder = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        running = [_fork(rank, workers, port, words, Path(folder)) for rank in range(workers)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
        print(json.dumps(codes), file=answers, flush=True)


def _fork(rank: int, workers: int, port: int, words: list[str], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        os.chdir(folder)
        logs = folder / f"logs-{rank}"
        logs.mkdir(exist_ok=True)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"golden-{port}",
        }
        # Ranks that start together may take each other's temporary folder for abandoned.
        tempfile.tempdir = str(logs)
        output = os.open(logs / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        reach.main(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve()
