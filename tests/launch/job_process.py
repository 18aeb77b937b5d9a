"""A rank of a torchrun or srun job that does what `mtrain train` does, with another target."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from importlib import metadata
from typing import NoReturn

import torch.distributed as dist

from mtrain_cli.composition import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import failure_channel, run_dir, worker
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.job import decide_on_rank_zero, job_rank, tell_the_others
from mtrain_cli.launch.local import launch
from mtrain_extras.watch import roll_call


def _raise(error: Exception) -> NoReturn:
    raise error


def main() -> None:
    """Run this process as a rank, and exit with its code."""
    target, *overrides = sys.argv[1:]
    if late := float(os.environ.get("LATE_S", 0)):
        connect = socket.create_connection
        # After all ranks have met at the store, the first connection is the one to rank 0's hub.
        socket.create_connection = lambda *args, **options: (
            time.sleep(late),
            connect(*args, **options),
        )[1]
    if other := os.environ.get("TORCH_VERSION"):
        version = metadata.version
        metadata.version = lambda name: other if name == "torch" else version(name)
    if number := os.environ.get("FAILS_TO_DECIDE"):
        worker.package_versions = lambda: _raise(OSError(int(number), os.strerror(int(number))))
    if "TERM_WHILE_JOINING" in os.environ:
        join = dist.init_process_group
        dist.init_process_group = lambda *args, **options: (
            os.kill(os.getpid(), signal.SIGTERM),
            join(*args, **options),
        )[1]
    roll_call.UNSEEN_S = float(os.environ.get("UNSEEN_S", roll_call.UNSEEN_S))
    try:
        roll_call.sign_in()
        if os.environ.get("ENDS_EARLY") == str(job_rank()):
            time.sleep(1)  # until it has shown that it lives
            os.kill(os.getpid(), signal.SIGKILL)
        if "DECIDES_FIRST" in os.environ:  # as --resume auto does
            failure_channel.FAREWELL_S = 1.0
            decide_on_rank_zero(str)
        config = compose.compose(overrides)
        environment = resolve_environment(config)
        sys.exit(
            launch(
                run_dir.create(config, overrides),
                environment,
                False,
                target=f"worker_targets:{target}",
                config=config,
            )
        )
    except ConfigError as error:
        print(f"before the workers: {error}", file=sys.stderr)
        tell_the_others(error.problems)
        sys.exit(2)
    except RunError as error:
        print(f"before the workers: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
