"""One worker: join the process group, run the target, and write a failure record after an error.

mtrain's launcher starts `python -m mtrain_cli.launch.worker RUN_DIR`. A process that torchrun or
srun started calls `run_in_job`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import pkgutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from mtrain_cli.config import keys, plugins, resolved_file
from mtrain_cli.config.cluster import cluster_of
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import failures, guarded_streams, progress_record, run_status, stop_request
from mtrain_cli.launch.environment import (
    Environment,
    gpu_index,
    loopback_variables,
    nccl_variables,
    resolve_environment,
)
from mtrain_cli.launch.failure_channel import FailureChannel, RankZeroDuties, exit_now
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.job import (
    STORE_TIMEOUT,
    Job,
    RankZeroEnds,
    current_job,
    decide_on_rank_zero,
    job_store,
    torchrun_serves,
)
from mtrain_cli.launch.restart import failure_summary
from mtrain_cli.launch.run_dir import RunDir, package_versions
from mtrain_cli.launch.safe_pickle import guard_collectives
from mtrain_cli.launch.stop_request import SAVE, SAVE_AND_STOP, STACK_DUMP, mark_stopped, remember
from mtrain_cli.launch.temporary_folders import is_private, private_folder

if TYPE_CHECKING:
    from torch.distributed import Store

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Run a worker that mtrain's launcher started, and exit with 0, 1 or, for a mistake, 2."""
    parser = argparse.ArgumentParser(prog="python -m mtrain_cli.launch.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--restarts", type=int, default=0, help="number of restarts so far")
    parser.add_argument("--launcher-pid", type=int, help="exit when this parent process ends")
    parser.add_argument("--store", type=Path, required=True, help="the launcher's private folder")
    parser.add_argument("--target", required=True, help="module:function (see launch.local.launch)")
    arguments = parser.parse_args()
    guarded_streams.guard_streams(output_required=False)
    plugins.on_broken = lambda _: None  # the command has printed the line
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remember(SAVE, SAVE_AND_STOP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (SAVE, SAVE_AND_STOP))  # see `Supervisor`
    if arguments.launcher_pid is not None:  # die with the parent, or now if it has ended
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != arguments.launcher_pid:
            os._exit(1)
    run_dir = RunDir(arguments.run_dir)
    rank = int(os.environ["RANK"])
    log = _open_log(run_dir, rank)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        config = resolved_file.load(run_dir.resolved)
        if error_file:
            record = progress_record.launcher_record_path(error_file, rank)
            progress_record.start_record(record, config.topology.timeout_s)
        environment = dataclasses.replace(
            resolve_environment(config), launcher="mtrain", restarts=arguments.restarts
        )
        store = open_store(arguments.store, environment.dims.workers, STORE_TIMEOUT)
        if _run_target(config, run_dir, environment, arguments.resume, arguments.target, store):
            mark_stopped(error_file)
    except BaseException as error:
        failure = failures.failure_from(error)
        failures.write_record(failure)
        with contextlib.suppress(OSError):
            traceback.print_exception(error, file=log)
        exit_now(2 if failure.kind == "config" else 1)
    exit_now(0)


def open_store(folder: Path, workers: int, timeout: timedelta) -> Store:
    """Open the file in which the workers meet. Raise OSError if others can open its folder."""
    from torch.distributed import FileStore

    if not is_private(folder):
        raise PermissionError(f"{folder}: other users can open the folder")
    store = FileStore(str(folder / "store"), workers)
    store.set_timeout(timeout)
    return store


