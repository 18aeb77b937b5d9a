"""The plan of a run: what its configuration resolves to, on this machine or on absent GPUs."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.kernel_registry import choose, make_kernel, survey_with_all_packages
from mtrain_cli.config.cluster import Cluster, load_cluster, uneven_nodes
from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.schema import Config, ConfigError, TopologyConfig
from mtrain_cli.launch.environment import (
    Environment,
    describe_host_memory,
    gpu_index,
    host_memory,
    resolve_environment,
)
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training import memory_remedies, memory_search, resolution
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.expert_price import ExpertRun
from mtrain_cli.training.expert_traffic import require_experts_fit
from mtrain_cli.training.first_masks import FirstMasks, first_masks
from mtrain_cli.training.flops import (
    FlopsPerToken,
    ParameterCount,
    causal_pairs,
    parameters,
    recomputed_attention,
    training_flops,
)
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory
from mtrain_cli.training.memory_search import MemorySearch, MemorySetting
from mtrain_cli.training.pipeline_plan import PipelinePlan
from mtrain_cli.training.received_bytes import ReceivedBytes, received_bytes

if TYPE_CHECKING:
    from mtrain_cli.training.resolution import ResolvedRun

# Plans for absent GPUs assume this GPU, unless topology.cluster names another.
ASSUMED_GPU, ASSUMED_GPU_BYTES = "NVIDIA H200", round(139.8 * GIB)
ASSUMED_HOST_BYTES = 128 * GIB  # host memory per assumed GPU
USABLE_HOST = 0.9  # share of host memory that plans use; the rest is for processes, files and data
USABLE = 0.95  # share of a GPU's memory that plans use; the allocator always leaves gaps
# A run that needs more than this share of a GPU is refused. Estimates err by up to 5 %.
CERTAIN = 1.05
SHORTEST_SEQ = 1024  # shortest sequence to propose
FITS = (
    f'To "fit" means to use at most {USABLE:.0%} of a GPU\'s memory and {USABLE_HOST:.0%} of the '
    "host's; gaps and other processes take the rest"
)
# How `train.memory=auto` chooses train.keep_mlp.
KEPT = f"train.keep_mlp was chosen to leave {1 - memory_search.ROOMY:.0%} of a GPU free"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All facts that `--dry-run` and the start-up banner show.

    kernel: name of the kernel.
    kernel_reason: why `kernel` was chosen.
    dtype: name of the compute dtype.
    gpu: name of the GPUs. None on a CPU, or if the GPUs are unknown.
    capacity: memory of one GPU in bytes. None if unknown.
    dense_kernel: name of the kernel for dense first steps or layers of a sparse run, and reason for
        the choice. None if the run has no such steps.
    machine: which machine the plan is for, and why.
    elsewhere: whether the plan is for absent GPUs.
    host_share: bytes of host memory that each worker may use.
    search: result of `train.memory=auto`. None for `train.memory=manual`.
    requested: the configuration before `train.memory=auto` changed it. None for
        `train.memory=manual`.
    """

    config: Config
    environment: Environment
    layout: Layout
    exchange: ExchangeChoice
    kernel: str
    kernel_reason: str
    dtype: str
    layout_reason: str = ""
    gpu: str | None = None
    capacity: int | None = None
    dense_kernel: tuple[str, str] | None = None
    machine: str = ""
    elsewhere: bool = False
    host_share: int = round(USABLE_HOST * ASSUMED_HOST_BYTES)
    search: MemorySearch | None = None
    requested: Config | None = None

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        """Estimated memory of one worker."""
        return self.estimate(self.config)

    @property
    def dims(self) -> ParallelDims:
        return self.environment.dims

    @property
    def chosen(self) -> dict[str, str]:
        """Layout, exchange and kernel, by the key that may leave the choice to ``auto``."""
        return {
            "topology.layout": self.layout.name,
            "topology.exchange": self.exchange.label,
            "train.kernel": self.kernel,
        }

    @property
    def dtype_bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch * self.config.seq

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a worker in an optimizer step."""
        train = self.config.train
        return train.global_batch // (train.micro_batch * self.dims.dp)

    @functools.cached_property
    def pipeline(self) -> PipelinePlan | None:
        """The stages; None if each worker holds the whole model."""
        if self.dims.pp == 1:
            return None
        return PipelinePlan.of(self.config, self.micro_batches, self.layout, self.dtype_bytes)

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint on disk: float32 weights and two AdamW states."""
        return 12 * self.parameters.total

    @functools.cached_property
    def parameters(self) -> ParameterCount:
        return parameters(self.config.model)

    @functools.cached_property
    def data_masks(self) -> FirstMasks | None:
        """The masks of the first sequences of the data; None if the data bring no masks."""
        return first_masks(self.config)

    @functools.cached_property
    def flops(self) -> FlopsPerToken:
        read = self.data_masks
        return self._flops(read.pairs if read is not None and read.masks else None)

    def flops_at(self, density: float) -> FlopsPerToken:
        """FLOP of attention that computes this share of the pairs of a causal mask."""
        return self._flops(density * causal_pairs(self.config.seq))

    def _flops(self, pairs: float | None) -> FlopsPerToken:
        return training_flops(
            self.config,
            self.layout,
            sharing=self.exchange.heads,
            dtype_bytes=self.dtype_bytes,
            pairs=pairs,
        )

    @property
    def recompute(self) -> Recompute:
        """The part of a layer's forward exchange that the backward pass runs again."""
        return recomputed_attention(self.config.train, self.layout, self.exchange.heads)

    @functools.cached_property
    def received(self) -> ReceivedBytes:
        """How many bytes reach one worker."""
        return received_bytes(
            self._dealt(self.config),
            layout=self.layout,
            exchange=self.exchange,
            kernel=self.kernel,
            workers=self.dims.workers,
            micro_batches=self.micro_batches,
            dtype_bytes=self.dtype_bytes,
        )

    @property
    def gpu_name(self) -> str:
        return self.gpu or ASSUMED_GPU

    @property
    def gpu_bytes(self) -> int:
        """Bytes of one GPU's memory. For an unknown GPU, bytes of the assumed GPU's memory."""
        return self.capacity or ASSUMED_GPU_BYTES

    @property
    def available_memory(self) -> str:
        """A description of the available memory, for messages."""
        if self.environment.device == "cpu":
            workers = self.environment.local_workers
            return f"{size(host_memory())}, shared by {workers} CPU workers of this machine"
        topology = self.config.topology
        gpu = self.gpu_name if topology.gpu_memory_gib == "auto" else "topology.gpu_memory_gib"
        host = f"{size(self.host_share)} of host memory"
        if topology.host_memory_gib != "auto":
            host += f" ({USABLE_HOST:.0%} of topology.host_memory_gib)"
        elif self.elsewhere:
            assumed = f"an assumed {round(self.host_share / USABLE_HOST / GIB)} GiB per GPU"
            host += f" ({USABLE_HOST:.0%} of {assumed}; set topology.host_memory_gib)"
        return f"{size(self.gpu_bytes)} ({gpu}, {USABLE:.0%} of it usable) and {host}"

    def device_bytes(self, memory: MemoryEstimate) -> int:
        """Return how many bytes a worker needs on its device. For a CPU, include host memory."""
        return memory.total + (memory.host_peak if self.environment.device == "cpu" else 0)

    def has_room_for(self, memory: MemoryEstimate, usable: float = USABLE) -> bool:
        """Return whether `memory` fits a worker's device and host.

        Args:
            usable: share of a GPU's memory to use.
        """
        if self.environment.device == "cpu":
            return self.device_bytes(memory) * self.environment.local_workers <= host_memory()
        return memory.total <= usable * self.gpu_bytes and memory.host_peak <= self.host_share

    def estimate(self, config: Config) -> MemoryEstimate:
        """Estimate the memory of a worker for another configuration.

        config: the plan's configuration with other memory settings.
        """
        return estimate_memory(
            self._dealt(config),
            workers=self.dims.workers,
            layout=self.layout,
            exchange=self.exchange,
            kernel=self.kernel,
            dtype_bytes=self.dtype_bytes,
            cuda=self.environment.device == "cuda",
            attention=self._attention,
        )

    @property
    def dealt(self) -> RunPlan:
        """The plan with the number that `topology.expert_parallel=auto` takes."""
        return dataclasses.replace(self, config=self._dealt(self.config))

    def _dealt(self, config: Config) -> Config:
        """Return a configuration with the number that `topology.expert_parallel=auto` takes."""
        if config.topology.expert_parallel != "auto":
            return config
        per_node = self.environment.workers_per_node
        degree = ExpertRun(config, self.dims, self.layout, self.dtype_bytes, per_node).degree
        return config.changed(topology={"expert_parallel": degree})

    @functools.cached_property
    def _attention(self) -> AttentionMemory:
        """Memory of a layer's attention, which does not depend on the memory settings."""
        return AttentionMemory(
            self.config.of_worker,
            self.layout,
            self.exchange,
            self.kernel,
            self.dtype_bytes,
            self.dense_kernel and self.dense_kernel[0],
        )

    def replan(self, config: Config) -> RunPlan:
        """Plan another configuration for the same device and number of workers.

        A number in `config.topology.workers` overrides the number of workers.

        Raises:
            ConfigError: the mask does not fit the sequence, or as in `make_plan`.
        """
        if wrong := list(mask_problems(config.mask, config.seq, config.sparsity.pattern)):
            raise ConfigError(*wrong)
        workers, device = config.topology.workers, self.environment.device
        workers = workers if isinstance(workers, int) else self.dims.workers
        config = config.changed(topology={"device": device, "workers": workers})
        return _plan_elsewhere(config, "") if self.elsewhere else _plan_here(config)

    @property
    def host_bytes(self) -> int:
        """Bytes that the CPU workers of one machine need together."""
        return self.device_bytes(self.memory) * self.environment.local_workers

    @property
    def fits(self) -> bool | None:
        """Whether the run fits its GPUs or its CPU machine. None if the GPU is unknown."""
        if self.environment.device == "cpu":
            return self.host_bytes <= host_memory()
        return None if self.capacity is None else self.has_room_for(self.memory)


