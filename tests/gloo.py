"""Run a function on real gloo processes and return their results.

Processes are forked from a server that has imported what they need (`gloo_server`): the imports of
each process took most of the tests' time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mtrain_cli.launch.environment import Environment, ParallelDims
from mtrain_cli.launch.safe_pickle import guard_collectives


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run function(rank, world, *args) in ``world`` processes of one group.

    Returns the results in rank order. A failing process fails the test.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _main,
            args=(world, folder, function, args),
            nprocs=world,
            join=True,
            start_method="forkserver",
        )
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]


def environment(
    rank: int,
    world: int,
    cp: int | None = None,
    per_node: int | None = None,
    tp: int = 1,
    pp: int = 1,
) -> Environment:
    """Return the environment of one of ``world`` CPU processes; by default all share sequences."""
    dims = ParallelDims.of(world, pp=pp, cp=cp or world // (tp * pp), tp=tp)
    return Environment("cpu", dims, per_node or world, rank, rank, "mtrain", world)


# Some tests remove it, which must not decide how the kernels of all later processes run.
_GIVEN = {name: os.environ[name] for name in ("TRITON_INTERPRET",) if name in os.environ}


def start_server() -> None:
    """Start the server unless it runs. It looks for `gloo_server` in its working folder."""
    multiprocessing.set_forkserver_preload(["gloo_server"])
    with contextlib.chdir(Path(__file__).parent), mock.patch.dict(os.environ, _GIVEN):
        forkserver.ensure_running()


def _main(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    guard_collectives()  # as in mtrain's own workers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    result = function(rank, world, *args)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Like mtrain's workers, exit without finalization: a gloo thread that waits for Python's lock
    # could abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
