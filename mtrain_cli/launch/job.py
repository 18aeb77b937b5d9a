"""A job that torchrun or srun started: the ranks of this process, and the store of all ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import ipaddress
import itertools
import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config import plugins
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.grouping import show_spans, spans
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.guarded_streams import print_error
from mtrain_cli.printable import one_line

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT = timedelta(minutes=10)
# Environment variables that a user may set for a job. MASTER_ADDR and MASTER_PORT are others.
SECRET, PORT = "MTRAIN_SECRET", "MTRAIN_PORT"
_decisions = itertools.count()
# Keys of the store before the first decision.
_HELLO, _JOINED, _NOTE, _NOTES = "mtrain hello", "mtrain joined", "mtrain note", "mtrain notes"
_HOST = "host of rank {}"
_smaller: tuple[Job, Job] | None = None  # the job that was started, and the one that continues
_NOTE_READ = "mtrain note is read"
_NOTE_TIMEOUT_S = 10.0
_ANSWER_S = 30.0  # of a store that is there


@dataclass(frozen=True)
class Job:
    """A job of several processes, and the ranks of this process, of all and of this machine.

    launcher: ``torchrun`` or ``slurm``.
    master_addr, master_port: of the job's store.
    restarts, max_restarts: how often the job was restarted, and how often torchrun may do so.
    name: differs between jobs and stays the same after a restart. Empty if unknown.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    restarts: int = 0
    max_restarts: int | None = None
    name: str = ""

    @property
    def address(self) -> str:
        """Address at which all ranks reach rank 0: loopback if the job has only one machine."""
        return "127.0.0.1" if self.one_machine else self.master_addr

    @property
    def one_machine(self) -> bool:
        """Whether all ranks share a machine, also those that wait since `continue_on`."""
        alone = self.local_world_size == self.world_size and self.local_rank == self.rank
        return alone and _smaller is None

    @property
    def started_again(self) -> bool:
        """Whether this job may be a restart: torchrun counts none after a change of its nodes."""
        return self.restarts > 0 or self.name.startswith("torchrun process")


def current_job(variables: Mapping[str, str] | None = None, check: bool = True) -> Job | None:
    """Return the job that this process belongs to, or None. Raise ConfigError for wrong variables.

    A single srun task is no job: mtrain starts the workers. Nor is a batch script outside srun,
    which has SLURM_PROCID but no SLURM step. variables: by default, those of this process.
    """
    variables = os.environ if variables is None else variables
    if _smaller is not None and variables is os.environ:
        return _smaller[1]
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _checked(_torchrun_job(variables), check)
    in_batch_script = (
        "SLURM_JOB_ID" in variables and not {"SLURM_STEP_ID", "SLURM_STEPID"} & variables.keys()
    )
    tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or "1"
    if "SLURM_PROCID" in variables and tasks != "1" and not in_batch_script:
        return _checked(_slurm_job(variables, _number(tasks, "SLURM_NTASKS")), check)
    if "RANK" in variables:
        _torchrun_job(variables)  # raises: it names what is missing
    return None


_NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
}


def _checked(job: Job, check: bool) -> Job:
    """Return the job, or raise ConfigError if its variables contradict each other."""
    rank, world, local_rank, local_world = _NAMES[job.launcher]
    of_world, of_machine = f"{world}={job.world_size}", f"{local_world}={job.local_world_size}"
    for name, value, allowed, what in (
        (world, job.world_size, job.world_size >= 1, "at least 1"),
        (rank, job.rank, job.rank < job.world_size, f"below {of_world}"),
        (
            local_world, job.local_world_size, 1 <= job.local_world_size <= job.world_size,
            f"at least 1, and at most {of_world}",
        ),
        (local_rank, job.local_rank, job.local_rank < job.local_world_size, f"below {of_machine}"),
        ("MASTER_PORT", job.master_port, 1 <= job.master_port <= 65535, "a port from 1 to 65535"),
    ):  # fmt: skip
        if check and not allowed:
            raise ConfigError(f"{name}={value}: must be {what}")
    return job