def make_plan(config: Config) -> RunPlan:
    """Plan a run on this machine or on absent GPUs.

    `topology.device` decides which devices the plan is for:
    - cpu: the CPU of this machine.
    - cuda: GPUs like those of this machine. On a machine without GPUs, absent GPUs.
    - auto: as for cuda, on a machine with GPUs. On other machines, the absent GPUs of
      `topology.cluster` if that key names a cluster, otherwise the CPU. If the CPU cannot run the
      configuration and `topology.workers` is a number, that number of absent GPUs.

    Raises:
        ConfigError: sizes are inconsistent, or the configured kernel does not support the run.
    """
    plan = _manual_plan(config)
    require_experts_fit(config, plan.dims, plan.dtype_bytes, plan.environment.device)
    return plan if config.train.memory == "manual" else with_auto_memory(plan)


def with_auto_memory(plan: RunPlan) -> RunPlan:
    """Apply `train.memory=auto`: the fastest setting that fits, or else the closest to fitting."""
    result = memory_search.search(plan)
    setting = result.chosen or memory_search.nearest_to_fitting(plan, result.settings)
    return dataclasses.replace(with_setting(plan, setting), search=result, requested=plan.config)


def with_setting(plan: RunPlan, setting: MemorySetting) -> RunPlan:
    """Return the plan with another memory setting."""
    return dataclasses.replace(plan, config=setting.config)


