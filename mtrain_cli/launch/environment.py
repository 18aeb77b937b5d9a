"""Resolve what a run uses: device, number of workers, context groups and nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config.parallel_checks import number_of_chunks, uneven_rounds
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import Config, TopologyConfig
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.job import Job, current_job

if TYPE_CHECKING:
    import torch

CPU_WORKERS = 2
# Workers take turns on a core, for tests of many workers. Each takes hundreds of MiB of memory.
_WORKERS_PER_CORE = 8
_ALWAYS_ALLOWED = 16


@dataclass(frozen=True)
class ParallelDims:
    """The degree of each dimension. The product of the degrees is the number of workers.

    Ranks are row-major in the order of the fields. A stage holds some of the layers, tensor
    parallelism cuts their matrices into ``tp`` parts, and FSDP shards those over ``dp`` and ``cp``.
    """

    pp: int = field(default=1, metadata={"name": "pipeline"})  # stages
    dp: int = field(default=1, metadata={"name": "data"})  # context groups
    cp: int = field(default=1, metadata={"name": "context"})  # workers that share a sequence
    tp: int = field(default=1, metadata={"name": "tensor"})  # workers that share heads and MLPs

    @classmethod
    def of(cls, workers: int, **degrees: int) -> ParallelDims:
        """Return dimensions for the given degrees, where ``dp`` takes the rest of the workers.

        Raises ValueError if a degree is below 1, or the product does not divide the workers.
        """
        if min(degrees.values(), default=1) < 1:
            raise ValueError(f"{degrees}: degrees must be at least 1")
        dp, rest = divmod(workers, prod(degrees.values()))
        if rest or not dp:
            raise ValueError(f"{degrees}: the product must divide the {workers} workers")
        return cls(dp=dp, **degrees)

    @property
    def sizes(self) -> dict[str, int]:
        """The degree of each dimension, by name. Ranks are consecutive along the last dimension."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def workers(self) -> int:
        return prod(self.sizes.values())

    def coordinate(self, dim: str, rank: int) -> int:
        assert 0 <= rank < self.workers, (rank, self)
        return rank // self._stride(dim) % self.sizes[dim]

    def group(self, dim: str, rank: int) -> tuple[int, ...]:
        """Return ``rank`` and the ranks that differ from it only in the coordinate ``dim``."""
        stride = self._stride(dim)
        first = rank - self.coordinate(dim, rank) * stride
        return tuple(range(first, first + self.sizes[dim] * stride, stride))

    def groups(self, dim: str) -> list[tuple[int, ...]]:
        """Return all groups of a dimension. Every rank is in exactly one."""
        return sorted({self.group(dim, rank) for rank in range(self.workers)})

    def __str__(self) -> str:
        """Return the degrees, such as ``2 data x 4 context``. ``pp`` and ``tp`` only above 1."""
        shown = [f for f in fields(self) if f.name in ("dp", "cp") or getattr(self, f.name) > 1]
        return " x ".join(f"{getattr(self, f.name)} {f.metadata['name']}" for f in shown)

    def _stride(self, dim: str) -> int:
        """Return the difference in rank between neighbors along a dimension."""
        names = list(self.sizes)
        return prod(self.sizes[name] for name in names[names.index(dim) + 1 :])