def hub_port() -> int:
    """Return the port of ``MTRAIN_PORT``; 0 without one, for any free port."""
    given = os.environ.get(PORT, "0")
    if not given.isdigit() or int(given) > 65535:
        line = "must be a port from 1 to 65535; unset it for any free port"
        raise ConfigError(f"{PORT}={given}: {line}")
    return int(given)


def job_rank() -> int:
    """Return the global rank of this process, 0 outside a job. Reads no other variable."""
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def continue_on(job: Job, keep: Sequence[int]) -> Job:
    """Make a job of fewer ranks the current one of this process, and return it.

    keep: the ranks that continue, by their old numbers. Others get numbers after these.
    """
    global _smaller
    rest = [rank for rank in range(job.world_size) if rank not in keep]
    smaller = replace(job, rank=[*keep, *rest].index(job.rank), world_size=len(keep))
    _smaller = job, smaller
    return smaller


def tell_host(job: Job) -> None:
    """Write the name of this rank's host to the job's store."""
    key = _HOST.format(job.rank)
    job_store(job).set(key, seal(key, socket.gethostname()))


def hosts_of_ranks(job: Job) -> list[str]:
    """Return the host of each rank, after all have called `tell_host`."""
    keys = [_HOST.format(rank) for rank in range(job.world_size)]
    return [unseal(key, job_store(job).get(key)) for key in keys]


def _torchrun_job(variables: Mapping[str, str]) -> Job:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in variables]:
        raise ConfigError(
            f"RANK={variables['RANK']}: the environment sets a rank but not {', '.join(missing)}. "
            "torchrun sets all of these; without a launcher, unset RANK."
        )
    numbers: dict[str, Any] = {
        name.lower(): _number(variables[name], name) for name in names if name != "MASTER_ADDR"
    }
    count, limit = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
    return Job(
        launcher="torchrun",
        master_addr=variables["MASTER_ADDR"],
        restarts=_number(variables.get(count, "0"), count),
        max_restarts=_number(variables.get(limit, "0"), limit),
        name=_torchrun_name(variables.get("TORCHELASTIC_RUN_ID", "none")),
        **numbers,
    )


def _torchrun_name(run_id: str) -> str:
    """Return --rdzv-id, or else a name of torchrun's agent, which survives a restart."""
    if run_id and run_id != "none":
        return f"torchrun {run_id}"
    with contextlib.suppress(OSError, IndexError):
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return f"torchrun process {os.getppid()} of {started} on {socket.gethostname()}"
    return ""


