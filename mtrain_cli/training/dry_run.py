"""`mtrain train --dry-run`: what a run would be, computed from its configuration on any machine, in seconds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.registry import choose, make_kernel, survey
from mtrain_cli.config.schema import CHECKPOINTS, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.environment import Environment, gpu_index, host_memory, resolve_environment
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.offload import layers_on_host
from mtrain_cli.parallel.schedule import make_schedule
from mtrain_cli.parallel.selection import ExchangeChoice, choose_exchange
from mtrain_cli.parallel.traffic import Sizes, pass_bytes
from mtrain_cli.sparsity.pattern import shown_name
from mtrain_cli.sparsity.registry import make_pattern
from mtrain_cli.sparsity.remarks import computes_everything, remarks
from mtrain_cli.training.auto import Search, Setting, longest_seq, refusal, search
from mtrain_cli.training.flops import FlopsPerToken, ParameterCount, parameters, peak_flops, recomputes_attention, training_flops
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory
from mtrain_cli.training.plan import (
    compute_dtype,
    dense_kernel_asked,
    dense_steps_named,
    exchange_needs,
    given_memory,
    make_choices,
    run_layout,
)
from mtrain_cli.training.state_memory import StateMemory

if TYPE_CHECKING:
    from mtrain_cli.training.plan import Choices

# GiB that CUDA reports for common GPUs, smallest first; a plan for a machine that is not here is held against them.
GPU_MEMORY = (("40 GB (A100)", 39.4), ("80 GB (A100, H100)", 79.2), ("141 GB (H200)", 139.8), ("180 GB (B200)", 178.3))
# The one GPU that a plan reckons with where none is here to ask: that of today's clusters.
ASSUMED_GPU, ASSUMED_GPU_BYTES = "NVIDIA H200", round(139.8 * GIB)
ASSUMED_HOST_BYTES = 128 * GIB  # of host memory for each such GPU
USABLE_HOST = 0.9  # of host memory; the rest is for processes, files and data
CERTAIN = 1.05  # a run is refused where the estimate is so much above all the memory of a GPU: it has been off by less
SHORTEST_SEQ = 1024  # that is worth a proposal
USUAL_MFU = 0.4  # what a well-tuned dense run reaches; only for the time of a step in a plan
USABLE = 0.95  # of a GPU's memory: the allocator's blocks are never packed without gaps


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that reach one worker: keys, values and their gradients of one layer and micro-batch, forward and backward; weights and their
    gradients of one optimizer step; host: both between its device and the host in such a step, where the optimizer is offloaded.
    """

    forward: int
    backward: int
    weights: int
    host: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
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
    moved: Moved
    checkpoint: int
    dense_kernel: tuple[str, str] | None = None
    machine: str = ""
    elsewhere: bool = False
    host_share: int = round(USABLE_HOST * ASSUMED_HOST_BYTES)
    search: Search | None = None
    asked: Config | None = None

    @property
    def gpu_name(self) -> str:
        return self.gpu or ASSUMED_GPU

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU, assumed where it is not known."""
        return self.capacity or ASSUMED_GPU_BYTES

    @property
    def has(self) -> str:
        """What there is of memory, for messages."""
        if self.environment.device == "cpu":
            return f"the {size(host_memory())} that {self.environment.local_workers} CPU workers of this machine share"
        return f"the {size(self.gpu_bytes)} of {self.gpu_name} with {size(self.host_share)} of host memory"

    def load(self, memory: MemoryEstimate) -> int:
        """Bytes of a worker on its device, which on a CPU is the host."""
        return memory.total + (memory.host_peak if self.environment.device == "cpu" else 0)

    def takes(self, memory: MemoryEstimate, usable: float = USABLE) -> bool:
        """Whether a worker of this plan has so much memory, on its device and on the host."""
        if self.environment.device == "cpu":
            return self.load(memory) * self.environment.local_workers <= host_memory()
        return memory.total <= usable * self.gpu_bytes and memory.host_peak <= self.host_share

    def again(self, config: Config) -> Plan:
        """The plan of another configuration on the same kind of machine; as many workers, unless it names their number."""
        workers = config.topology.workers if isinstance(config.topology.workers, int) else self.environment.workers
        topology = dataclasses.replace(config.topology, device=self.environment.device, workers=workers)
        config = dataclasses.replace(config, topology=topology)
        return _elsewhere(config, "") if self.elsewhere else _here(config)

    @property
    def host_bytes(self) -> int:
        """What the CPU workers of one machine need together."""
        return self.load(self.memory) * self.environment.local_workers

    @property
    def fits(self) -> bool | None:
        """Whether the memory of a worker, or on a CPU that of this machine, suffices; None when the GPU is not known."""
        if self.environment.device == "cpu":
            return self.host_bytes <= host_memory()
        return None if self.capacity is None else self.takes(self.memory)


def plan(config: Config) -> Plan:
    """The plan of a run on a machine that need not be this one; where this one has GPUs, it reckons with GPUs like them.

    With ``topology.device=auto`` and no GPU here it is what the same line would do here, on the CPU, unless this machine would refuse that
    and ``topology.workers`` is a number: then it is a plan for so many GPUs. ``topology.device`` = cpu or cuda leaves no choice.

    Raises:
        ConfigError: sizes do not fit each other, or the configured kernel cannot serve the run.
    """
    found = _plan(config)
    return found if config.train.memory == "manual" else decided(found)


def decided(found: Plan) -> Plan:
    """A plan with what ``train.memory=auto`` decides, or the least that it could take where nothing fits; ``search`` tells."""
    result = search(found)
    setting = result.chosen or min(result.settings, key=lambda setting: found.load(setting.memory))
    return dataclasses.replace(taking(found, setting), search=result, asked=found.config)


def taking(found: Plan, setting: Setting) -> Plan:
    """A plan with another way of using memory."""
    train = setting.config.train
    dtype_bytes = getattr(torch, found.dtype).itemsize
    return dataclasses.replace(
        found,
        config=setting.config,
        memory=setting.memory,
        flops=training_flops(setting.config, found.layout, dtype_bytes=dtype_bytes),
        moved=moved(
            setting.config,
            found.environment.workers,
            found.layout,
            found.exchange,
            dtype_bytes,
            needs_out=make_kernel(found.kernel).needs_out,
        ),
        micro_batches=train.global_batch // (train.micro_batch * found.environment.dp),
    )


def _plan(config: Config) -> Plan:
    device = config.topology.device
    if torch.cuda.is_available() or device == "cpu":
        return _here(config)
    if device == "cuda":
        return _elsewhere(config, "topology.device=cuda, and no GPU is here")
    refusal = _refusal_here(config) if config.topology.workers != "auto" else None
    return _elsewhere(config, refusal) if refusal else _here(config)


def _here(config: Config) -> Plan:
    """A plan for this machine, or for more GPUs like its own."""
    environment = resolve_environment(config, planning=True)
    # The plan is for the first GPU here, whichever worker this process would be.
    found = planned(config, environment, make_choices(config, dataclasses.replace(environment, rank=0, local_rank=0)))
    return dataclasses.replace(found, machine=_machine_here(found))


def _machine_here(found: Plan) -> str:
    if found.gpu is None:
        asked = found.config.topology.device == "cpu"
        return "the CPU of this machine" + (
            "" if asked else ", since no GPU is here; topology.device=cuda topology.workers=N plans for N GPUs"
        )
    gpus = torch.cuda.device_count()
    return f"GPUs like the {gpus} x {found.gpu} of this machine" if found.environment.workers > gpus else "the GPUs of this machine"


def _refusal_here(config: Config) -> str | None:
    """Why this machine's CPU would not take a run; None if it would."""
    try:
        found = _here(config)
    except ConfigError as error:
        return f"no GPU is here, and the CPU refuses {error.problems[0]}"
    if found.fits:
        return None
    workers = found.environment.workers
    return f"no GPU is here, and {workers} CPU worker{'s' * (workers > 1)} would need {needed_here(found)}"


