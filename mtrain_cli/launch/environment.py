"""What a run finds around it: the device, the number of workers, and how they divide into context groups and nodes."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.job import current_job

if TYPE_CHECKING:
    import torch

CPU_WORKERS = 2


@dataclass(frozen=True)
class Environment:
    """The facts behind every ``auto`` of the topology, and the place of this process.

    ``workers`` = ``dp`` (data parallel) x ``cp`` (context parallel); ranks of one context group are consecutive. A node may be virtual:
    ``workers_per_node`` is ``topology.gpus_per_node`` where given, while ``local_workers`` really run on this machine. ``launcher`` is
    ``mtrain``, ``torchrun`` or ``slurm``. ``restarts``: how often workers of this run were lost and started again by it.
    """

    device: str
    workers: int
    cp: int
    dp: int
    workers_per_node: int
    nodes: int
    rank: int
    local_rank: int
    launcher: str
    local_workers: int
    restarts: int = 0

    @property
    def dp_rank(self) -> int:
        """Which context group this worker belongs to."""
        return self.rank // self.cp

    @property
    def cp_rank(self) -> int:
        """Place of this worker in its context group."""
        return self.rank % self.cp


def resolve_environment(config: Config, *, planning: bool = False) -> Environment:
    """Turn every ``auto`` of ``config.topology`` into a fact.

    ``planning`` prices a run of any size on any machine: neither the GPUs of this machine nor the job that this process is part of count.

    Raises:
        ConfigError: sizes do not fit each other, this machine or the job; one line for each.
    """
    topology = config.topology
    job = None if planning else current_job()
    problems: list[str] = []

    gpus = _visible_gpus() if topology.device != "cpu" else 0
    device = ("cuda" if gpus else "cpu") if topology.device == "auto" else topology.device
    if device == "cuda" and not gpus and not planning:
        problems.append(
            "topology.device=cuda: no GPU is visible to torch on this machine; use cpu or auto"
        )

    given = _parse_count("topology.workers", topology.workers, problems)
    workers = given or (job.world_size if job else gpus or CPU_WORKERS)
    if job and given and given != job.world_size:
        problems.append(
            f"topology.workers={given}: {job.launcher} started {job.world_size} processes; leave it at auto or give {job.world_size}"
        )
    if not job and not planning and device == "cuda" and gpus and workers > gpus:
        problems.append(
            f"topology.workers={workers}: this machine has {gpus} GPU{'s' * (gpus > 1)}; give at most {gpus}, or auto"
        )

    cp = _parse_divisor(
        "topology.context_parallel", topology.context_parallel, workers, workers, problems
    )
    local_size = job.local_world_size if job else workers
    workers_per_node = _parse_divisor(
        "topology.gpus_per_node", topology.gpus_per_node, local_size, workers, problems
    )
    dp = workers // cp

    per_pass = dp * config.train.micro_batch
    if not problems and config.train.global_batch % per_pass:
        problems.append(
            f"train.global_batch={config.train.global_batch}: must be a multiple of {per_pass} = "
            f"{dp} context groups (topology.workers={workers} / context_parallel={cp}) x train.micro_batch={config.train.micro_batch}"
        )
    if problems:
        raise ConfigError(*problems)
    return Environment(
        device=device,
        workers=workers,
        cp=cp,
        dp=dp,
        workers_per_node=workers_per_node,
        nodes=workers // workers_per_node,
        rank=job.rank if job else 0,
        local_rank=job.local_rank if job else 0,
        launcher=job.launcher if job else "mtrain",
        local_workers=local_size,
        restarts=job.restarts if job else 0,
    )


def host_memory() -> int:
    """Bytes of memory of this machine, or those that a container or a job's scheduler leaves this process of them."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def describe_host_memory() -> str:
    """Behind "this machine": its memory, or what a limit leaves of it, in whole GiB."""
    limited = any(limit <= host_memory() for limit in memory_limits())
    return f"{'lets this process have' if limited else 'has'} {host_memory() / 2**30:,.0f} GiB"


def memory_limits(root: Path = Path("/")) -> list[int]:
    """Bytes that the memory cgroups of this process allow, its own and those above it, as docker, Kubernetes and SLURM set them.

    Both versions of cgroups are read. A container may see its own group as the root, while /proc names it as the machine does: then the
    limit of the root is read. Without a limit version 2 gives nothing, version 1 a number near 2^63. root: of the file system.
    """
    found = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        limits = [_read_text(mount / folder / name).strip() for folder in (group, *group.parents)]
        found += [int(limit) for limit in limits if limit.isdigit()]
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def gpu_index(environment: Environment) -> int:
    """Index of this worker's GPU among those that it can see; SLURM may show each task only its own.

    Raises:
        ConfigError: this machine shows fewer GPUs than it runs workers.
    """
    gpus = _visible_gpus()
    if gpus == 1 and environment.launcher == "slurm":
        return 0
    if environment.local_rank >= gpus:
        raise ConfigError(
            f"topology.device=cuda: worker {environment.local_rank} of this machine has no GPU, only {gpus} visible here"
        )
    return environment.local_rank


def nccl_variables(logs: Path, timeout_s: float) -> dict[str, str]:
    """What has a hang in NCCL end in time, for processes that are yet to start torch; where the user has not said otherwise.

    A collective that takes longer than ``topology.timeout_s`` is ended by NCCL's watchdog, which ends its process. By default the watchdog
    itself may be stuck, in a call to a device that does not answer, for 8 minutes, and having found a collective that takes too long it
    waits for four times 15 seconds before it ends the process, for all ranks to write down what they had posted last: four times 2.5 do,
    since that goes into the run's logs, and is small.
    """
    trace = str(logs / "nccl-rank-")
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's default, which older set-ups turn off
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(120, round(timeout_s))),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2500",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace,
        "TORCH_FR_DUMP_TEMP_FILE": trace,  # the same by its newer name
    }


def loopback_variables() -> dict[str, str]:
    """Has gloo and NCCL listen on loopback alone, for workers that are all on one machine.

    gloo would also look its address up by host name, which many laptops and containers cannot resolve.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    found = next((name for name in ("lo", "lo0") if name in interfaces), None)  # Linux, macOS
    return {} if found is None else {"GLOO_SOCKET_IFNAME": found, "NCCL_SOCKET_IFNAME": f"={found}"}


def describe_place(device: torch.device) -> str:
    """Host and device of this worker, such as ``node7, GPU 3 (NVIDIA H200)``."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{host}, {device.type}"
    import torch

    seen = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    index = device.index or 0
    return f"{host}, GPU {seen[index] if index < len(seen) else index} ({torch.cuda.get_device_name(device)})"


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _parse_count(key: str, value: int | str, problems: list[str]) -> int | None:
    """A positive count, or None for ``auto`` and for what it added to ``problems``."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problems.append(f"{key}={value}: must be auto or a whole number of at least 1")
        return None
    return value


def _parse_divisor(
    key: str, value: int | str, default: int, workers: int, problems: list[str]
) -> int:
    """``value`` where it divides ``workers``, ``default`` for auto."""
    size = _parse_count(key, value, problems) or default
    if workers % size == 0:
        return size
    allowed = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
    problems.append(
        f"{key}={size}: must divide the {workers} workers; possible are auto, {allowed}"
    )
    return workers
