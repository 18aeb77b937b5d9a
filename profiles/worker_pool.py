"""Worker processes that stay: each imports torch once and then runs many measurements.

A measurement on GPUs is often shorter than the start of its processes. The processes of a `Pool`
join a new process group for every task and leave it at the end of the task. If a task fails, all
processes end, because the others may wait for the one that failed. The next task starts new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

LIMIT_S = 300.0  # of one task


class RunFailed(Exception):
    """A task failed. The text is its cause, in one line."""


class Pool:
    """Processes of this machine, one for each GPU or several on its CPU.

    Args:
        workers: number of processes.
        device: ``cuda`` or ``cpu``.
        logs: folder for what the processes print; None for a temporary folder.
    """

    def __init__(self, workers: int, device: str, logs: Path | None = None) -> None:
        self.workers, self.device = workers, device
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self._logs = logs or self.folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._spare: tuple[list[Any], list[Connection]] | None = None
        self._tasks, self._used = 0, False
        self._splits = False  # whether the last task asked for new processes
        self._count: int | None = None  # number of workers of the last task

    def __enter__(self) -> Pool:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self._spare is not None:
            _end(*self._spare)
        self._folder.cleanup()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        workers: int | None = None,
        limit_s: float = LIMIT_S,
        splits: bool = False,
    ) -> Any:
        """Return what ``function(rank, workers, *arguments)`` returns on rank 0.

        Args:
            function: function of a module. Each process calls it in a new process group.
            workers: number of processes that take part, from rank 0; None for all.
            splits: whether the function may split the process group. On GPUs it then has new
                processes, because torch 2.11 crashes when it splits a second group of a process.

        Raises:
            RunFailed: the function failed on a process, or took longer than ``limit_s`` seconds.
        """
        count = self.workers if workers is None else workers
        if self._count not in (None, count) or (self.device == "cuda" and (splits or self._splits)):
            self.restart()  # after a group of another size torch 2.11 crashes, too
        self._count, self._splits = count, splits
        if not self._processes:
            self._start()
        self._tasks += 1
        self._used = True
        store = self.folder / f"store-{self._tasks}"
        for pipe in self._pipes[:count]:
            with suppress(BrokenPipeError):  # the process has ended, which the loop below notices
                pipe.send((function, arguments, count, str(store)))
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        while len(results) < count:
            for rank in range(count):
                if rank in results or not self._pipes[rank].poll(0.02):
                    continue
                try:
                    problem, results[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join(5)
                    problem = f"rank {rank} ended with code {self._processes[rank].exitcode}"
                if problem is not None:
                    self._stop()
                    raise RunFailed(problem)
            if time.monotonic() > deadline:
                for process in self._processes:
                    os.kill(process.pid, signal.SIGUSR1)  # its log shows where it waits
                time.sleep(0.5)
                self._stop()
                raise RunFailed(f"longer than {limit_s:.0f} s")
        return results[0]

    def restart(self) -> None:
        """Make the next task find new processes."""
        if self._used:
            self._stop()
            self._start()

    def _start(self) -> None:
        """Take the processes that wait, and start others in their place: imports take long."""
        self._used = False
        self._processes, self._pipes = self._spare or self._spawn()
        self._spare = self._spawn() if self.device == "cuda" else None

    def _spawn(self) -> tuple[list[Any], list[Connection]]:
        context = mp.get_context("spawn")
        processes: list[Any] = []
        pipes = []
        for rank in range(self.workers):
            mine, theirs = context.Pipe()
            log = self._logs / f"worker-{rank}.log"
            process = context.Process(
                target=_serve, args=(theirs, rank, self.device, self.workers, str(log)), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        return processes, pipes

    def _stop(self) -> None:
        _end(self._processes, self._pipes)
        self._processes, self._pipes = [], []


def _end(processes: list[Any], pipes: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()


def _serve(pipe: Connection, rank: int, device: str, processes: int, log: str) -> None:
    """Run the tasks that come through the pipe until it is closed."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)
    if device == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        threads = max(1, (os.cpu_count() or 1) // processes)
        torch.set_num_threads(threads)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, _run(rank, device, *task)))
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            line = (str(error).strip() or "no message").splitlines()[0]
            pipe.send((f"rank {rank}: {type(error).__name__}: {line}", None))
            return


def _run(
    rank: int,
    device: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    workers: int,
    store: str,
) -> Any:
    """Call the function in a new process group."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # unused: each task has a store of its own
    }
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)  # here, because processes that wait must take no memory
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(store, workers),
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=LIMIT_S),
        device_id=torch.device("cuda", rank) if cuda else None,
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result = function(rank, workers, *arguments)
    dist.destroy_process_group()
    torch.compiler.reset()
    _clear_sharding_prop_cache()  # a later mesh may look equal to one of this group
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return result