def needed_here(found: Plan) -> str:
    """Memory of CPU workers against that of this machine, in whole GiB as the run itself says it."""
    return f"about {found.host_bytes / GIB:,.0f} GiB where this machine has {host_memory() / GIB:,.0f} GiB"


def planned(config: Config, environment: Environment, choices: Choices) -> Plan:
    """The plan of a run whose choices are made, on this machine."""
    properties = torch.cuda.get_device_properties(gpu_index(environment)) if environment.device == "cuda" else None
    found = _complete(
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
        per_machine = min(environment.local_workers, max(1, torch.cuda.device_count()))
        found = dataclasses.replace(found, host_share=round(USABLE_HOST * host_memory() / per_machine))
    if choices.dense_kernel is None:
        return found
    kernel, reason = choices.dense_kernel
    return dataclasses.replace(found, dense_kernel=(kernel.name, reason))


def _elsewhere(config: Config, why: str) -> Plan:
    """A plan for GPUs that are not here: what cannot be asked of them is assumed, and says so."""
    config = dataclasses.replace(config, topology=dataclasses.replace(config.topology, device="cuda"))
    environment = resolve_environment(config, planning=True)
    layout = run_layout(config, environment.cp)
    dtype = compute_dtype(config, environment.device)
    pattern = make_pattern(config.sparsity, config.seed)
    kernel = _kernel_elsewhere(config, dtype, config.train.kernel, None if pattern is None else pattern.request())
    dense_kernel = None
    if config.sparsity.dense_steps:
        with dense_steps_named(config):
            dense_kernel = _kernel_elsewhere(config, dtype, dense_kernel_asked(config), None)
    exchange = choose_exchange(
        config.topology,
        exchange_needs(config, environment, layout, dtype, make_kernel(kernel[0]), given_memory(config) or ASSUMED_GPU_BYTES),
    )
    found = _complete(config, environment, layout, exchange, kernel, dtype, gpu=None, capacity=given_memory(config))
    return dataclasses.replace(
        found, dense_kernel=dense_kernel, machine=f"GPUs elsewhere, taken to be {ASSUMED_GPU}: {why}", elsewhere=True
    )


def plan_for(
    config: Config, *, gpu: str, capability: tuple[int, int], capacity: int, host: int = ASSUMED_HOST_BYTES, kernel: str | None = None
) -> Plan:
    """The plan of a run on described GPUs; ``config.topology`` says how many, in nodes of how many. kernel: instead of ``train.kernel``.
    host: bytes of host memory for each GPU.

    Its memory is that of a `plan` of the same configuration, with the same kernel and exchange.

    Raises:
        ConfigError: sizes do not fit each other, or no kernel serves the run.
    """
    config = dataclasses.replace(config, topology=dataclasses.replace(config.topology, device="cuda"))
    environment = resolve_environment(config, planning=True)
    layout, dtype = run_layout(config, environment.cp), compute_dtype(config, "cuda")
    pattern = make_pattern(config.sparsity, config.seed)
    index = None if pattern is None else pattern.request()
    found = _kernel_elsewhere(config, dtype, kernel or config.train.kernel, index, capability, gpu)
    exchange = choose_exchange(config.topology, exchange_needs(config, environment, layout, dtype, make_kernel(found[0]), capacity))
    made = _complete(config, environment, layout, exchange, found, dtype, gpu=gpu, capacity=capacity)
    made = dataclasses.replace(made, host_share=round(USABLE_HOST * host))
    return made if config.train.memory == "manual" else decided(made)


def _kernel_elsewhere(
    config: Config,
    dtype: torch.dtype,
    asked: str,
    index: IndexRequest | None,
    capability: tuple[int, int] = (9, 0),
    gpu: str = ASSUMED_GPU,
) -> tuple[str, str]:
    """The kernel of a run with every package installed, which is what can be assumed of a machine that is not here; on Hopper, if nothing
    else is said.
    """
    model = config.model
    request = KernelRequest(
        device="cuda",
        capability=capability,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        deterministic=config.train.deterministic,
        index=index,
    )
    possible = [name for name, reason in survey(request) if reason is None or "not installed" in reason]
    if asked in possible:
        return asked, "as configured; no GPU here to ask whether it serves"
    if asked != "auto" and (reason := dict(survey(request)).get(asked)) is not None:
        raise ConfigError(f"train.kernel={asked}: {reason}; allowed on {gpu}: {', '.join(['auto', *possible])}")
    if asked != "auto" or possible[0] == "reference":
        kernel, reason = choose(asked, request)
        return kernel.name, reason
    others = f", else {possible[1]}" if possible[1] != "reference" else ""
    on = "Hopper" if gpu == ASSUMED_GPU else gpu
    return possible[0], f"assumed, no GPU here to ask: what auto takes on {on} with every package installed{others}"


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
) -> Plan:
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
    return Plan(
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
        moved=moved(config, environment.workers, layout, exchange, dtype.itemsize, needs_out=make_kernel(kernel[0]).needs_out),
        checkpoint=12 * count.total,
    )