def _slurm_job(variables: Mapping[str, str], tasks: int) -> Job:
    def first(*names: str) -> str:
        return next((variables[name] for name in names if variables.get(name)), "")

    per_node = first("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    local_sizes = set(re.findall(r"(?:^|,)(\d+)", per_node or str(tasks)))
    if len(local_sizes) != 1:
        problem = "every node must run the same number of workers. Use srun --ntasks-per-node."
        raise ConfigError(f"SLURM_TASKS_PER_NODE={per_node}: {problem}")
    nodes = first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or "127.0.0.1"
    # Several steps of a job may run at the same time, so the port depends on the step, too.
    step, job_id = first("SLURM_STEP_ID") or "0", first("SLURM_JOB_ID")
    default_port = 20000 + (16 * _number(job_id or "0", "SLURM_JOB_ID") + int(step)) % 20000
    return Job(
        launcher="slurm",
        rank=_number(variables["SLURM_PROCID"], "SLURM_PROCID"),
        world_size=tasks,
        local_rank=_number(variables.get("SLURM_LOCALID", "0"), "SLURM_LOCALID"),
        local_world_size=int(local_sizes.pop()),
        master_addr=first("MASTER_ADDR") or first_host(nodes),
        master_port=_number(first("MASTER_PORT") or str(default_port), "MASTER_PORT"),
        restarts=_number(first("SLURM_RESTART_COUNT") or "0", "SLURM_RESTART_COUNT"),
        name=f"slurm {first('SLURM_CLUSTER_NAME')} {job_id}.{step}",
    )


def _number(text: str, name: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{name}={text}: the environment variable must be a whole number.")
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list. ``gpu[07-09,12],login1`` gives ``gpu07``."""
    head = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,\[]*)", nodes)
    if head is None:
        problem = "cannot read the first host. Set MASTER_ADDR."
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes}: {problem}")
    prefix, ranges, suffix = head.groups()
    return prefix + (re.split(r"[-,]", ranges)[0] if ranges else "") + suffix


@functools.cache
def job_store(job: Job) -> Store:
    """Return the key-value store of all processes of ``job``, served by torchrun or else by rank 0.

    Raises ConfigError if its address does not answer, or its port is in use, and RunError if a rank
    ends before all have met.
    """
    import torch.distributed as dist

    # Refuse a secret that others know, and a number that is no port, before anybody waits.
    shared_key("")
    hub_port()
    if _smaller is not None and job == _smaller[1]:
        return dist.PrefixStore(f"{job.world_size} ranks", job_store(_smaller[0]))
    store = open_store(job)
    if not torchrun_serves():
        with _explain_failures(job):
            _meet(job, store)
    return store


@functools.cache
def open_store(job: Job) -> Store:
    """Return the job's store before the ranks have met there. Raises ConfigError as `job_store`."""
    import torch.distributed as dist

    with _explain_failures(job):
        if job.rank or torchrun_serves():
            return connect(job, STORE_TIMEOUT)
        return dist.TCPStore(
            job.address, job.master_port, job.world_size, is_master=True, timeout=STORE_TIMEOUT,
            # Without a socket of ours, torch would listen on every interface.
            wait_for_workers=False, master_listen_fd=listen(job, job.master_port).detach(),
        )  # fmt: skip


def connect(job: Job, timeout: timedelta) -> Store:
    """Return a new connection to the job's store: no thread can use one in which another waits."""
    import torch.distributed as dist

    address = job.master_addr if torchrun_serves() else job.address
    _wait_for_port(address, job.master_port, timeout.total_seconds())
    open_store = functools.partial(
        dist.TCPStore, address, job.master_port, job.world_size, is_master=False, timeout=timeout,
        wait_for_workers=False,
    )  # fmt: skip
    store = _answer(open_store)
    if not torchrun_serves():
        return store
    # The store of torchrun survives a restart. The prefix hides the entries from before a restart.
    # All ranks have that of the job as started, also if it continues with fewer.
    size = (_smaller[0] if _smaller else job).world_size
    return dist.PrefixStore(f"mtrain/{job.restarts}/{size}", store)


@contextlib.contextmanager
def _explain_failures(job: Job) -> Iterator[None]:
    try:
        yield
    except RunError:
        raise
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        where = f"MASTER_ADDR={job.master_addr} MASTER_PORT={job.master_port}"
        advice = "Set both to rank 0's address and port."
        if job.rank == 0 and "already in use" in reason:
            advice = "Choose another port for all ranks."
        raise ConfigError(
            f"{where}: rank {job.rank} cannot reach the job's store there ({reason}). {advice}"
        ) from error


def _wait_for_port(address: str, port: int, seconds: float) -> None:
    """Wait until a program listens. Raise OSError if none does. torch would print its attempts."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _answer(open_store: Callable[[], Store]) -> Store:
    """Return what the function returns, or raise RuntimeError if that takes too long.

    At another program, which does not answer, torch would wait without end.
    """
    opened: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            opened.put(open_store())
        except Exception as error:  # the other thread raises it
            opened.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        store = opened.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise RuntimeError("another program may listen there: it does not answer") from None
    if isinstance(store, Exception):
        raise store
    return store


def torchrun_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _meet(job: Job, store: Store) -> None:
    """Wait on rank 0 for all ranks, or for a note of one that does not come (`tell_the_others`).

    torchrun does this itself: where it serves the store, it ends all ranks after the first.
    """
    if job.rank:
        try:
            size = int(unseal(_HELLO, store.get(_HELLO)))
            if not size:
                store.add(_NOTES, 1)
                raise SystemExit(2)  # rank 0 has printed why
            if size != job.world_size:
                name = "SLURM_NTASKS" if job.launcher == "slurm" else "WORLD_SIZE"
                raise ConfigError(
                    f"{name}={job.world_size}: rank {job.rank} on {socket.gethostname()} was "
                    f"started with this value, rank 0 with {size}. Start all ranks with the same "
                    "number."
                )
            if store.add(f"{_JOINED}/{job.rank}", 1) > 1:
                raise ConfigError(f"RANK={job.rank}: another process has this rank, too.")
        except ConfigError as error:
            _leave_note(job, store, error.problems)
            raise
        store.add(_JOINED, 1)
        return

    def late() -> list[int]:
        return [r for r in range(1, job.world_size) if not store.check([f"{_JOINED}/{r}"])]

    store.set(_HELLO, seal(_HELLO, str(job.world_size)))
    end, is_noted = time.monotonic() + STORE_TIMEOUT.total_seconds(), False
    roll_calls = [watch.roll_call(job, store) for watch in plugins.watches()]
    while store.add(_JOINED, 0) + store.add(_NOTES, 0) < job.world_size - 1:
        if not is_noted and store.check([_NOTE]):
            # A rank that does not find the store would wait for it until STORE_TIMEOUT.
            is_noted, end = True, time.monotonic() + _NOTE_TIMEOUT_S
        if time.monotonic() > end:
            break
        for call in roll_calls:
            call(late)
        time.sleep(0.05)
    require_no_note(store)
    if ranks := late():
        raise ConfigError(
            f"WORLD_SIZE={job.world_size}: rank {show_spans(spans(ranks))} did not come within "
            f"{STORE_TIMEOUT.total_seconds():g} s. Start all ranks within this time."
        )


def _leave_note(job: Job, store: Store, problems: Iterable[str]) -> None:
    store.set(_NOTE, seal(_NOTE, json.dumps([job.rank, *problems])))
    store.add(_NOTES, 1)


def require_no_note(store: Store) -> None:
    """Raise ConfigError with what a rank that does not come has told (`tell_the_others`)."""
    if not store.check([_NOTE]):
        return
    store.set(_NOTE_READ, "")
    text = unseal(_NOTE, store.get(_NOTE))
    try:
        rank, *problems = json.loads(text)
    except (ValueError, TypeError):
        rank, problems = "?", ["it does not come, and left a note that cannot be read."]
    raise ConfigError(*(f"rank {rank}: {problem}" for problem in problems))


def tell_the_others(problems: Iterable[str]) -> None:
    """Tell rank 0 why this rank of a job does not come, so that it need not wait. Never raise.

    Give up if rank 0 does not open its store within `_NOTE_TIMEOUT_S`. Rank 0 itself turns away
    all ranks that come within this time. Under torchrun, print it if rank 0 does not read it.
    """
    with contextlib.suppress(Exception):
        job = current_job(check=False)
        if job is None or (cache := job_store.cache_info()).misses > cache.currsize:
            return  # it found no store, or has left a note there
        if job.rank:
            store = connect(job, timedelta(seconds=_NOTE_TIMEOUT_S))
            _leave_note(job, store, problems)
            if torchrun_serves():  # it ends rank 0, too, which must first print why
                try:
                    store.wait([_NOTE_READ], timedelta(seconds=_ANSWER_S))
                    time.sleep(1)
                except RuntimeError:
                    for problem in problems if job.local_rank else ():  # else it is printed
                        print_error(f"mtrain: rank {job.rank}: {one_line(problem)}")
        elif not (torchrun_serves() or cache.misses):  # it ends them, or all have met
            store = open_store(job)
            store.set(_HELLO, seal(_HELLO, "0"))
            _wait_for_readers(store, _NOTES, job)


def _wait_for_readers(store: Store, count: str, job: Job) -> None:
    """Wait on rank 0, which serves the store, until the others have read why it ends."""
    end = time.monotonic() + _NOTE_TIMEOUT_S
    while store.add(count, 0) < job.world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)


def listen(job: Job, port: int) -> socket.socket:
    """Open a listening socket of rank 0 at ``job.address``, or else on all interfaces.

    Else: the address is that of a proxy, or several machines connect but /etc/hosts maps the host
    name to loopback. port: 0 for any free port.
    """
    several, backlog = not job.one_machine, max(128, job.world_size)
    with contextlib.suppress(socket.gaierror):
        places = socket.getaddrinfo(job.address, port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in places:
            if several and ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
                continue
            try:
                return socket.create_server(place[:2], family=family, backlog=backlog)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def shared_key(purpose: str) -> str | None:
    """Return a key that depends on the job's secret and on ``purpose``. None without a secret.

    Raises ConfigError if the secret is empty, or if others can know it.
    """
    secret = os.environ.get(SECRET)
    if secret == "":
        raise ConfigError(f"{SECRET}: is empty. Set it to a secret, or unset it.")
    if secret and os.path.isfile(secret):
        raise ConfigError(
            f"{SECRET}: is the name of a file, which others can guess. Set it to what the file has."
        )
    return _digest(secret, f"mtrain {purpose}") if secret else None


def _digest(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def seal(name: str, text: str) -> str:
    key = shared_key("decision")
    seal = "" if key is None else _digest(key, f"{name}\0{text}")
    return f"{seal}\n{text}"


def unseal(name: str, content: bytes) -> str:
    text = content.decode(errors="replace").partition("\n")[2]
    if not hmac.compare_digest(content, seal(name, text).encode()):
        raise ConfigError(
            f"{SECRET}: an entry in the job's store was written with another secret, or with none. "
            "Give all ranks the same one."
        )
    return text


def leave_word(key: str, text: str) -> None:
    """Leave a text in the job's store, for `find_word` on another rank. "" takes it back."""
    if (job := current_job()) is not None:
        job_store(job).set(key, seal(key, text))


def find_word(key: str) -> str:
    """Return the text that a rank has left, without waiting for one; "" if there is none."""
    job = current_job()
    if job is None or not (store := job_store(job)).check([key]):
        return ""
    return unseal(key, store.get(key))


class RankZeroEnds(SystemExit):
    """Rank 0 failed in a decision, and says why. This rank ends with the same code."""


def decide_on_rank_zero(action: Callable[[], str], key: str = "") -> str:
    """Call ``action`` on global rank 0 only, and return its text on every rank.

    All ranks call this in the same order, or with a key, as ranks beyond the job's size may, too.
    If it fails, the others exit with the code of rank 0.
    """
    job = current_job()
    if job is None or (job.world_size == 1 and not key):
        return action()
    store, key = job_store(job), key or f"decision/{next(_decisions)}"
    if job.rank == 0:
        try:
            text = action()
        except Exception as error:
            code = 2 if isinstance(error, ConfigError) else 1
            store.set(key, seal(key, json.dumps({"exit_code": code})))
            if not torchrun_serves():
                _wait_for_readers(store, f"readers of {key}", job)
            raise
        store.set(key, seal(key, json.dumps({"text": text})))
        return text
    try:
        content = store.get(key)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"rank {job.rank}: rank 0 has ended, or does not answer ({reason}). See its output."
        ) from error
    answer = json.loads(unseal(key, content))
    if "exit_code" in answer:
        store.add(f"readers of {key}", 1)
        if torchrun_serves():
            time.sleep(3)  # torchrun ends rank 0, too, which must first print why
        raise RankZeroEnds(answer["exit_code"])
    return answer["text"]