def run_in_job(
    run_dir: RunDir,
    environment: Environment,
    resume: bool,
    target: str,
    config: Config | None = None,
) -> NoReturn:
    """Run the target of `local.launch` in this rank of a torchrun or srun job, and exit.

    The code is 0, 1 after a failure, or 2 after a user's mistake; rank 0 prints the cause.
    """
    import torch.distributed as dist

    guarded_streams.guard_streams(output_required=False)
    plugins.on_broken = lambda _: None  # the command has printed the line
    job = current_job()
    assert job is not None
    agent_is_gone = _follow_agent()
    if job.local_world_size == job.world_size:
        for name, value in loopback_variables().items():
            os.environ.setdefault(name, value)

    def failed(failure: failures.Failure) -> str:
        run_status.set_phase(run_dir, "failed", failure_summary(failure))
        return _resume_hint(run_dir, job)

    record = progress_record.job_record_path(run_dir.logs, job.rank)

    def forget() -> None:
        run_dir.discard()
        for remove in (record.unlink, run_dir.logs.rmdir, run_dir.path.rmdir) if job.rank else ():
            with contextlib.suppress(OSError):  # it is of the disk that rank 0 has, or not empty
                remove()

    def end() -> None:
        if not dist.is_initialized():
            with contextlib.suppress(Exception):  # a place may be out of reach
                forget()
            exit_now(128 + signal.SIGTERM)

    if torchrun_serves():  # it ends all ranks after one; others send it before a time limit
        stop_request.call_at(signal.SIGTERM, end)
    duties = RankZeroDuties(forget, failed, run_dir.beat)
    try:
        channel = FailureChannel(job, duties, run_dir.logs)
    except ConfigError:
        run_dir.discard()
        raise
    # Not earlier: a signal, such as torchrun's after the loss of a rank, ends a wait for rank 0.
    remember(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, SAVE, SAVE_AND_STOP)
    try:
        # Other machines may not have the disk of rank 0.
        text = decide_on_rank_zero(run_dir.resolved.read_text)
        _require_same_versions(
            json.loads(decide_on_rank_zero(lambda: json.dumps(package_versions()))), job.rank
        )
        _require_same_size(int(decide_on_rank_zero(lambda: str(job.local_world_size))), job)
        run_dir.path.mkdir(parents=True, exist_ok=True)
        with private_folder() as folder:
            (folder / "resolved.yaml").write_text(text)
            agreed = resolved_file.load(folder / "resolved.yaml")
        _require_same_config(config, agreed, job.rank)
        name = agreed.topology.cluster
        _require_same_cluster(name, decide_on_rank_zero(lambda: repr(cluster_of(name))), job.rank)
        with contextlib.suppress(OSError):
            run_dir.logs.mkdir(exist_ok=True)
        if environment.device == "cuda":
            for name, value in nccl_variables(run_dir.logs, agreed.topology.timeout_s).items():
                os.environ.setdefault(name, value)
        progress_record.start_record(record, agreed.topology.timeout_s)
        _run_target(agreed, run_dir, environment, resume, target, job_store(job))
        if agent_is_gone():
            who = f"rank {job.rank}: its torchrun on {socket.gethostname()} is gone"
            raise RunError(f"{who}, so the run has saved and stopped")
    except RankZeroEnds:
        channel.wait()
    except BaseException as error:
        failure = failures.failure_from(error)
        if not failure.is_consequence:  # torchrun may show this record as the cause
            failures.write_record(failure)
        channel.fail(failure)
    channel.close()
    record.unlink(missing_ok=True)
    if environment.rank == 0:
        run_dir.forget_requests()
    # 0 after a requested stop, too: for any other code torchrun and srun kill or restart the rest.
    exit_now(0)


