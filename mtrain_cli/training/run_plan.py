"""The plan of a run: everything that it would be, from its configuration, on this machine or on GPUs that are not here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.kernel_registry import choose, make_kernel, survey
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import (
    Environment,
    gpu_index,
    host_memory,
    machine_has,
    resolve_environment,
)
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.parallel.exchange_bytes import ShardSizes, pass_bytes
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, choose_exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.schedule import make_schedule
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.flops import (
    FlopsPerToken,
    ParameterCount,
    parameters,
    recomputes_attention,
    training_flops,
)
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory
from mtrain_cli.training.memory_search import (
    ROOMY,
    MemorySearch,
    MemorySetting,
    nearest_to_fitting,
    refusal,
    search,
)
from mtrain_cli.training.resolution import (
    compute_dtype,
    dense_kernel_asked,
    dense_steps_named,
    exchange_needs,
    given_host_memory,
    given_memory,
    kernel_request,
    resolve_run,
    run_layout,
)
from mtrain_cli.training.state_memory import StateMemory

if TYPE_CHECKING:
    from mtrain_cli.training.resolution import ResolvedRun

# The one GPU that a plan reckons with where none is here to ask: that of today's clusters.
ASSUMED_GPU, ASSUMED_GPU_BYTES = "NVIDIA H200", round(139.8 * GIB)
ASSUMED_HOST_BYTES = 128 * GIB  # of host memory for each such GPU
USABLE_HOST = 0.9  # of host memory; the rest is for processes, files and data
CERTAIN = 1.05  # a run is refused where the estimate is so much above all the memory of a GPU: it has been off by less
SHORTEST_SEQ = 1024  # that is worth a proposal
USABLE = 0.95  # of a GPU's memory: the allocator's blocks are never packed without gaps


FITS = f"fits: in {USABLE:.0%} of the memory of a GPU and {USABLE_HOST:.0%} of the host's, since gaps and other processes take the rest"
KEPT = f"train.keep_mlp keeps as much as leaves {1 - ROOMY:.0%} of a GPU free"  # as `train.memory=auto` chooses it


@dataclass(frozen=True, kw_only=True)
class ReceivedBytes:
    """Bytes that reach one worker: keys, values and their gradients of one layer and micro-batch, forward and backward; weights and their
    gradients of one optimizer step; host: both between its device and the host in such a step, where the optimizer is offloaded.
    """

    forward: int
    backward: int
    weights: int
    host: int = 0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that `--dry-run` and the start-up banner show.

    machine: which machine the plan is for, and why. gpu: name of its GPUs, None on a CPU or when they are assumed; capacity: memory of one
    in bytes.
    micro_batches: forward and backward passes of one worker in an optimizer step. checkpoint: bytes of one checkpoint on disk.
    dense_kernel: name and reason for the dense first steps of a sparse run. elsewhere: for GPUs that are not here. host_share: bytes of
    host memory that each worker may fill. search: what ``train.memory=auto`` found, for what was asked.
    """

    config: Config
    environment: Environment
    layout: Layout
    exchange: ExchangeChoice
    kernel: str
    kernel_reason: str
    dtype: str
    gpu: str | None
    capacity: int | None
    rope_factor: float
    parameters: ParameterCount
    flops: FlopsPerToken
    tokens_per_step: int
    micro_batches: int
    memory: MemoryEstimate
    received: ReceivedBytes
    checkpoint: int
    dense_kernel: tuple[str, str] | None = None
    machine: str = ""
    elsewhere: bool = False
    host_share: int = round(USABLE_HOST * ASSUMED_HOST_BYTES)
    search: MemorySearch | None = None
    requested: Config | None = None

    @property
    def gpu_name(self) -> str:
        return self.gpu or ASSUMED_GPU

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU, assumed where it is not known."""
        return self.capacity or ASSUMED_GPU_BYTES

    @property
    def available_memory(self) -> str:
        """What there is of memory, for messages."""
        if self.environment.device == "cpu":
            return f"the {size(host_memory())} that {self.environment.local_workers} CPU workers of this machine share"
        topology = self.config.topology
        gpu = self.gpu_name if topology.gpu_memory_gib == "auto" else "topology.gpu_memory_gib"
        host = f"{size(self.host_share)} of host memory"
        if topology.host_memory_gib != "auto":
            host += f" ({USABLE_HOST:.0%} of topology.host_memory_gib)"
        elif self.elsewhere:
            host += f" ({USABLE_HOST:.0%} of {ASSUMED_HOST_BYTES // GIB} GiB a GPU, assumed; topology.host_memory_gib says otherwise)"
        return (
            f"the {size(self.gpu_bytes)} of {gpu}, {USABLE:.0%} of which can be used, with {host}"
        )

    def device_bytes(self, memory: MemoryEstimate) -> int:
        """Bytes of a worker on its device, which on a CPU is the host."""
        return memory.total + (memory.host_peak if self.environment.device == "cpu" else 0)

    def has_room_for(self, memory: MemoryEstimate, usable: float = USABLE) -> bool:
        """Whether a worker of this plan has so much memory, on its device and on the host."""
        if self.environment.device == "cpu":
            return self.device_bytes(memory) * self.environment.local_workers <= host_memory()
        return memory.total <= usable * self.gpu_bytes and memory.host_peak <= self.host_share

    def replan(self, config: Config) -> RunPlan:
        """The plan of another configuration on the same kind of machine; as many workers, unless it names their number."""
        workers = (
            config.topology.workers
            if isinstance(config.topology.workers, int)
            else self.environment.workers
        )
        topology = dataclasses.replace(
            config.topology, device=self.environment.device, workers=workers
        )
        config = dataclasses.replace(config, topology=topology)
        return _plan_elsewhere(config, "") if self.elsewhere else _plan_here(config)

    @property
    def host_bytes(self) -> int:
        """What the CPU workers of one machine need together."""
        return self.device_bytes(self.memory) * self.environment.local_workers

    @property
    def fits(self) -> bool | None:
        """Whether the memory of a worker, or on a CPU that of this machine, suffices; None when the GPU is not known."""
        if self.environment.device == "cpu":
            return self.host_bytes <= host_memory()
        return None if self.capacity is None else self.has_room_for(self.memory)


def make_plan(config: Config) -> RunPlan:
    """The plan of a run on a machine that need not be this one; where this one has GPUs, it reckons with GPUs like them.

    With ``topology.device=auto`` and no GPU here it is what the same line would do here, on the CPU, unless this machine would refuse that
    and ``topology.workers`` is a number: then it is a plan for so many GPUs. ``topology.device`` = cpu or cuda leaves no choice.

    Raises:
        ConfigError: sizes do not fit each other, or the configured kernel cannot serve the run.
    """
    plan = _manual_plan(config)
    return plan if config.train.memory == "manual" else with_auto_memory(plan)


def with_auto_memory(plan: RunPlan) -> RunPlan:
    """A plan with what ``train.memory=auto`` decides, or the least that it could take where nothing fits; ``search`` tells."""
    result = search(plan)
    setting = result.chosen or nearest_to_fitting(plan, result.settings)
    return dataclasses.replace(with_setting(plan, setting), search=result, requested=plan.config)


def with_setting(plan: RunPlan, setting: MemorySetting) -> RunPlan:
    """A plan with another way of using memory."""
    train = setting.config.train
    dtype_bytes = getattr(torch, plan.dtype).itemsize
    return dataclasses.replace(
        plan,
        config=setting.config,
        memory=setting.memory,
        flops=training_flops(setting.config, plan.layout, dtype_bytes=dtype_bytes),
        received=received_bytes(
            setting.config,
            plan.environment.workers,
            plan.layout,
            plan.exchange,
            dtype_bytes,
            needs_out=make_kernel(plan.kernel).needs_out,
        ),
        micro_batches=train.global_batch // (train.micro_batch * plan.environment.dp),
    )


def _manual_plan(config: Config) -> RunPlan:
    device = config.topology.device
    if torch.cuda.is_available() or device == "cpu":
        return _plan_here(config)
    if device == "cuda":
        return _plan_elsewhere(config, "topology.device=cuda, and no GPU is here")
    refusal = _refusal_here(config) if config.topology.workers != "auto" else None
    return _plan_elsewhere(config, refusal) if refusal else _plan_here(config)


def _plan_here(config: Config) -> RunPlan:
    """A plan for this machine, or for more GPUs like its own."""
    environment = resolve_environment(config, planning=True)
    # The plan is for the first GPU here, whichever worker this process would be.
    plan = plan_resolved(
        config,
        environment,
        resolve_run(config, dataclasses.replace(environment, rank=0, local_rank=0)),
    )
    return dataclasses.replace(plan, machine=_machine_here(plan))


def _machine_here(plan: RunPlan) -> str:
    if plan.gpu is None:
        requested = plan.config.topology.device == "cpu"
        return "the CPU of this machine" + (
            ""
            if requested
            else ", since no GPU is here; topology.device=cuda topology.workers=N plans for N GPUs"
        )
    gpus = torch.cuda.device_count()
    return (
        f"GPUs like the {gpus} x {plan.gpu} of this machine"
        if plan.environment.workers > gpus
        else "the GPUs of this machine"
    )


def _refusal_here(config: Config) -> str | None:
    """Why this machine's CPU would not take a run; None if it would."""
    try:
        plan = _plan_here(config)
    except ConfigError as error:
        return f"no GPU is here, and the CPU refuses {error.problems[0]}"
    if plan.fits:
        return None
    workers = plan.environment.workers
    return f"no GPU is here, and {workers} CPU worker{'s' * (workers > 1)} would need {needed_here(plan)}"


