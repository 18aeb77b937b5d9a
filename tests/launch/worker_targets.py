"""What workers run in the launch tests, in the place of the trainer. Each leaves its process id in the run's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import whereabouts
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop import StopFlag
from mtrain_cli.parallel.mail import naming
from mtrain_cli.training.checkpoint import Checkpointer
from mtrain_cli.training.progress import Progress


def _sign_in(run_dir: RunDir, environment: Environment) -> None:
    file = run_dir.path / f"pid-{environment.rank}"
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)


def adds_ranks(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> None:
    _sign_in(run_dir, environment)
    total = torch.tensor([float(environment.rank + 1)])
    dist.all_reduce(total)
    facts = f"{total.item():g} {os.environ['OMP_NUM_THREADS']} {environment.launcher} {resume} {config.run.dir}"
    (run_dir.path / f"result-{environment.rank}").write_text(facts)
    print(f"words of rank {environment.rank}")


def libraries_write(_config: Config, _run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    """To standard error, as C++ does, in this process and in a child of it; Python writes there between them."""
    os.write(2, f"library of rank {environment.rank}\n".encode())
    print(f"Python of rank {environment.rank}", file=sys.stderr)
    subprocess.run([sys.executable, "-c", f"import sys; print('child of rank {environment.rank}', file=sys.stderr)"], check=True)
    if environment.rank == 0:
        os.write(2, b"the last words\n")
        os.abort()
    dist.barrier()


def rank_1_raises(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    _sign_in(run_dir, environment)
    while True:
        dist.all_reduce(torch.ones(1))
        if environment.rank == 1:
            raise ValueError("a bad thing\nand more of it")


def rank_1_raises_late(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    _sign_in(run_dir, environment)
    dist.barrier()
    if environment.rank == 0:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")
    time.sleep(1)
    raise ValueError("the true cause")


def rank_1_hangs(_config: Config, _run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    dist.barrier()
    if environment.rank == 1:
        whereabouts.begin(2)
        time.sleep(600)
    dist.barrier()


def rank_1_is_killed_in_a_ring(_config: Config, _run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    _lost_in_a_ring(environment, signal.SIGKILL)


def rank_1_is_stopped_in_a_ring(_config: Config, _run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    _lost_in_a_ring(environment, signal.SIGSTOP)


def _lost_in_a_ring(environment: Environment, signum: signal.Signals) -> None:
    dist.barrier()
    whereabouts.begin(3)
    if environment.rank == 1:
        whereabouts.note("ring, layer 1, forward, step 2 of 3")
        os.kill(os.getpid(), signum)
    with naming("ring, layer 1, forward, step 3 of 3", "waits for kv from rank 1", "kv from rank 1 did not come", 1):
        dist.recv(torch.ones(1), 1)


def rank_0_is_aborted_as_by_nccl(_config: Config, _run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    """What is left of a wait in NCCL that was too long: the watchdog ends the process, which can say nothing."""
    dist.barrier()
    whereabouts.begin(2 + environment.rank)
    time.sleep(600 if environment.rank else 4)
    os.abort()


def steps_until_stopped(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> bool:
    flag = StopFlag(run_dir, environment)
    dist.all_reduce(torch.ones(1))
    _sign_in(run_dir, environment)
    stop = torch.zeros(1)
    while not stop.item():
        time.sleep(0.02)
        stop = torch.tensor([float(flag.requested())])
        dist.all_reduce(stop)
    (run_dir.path / f"stopped-{environment.rank}").touch()
    return True


def finishes_when_asked(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:
    """Its last step was under way when the request came."""
    return not steps_until_stopped(config, run_dir, environment, resume)


def shows_steps_until_stopped(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:
    """With the display of a training, from its first line to its summary."""
    with Progress(1000, 0, environment.rank == 0, log=run_dir.log) as progress:
        progress.message("before the steps")
        steps_until_stopped(config, run_dir, environment, resume)
        time.sleep(0.5)  # the display refreshes four times a second
        progress.message("saving")
        progress.summary("stopped")
    print("a last word")
    return True


def sleeps(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    dist.barrier()
    _sign_in(run_dir, environment)
    time.sleep(600)


def rank_0_waits_in_nccl(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    total.item()
    _sign_in(run_dir, environment)
    if environment.rank == 1:
        time.sleep(600)
    dist.all_reduce(total)
    total.item()


def rank_0_ignores_sigterm(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    _sign_in(run_dir, environment)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    if environment.rank == 1:
        os._exit(7)
    time.sleep(600)


def all_find_a_mistake(_config: Config, _run_dir: RunDir, _environment: Environment, _resume: bool) -> None:
    raise ConfigError("data.path=x: too short", "seq=4096: too long")


def rank_1_is_killed_while_saving(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    """Saves step 1, then dies with the files of step 2 half written."""
    _sign_in(run_dir, environment)
    checkpointer = Checkpointer(run_dir.checkpoints, keep=1)
    checkpointer.save(1, _state(1, environment.rank), asynchronous=False)
    if environment.rank == 1:
        _die_when_opening("step-2.tmp-2/__1_0.distcp")
    checkpointer.save(2, _state(2, environment.rank))
    checkpointer.wait()


def _state(step: int, rank: int) -> dict[str, object]:
    return {"model": {f"weight-{rank}": torch.full((1000,), float(step))}, "trainer": {"step": step}}


def _die_when_opening(name: str) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(name) and Path(str(arguments[0])).exists():
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def rank_0_waits_and_nothing_ends_it(_config: Config, _run_dir: RunDir, environment: Environment, _resume: bool) -> None:
    """As in a wait of NCCL that its watchdog does not see."""
    dist.barrier()
    whereabouts.begin(2)
    if environment.rank == 0:
        whereabouts.note("waits for gradients of all ranks", whereabouts.SEVERAL)
    time.sleep(600)
