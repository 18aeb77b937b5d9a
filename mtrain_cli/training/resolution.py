"""Resolve the `auto` settings of a run on its machine: kernel, exchange, layout, dtype, compile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mtrain_cli.attention.kernel import Kernel, KernelRequest
from mtrain_cli.attention.kernel_registry import choose
from mtrain_cli.config.schema import Config
from mtrain_cli.data.open_dataset import most_intervals
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.layout_choice import LayoutChoice, choose_layout
from mtrain_cli.training.stage_choice import choose_staged_exchange


@dataclass(frozen=True)
class ResolvedRun:
    """The choices for all `auto` settings of a run.

    layout: layout of sequences that are one document.
    layout_reason: why the layout was chosen; "" if nothing but `Config.layout` decided.
    balancer: makes the layout of each batch; None if all batches have the same layout.
    kernel_reason: why `kernel` was chosen.
    compile: whether to compile the layers.
    pattern: method that estimates a dynamic index. None for dense attention.
    dense_kernel: kernel for the dense first steps and dense layers of a sparse run, and the reason.
        None if the run has no such steps.
    """

    layout: Layout
    exchange: ExchangeChoice
    kernel: Kernel
    kernel_reason: str
    dtype: torch.dtype
    compile: bool
    layout_reason: str = ""
    balancer: Balancer | None = None
    pattern: Pattern | None = None
    dense_kernel: tuple[Kernel, str] | None = None


def compute_dtype(config: Config, device: str) -> torch.dtype:
    """Return the compute dtype. `auto` means bfloat16 on a GPU and float32 on a CPU."""
    name = config.train.dtype
    if name == "auto":
        name = "bfloat16" if device == "cuda" else "float32"
    return getattr(torch, name)


def compiles(config: Config, device: str) -> bool:
    """Return whether to compile the layers. `auto` compiles only on a GPU."""
    return device == "cuda" if config.train.compile == "auto" else bool(config.train.compile)


def run_exchange(
    chosen: LayoutChoice, config: Config, needs: ExchangeNeeds, device: str
) -> ExchangeChoice:
    """Choose the exchange of a run on cuda or cpu, after its layout.

    Raises:
        ConfigError: the settings do not fit the model, the nodes or the pattern.
    """
    if chosen.exchange is None:
        return choose_staged_exchange(config, chosen.layout, needs, device)
    reason = "moves the rows that a balanced layout leaves with other workers"
    return choose_staged_exchange(config, chosen.layout, needs, device, (chosen.exchange, reason))


def context_layout(config: Config, environment: Environment) -> LayoutChoice:
    """Choose the layout of the run's context groups."""
    return choose_layout(config.of_worker, environment.dims.cp, environment.context_per_node)


def exchange_needs(
    config: Config,
    environment: Environment,
    layout: Layout,
    dtype: torch.dtype,
    kernel: Kernel,
    device_memory: int | None,
) -> ExchangeNeeds:
    """Return the facts on which the choice of an exchange depends.

    Args:
        device_memory: bytes of one GPU's memory. None on a CPU.
    """
    model, sparsity = config.of_worker.model, config.sparsity
    pattern = make_pattern(sparsity, config.seed)
    return ExchangeNeeds(
        workers=environment.dims.cp,
        per_node=environment.context_per_node,
        tokens=layout.padded_seq * config.train.micro_batch,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=dtype.itemsize,
        device_memory=device_memory,
        index=None if pattern is None else pattern.request(),
        columns=sparsity.column_bound,
        needs_out=kernel.needs_out,
    )


def given_memory(config: Config) -> int | None:
    """Return `topology.gpu_memory_gib` in bytes; None for auto."""
    gib = config.topology.gpu_memory_gib
    return None if isinstance(gib, str) else round(gib * 2**30)


def given_host_memory(config: Config) -> int | None:
    """Return `topology.host_memory_gib` in bytes; None for auto."""
    gib = config.topology.host_memory_gib
    return None if isinstance(gib, str) else round(gib * 2**30)


def kernel_request(
    config: Config, device: str, dtype: torch.dtype, capability: tuple[int, int] | None
) -> KernelRequest:
    """Return what a run needs from a kernel for dense attention.

    Args:
        capability: CUDA compute capability. None on a CPU.
    """
    model = config.of_worker.model
    return KernelRequest(
        device=device,
        capability=capability,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        deterministic=config.train.deterministic,
        intervals=most_intervals(config),
    )


def resolve_run(config: Config, environment: Environment) -> ResolvedRun:
    """Resolve the `auto` settings of a run.

    Raises:
        ConfigError: the configured kernel or exchange does not support the run.
    """
    chosen = context_layout(config, environment)
    layout = chosen.layout
    dtype = compute_dtype(config, environment.device)
    memory = capability = None
    if environment.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory = given_memory(config) or properties.total_memory
        capability = (properties.major, properties.minor)
    pattern = make_pattern(config.sparsity, config.seed)
    dims = environment.dims
    if isinstance(pattern, FixedPattern):
        pattern = replace(pattern, part=(dims.coordinate("tp", environment.rank), dims.tp))
    (kernel, kernel_reason), dense_kernel = choose_kernels(
        config, kernel_request(config, environment.device, dtype, capability), pattern
    )
    needs = exchange_needs(config, environment, layout, dtype, kernel, memory)
    exchange = run_exchange(chosen, config, needs, environment.device)
    return ResolvedRun(
        layout=layout,
        layout_reason=chosen.reason,
        balancer=chosen.balancer,
        exchange=exchange,
        kernel=kernel,
        kernel_reason=kernel_reason,
        dtype=dtype,
        compile=compiles(config, environment.device),
        pattern=pattern,
        dense_kernel=dense_kernel,
    )


def require_cpu_kernel(config: Config) -> None:
    """Raise ConfigError if `train.kernel` cannot compute the run on a CPU."""
    request = kernel_request(config, "cpu", compute_dtype(config, "cpu"), None)
    choose_kernels(config, request, make_pattern(config.sparsity, config.seed))


def choose_kernels(
    config: Config, request: KernelRequest, pattern: Pattern | None
) -> tuple[tuple[Kernel, str], tuple[Kernel, str] | None]:
    """Return the kernel of a run, and the kernel of dense first steps or layers of a sparse run.

    Each kernel comes with the reason for its choice. The second result is None if the run has
    neither.

    request: what the run needs from a kernel for dense attention.

    Raises:
        ConfigError: the configured kernel does not support the run.
    """
    if pattern is None:
        return choose(config.train.kernel, request), None
    dense_kernel = choose_dense_kernel(config, request)
    return choose(config.train.kernel, replace(request, index=pattern.request())), dense_kernel


def choose_dense_kernel(config: Config, request: KernelRequest) -> tuple[Kernel, str] | None:
    """Return the kernel for dense first steps or dense layers of a sparse run, and the reason.

    Return None if the run has no such steps or layers.

    Args:
        request: what the run needs for dense attention.

    Raises:
        ConfigError: no kernel supports these steps or layers.
    """
    if not config.sparsity.dense_steps and not config.sparsity.dense_layers:
        return None
    return choose(dense_kernel_asked(config.train.kernel), request)


def dense_kernel_asked(kernel: str) -> str:
    """Return a kernel's name, or "auto" for triton: without an index, others may be faster."""
    return "auto" if kernel == "triton" else kernel