def moved(config: Config, workers: int, layout: Layout, exchange: ExchangeChoice, dtype_bytes: int, *, needs_out: bool) -> Moved:
    """Traffic of one worker, from the schedule of its exchange; columns of an index that are gathered once come on top.

    Where attention is computed again, in part or in full, the forward exchange runs twice. Weights are gathered in the compute dtype and
    their gradients reduced in train.reduce_dtype, (W - 1) / W of them, as often as train.shard says (see `parallel.fsdp`).
    """
    model, train = config.model, config.train
    sizes = Sizes(layout.tokens_per_worker * train.micro_batch, model.num_heads, model.num_kv_heads, model.head_dim, dtype_bytes, needs_out)
    schedule = make_schedule(exchange.name, exchange.options(layout.workers))
    forward, backward = (pass_bytes(schedule, 0, sizes, backward=b) for b in (False, True))
    passes = train.global_batch // (train.micro_batch * (workers // layout.workers))
    states = StateMemory(config, workers, passes, dtype_bytes)
    return Moved(
        forward=forward,
        backward=backward + (forward if recomputes_attention(train) else 0),
        weights=states.sent(),
        host=states.over_host_link(),
    )


def dry_run(config: Config) -> RenderableType:
    """The plan of a run as a person reads it, 80 columns wide or more."""
    return render(plan(config))


