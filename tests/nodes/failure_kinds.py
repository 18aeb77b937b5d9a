"""The ways in which a campaign breaks a run, when, and what must hold then."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

KILL, HANG, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
# After the other side has been silent for 25 s, and rank 0 has waited 10 s for ranks to answer.
_LINK_S = 45.0
_S3 = "http://10.77.0.1:5000"
AWS = {
    "AWS_ENDPOINT_URL": _S3,
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class Moment:
    """When a failure comes: ``seconds`` after a condition first holds."""

    text: str
    holds: Callable[[Any, float], bool]
    seconds: float
    _since: float | None = None

    def has_come(self, case: Any, age: float) -> bool:
        """age: seconds since the run was started."""
        if self._since is None and self.holds(case, age):
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since >= self.seconds


def in_training(rng: random.Random, steps: int, _every: int) -> Moment:
    step, seconds = rng.randrange(1, steps - 4), rng.uniform(0, 0.12)

    def holds(case: Any, _: float) -> bool:
        file = case.run_dir / "metrics.jsonl"
        return file.exists() and file.read_bytes().count(b"\n") >= step

    return Moment(f"{seconds:.3f} s after step {step}", holds, seconds)


def in_a_save(rng: random.Random, steps: int, every: int) -> Moment:
    step, seconds = every * rng.randrange(1, steps // every), rng.uniform(0, 0.06)

    def holds(case: Any, _: float) -> bool:
        return any((case.run_dir / "checkpoints").glob(f"step-{step}.tmp*"))

    return Moment(f"{seconds:.3f} s into the save of step {step}", holds, seconds)


def in_the_start(rng: random.Random, _steps: int, _every: int, most: float = 1.5) -> Moment:
    seconds = rng.uniform(0.2, most)
    return Moment(f"{seconds:.3f} s after the start", lambda _, age: age >= seconds, 0)


def in_an_upload(rng: random.Random, steps: int, every: int) -> Moment:
    step, seconds = every * rng.randrange(1, steps // every), rng.uniform(0, 0.5)

    def holds(case: Any, _: float) -> bool:
        return any((case.store / f"run/checkpoints/step-{step}").glob("*"))

    return Moment(f"{seconds:.3f} s into the upload of step {step}", holds, seconds)


Undo = tuple[float, Callable[[], object]] | None


@dataclass(frozen=True)
class Kind:
    """A way to break a run, and what must hold then.

    act: breaks it; returns after how many seconds to mend it, and how, or None.
    how: ``ranks`` of a job, mtrain's ``launcher`` on one node, or ``torchrun`` on each.
    shapes: nodes and workers of each, to choose from.
    says: pattern of the line on the failure; "" if nobody need say anything. It comes within
        ``within_s`` seconds, and names the victim if ``names_victim``.
    ends_within_s: limit for all processes to end; 0 for none.
    codes: exit codes that a process may have.
    loses_nothing: whether no step may be trained again. is_clean: whether nothing may be left
        behind even before the next start.
    store: URL of the copy. loses_machine: whether the run then goes on from the copy alone.
    keeps: whether the copy must have all checkpoints of `train.keep_every` at the end.
    disk_kib: size of the run's disk, or of the store's (``full_store``), which ``act`` fills.
    """

    count: int
    act: Callable[[Any], Undo]
    moment: Callable[[random.Random, int, int], Moment] = in_training
    how: str = "ranks"
    shapes: Sequence[tuple[int, int]] = ((2, 1), (2, 1), (2, 2))
    words: Sequence[str] = ()
    says: str = ""
    names_victim: bool = False
    within_s: float = 10.0
    ends_within_s: float = 0.0
    codes: Sequence[int] = (0,)
    loses_nothing: bool = False
    is_clean: bool = False
    store: str = ""
    loses_machine: bool = False
    keeps: bool = False
    disk_kib: int = 0
    full_store: bool = False
    pace_s: float = 0.0
    prepare: Sequence[Callable[[Any], Callable[[], object]]] = field(default=())

    @property
    def says_pattern(self) -> re.Pattern[str]:
        return re.compile(self.says or r"(?!)")

    def servers(self, case: Any) -> set[int]:
        """Return processes on the nodes that are no part of the run."""
        return {case.server.pid} if getattr(case, "server", None) is not None else set()


def _victim(case: Any) -> int:
    """Choose a rank, and note how a line names it."""
    rank = case.rng.randrange(case.outcome.workers)
    case.outcome.victim = f"rank {rank}"
    return rank


def _to_one(number: signal.Signals, case: Any) -> Undo:
    rank = _victim(case)
    if case.network.count > 1:
        case.outcome.victim += f" on 10.77.0.{rank // case.per_node + 1}"
    os.kill(case.rank_pids[rank], number)
    return None


def _to_one_of_a_job(case: Any) -> Undo:
    """Kill a rank. Its scheduler then ends the job, since nobody may know the rank yet."""
    _to_one(KILL, case)

    def end() -> None:
        _to_all(signal.SIGTERM, case)
        time.sleep(3)
        _kill_all(case)

    return 5.0, end


def _to_all(number: signal.Signals, case: Any) -> Undo:
    for pid in case.rank_pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return None


def _to_the_launcher(case: Any, *numbers: signal.Signals) -> Undo:
    for number in numbers:
        os.kill(case.attempt.pids[0], number)
        time.sleep(0.05)
    return None


def _kill_node(case: Any) -> Undo:
    node = _node(case)
    case.network.kill(node)
    return None


def _node(case: Any) -> int:
    node = case.rng.randrange(case.network.count)
    case.outcome.victim = f"on 10.77.0.{node + 1}"
    return node


def _lose_power(case: Any) -> Undo:
    case.network.lose_power(_node(case))
    return None


def _hang(case: Any) -> Undo:
    rank = _victim(case)
    pid = case.rank_pids[rank]
    os.kill(pid, HANG)
    return 25.0, partial(_continue, pid)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, GO_ON)


def _cut(case: Any, *, for_good: bool) -> Undo:
    node = _node(case)
    case.network.cut(node)
    case.outcome.victim = "10.77.0."  # each side names the other
    return None if for_good else (case.rng.uniform(2, 3), partial(case.network.mend, node))


def _slow_link(case: Any) -> Undo:
    node = _node(case)
    case.network.slow(node, f"{case.rng.randrange(1, 9)}mbit")
    return case.rng.uniform(1, 3), partial(case.network.slow, node)


def _kill_agent(case: Any) -> Undo:
    node = case.rng.randrange(case.network.count)
    case.outcome.victim = f"node{node}"
    os.kill(case.attempt.pids[node], KILL)
    return None


def _fault(name: str, case: Any) -> Undo:
    number = {"nth": case.rng.randrange(1, 9), "from": case.rng.randrange(1, 9), "slow": 0.4}
    case.fault(name, number.get(name, 0))
    case.outcome.victim = "run.remote="
    return None


def _fault_of_one_node(name: str, case: Any) -> Undo:
    case.fault(name, 0, 1)
    case.outcome.victim = "run.remote="
    return None


def _fault_for(name: str, seconds: float, case: Any) -> Undo:
    _fault(name, case)
    return seconds, partial(case.fault, None)


def _fill(case: Any) -> Undo:
    """Fill a small disk but for a few KiB."""
    folder = case.store if case.kind.full_store else case.run_dir.parent
    free = os.statvfs(folder)
    spare = case.rng.choice((0, 4096, 65536))
    # The run may take the rest meanwhile.
    with contextlib.suppress(OSError), (folder / "filler").open("wb") as file:
        file.write(b"x" * max(0, free.f_bavail * free.f_frsize - spare))
    case.outcome.victim = "No space left on device"
    return None


def _limit_files(case: Any) -> Undo:
    """Let one rank write no more than the first bytes of a file for a while."""
    rank = case.rng.randrange(1, case.outcome.workers)
    case.outcome.victim = f"rank {rank}: File too large"
    pid = case.rank_pids[rank]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    return 1.5, end


def _slow_store(case: Any) -> Callable[[], object]:
    case.fault("slow", 0.15)
    return lambda: None


def _kill_all(case: Any) -> Undo:
    for node in range(case.network.count):
        case.network.kill(node)
    return None


def _serve_s3(case: Any) -> Callable[[], object]:
    """Start a server of the S3 protocol on node 0, with a bucket."""
    words = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
    nowhere = subprocess.DEVNULL
    case.server = subprocess.Popen(case.network.command(0, words), stdout=nowhere, stderr=nowhere)
    case.variables |= AWS
    make = (
        "import time, s3fs\n"
        "for _ in range(200):\n"
        "    try:\n"
        "        s3fs.S3FileSystem().mkdir('bucket'); break\n"
        "    except Exception: time.sleep(0.2)\n"
    )
    environment = {**os.environ, **AWS}
    subprocess.run(
        case.network.command(0, [sys.executable, "-c", make]), env=environment, check=True
    )

    def stop() -> None:
        case.server.kill()
        case.server.wait()

    return stop


def _end_server(case: Any) -> Undo:
    case.outcome.victim = "run.remote="
    case.server.kill()
    return None


def _stop_server(case: Any) -> Undo:
    os.kill(case.server.pid, HANG)
    return case.rng.uniform(2, 6), partial(_continue, case.server.pid)


_GONE = r"^error: rank \d+ .*is gone"
_STOPPED = r"stopped on request after step"
_COPY = r"run\.remote=.*(failed|not complete|waits|not copied)"
_NODES = (2, 1), (2, 2)
_DEAD = (-KILL, 1)
_STORE: dict[str, Any] = {
    "store": "faulty://{store}", "pace_s": 0.25, "loses_machine": True, "shapes": ((2, 1), (1, 2)),
    "is_clean": True,
}  # fmt: skip
_SIGNALS: dict[str, Any] = {
    "says": _STOPPED, "within_s": 15, "ends_within_s": 25, "loses_nothing": True, "is_clean": True
}  # fmt: skip
_OWN: dict[str, Any] = {"how": "launcher", "shapes": ((1, 2),)}
_TO_DIE: dict[str, Any] = {
    "says": _GONE, "names_victim": True, "codes": _DEAD, "ends_within_s": 20
}  # fmt: skip

KINDS: dict[str, Kind] = {
    "kill -9 of a rank": Kind(12, partial(_to_one, KILL), **_TO_DIE),
    "kill -9 of a rank in a save": Kind(10, partial(_to_one, KILL), in_a_save, **_TO_DIE),
    "kill -9 of a rank that starts": Kind(
        6, _to_one_of_a_job, in_the_start, codes=(*_DEAD, 0, 2, 143, -signal.SIGTERM),
        ends_within_s=15,
    ),
    "kill -9 of a node's processes": Kind(8, _kill_node, shapes=((2, 2),), **_TO_DIE),
    "a node loses its power": Kind(
        3, _lose_power, shapes=_NODES, says=_GONE, names_victim=True, within_s=_LINK_S, codes=_DEAD
    ),
    "a rank hangs, topology.timeout_s=6": Kind(
        4, _hang, shapes=_NODES, words=("topology.timeout_s=6",), says="^error: ", codes=(1,),
        names_victim=True, within_s=25,
    ),
    "a link is cut for 2 to 3 s": Kind(8, partial(_cut, for_good=False), loses_nothing=True),
    "a link is cut for good": Kind(
        3, partial(_cut, for_good=True), says=_GONE, names_victim=True, within_s=_LINK_S, codes=(1,)
    ),
    "a link is cut for good, topology.timeout_s=8": Kind(
        3, partial(_cut, for_good=True), words=("topology.timeout_s=8",), within_s=25, codes=(1,),
        says=r"^error: topology\.timeout_s=8: rank.*(\d kept the others waiting|may be rank 0)",
    ),
    "a link is slow for 1 to 3 s": Kind(6, _slow_link, loses_nothing=True),
    "SIGTERM to all ranks": Kind(5, partial(_to_all, signal.SIGTERM), **_SIGNALS),
    "SIGTERM to all ranks that start": Kind(
        6, partial(_to_all, signal.SIGTERM), in_the_start, codes=(0, 143, -signal.SIGTERM),
        ends_within_s=15, is_clean=True,
    ),
    "SIGTERM to a rank": Kind(5, partial(_to_one, signal.SIGTERM), **_SIGNALS),
    "SIGTERM in a save": Kind(5, partial(_to_all, signal.SIGTERM), in_a_save, **_SIGNALS),
    "SIGINT to all ranks": Kind(4, partial(_to_all, signal.SIGINT), **_SIGNALS),
    "SIGINT in a save": Kind(4, partial(_to_all, signal.SIGINT), in_a_save, **_SIGNALS),
    "SIGUSR2 to all ranks": Kind(4, partial(_to_all, signal.SIGUSR2), **_SIGNALS),
    "SIGUSR2 in a save": Kind(4, partial(_to_one, signal.SIGUSR2), in_a_save, **_SIGNALS),
    "SIGUSR1 to all ranks": Kind(
        4, partial(_to_all, signal.SIGUSR1), loses_nothing=True, is_clean=True
    ),
    "SIGUSR1 in a save": Kind(
        4, partial(_to_one, signal.SIGUSR1), in_a_save, loses_nothing=True, is_clean=True
    ),
    "launcher: kill -9 of a worker": Kind(
        5, partial(_to_one, KILL), says=r"^error: rank \d+ was killed by SIGKILL", codes=(0, 1),
        names_victim=True, **_OWN,
    ),
    "launcher: kill -9 of it": Kind(
        5, lambda case: _to_the_launcher(case, KILL), codes=(-KILL,), ends_within_s=3, **_OWN
    ),
    "launcher: SIGTERM": Kind(
        3, lambda case: _to_the_launcher(case, signal.SIGTERM), codes=(143,), **_SIGNALS, **_OWN
    ),
    "launcher: Ctrl-C": Kind(
        3, lambda case: _to_the_launcher(case, signal.SIGINT), codes=(130,), **_SIGNALS, **_OWN
    ),
    "launcher: SIGTERM while it starts": Kind(
        4, lambda case: _to_the_launcher(case, signal.SIGTERM), partial(in_the_start, most=9.0),
        codes=(143, -signal.SIGTERM), ends_within_s=25, is_clean=True, **_OWN,
    ),
    "launcher: Ctrl-C twice": Kind(
        3, lambda case: _to_the_launcher(case, signal.SIGINT, signal.SIGINT), codes=(130,),
        says="^killed; ", ends_within_s=5, **_OWN,
    ),
    "torchrun: kill -9 of an agent": Kind(
        4, _kill_agent, how="torchrun", shapes=((2, 1),), codes=(-KILL, 0, 1), ends_within_s=30,
        says=r"^error: rank \d: its torchrun on node\d is gone", names_victim=True,
        loses_nothing=True, is_clean=True,
    ),
    "a rank cannot write for 1.5 s": Kind(
        5, _limit_files, says="was not saved", names_victim=True, within_s=5, pace_s=0.25,
        loses_nothing=True, is_clean=True,
    ),
    "the disk is full": Kind(
        5, _fill, disk_kib=24_000, says="was not saved", names_victim=True, codes=(0, 1),
        within_s=15, pace_s=0.2,
    ),
    "the store refuses writes": Kind(
        5, partial(_fault, "refuse"), says=_COPY, names_victim=True, within_s=20, **_STORE
    ),
    "the store refuses the writes of one node": Kind(
        4, partial(_fault_of_one_node, "refuse"), names_victim=True, within_s=35,
        says=r"run\.remote=.*rank 1 on node1: AccessDenied", **_STORE | {"shapes": ((2, 1),)},
    ),
    "the store fails at the n-th write": Kind(6, partial(_fault, "nth"), keeps=True, **_STORE),
    "the store fails from the n-th write on": Kind(
        5, partial(_fault, "from"), says=_COPY, names_victim=True, within_s=25, **_STORE
    ),
    "the store is full": Kind(
        4, _fill, disk_kib=40_000, full_store=True, within_s=25,
        says=r"run\.remote=.*No space left", **_STORE | {"store": "file://{store}"},
    ),
    "the store cannot be reached": Kind(
        5, partial(_fault, "away"), says=_COPY, names_victim=True, within_s=20, **_STORE
    ),
    "the store cannot be reached for 3 s": Kind(
        4, partial(_fault_for, "away", 3.0), keeps=True, **_STORE
    ),
    "the store hangs for 6 s": Kind(4, partial(_fault_for, "hang", 6.0), keeps=True, **_STORE),
    "the store is slow": Kind(4, partial(_fault, "slow"), keeps=True, **_STORE),
    "kill -9 of all in an upload": Kind(
        8, _kill_all, in_an_upload, codes=(-KILL,), prepare=(_slow_store,),
        **_STORE | {"is_clean": False},
    ),
    "an S3 server ends": Kind(
        3, _end_server, says=_COPY, names_victim=True, within_s=40, ends_within_s=35,
        prepare=(_serve_s3,),
        **_STORE | {"store": "s3://bucket", "loses_machine": False},
    ),
    "an S3 server hangs for 2 to 6 s": Kind(
        3, _stop_server, prepare=(_serve_s3,),
        **_STORE | {"store": "s3://bucket", "loses_machine": False},
    ),
}  # fmt: skip