def _manual_plan(config: Config) -> RunPlan:
    device = config.topology.device
    if torch.cuda.is_available() or device == "cpu":
        return _plan_here(config)
    if device == "cuda":
        return _plan_elsewhere(config, "topology.device=cuda, but this machine has no GPU")
    if config.topology.cluster != "auto":
        return _plan_elsewhere(config, "this machine has no GPU")
    refusal = _refusal_here(config) if config.topology.workers != "auto" else None
    return _plan_elsewhere(config, refusal) if refusal else _plan_here(config)


def _plan_here(config: Config) -> RunPlan:
    """Plan for this machine, or for a larger number of GPUs like its own."""
    environment = resolve_environment(config, planning=True)
    # Plan for this machine's first GPU, whatever rank this process has.
    first = dataclasses.replace(environment, rank=0, local_rank=0)
    plan = plan_resolved(config, environment, resolution.resolve_run(config, first))
    return dataclasses.replace(plan, machine=_machine_here(plan))


def _machine_here(plan: RunPlan) -> str:
    if plan.gpu is None:
        other = "; plan for N GPUs with topology.device=cuda topology.workers=N"
        requested = plan.config.topology.device == "cpu"
        return f"the CPU of this machine{'' if requested else f', which has no GPU{other}'}"
    gpus = torch.cuda.device_count()
    if plan.dims.workers > gpus:
        return f"GPUs like the {gpus} x {plan.gpu} of this machine"
    return "the GPUs of this machine"


def _refusal_here(config: Config) -> str | None:
    """Return why this machine's CPU cannot run a configuration, or None if the CPU can."""
    try:
        plan = _plan_here(config)
    except ConfigError as error:
        return f"this machine has no GPU, and its CPU refuses {error.problems[0]}"
    if plan.fits:
        return None
    workers = plan.dims.workers
    needs = f"{workers} CPU worker{'s' * (workers > 1)} would need {needed_here(plan)}"
    return f"this machine has no GPU, and {needs}"


