"""Run a module of mtrain as a command, in a process forked from the warm server.

The imports of a new process take three seconds, and one command starts several processes. The
server (`gloo_server`) has imported what they need. A forked process takes over the command line,
the environment, the working folder and the output, as a new process does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import gloo
import numpy as np
import torch
import torch.multiprocessing as mp

from mtrain_cli.launch import local

_OWN_FOLDER = str(Path(__file__).parent)


class Command:
    """A running ``python -m module arguments`` in ``folder``, with parts of Popen's interface.

    The workers that it starts are forked from it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        gloo.start_server()
        self.args = [module, *arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        outputs = list(map(str, self._streams))
        self._process = mp.get_context("forkserver").Process(
            target=_main, args=(self.args, str(folder), dict(environment), outputs)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the command takes longer.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return what the command wrote to stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = (stream.read_text() for stream in self._streams)
        return stdout, stderr

    def send_signal(self, signum: int) -> None:
        if self._process.exitcode is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run a `Command` and return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: the command takes longer than ``timeout`` seconds.
    """
    command = Command(module, arguments, folder, environment)
    try:
        stdout, stderr = command.communicate(timeout)
    finally:
        command.kill()
    return subprocess.CompletedProcess(command.args, command.returncode or 0, stdout, stderr)


def _main(words: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    for target, path in enumerate((os.devnull, *outputs)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, target)
        os.close(opened)
    os.chdir(folder)
    # With a GPU, the launcher may have opened NVML, which no worker with closed files can use.
    if not torch.cuda.is_available():
        local.Popen = ForkedWorker  # type: ignore[attr-defined]
    _become(words, environment)


class ForkedWorker(subprocess.Popen):
    """A worker that the launcher starts: forked from this process, not a new program."""

    def _execute_child(self, args: Sequence[str], *more: Any, **_: Any) -> None:
        environment = more[5]
        words = list(args)[list(args).index("-m") + 1 :]
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # locks, for example
            _become(words, environment, buffered=False)
        self._child_created = True


def _become(words: list[str], environment: Mapping[str, str], buffered: bool = True) -> NoReturn:
    """Run the module ``words[0]`` as the main program of this forked process, and exit."""
    gc.freeze()  # never finalize what belongs to the parent
    atexit._clear()
    for signum in signal.valid_signals():  # a new program keeps only what is ignored
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=not buffered)
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = {_OWN_FOLDER, str(Path(_OWN_FOLDER).parent), ""}
    sys.path[:] = [os.getcwd(), *filter(None, paths), *(p for p in sys.path if p not in ours)]
    sys.argv[:] = words
    random.seed()
    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    code: object = 1
    try:
        importlib.import_module(words[0]).main()
        code = 0
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)
