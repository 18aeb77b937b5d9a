"""What workers run in the launch tests instead of the trainer. Each leaves its process id in the
run.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.transport import explain_peer_loss
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.progress import TrainingProgress


def _sign_in(run_dir: RunDir, environment: Environment) -> None:
    file = run_dir.path / f"pid-{environment.rank}"
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)


def adds_ranks(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> None:
    _sign_in(run_dir, environment)
    total = torch.tensor([float(environment.rank + 1)])
    dist.all_reduce(total)
    facts = [f"{total.item():g}", os.environ["OMP_NUM_THREADS"], environment.launcher]
    text = " ".join([*facts, str(resume), config.run.dir])
    (run_dir.path / f"result-{environment.rank}").write_text(text)
    print(f"words of rank {environment.rank}")


def rank_0_is_asked_to_end_after_the_run(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    def ask() -> None:
        while dist.is_initialized():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    dist.barrier()
    if environment.rank == 0:
        threading.Thread(target=ask, daemon=True).start()
    else:
        time.sleep(2)  # rank 0 waits for this rank


def libraries_write(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    """Write to standard error like C++ code, here and in a child process, with Python output
    between.
    """
    os.write(2, f"library of rank {environment.rank}\n".encode())
    print(f"Python of rank {environment.rank}", file=sys.stderr)
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; print('child of rank {environment.rank}', file=sys.stderr)",
        ],
        check=True,
    )
    if environment.rank == 0:
        os.write(2, b"the last words\n")
        os.abort()
    dist.barrier()


def rank_1_raises(
    _config: Config, run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    _sign_in(run_dir, environment)
    while True:
        dist.all_reduce(torch.ones(1))
        if environment.rank == 1:
            raise ValueError("a bad thing\nand more of it")


def rank_1_raises_late(
    _config: Config, run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    _sign_in(run_dir, environment)
    dist.barrier()
    if environment.rank == 0:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")
    time.sleep(1)
    raise ValueError("the true cause")


def rank_1_hangs(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    dist.barrier()
    if environment.rank == 1:
        progress_record.begin_step(2)
        time.sleep(600)
    dist.barrier()


def rank_1_is_killed_in_a_ring(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    _lost_in_a_ring(environment, signal.SIGKILL)


def rank_1_is_stopped_in_a_ring(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    _lost_in_a_ring(environment, signal.SIGSTOP)


def _lost_in_a_ring(environment: Environment, signum: signal.Signals) -> None:
    dist.barrier()
    progress_record.begin_step(3)
    if environment.rank == 1:
        progress_record.note("ring, layer 1, forward, step 2 of 3")
        os.kill(os.getpid(), signum)
    with explain_peer_loss(
        "ring, layer 1, forward, step 3 of 3",
        "waits for kv from rank 1",
        "kv from rank 1 did not arrive",
        1,
    ):
        dist.recv(torch.ones(1), 1)


def rank_0_is_aborted_as_by_nccl(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    """NCCL's watchdog ends a process after a wait that was too long, without a report."""
    dist.barrier()
    progress_record.begin_step(2 + environment.rank)
    time.sleep(600 if environment.rank else 4)
    os.abort()


def steps_until_stopped(
    _config: Config, run_dir: RunDir, environment: Environment, _resume: bool
) -> bool:
    flag = StopFlag(run_dir)
    dist.all_reduce(torch.ones(1))
    _sign_in(run_dir, environment)
    stop = save = 0.0
    saves = 0
    while not stop:
        if save:
            saves += 1
            flag.answer_saves()
            replace_text(run_dir.path / f"saved-{environment.rank}", str(saves))
        time.sleep(0.02)
        requests = torch.tensor([float(flag.requested()), float(flag.save_requested())])
        dist.all_reduce(requests)
        stop, save = requests.tolist()
    (run_dir.path / f"stopped-{environment.rank}").touch()
    return True


def finishes_when_asked(
    config: Config, run_dir: RunDir, environment: Environment, resume: bool
) -> bool:
    """The last step is under way when the request comes."""
    return not steps_until_stopped(config, run_dir, environment, resume)