def render(found: Plan) -> RenderableType:
    """The table of a plan, and the memory of a worker by part."""
    config, model = found.config, found.config.model
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    attention = 1 - 6 * found.parameters.matmul / found.flops.model
    recomputation = f"recomputation {describe_activations(config)}"
    # How much a pattern leaves depends on the data.
    less = (
        config.sparsity.pattern != "dense" and not computes_everything(config) and (config.sparsity.dense_steps or 0) < config.train.steps
    )
    sparsely = f" were it dense, {config.sparsity.pattern} computes less" if less else ""
    rows = [
        ("machine", found.machine),
        ("model", describe_model(found)),
        ("", f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, vocabulary {model.vocab_size:,}"),
        ("", f"{count(found.parameters.embedding)} in the embedding{' (and LM head, tied)' if model.tie_word_embeddings else ''}"),
        ("positions", describe_rope(found)),
        ("per token", f"{flop(found.flops.model)} model, {attention:.0%} of it attention (causal, whole sequence)"),
        ("", f"{flop(found.flops.executed)} executed{sparsely}, with {recomputation}"),
        ("step", describe_step(found)),
        ("", describe_time(found)),
        ("workers", describe_workers(found)),
        ("layout", describe_layout(found)),
        ("exchange", f"{found.exchange.label}: {found.exchange.reason}"),
        ("sparsity", describe_sparsity(found)),
        *(("", line) for line in remarks(config)),
        *kernel_rows(found),
        ("dtype", describe_dtype(found)),
        ("moved", describe_moved(found)),
        ("checkpoint", f"{size(found.checkpoint)} on disk, {config.train.keep_checkpoints} kept"),
    ]
    title = Text(f"Dry run: {model.name}, seq {format_size(config.seq)}, nothing is trained", style="bold")
    return Group(title, facts(rows), Text(""), memory_table(found), *search_rows(found), *verdict(found))


def search_rows(found: Plan) -> list[RenderableType]:
    """What ``train.memory=auto`` chose, and what it rejected and why."""
    if found.search is None or found.search.chosen is None:
        return []
    rejected = "; ".join(f"{way}: {reason}" for way, reason in found.search.rejected())
    return [Text(f"{describe_choice(found)}."), Text(f"Rejected, by the fastest setting of each: {rejected}.", style="dim")]


def describe_choice(found: Plan) -> str:
    assert found.search is not None
    assert found.search.chosen is not None
    chosen = found.search.chosen
    how = f"the fastest of {len(found.search.settings)} settings that fits"
    return f"train.memory=auto takes {chosen.words or 'the defaults'}, {how}: {duration(chosen.seconds)} a step by the model"


def verdict(found: Plan) -> list[RenderableType]:
    """What would help where a plan does not fit, and how long a sequence may be."""
    config = found.config
    on_cpu = found.environment.device == "cpu"
    if on_cpu and not found.fits:
        return [Text(f"Does not fit this machine: {advice(found)}", style="red")]
    if on_cpu:
        return []
    if found.search is not None:
        if found.search.chosen is None:
            return [Text(f"Does not fit: {refusal(found, found.search)}.", style="red")]
        longest = longest_seq(found)
        return [Text(f"Longest sequence that fits with train.memory=auto: {'none' if longest is None else format_size(longest)}.")]
    lines: list[RenderableType] = []
    if not found.takes(found.memory):
        lines.append(Text(f"Does not fit: {refusal(found, search(found))}.", style="red"))
    longest = longest_seq(found)
    automatic = longest_seq(dataclasses.replace(found, config=with_memory(config, "auto")))
    shown = ["none" if seq is None else format_size(seq) for seq in (longest, automatic)]
    on = f"on {found.gpu_name}" if found.elsewhere else "here"
    lines.append(Text(f"Longest sequence that fits {on}: {shown[0]} with these settings, {shown[1]} with train.memory=auto.", style="dim"))
    return lines


def with_memory(config: Config, memory: str) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, memory=memory))