def needed_here(plan: RunPlan) -> str:
    """Describe the memory that CPU workers need and the memory that this machine has."""
    when = " while a checkpoint is written" if plan.memory.saving else ""
    need = f"about {plan.host_bytes / GIB:,.0f} GiB{when}"
    return f"{need}, but this machine {describe_host_memory()}"


def plan_resolved(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """Plan a run on this machine. `choices` are the resolved `auto` settings of the run."""
    kernel = choices.kernel.name, choices.kernel_reason
    plan = dataclasses.replace(
        _complete(config, environment, choices.layout, choices.exchange, kernel, choices.dtype),
        layout_reason=choices.layout_reason,
    )
    if environment.device == "cuda":
        properties = torch.cuda.get_device_properties(gpu_index(environment))
        sharing = workers_sharing_host(environment, torch.cuda.device_count())
        plan = dataclasses.replace(
            plan,
            gpu=properties.name,
            capacity=resolution.given_memory(config) or properties.total_memory,
            host_share=round(
                USABLE_HOST * (resolution.given_host_memory(config) or host_memory() / sharing)
            ),
        )
    if choices.dense_kernel is None:
        return plan
    dense, reason = choices.dense_kernel
    return dataclasses.replace(plan, dense_kernel=(dense.name, reason))


def workers_sharing_host(environment: Environment, gpus: int) -> int:
    """Count the workers that share this machine's memory.

    A dry run may plan for more workers than this machine has GPUs. Therefore count at most `gpus`
    workers. Under SLURM, count all workers, since SLURM may show each task only one GPU.

    Args:
        gpus: number of GPUs that this process sees.
    """
    if environment.launcher == "slurm":
        return environment.local_workers
    return max(1, min(environment.local_workers, gpus))


def _plan_elsewhere(config: Config, why: str) -> RunPlan:
    """Plan for absent GPUs. why: the reason, for `RunPlan.machine`."""
    name = config.topology.cluster
    if name == "auto":
        gpu, capability, of = None, (9, 0), " (set topology.cluster to plan for others)"
        memory, host = None, ASSUMED_HOST_BYTES
    else:
        cluster = _described(name)
        config = dataclasses.replace(config, topology=_filled(config.topology, cluster))
        gpu, capability = cluster.gpu.name, cluster.gpu.capability
        of = f" of topology.cluster={name}"
        memory, host = (
            round(constant.value * GIB) for constant in (cluster.gpu.hbm_gib, cluster.gpu.host_gib)
        )
    memory = resolution.given_memory(config) or memory
    plan = _plan_gpus(config, gpu, capability, memory, host, None)
    machine = f"assumed {plan.gpu_name} GPUs{of}: {why}"
    return dataclasses.replace(plan, machine=machine, elsewhere=True)


@functools.lru_cache(maxsize=1)  # a search for memory settings plans many times
def _described(name: str) -> Cluster:
    """Return the cluster that `topology.cluster` names.

    Raises:
        ConfigError: there is no such cluster, or it has no GPUs.
    """
    cluster = load_cluster(name, f"topology.cluster={name}")
    if cluster.gpu.is_cpu:
        raise ConfigError(
            f"topology.cluster={name}: has {cluster.gpu.name}, a CPU; give a cluster of GPUs, or "
            "auto"
        )
    return cluster


def _filled(topology: TopologyConfig, cluster: Cluster) -> TopologyConfig:
    """Return the topology with the cluster's numbers for `auto` workers and `auto` GPUs per node.

    Raises:
        ConfigError: the workers would use only some of the GPUs of a node.
    """
    workers = cluster.gpus if topology.workers == "auto" else int(topology.workers)
    per_node = topology.gpus_per_node
    if per_node == "auto":
        if why := uneven_nodes(cluster, workers):
            raise ConfigError(f"topology.workers={workers}: {why}")
        per_node = min(cluster.gpus_per_node, workers)
    return dataclasses.replace(topology, workers=workers, gpus_per_node=per_node)


def plan_for(
    config: Config,
    *,
    gpu: str,
    capability: tuple[int, int],
    capacity: int,
    host: int = ASSUMED_HOST_BYTES,
    kernel: str | None = None,
) -> RunPlan:
    """Plan a run on GPUs that the arguments describe. `config.topology` gives the number of GPUs.

    The memory estimate equals that of `make_plan` for the same configuration, kernel and exchange.

    Args:
        gpu: name of the GPU.
        capability: CUDA compute capability.
        capacity: bytes of GPU memory.
        host: bytes of host memory per GPU.
        kernel: name of a kernel to use instead of `train.kernel`.

    Raises:
        ConfigError: sizes are inconsistent, or no kernel supports the run.
    """
    plan = _plan_gpus(config, gpu, capability, capacity, host, kernel)
    return plan if config.train.memory == "manual" else with_auto_memory(plan)


def _plan_gpus(
    config: Config,
    gpu: str | None,
    capability: tuple[int, int],
    capacity: int | None,
    host: int,
    kernel: str | None,
) -> RunPlan:
    """Plan as `plan_for` does, without `train.memory=auto`.

    Args:
        gpu: name of the GPU. None means `ASSUMED_GPU`.
        capacity: bytes of GPU memory. None means the memory of `ASSUMED_GPU`.
    """
    config = config.changed(topology={"device": "cuda"})
    environment = resolve_environment(config, planning=True)
    chosen = resolution.context_layout(config, environment)
    dtype = resolution.compute_dtype(config, "cuda")
    pattern = make_pattern(config.sparsity, config.seed)
    index = None if pattern is None else pattern.request()
    choice = _kernel_elsewhere(
        config, dtype, kernel or config.train.kernel, index, capability, gpu or ASSUMED_GPU
    )
    memory = capacity or ASSUMED_GPU_BYTES
    needs = resolution.exchange_needs(
        config, environment, chosen.layout, dtype, make_kernel(choice[0]), memory
    )
    exchange = resolution.run_exchange(chosen, config, needs, environment.device)
    dense_kernel = None
    if config.sparsity.dense_steps or config.sparsity.dense_layers:
        asked = resolution.dense_kernel_asked(kernel or config.train.kernel)
        dense_kernel = _kernel_elsewhere(config, dtype, asked, None, capability, gpu or ASSUMED_GPU)
    return dataclasses.replace(
        _complete(config, environment, chosen.layout, exchange, choice, dtype),
        layout_reason=chosen.reason,
        dense_kernel=dense_kernel,
        gpu=gpu,
        capacity=capacity,
        host_share=round(USABLE_HOST * (resolution.given_host_memory(config) or host)),
    )


def _kernel_elsewhere(
    config: Config,
    dtype: torch.dtype,
    requested: str,
    index: IndexRequest | None,
    capability: tuple[int, int] = (9, 0),
    gpu: str = ASSUMED_GPU,
) -> tuple[str, str]:
    """Return the kernel of a run on GPUs that this machine lacks, and the reason for the choice.

    Assume that all packages are installed.
    """
    request = dataclasses.replace(
        resolution.kernel_request(config, "cuda", dtype, capability), index=index
    )
    reasons = dict(survey_with_all_packages(request))
    possible = [name for name, reason in reasons.items() if reason is None]
    if requested in possible:
        return requested, "as configured; no GPU here to check that it is supported"
    if requested != "auto" and (reason := reasons.get(requested)) is not None:
        allowed = ", ".join(["auto", *possible])
        raise ConfigError(f"train.kernel={requested}: {reason}; allowed on {gpu}: {allowed}")
    if requested != "auto" or possible[0] == "reference":
        kernel, reason = choose(requested, request)
        return kernel.name, reason
    others = f", else {possible[1]}" if possible[1] != "reference" else ""
    on = "Hopper" if gpu == ASSUMED_GPU else gpu
    reason = f"assumed without a GPU: on {on} with all packages, auto takes this kernel{others}"
    return possible[0], reason


def _complete(
    config: Config,
    environment: Environment,
    layout: Layout,
    exchange: ExchangeChoice,
    kernel: tuple[str, str],
    dtype: torch.dtype,
) -> RunPlan:
    """Return a plan without the name and memory of the GPU."""
    return RunPlan(
        config=config,
        environment=environment,
        layout=layout,
        exchange=exchange,
        kernel=kernel[0],
        kernel_reason=kernel[1],
        dtype=str(dtype).removeprefix("torch."),
    )


def require_fit(plan: RunPlan) -> None:
    """Refuse to start a run that certainly does not fit the memory.

    Raises:
        ConfigError: the run does not fit. The message is one line that says what would fit.
    """
    if plan.search is not None and plan.search.chosen is None:
        raise ConfigError(memory_remedies.refusal(plan, plan.search))
    if plan.environment.device == "cuda" and not plan.has_room_for(plan.memory, CERTAIN):
        raise ConfigError(memory_remedies.refusal(plan, memory_search.search(plan)))


def size(number: int) -> str:
    """Format bytes as GiB, or as MiB below 0.1 GiB."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"