def shows_steps_until_stopped(
    config: Config, run_dir: RunDir, environment: Environment, resume: bool
) -> bool:
    """Show the display of a training, from its first line to its summary."""
    with TrainingProgress(1000, 0, environment.rank == 0, log=run_dir.log) as progress:
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


def rank_0_waits_in_nccl(
    _config: Config, run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    total.item()
    _sign_in(run_dir, environment)
    if environment.rank == 1:
        time.sleep(600)
    dist.all_reduce(total)
    total.item()


def all_find_a_mistake(
    _config: Config, _run_dir: RunDir, _environment: Environment, _resume: bool
) -> None:
    raise ConfigError("data.path=x: too short", "seq=4096: too long")


def rank_1_is_killed_while_saving(
    _config: Config, run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    """Save step 1, then die with the files of step 2 half written."""
    _sign_in(run_dir, environment)
    checkpointer = Checkpointer(run_dir.checkpoints, keep=1)
    checkpointer.save(1, _state(1, environment.rank), asynchronous=False)
    if environment.rank == 1:
        _die_when_opening("step-2.tmp-2/__1_0.distcp")
    checkpointer.save(2, _state(2, environment.rank))
    checkpointer.wait()


def _state(step: int, rank: int) -> dict[str, object]:
    return {
        "model": {f"weight-{rank}": torch.full((1000,), float(step))},
        "trainer": {"step": step},
    }


def _die_when_opening(name: str) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if (
            event == "open"
            and str(arguments[0]).endswith(name)
            and Path(str(arguments[0])).exists()
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def rank_0_waits_and_nothing_ends_it(
    _config: Config, _run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    """As in a wait of NCCL that its watchdog does not see."""
    dist.barrier()
    progress_record.begin_step(2)
    if environment.rank == 0:
        progress_record.note("waits for gradients of all ranks", progress_record.SEVERAL)
    time.sleep(600)


def listening(pids: list[int]) -> list[tuple[int, str, int]]:
    """Return process, address and port of every TCP socket that the processes listen on (Linux)."""
    sockets: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A":  # TCP_LISTEN
                continue
            address, port = fields[1].split(":")
            words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
            family = socket.AF_INET if table == "tcp" else socket.AF_INET6
            sockets[fields[9]] = socket.inet_ntop(family, b"".join(words)), int(port, 16)
    listeners = []
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                if inode in sockets:
                    listeners.append((pid, *sockets[inode]))
    return listeners


def _own_ports(device: str) -> list[tuple[int, str, int]]:
    """Return the ports of this worker and its launcher after setting up collectives of several
    groups.
    """
    dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1))
    if device == "cuda":
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
    listeners = listening([os.getpid(), os.getppid()])
    dist.barrier()
    return listeners


def attacks_its_ports(
    _config: Config, run_dir: RunDir, environment: Environment, _resume: bool
) -> None:
    """Rank 0 sends every port of the run a message that sets the state of an elastic rendezvous.

    Then it gives the launcher time to read it.
    """
    listeners = _own_ports(environment.device)
    (run_dir.path / f"listening-{environment.rank}").write_text(
        "\n".join(f"{pid} {address} {port}" for pid, address, port in listeners)
    )
    ports = {port for _, _, port in listeners}
    if environment.rank == 0:
        bomb = (run_dir.path / "bomb").read_bytes() if (run_dir.path / "bomb").exists() else b"bomb"
        for port in ports:
            for key in (
                f"torch.rendezvous.{os.environ.get('TORCHELASTIC_RUN_ID')}",
                "torchelastic/role_info/0",
            ):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), timeout=1) as stranger,
                ):
                    stranger.sendall(_set_message(key, base64.b64encode(bomb)))
        time.sleep(1)
    dist.barrier()


def _set_message(key: str, value: bytes) -> bytes:
    """Return what a TCPStore client sends: VALIDATE with the magic number, then SET."""
    name = f"/{key}".encode()
    return (
        struct.pack("<BI", 0, 0x3C85F7CE)
        + b"\x01"
        + struct.pack("<Q", len(name))
        + name
        + struct.pack("<Q", len(value))
        + value
    )