def require_fit(found: Plan) -> None:
    """At the start of a run, where it can be told that memory will not do.

    Raises:
        ConfigError: one line with what would.
    """
    if found.search is not None and found.search.chosen is None:
        raise ConfigError(refusal(found, found.search))
    if found.environment.device == "cuda" and not found.takes(found.memory, CERTAIN):
        raise ConfigError(refusal(found, search(found)))


def kernel_rows(found: Plan) -> list[tuple[str, str]]:
    """The kernel, and that of dense first steps where there are some."""
    rows = [("kernel", f"{found.kernel}: {found.kernel_reason}")]
    if found.dense_kernel is not None:
        name, reason = found.dense_kernel
        rows.append(("", f"{name} in the first {found.config.sparsity.dense_steps} steps, which are dense: {reason}"))
    return rows


def facts(rows: list[tuple[str, str]]) -> Table:
    """Two columns: a dim label and its text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    return table


def memory_table(found: Plan) -> RenderableType:
    """Memory of a worker at its peak by part, and whether it fits."""
    memory, peak = found.memory, found.memory.peak
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    rows = {**{name.replace("_", " "): part for name, part in peak.parts.items()}, "CUDA and NCCL": memory.reserve}
    for name, part in rows.items():
        if part:
            table.add_row(name, size(part), Text("█" * round(30 * part / memory.total), style="cyan"))
    table.add_row(Text("total", style="bold not dim"), Text(size(memory.total), style="bold"), fitting(found))
    moments = [f"{moment.name} {size(moment.allocated)}" for moment in memory.moments if moment is not peak]
    choices = [f"{name} {size(total)}" for name, total in alternatives(found).items()]
    workers = found.environment.local_workers
    waiting = f"Offloaded: {size(memory.host)} of pinned host memory a worker, {size(memory.host * workers)} a machine."
    saving = (
        f"While a checkpoint is written: {size(memory.saving)} more of host memory a worker, {size(memory.saving * workers)} a machine."
    )
    return Group(
        Text.assemble(("Memory of a worker", "bold"), f" at its peak, the {peak.name}"),
        table,
        Text(f"At other moments: {', '.join(moments)}.", style="dim"),
        *([Text(waiting)] if memory.host else []),
        *([Text(saving)] if memory.saving else []),
        Text(f"With train.activation_checkpoint: {', '.join(choices)}.", style="dim"),
    )


def describe_activations(config: Config) -> str:
    """What layers keep, and where."""
    train = config.train
    kept = f" (last {train.checkpoint_keep:.0%} kept)" if train.activation_checkpoint == "sequence_selective" else ""
    on_host, layers = layers_on_host(train.offload_activations, config.model.num_layers), config.model.num_layers
    offloaded = f", {'' if on_host == layers - 1 else f'{on_host} of {layers} layers '}offloaded" if on_host else ""
    whole = layers_with_products(train.keep_mlp, layers)
    products = f", MLP products of {'all' if whole == layers else f'{whole} of {layers}'} layers kept" if whole else ""
    return f"{train.activation_checkpoint}{kept}{offloaded}{products}"


def alternatives(found: Plan) -> dict[str, int]:
    """Total bytes of a worker for each kind of activation checkpointing."""
    totals = {}
    for kind in CHECKPOINTS:
        offload = found.config.train.offload_activations if kind != "none" else False
        train = dataclasses.replace(found.config.train, activation_checkpoint=kind, offload_activations=offload)
        other = estimate_memory(
            dataclasses.replace(found.config, train=train),
            workers=found.environment.workers,
            layout=found.layout,
            exchange=found.exchange,
            kernel=found.kernel,
            dtype_bytes=getattr(torch, found.dtype).itemsize,
            cuda=found.environment.device == "cuda",
        )
        totals[kind] = found.load(other)
    return totals


def fitting(found: Plan) -> Text:
    """Whether the peak fits, and on what."""
    word, style = ("fits", "green") if found.fits else ("does not fit", "red")
    if found.environment.device == "cpu":
        workers = found.environment.local_workers
        share = found.host_bytes / host_memory()
        percent = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        return Text(f"{word}: {f'{workers} of them are ' if workers > 1 else ''}{percent} of {size(host_memory())}", style=style)
    if found.capacity is not None:
        share = found.memory.total / found.capacity
        return Text(f"{word}: {share:.0%} of the {size(found.capacity)} of {found.gpu or 'a GPU'}", style=style)
    large_enough = [name for name, gib in GPU_MEMORY if found.memory.total <= USABLE * gib * GIB]
    return Text(f"fits GPUs of {large_enough[0]} and more", style="green") if large_enough else Text("fits no GPU of today", style="red")


def advice(found: Plan) -> str:
    """What CPU workers need, and what would help, for a plan that does not fit this machine."""
    workers = found.environment.workers
    helps = [
        f"train.activation_checkpoint={kind}"
        for kind, total in alternatives(found).items()
        if total * found.environment.local_workers <= host_memory()
    ][:1]
    if (seq := _longest_seq(found)) is not None:
        helps.append(f"seq={format_size(seq)}")
    would = f"{' or '.join(helps)} would fit" if helps else "only a smaller model would fit"
    gpus = "topology.workers=8" if found.config.topology.device == "auto" else "topology.device=cuda topology.workers=8"
    need = f"{workers} worker{'s' * (workers > 1)} need{'s' * (workers == 1)} {needed_here(found)}"
    return f"{need}; {would}. {gpus} plans for eight GPUs."


def _longest_seq(found: Plan) -> int | None:
    """The length that fits this machine when that of the plan is halved again and again; None where the weights alone are too much."""
    seq = found.config.seq // 2
    while seq >= SHORTEST_SEQ:
        if _here(dataclasses.replace(found.config, seq=seq)).fits:
            return seq
        seq //= 2
    return None


def describe_model(found: Plan) -> str:
    return f"{found.config.model.name} ({found.config.model.family}), {count(found.parameters.total)} parameters"


def describe_rope(found: Plan) -> str:
    rope = found.config.model.rope
    if rope.scaling == "none":
        return f"rotary, theta {rope.theta:,.0f}, not stretched"
    reach = f"from {format_size(rope.original_max_position)} tokens"
    return f"rotary, theta {rope.theta:,.0f}, {rope.scaling} by {found.rope_factor:g} {reach}"


def describe_step(found: Plan) -> str:
    train, environment = found.config.train, found.environment
    batch = "1 sequence" if train.global_batch == 1 else f"{train.global_batch} sequences"
    split = "" if train.global_batch == 1 else f" = {environment.dp} x {train.micro_batch} x {found.micro_batches} accumulated"
    return f"{found.tokens_per_step:,} tokens, {batch}{split}"


def describe_time(found: Plan) -> str:
    """FLOP of a step and how long they take at a usual share of the peak; that of the GPU assumed where none is known."""
    text = f"{flop(found.flops.model * found.tokens_per_step)} model"
    if found.environment.device == "cpu":
        return text
    name = found.gpu or ASSUMED_GPU
    peak = peak_flops(name)
    if peak is None:
        return text
    seconds = found.flops.model * found.tokens_per_step / (USUAL_MFU * peak * found.environment.workers)
    return f"{text}: {duration(seconds)} at {USUAL_MFU:.0%} of the {flop(peak)}/s of {name}"


def describe_workers(found: Plan) -> str:
    environment = found.environment
    what = found.gpu or ("GPU" if environment.device == "cuda" else "CPU process")
    if environment.workers > 1 and not found.gpu:
        what += "es" if what.endswith("s") else "s"
    nodes = f", {environment.nodes} nodes of {environment.workers_per_node}" if environment.nodes > 1 else ""
    return f"{environment.workers} {'x ' if found.gpu else ''}{what} = {environment.dp} data x {environment.cp} context{nodes}"


def describe_sparsity(found: Plan) -> str:
    pattern = make_pattern(found.config.sparsity, found.config.seed)
    if pattern is None:
        return "dense: every pair that the mask allows"
    dense = found.config.sparsity.dense_steps
    return f"{shown_name(pattern)}: {pattern.describe()}" + (f"; the first {dense} steps dense" if dense else "")


def describe_layout(found: Plan) -> str:
    layout = found.layout
    name = f"{layout.name}, blocks of {layout.block_size}" if layout.name == "striped" else layout.name
    pads = layout.padded_seq - layout.seq
    padding = f", {pads:,} of {layout.padded_seq:,} are padding" if pads else ""
    return f"{name}: {layout.tokens_per_worker:,} tokens a worker{padding}"


def describe_dtype(found: Plan) -> str:
    train = found.config.train
    text = found.dtype if found.dtype == "float32" else f"{found.dtype} compute; float32 parameters, gradients and AdamW states"
    if found.config.optim.offload:
        text = f"{found.dtype} compute and weights, float32 gradients; float32 parameters and AdamW states on the host"
    return f"{text}, gradients reduced in {train.reduce_dtype}" if train.reduce_dtype != "float32" else text


def describe_moved(found: Plan) -> str:
    host = found.moved.host
    link = f"{size(host)} between GPU and host a step" if host and found.environment.device == "cuda" else ""
    if found.environment.workers == 1:
        return link or "nothing, one worker"
    exchange = f"{size(found.moved.forward)} forward and {size(found.moved.backward)} backward a layer and pass"
    n = found.micro_batches
    often = {"full": "twice", "gradients": "once a step", "optimizer": "once a step"}[found.config.train.shard]
    each = "" if n == 1 or found.config.train.shard == "optimizer" else f" in each of {n} micro-batches"
    how = f"gathered {often}, reduced{each}" if found.config.train.shard != "full" else f"gathered {often} and reduced{each}"
    weights = f"weights and gradients {size(found.moved.weights)} a step ({how})"
    return "; ".join(part for part in (exchange if found.environment.cp > 1 else "no keys or values", weights, link) if part)


def count(number: int) -> str:
    """3.09 B, 494 M or 874 K."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


def flop(number: float) -> str:
    """1.34 TFLOP."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number / 1e6:.3g} MFLOP"


def duration(seconds: float) -> str:
    """41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"


def size(number: int) -> str:
    """Bytes as GiB, or MiB below a tenth of that."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"
