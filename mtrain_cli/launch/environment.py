"""Find out what a run can use: device, number of workers, context groups and nodes."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.job import current_job
from mtrain_cli.launch.parallel_dims import ParallelDims

if TYPE_CHECKING:
    import torch

CPU_WORKERS = 2


@dataclass(frozen=True)
class Environment:
    """The topology with every ``auto`` resolved, and this process's place in it.

    device: ``cuda`` or ``cpu``.
    dims: how the workers divide the work.
    workers_per_node: size of a node, real or virtual (``topology.gpus_per_node``).
    rank: global rank of this process.
    local_rank: rank of this process on its machine.
    launcher: ``mtrain``, ``torchrun`` or ``slurm``.
    local_workers: workers that really run on this machine.
    restarts: number of restarts of this run's workers so far.
    """

    device: str
    dims: ParallelDims
    workers_per_node: int
    rank: int
    local_rank: int
    launcher: str
    local_workers: int
    restarts: int = 0

    @property
    def nodes(self) -> int:
        """Number of nodes, real or virtual."""
        return self.dims.workers // self.workers_per_node


def resolve_environment(config: Config, *, planning: bool = False) -> Environment:
    """Resolve every ``auto`` of ``config.topology``.

    Args:
        planning: plan a run of any size on any machine. Ignore this machine's GPUs and the job that
            this process belongs to.

    Raises:
        ConfigError: sizes contradict each other, this machine or the job. One line per problem.
    """
    topology = config.topology
    job = None if planning else current_job()
    problems: list[str] = []

    gpus = _visible_gpus() if topology.device != "cpu" else 0
    device = ("cuda" if gpus else "cpu") if topology.device == "auto" else topology.device
    if device == "cuda" and not gpus and not planning:
        problems.append("topology.device=cuda: torch sees no GPU on this machine. Use cpu or auto.")

    given = _parse_count("topology.workers", topology.workers, problems)
    workers = given or (job.world_size if job else gpus or CPU_WORKERS)
    if job and given and given != job.world_size:
        problems.append(
            f"topology.workers={given}: {job.launcher} started {job.world_size} processes. Use "
            f"auto or {job.world_size}."
        )
    if not job and not planning and device == "cuda" and gpus and workers > gpus:
        problems.append(
            f"topology.workers={workers}: this machine has {gpus} GPU{'s' * (gpus > 1)}. Use at "
            f"most {gpus}, or auto."
        )

    cp = _parse_divisor(
        "topology.context_parallel", topology.context_parallel, workers, workers, problems
    )
    local_size = job.local_world_size if job else workers
    workers_per_node = _parse_divisor(
        "topology.gpus_per_node", topology.gpus_per_node, local_size, workers, problems
    )
    dims = ParallelDims.of(workers, cp=cp)

    per_pass = dims.dp * config.train.micro_batch
    if not problems and config.train.global_batch % per_pass:
        problems.append(
            f"train.global_batch={config.train.global_batch}: must be a multiple of {per_pass} = "
            f"{dims.dp} context groups (topology.workers={workers} / context_parallel={cp}) x "
            f"train.micro_batch={config.train.micro_batch}"
        )
    if problems:
        raise ConfigError(*problems)
    return Environment(
        device=device,
        dims=dims,
        workers_per_node=workers_per_node,
        rank=job.rank if job else 0,
        local_rank=job.local_rank if job else 0,
        launcher=job.launcher if job else "mtrain",
        local_workers=local_size,
        restarts=job.restarts if job else 0,
    )


def host_memory() -> int:
    """Return the bytes of host memory, or the limit that a container or scheduler sets."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def describe_host_memory() -> str:
    """Complete the phrase "this machine ..." with its memory, or its memory limit, in whole GiB."""
    limited = any(limit <= host_memory() for limit in memory_limits())
    return f"{'lets this process have' if limited else 'has'} {host_memory() / 2**30:,.0f} GiB"


def memory_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits, in bytes, of this process's cgroups and their ancestors.

    docker, Kubernetes and SLURM set such limits. Read cgroups v1 and v2. Read the root's limit too:
    a container may mount its own group as the root, while /proc gives the group's path on the host.
    Without a limit, v2 adds no number and v1 adds one near 2^63.

    Args:
        root: root of the file system.
    """
    limits = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))

        texts = [_read_text(mount / folder / name).strip() for folder in (group, *group.parents)]
        limits += [int(text) for text in texts if text.isdigit()]
    return limits


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def gpu_index(environment: Environment) -> int:
    """Return the index of this worker's GPU among the GPUs that it can see.

    SLURM may show each task only its own GPU.

    Raises:
        ConfigError: this machine has fewer visible GPUs than workers.
    """
    gpus = _visible_gpus()
    if gpus == 1 and environment.launcher == "slurm":
        return 0
    if environment.local_rank >= gpus:
        raise ConfigError(
            f"topology.device=cuda: worker {environment.local_rank} of this machine has no GPU. "
            f"Start one worker per visible GPU ({gpus})."
        )
    return environment.local_rank


def nccl_variables(logs: Path, timeout_s: float) -> dict[str, str]:
    """Return environment variables that make NCCL end a hang in time.

    Set each one before the process group is created, unless the user has set it.

    NCCL's watchdog ends a process whose collective takes longer than ``topology.timeout_s``. Two
    defaults delay that. The watchdog itself may be stuck for 8 minutes in a call to a device that
    does not respond. After it finds a late collective, it waits 4 x 15 seconds for all ranks to
    dump what they posted last. 4 x 2.5 seconds are enough here, because the dump is small and goes
    to the run's logs.
    """
    trace = str(logs / "nccl-rank-")
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's default, which older setups turn off
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(120, round(timeout_s))),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2500",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace,
        "TORCH_FR_DUMP_TEMP_FILE": trace,  # newer name of the same variable
    }


def loopback_variables() -> dict[str, str]:
    """Return variables that make gloo and NCCL listen on loopback only, for workers on one machine.

    Otherwise gloo would look up its address by host name, which many laptops and containers cannot
    resolve.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)  # Linux, macOS
    if loopback is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def describe_place(device: torch.device) -> str:
    """Return host and device of this worker, such as ``node7, GPU 3 (NVIDIA H200)``."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{host}, {device.type}"
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in listed if name.strip()]
    index = device.index or 0
    gpu = names[index] if index < len(names) else index
    return f"{host}, GPU {gpu} ({torch.cuda.get_device_name(device)})"


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _parse_count(key: str, value: int | str, problems: list[str]) -> int | None:
    """Return a positive count, or None for ``auto``. Report other values in ``problems``."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problems.append(f"{key}={value}: must be auto or a whole number of at least 1")
        return None
    return value


def _parse_divisor(
    key: str, value: int | str, default: int, workers: int, problems: list[str]
) -> int:
    """Return ``value`` if it divides ``workers``, and ``default`` for auto."""
    size = _parse_count(key, value, problems) or default
    if workers % size == 0:
        return size
    allowed = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
    problems.append(
        f"{key}={size}: must divide the {workers} workers. Use auto or one of {allowed}."
    )
    return workers