@dataclass(frozen=True)
class Environment:
    """The topology without ``auto``, and the ranks of this process."""

    device: str  # ``cuda`` or ``cpu``
    dims: ParallelDims
    workers_per_node: int  # of a node that may be virtual (``topology.gpus_per_node``)
    rank: int
    local_rank: int  # on this machine
    launcher: str  # ``mtrain``, ``torchrun`` or ``slurm``
    local_workers: int
    restarts: int = 0  # of the workers so far

    @property
    def nodes(self) -> int:
        return self.dims.workers // self.workers_per_node

    @property
    def context_per_node(self) -> int:
        """Number of consecutive workers of a context group that share a node."""
        return min(self.workers_per_node // self.dims.tp, self.dims.cp)


_NO_GPU = (
    "topology.device=cuda: torch sees no GPU on this machine. Set topology.device to cpu or auto, "
    "or plan for GPUs with `mtrain train ... --dry-run`."
)


def resolve_environment(
    config: Config, *, planning: bool = False, job: Job | None = None
) -> Environment:
    """Resolve every ``auto`` of ``config.topology``, or raise ConfigError with a line per problem.

    planning: whether the run is only planned, so that this machine and job do not limit it.
    job: the job of this process; None to read it from the environment variables.
    """
    topology = config.topology
    if job is None and not planning:
        job = current_job()
    problems: list[str] = []

    gpus = _visible_gpus() if topology.device != "cpu" else 0
    device = ("cuda" if gpus else "cpu") if topology.device == "auto" else topology.device
    if device == "cuda" and not gpus and not planning:
        problems.append(_NO_GPU)

    given = None if topology.workers == "auto" else int(topology.workers)
    workers = job.world_size if job else given or gpus or CPU_WORKERS
    if not planning:
        problems.extend(_wrong_number_of_workers(workers, given, job, gpus, device))

    local_size = job.local_world_size if job else workers
    key, unit = "topology.gpus_per_node", f"{workers} workers"
    workers_per_node = _divisor(key, topology.gpus_per_node, workers, unit, problems, local_size)
    if job and not problems and local_size < workers and local_size % workers_per_node:
        problems.append(
            f"{key}={workers_per_node}: {job.launcher} started {local_size} on each node. Use auto "
            f"or one of {', '.join(map(str, _divisors(local_size)))}."
        )
    dims = _parallel_dims(topology, workers, workers_per_node, problems)
    train, per_pass = config.train, dims.dp * config.train.micro_batch
    if not problems and train.global_batch % per_pass:
        tensor = f" / tensor_parallel={dims.tp}" if dims.tp > 1 else ""
        tensor += f" / pipeline_parallel={dims.pp}" if dims.pp > 1 else ""
        problems.append(
            f"train.global_batch={train.global_batch}: must be a multiple of {per_pass} = "
            f"{dims.dp} context groups (topology.workers={dims.workers} / "
            f"context_parallel={dims.cp}{tensor}) x train.micro_batch={train.micro_batch}"
        )
    if not problems:
        problems.extend(number_of_chunks(config, dims.cp))
        problems.extend(uneven_rounds(config, dims.dp))
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


def _wrong_number_of_workers(
    workers: int, given: int | None, job: Job | None, gpus: int, device: str
) -> Iterator[str]:
    """Yield an error if the job has another number of workers, or this machine too few cores."""
    if job and given and given != job.world_size:
        yield (
            f"topology.workers={given}: {job.launcher} started {job.world_size} processes. Use "
            f"auto or {job.world_size}."
        )
    of_node = job.local_world_size if job else workers
    if job and (
        job.world_size % of_node or (of_node == job.world_size and job.local_rank != job.rank)
    ):
        yield (
            f"LOCAL_WORLD_SIZE={of_node}: this is process {job.local_rank} of its node, and rank "
            f"{job.rank} of {job.world_size}. Start the same number on every node."
        )
    if job or (device == "cuda" and not gpus):
        return
    cores = cpu_cores()
    most = gpus if device == "cuda" else max(_ALWAYS_ALLOWED, _WORKERS_PER_CORE * cores)
    if workers > most:
        has = with_count(gpus, "GPU") if device == "cuda" else with_count(cores, "CPU core")
        yield f"topology.workers={workers}: this machine has {has}. Use at most {most}, or auto."


def _parallel_dims(
    topology: TopologyConfig, workers: int, per_node: int, problems: list[str]
) -> ParallelDims:
    """Return the degrees of all dimensions. Add degrees that do not fit to ``problems``."""
    unit = f"{with_count(per_node, 'worker')} of a node"
    tp = _divisor("topology.tensor_parallel", topology.tensor_parallel, per_node, unit, problems)
    groups, unit = workers // tp, "workers"
    unit = unit if tp == 1 else f"tensor groups (topology.tensor_parallel={tp})"
    key, pp = "topology.pipeline_parallel", topology.pipeline_parallel
    pp = _divisor(key, pp, groups, f"{groups} {unit}", problems)
    unit += f" of a stage (topology.pipeline_parallel={pp})" * (pp > 1)
    key, groups, nodes = "topology.context_parallel", groups // pp, per_node // tp
    given, phrase = topology.context_parallel, f"{groups} {unit}"
    cp = _divisor(key, given, groups, phrase, problems, groups)
    if cp % nodes and nodes % cp:  # a context group has a part of one node and of another
        fits = [n for n in _divisors(groups) if n % nodes == 0 or nodes % n == 0]
        problems.append(
            f"{key}={cp}: must divide the {nodes} workers of a node or fill whole nodes. Use auto "
            f"or one of {', '.join(map(str, fits))}."
        )
    return ParallelDims.of(workers, pp=pp, cp=cp, tp=tp)


def cpu_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> int:
    """Return the bytes of host memory that this process may use, within the limits of cgroups."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def memory_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits in bytes of the cgroups of this process and of their ancestors.

    In a container the root group may be its own, while /proc names the group by the host's path.
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
    """Return the index of this worker's GPU among those it sees. Raise ConfigError without one."""
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
    """Return environment variables with which NCCL ends a hang soon after the timeout.

    By default the watchdog may hang for 8 minutes in a call to a device that does not respond, and
    waits 4 x 15 s, here 4 x 2.5 s, while all ranks dump their last collectives to ``logs``.
    """
    trace = str(logs / "nccl-rank-")
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's default
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(120, round(timeout_s))),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2500",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace,
        "TORCH_FR_DUMP_TEMP_FILE": trace,  # the name of this variable in newer versions of torch
    }


def loopback_variables() -> dict[str, str]:
    """Return environment variables with which gloo and NCCL listen only on loopback.

    Otherwise gloo looks up the host name, which fails on many laptops and in many containers.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)  # Linux, macOS
    if loopback is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def describe_place(device: torch.device) -> str:
    """Return the host and device of this worker, such as ``node7, GPU 3 (NVIDIA H200)``."""
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


def _divisor(
    key: str, value: int | str, number: int, unit: str, problems: list[str], default: int = 0
) -> int:
    """Return ``value``, or the default for ``auto``. Add a problem if it does not divide."""
    size = default if value == "auto" else int(value)
    if number % size == 0:
        return size
    allowed = ", ".join(map(str, _divisors(number)))
    auto = "auto or " if default else ""
    problems.append(f"{key}={size}: must divide the {unit}. Use {auto}one of {allowed}.")
    return number if default else 1


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