def needed_here(plan: RunPlan) -> str:
    """Memory of CPU workers against that of this machine, in whole GiB as the run itself says it."""
    return f"about {plan.host_bytes / GIB:,.0f} GiB where this machine {machine_has()}"


def plan_resolved(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """The plan of a run whose choices are made, on this machine."""
    properties = (
        torch.cuda.get_device_properties(gpu_index(environment))
        if environment.device == "cuda"
        else None
    )
    plan = _complete(
        config,
        environment,
        choices.layout,
        choices.exchange,
        (choices.kernel.name, choices.kernel_reason),
        choices.dtype,
        gpu=properties.name if properties else None,
        capacity=given_memory(config) or properties.total_memory if properties else None,
    )
    if environment.device == "cuda":
        host = given_host_memory(config) or host_memory() / workers_sharing_host(
            environment, torch.cuda.device_count()
        )
        plan = dataclasses.replace(plan, host_share=round(USABLE_HOST * host))
    if choices.dense_kernel is None:
        return plan
    kernel, reason = choices.dense_kernel
    return dataclasses.replace(plan, dense_kernel=(kernel.name, reason))


def workers_sharing_host(environment: Environment, gpus: int) -> int:
    """Workers that share this machine's memory. gpus: that this process sees; SLURM may show each of several tasks one, and a dry run may
    ask about more workers than there are.
    """
    if environment.launcher == "slurm":
        return environment.local_workers
    return max(1, min(environment.local_workers, gpus))


def _plan_elsewhere(config: Config, why: str) -> RunPlan:
    """A plan for GPUs that are not here: what cannot be asked of them is assumed, and says so."""
    config = dataclasses.replace(
        config, topology=dataclasses.replace(config.topology, device="cuda")
    )
    environment = resolve_environment(config, planning=True)
    layout = run_layout(config, environment.cp)
    dtype = compute_dtype(config, environment.device)
    pattern = make_pattern(config.sparsity, config.seed)
    kernel = _kernel_elsewhere(
        config, dtype, config.train.kernel, None if pattern is None else pattern.request()
    )
    dense_kernel = None
    if config.sparsity.dense_steps:
        with dense_steps_named(config):
            dense_kernel = _kernel_elsewhere(config, dtype, dense_kernel_asked(config), None)
    exchange = choose_exchange(
        config.topology,
        exchange_needs(
            config,
            environment,
            layout,
            dtype,
            make_kernel(kernel[0]),
            given_memory(config) or ASSUMED_GPU_BYTES,
        ),
    )
    plan = _complete(
        config,
        environment,
        layout,
        exchange,
        kernel,
        dtype,
        gpu=None,
        capacity=given_memory(config),
    )
    host_share = round(USABLE_HOST * (given_host_memory(config) or ASSUMED_HOST_BYTES))
    machine = f"GPUs elsewhere, taken to be {ASSUMED_GPU}: {why}"
    return dataclasses.replace(
        plan, dense_kernel=dense_kernel, machine=machine, elsewhere=True, host_share=host_share
    )


def plan_for(
    config: Config,
    *,
    gpu: str,
    capability: tuple[int, int],
    capacity: int,
    host: int = ASSUMED_HOST_BYTES,
    kernel: str | None = None,
) -> RunPlan:
    """The plan of a run on described GPUs; ``config.topology`` says how many, in nodes of how many. kernel: instead of ``train.kernel``.
    host: bytes of host memory for each GPU.

    Its memory is that of a `plan` of the same configuration, with the same kernel and exchange.

    Raises:
        ConfigError: sizes do not fit each other, or no kernel serves the run.
    """
    config = dataclasses.replace(
        config, topology=dataclasses.replace(config.topology, device="cuda")
    )
    environment = resolve_environment(config, planning=True)
    layout, dtype = run_layout(config, environment.cp), compute_dtype(config, "cuda")
    pattern = make_pattern(config.sparsity, config.seed)
    index = None if pattern is None else pattern.request()
    kernel_choice = _kernel_elsewhere(config, dtype, kernel or config.train.kernel, index, capability, gpu)
    exchange = choose_exchange(
        config.topology,
        exchange_needs(config, environment, layout, dtype, make_kernel(kernel_choice[0]), capacity),
    )
    plan = _complete(
        config, environment, layout, exchange, kernel_choice, dtype, gpu=gpu, capacity=capacity
    )
    plan = dataclasses.replace(
        plan, host_share=round(USABLE_HOST * (given_host_memory(config) or host))
    )
    return plan if config.train.memory == "manual" else with_auto_memory(plan)


def _kernel_elsewhere(
    config: Config,
    dtype: torch.dtype,
    requested: str,
    index: IndexRequest | None,
    capability: tuple[int, int] = (9, 0),
    gpu: str = ASSUMED_GPU,
) -> tuple[str, str]:
    """The kernel of a run with every package installed, which is what can be assumed of a machine that is not here; on Hopper, if nothing
    else is said.
    """
    request = dataclasses.replace(kernel_request(config, "cuda", dtype, capability), index=index)
    possible = [
        name for name, reason in survey(request) if reason is None or "not installed" in reason
    ]
    if requested in possible:
        return requested, "as configured; no GPU here to ask whether it serves"
    if requested != "auto" and (reason := dict(survey(request)).get(requested)) is not None:
        raise ConfigError(
            f"train.kernel={requested}: {reason}; allowed on {gpu}: {', '.join(['auto', *possible])}"
        )
    if requested != "auto" or possible[0] == "reference":
        kernel, reason = choose(requested, request)
        return kernel.name, reason
    others = f", else {possible[1]}" if possible[1] != "reference" else ""
    on = "Hopper" if gpu == ASSUMED_GPU else gpu
    return possible[
        0
    ], f"assumed, no GPU here to ask: what auto takes on {on} with every package installed{others}"


def _complete(
    config: Config,
    environment: Environment,
    layout: Layout,
    exchange: ExchangeChoice,
    kernel: tuple[str, str],
    dtype: torch.dtype,
    *,
    gpu: str | None,
    capacity: int | None,
) -> RunPlan:
    train, count = config.train, parameters(config.model)
    micro_batches = train.global_batch // (train.micro_batch * environment.dp)
    memory = estimate_memory(
        config,
        workers=environment.workers,
        layout=layout,
        exchange=exchange,
        kernel=kernel[0],
        dtype_bytes=dtype.itemsize,
        cuda=environment.device == "cuda",
    )
    return RunPlan(
        config=config,
        environment=environment,
        layout=layout,
        exchange=exchange,
        kernel=kernel[0],
        kernel_reason=kernel[1],
        dtype=str(dtype).removeprefix("torch."),
        gpu=gpu,
        capacity=capacity,
        rope_factor=rope_factor(config.model.rope, config.seq),
        parameters=count,
        flops=training_flops(config, layout, dtype_bytes=dtype.itemsize),
        tokens_per_step=train.global_batch * config.seq,
        micro_batches=micro_batches,
        memory=memory,
        received=received_bytes(
            config,
            environment.workers,
            layout,
            exchange,
            dtype.itemsize,
            needs_out=make_kernel(kernel[0]).needs_out,
        ),
        checkpoint=12 * count.total,
    )


def received_bytes(
    config: Config,
    workers: int,
    layout: Layout,
    exchange: ExchangeChoice,
    dtype_bytes: int,
    *,
    needs_out: bool,
) -> ReceivedBytes:
    """Traffic of one worker, from the schedule of its exchange; columns of an index that are gathered once come on top.

    Where attention is computed again, in part or in full, the forward exchange runs twice. Weights are gathered in the compute dtype and
    their gradients reduced in train.reduce_dtype, (W - 1) / W of them, as often as train.shard says (see `parallel.fsdp`).
    """
    model, train = config.model, config.train
    sizes = ShardSizes(
        layout.tokens_per_worker * train.micro_batch,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        dtype_bytes,
        needs_out,
    )
    schedule = make_schedule(exchange.name, exchange.options(layout.workers))
    forward, backward = (pass_bytes(schedule, 0, sizes, backward=b) for b in (False, True))
    passes = train.global_batch // (train.micro_batch * (workers // layout.workers))
    states = StateMemory(config, workers, passes, dtype_bytes)
    return ReceivedBytes(
        forward=forward,
        backward=backward + (forward if recomputes_attention(train) else 0),
        weights=states.sent(),
        host=states.over_host_link(),
    )


def require_fit(plan: RunPlan) -> None:
    """At the start of a run, where it can be told that memory will not do.

    Raises:
        ConfigError: one line with what would.
    """
    if plan.search is not None and plan.search.chosen is None:
        raise ConfigError(refusal(plan, plan.search))
    if plan.environment.device == "cuda" and not plan.has_room_for(plan.memory, CERTAIN):
        raise ConfigError(refusal(plan, search(plan)))


def size(number: int) -> str:
    """Bytes as GiB, or MiB below a tenth of that."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"
