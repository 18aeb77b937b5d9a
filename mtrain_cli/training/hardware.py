"""The devices that a plan is for, and how much memory they have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mtrain_cli.config.cluster import Cluster, cluster_of, uneven_nodes
from mtrain_cli.config.schema import Config, ConfigError, TopologyConfig
from mtrain_cli.launch.environment import Environment, host_memory
from mtrain_cli.training.memory import GIB

# Plans for absent GPUs assume this GPU, unless topology.cluster names another.
ASSUMED_GPU, ASSUMED_GPU_BYTES = "NVIDIA H200", round(139.8 * GIB)
ASSUMED_HOST_BYTES = 128 * GIB  # host memory per assumed GPU


def device_of(environment: Environment) -> torch.device:
    """Return the device of this worker."""
    if environment.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices that a plan is for.

    gpu, capability: None on a CPU.
    count: number of GPUs of this machine or of the cluster; 0 on a CPU and for assumed GPUs.
    memory: bytes of one GPU; 0 on a CPU.
    host_memory: bytes of this machine, or per GPU of absent hardware.
    source: which machine this is, and why a plan is for it.
    cluster: the cluster that has the absent GPUs; None if they are assumed.
    """

    device: str
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    count: int = 0
    memory: int = 0
    host_memory: int
    source: str = ""
    absent: bool = False
    cluster: Cluster | None = None

    @classmethod
    def here(cls, device: str = "auto") -> Hardware:
        """Return this machine's GPUs, like the current one, or its CPU."""
        if device != "cpu" and torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            return cls(
                device="cuda",
                gpu=gpu.name,
                capability=(gpu.major, gpu.minor),
                count=torch.cuda.device_count(),
                memory=gpu.total_memory,
                host_memory=host_memory(),
                source="the GPUs of this machine",
            )
        source = "the CPU of this machine"
        if device != "cpu":
            source += ", which has no GPU; plan for N GPUs with topology.device=cuda "
            source += "topology.workers=N"
        return cls(device="cpu", host_memory=host_memory(), source=source)

    @classmethod
    def assumed(cls, topology: TopologyConfig, why: str) -> Hardware:
        """Return the GPUs of `topology.cluster`, or H200s if that key is auto.

        why: why a plan is for absent GPUs.

        Raises:
            ConfigError: there is no such cluster, or it has no GPUs.
        """
        hardware, of = _ASSUMED, " (set topology.cluster to plan for others)"
        if (name := topology.cluster) != "auto":
            of, cluster = f" of topology.cluster={name}", cluster_of(name)
            assert cluster is not None
            if cluster.gpu.is_cpu:
                has = f"has {cluster.gpu.name}, a CPU; give a cluster of GPUs, or auto"
                raise ConfigError(f"topology.cluster={name}: {has}")
            hardware = cls.of_cluster(cluster)
        return replace(hardware, source=f"assumed {hardware.gpu} GPUs{of}: {why}")

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Hardware:
        return cls(
            device="cuda",
            gpu=cluster.gpu.name,
            capability=cluster.gpu.capability,
            count=cluster.gpus,
            memory=round(cluster.gpu.hbm_gib.value * GIB),
            host_memory=round(cluster.gpu.host_gib.value * GIB),
            absent=True,
            cluster=cluster,
        )

    @property
    def is_guess(self) -> bool:
        """Whether nobody named the GPUs."""
        return self.absent and self.cluster is None

    def limited(self, topology: TopologyConfig) -> Hardware:
        """Return GPUs with the memory that `topology.gpu_memory_gib` sets."""
        gib = topology.gpu_memory_gib
        if isinstance(gib, str) or self.device == "cpu":
            return self
        return replace(self, memory=max(1, round(gib * GIB)))

    def workers_sharing_host(self, environment: Environment) -> int:
        """Count the workers that share `host_memory`: at most as many as the machine has GPUs."""
        if self.absent:
            return 1
        if environment.launcher == "slurm":  # which may show each task only one GPU
            return environment.local_workers
        return max(1, min(environment.local_workers, self.count))

    def complete(self, config: Config) -> Config:
        """Return the configuration with the numbers of absent GPUs that its topology leaves open.

        Raises:
            ConfigError: the workers would use only some of the GPUs of a node.
        """
        if not self.absent:
            return config
        config = config.changed(topology={"device": "cuda"})
        cluster, topology = self.cluster, config.topology
        if cluster is None:
            return config
        workers = cluster.gpus if topology.workers == "auto" else int(topology.workers)
        per_node = topology.gpus_per_node
        if per_node == "auto":
            if why := uneven_nodes(cluster, workers):
                raise ConfigError(f"topology.workers={workers}: {why}")
            per_node = min(cluster.gpus_per_node, workers)
        return config.changed(topology={"workers": workers, "gpus_per_node": per_node})


_ASSUMED = Hardware(
    device="cuda",
    gpu=ASSUMED_GPU,
    capability=(9, 0),
    memory=ASSUMED_GPU_BYTES,
    host_memory=ASSUMED_HOST_BYTES,
    absent=True,
)