def _follow_agent() -> Callable[[], bool]:
    """Let the run save and stop if torchrun ends: nobody would end or restart this worker.

    Return a function that says whether it has ended. False for ranks that torchrun did not start.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") is None or sys.platform != "linux":
        return lambda: False
    agent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return lambda: os.getppid() != agent


def _resume_hint(run_dir: RunDir, job: Job) -> str:
    """Return a line on how a torchrun or srun job resumes, empty without a checkpoint."""
    step = run_dir.last_step()
    if step is None:
        return ""
    if job.max_restarts is not None and job.restarts < job.max_restarts:
        count = f"restart {job.restarts + 1} of {job.max_restarts}"
        return f"torchrun restarts the workers ({count}) from the checkpoint of step {step}"
    again = f"run the same command with --resume {run_dir.path}"
    return f"resume from the checkpoint of step {step}: {again}"


def _run_target(
    config: Config,
    run_dir: RunDir,
    environment: Environment,
    resume: bool,
    target: str,
    store: Store,
) -> bool:
    """Join the process group, call the target, and leave. Return whether a request ended it."""
    # After an error, do not leave the group: leaving waits for peers that may be gone.
    import torch.distributed as dist

    run = pkgutil.resolve_name(target)
    plugins.on_broken = lambda _: None  # importing a command sets it
    job = current_job()
    assert job is not None, "workers run with torchrun's or srun's environment variables"
    guard_collectives()
    timeout = timedelta(seconds=config.topology.timeout_s)
    store = dist.PrefixStore("process_group", store)
    with _explain_timeouts(config, job.rank):
        progress_record.note("waits for all ranks to join", progress_record.SEVERAL)
        _require_interfaces()
        backend, device = "gloo", None
        if environment.device == "cuda":
            import torch

            backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", gpu_index(environment))
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, store=store, rank=job.rank, world_size=job.world_size, timeout=timeout,
            device_id=device,
        )  # fmt: skip
        signal.set_wakeup_fd(-1)  # from now on, SIGTERM only lets the run save and stop
        progress_record.note("prepares")
        stopped = run(config, run_dir, environment, resume)
        dist.destroy_process_group()
    return bool(stopped)


@contextlib.contextmanager
def _explain_timeouts(config: Config, rank: int) -> Iterator[None]:
    """Replace the error of a wait that timed out with a `PeerLostError` of one line."""
    try:
        yield
    except RuntimeError as error:
        if not failures.is_timeout(error):
            raise
        details = f" ({error})" if getattr(error, "peer_lost", False) else ""
        raise failures.PeerLostError(
            f"topology.timeout_s={config.topology.timeout_s:g}: rank {rank} waited longer than "
            f"this for another worker{details}, and no worker reported an error. Increase the "
            "value, or look in the run's logs/ for the worker that hangs."
        ) from error


def _require_interfaces() -> None:
    """Raise ConfigError for an interface that gloo would not find. ``lo:1`` is an alias of lo."""
    wanted = list(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
    present = [name for _, name in socket.if_nameindex()] if wanted else []
    for name in wanted:
        if name.partition(":")[0] not in present:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={name}: {socket.gethostname()} has no such network interface; "
                f"it has {', '.join(present)}"
            )


def _require_same_versions(expected: dict[str, str], rank: int) -> None:
    """Raise ConfigError with a line for each package whose version differs from rank 0's."""
    own = package_versions()
    problems = [
        f"{name}={own.get(name, 'missing')}: rank {rank} on {socket.gethostname()} has this "
        f"version, rank 0 has {expected.get(name, 'none')}. Install the same version on all "
        "machines."
        for name in {**expected, **own}
        if own.get(name) != expected.get(name)
    ]
    if problems:
        raise ConfigError(*problems)


def _require_same_size(expected: int, job: Job) -> None:
    """Raise ConfigError if this machine has another number of ranks than rank 0's."""
    if job.local_world_size != expected:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={job.local_world_size}: rank {job.rank} on {socket.gethostname()} "
            f"was started with this value, rank 0 with {expected}. Start the same number on every "
            "node."
        )


def _require_same_config(own: Config | None, agreed: Config, rank: int) -> None:
    """Raise ConfigError with a line for each key that differs from rank 0's, outside of run."""
    # Ranks would wait for each other in different collectives.
    expected = keys.values(agreed)
    problems = [
        f"{name}={keys.show(value)}: rank {rank} was started with this value, rank 0 with "
        f"{keys.show(expected[name])}. Start all ranks with the same settings."
        for name, value in (keys.values(own).items() if own else ())
        if not name.startswith("run.") and value != expected[name]
    ]
    if problems:
        raise ConfigError(*problems)


def _require_same_cluster(name: str, expected: str, rank: int) -> None:
    """Raise ConfigError if the file of a cluster, by which ranks choose, differs from rank 0's."""
    if repr(cluster_of(name)) != expected:
        raise ConfigError(
            f"topology.cluster={name}: rank {rank} on {socket.gethostname()} has another content "
            "of this file than rank 0. Give all machines the same file."
        )


def _open_log(run_dir: RunDir, rank: int) -> TextIO:
    """Open this worker's log, which has tracebacks and, except on rank 0, all its output."""
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    log = (run_dir.logs / f"rank-{rank}.log").open("a", buffering=1)
    if rank != 0:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    else:
        guarded_streams.divert_native_output(log)
    faulthandler.enable(file=log)
    faulthandler.register(STACK_DUMP, file=log, all_threads=True)
    return log


if __name__ == "__main__":
    main()
