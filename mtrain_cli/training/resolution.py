"""Resolve the `auto` settings of a run: kernel, exchange, layout, dtype, compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from mtrain_cli.attention.kernel import Kernel, KernelRequest
from mtrain_cli.attention.kernel_registry import choose, make_kernel, survey_with_all_packages
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.open_dataset import most_intervals
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.pattern import Pattern, make_pattern
from mtrain_cli.training.hardware import ASSUMED_GPU, Hardware
from mtrain_cli.training.layout_choice import choose_layout, choose_staged_exchange
from mtrain_cli.training.stage_prices import OFTEN_PRICED, StagePrices, stage_prices


@dataclass(frozen=True)
class ResolvedRun:
    """The choices for all `auto` settings of a run.

    layout: layout of sequences that are one document.
    balancer: makes the layout of each batch; None if all batches have the same layout.
    pattern: method that estimates a dynamic index; None for dense attention.
    dense_kernel: kernel of dense first steps and layers of a sparse run, and the reason, if any.
    stage_prices: chooses the stages of group casts for each micro-batch; None if they are fixed.
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
    stage_prices: StagePrices | None = None


def compute_dtype(config: Config, device: str) -> torch.dtype:
    """Return the compute dtype. `auto` means bfloat16 on a GPU and float32 on a CPU."""
    name = config.train.dtype
    if name == "auto":
        name = "bfloat16" if device == "cuda" else "float32"
    return getattr(torch, name)


_FP8_CAPABILITY = 8, 9  # of the first GPUs with fp8 products


def compiles(config: Config, device: str) -> bool:
    return device == "cuda" if config.train.compile == "auto" else bool(config.train.compile)


def kernel_request(
    config: Config, device: str, dtype: torch.dtype, capability: tuple[int, int] | None
) -> KernelRequest:
    """Return what a run needs from a kernel for dense attention."""
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


def resolve_run(
    config: Config,
    environment: Environment,
    hardware: Hardware | None = None,
    softcap: float = 0.0,
) -> ResolvedRun:
    """Resolve the `auto` settings of a run on this machine, or on other hardware.

    softcap: of attention's scores, see `KernelRequest`.

    Raises:
        ConfigError: the configured kernel or exchange does not support the run.
    """
    hardware = (hardware or Hardware.here(environment.device)).limited(config.topology)
    model, dims = config.of_worker.model, environment.dims
    chosen = choose_layout(config.of_worker, dims.cp, environment.context_per_node)
    dtype = compute_dtype(config, environment.device)
    if config.train.fp8 != "none":
        _require_fp8(config.train.fp8, dtype, hardware.capability)
    pattern = make_pattern(config.sparsity, config.seed)
    if isinstance(pattern, FixedPattern):
        pattern = replace(pattern, part=(dims.coordinate("tp", environment.rank), dims.tp))
    request = kernel_request(config, environment.device, dtype, hardware.capability)
    request = replace(request, softcap=softcap)
    (kernel, kernel_reason), dense_kernel = choose_kernels(
        config, request, pattern, partial(_assume, hardware) if hardware.absent else choose
    )
    needs = ExchangeNeeds(
        workers=dims.cp,
        per_node=environment.context_per_node,
        tokens=chosen.layout.padded_seq * config.train.micro_batch,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=dtype.itemsize,
        device_memory=hardware.memory or None,
        index=None if pattern is None else pattern.request(),
        columns=config.sparsity.column_bound,
    )
    exchange = choose_staged_exchange(config, chosen, needs, environment.device)
    return ResolvedRun(
        layout=chosen.layout,
        layout_reason=chosen.reason,
        balancer=chosen.balancer,
        exchange=exchange,
        stage_prices=stage_prices(config, exchange, needs) if dims.cp <= OFTEN_PRICED else None,
        kernel=kernel,
        kernel_reason=kernel_reason,
        dtype=dtype,
        compile=compiles(config, environment.device),
        pattern=pattern,
        dense_kernel=dense_kernel,
    )


def _require_fp8(fp8: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    if dtype != torch.bfloat16:
        given = f"train.fp8={fp8}: needs bfloat16, not {str(dtype).removeprefix('torch.')}"
        raise ConfigError(f"{given}; give train.dtype=bfloat16")
    if capability is not None and capability < _FP8_CAPABILITY:
        needs, has = (".".join(map(str, each)) for each in (_FP8_CAPABILITY, capability))
        raise ConfigError(
            f"train.fp8={fp8}: needs GPUs of compute capability {needs} or later, not {has}"
        )


def choose_kernels(
    config: Config,
    request: KernelRequest,
    pattern: Pattern | None,
    choose: Callable[[str, KernelRequest], tuple[Kernel, str]] = choose,
) -> tuple[tuple[Kernel, str], tuple[Kernel, str] | None]:
    """Return the kernel of a run, and that of dense first steps or layers of a sparse run, if any.

    Each comes with the reason for its choice. request: for dense attention.
    """
    name, sparsity = config.train.kernel, config.sparsity
    if pattern is None:
        return choose(name, request), None
    sparse = choose(name, replace(request, index=pattern.request()))
    if not sparsity.dense_steps and not sparsity.dense_layers:
        return sparse, None
    # Without an index, other kernels may be faster than Triton's.
    return sparse, choose("auto" if name == "triton" else name, request)


def _assume(hardware: Hardware, name: str, request: KernelRequest) -> tuple[Kernel, str]:
    """Choose a kernel for absent GPUs, on which all packages are taken to be installed."""
    reasons = dict(survey_with_all_packages(request))
    possible = [kernel for kernel, reason in reasons.items() if reason is None]
    if name in possible:
        return make_kernel(name), "as configured; no GPU here to check that it is supported"
    if name != "auto" and (reason := reasons.get(name)) is not None:
        allowed = ", ".join(["auto", *possible])
        raise ConfigError(f"train.kernel={name}: {reason}; allowed on {hardware.gpu}: {allowed}")
    if name != "auto" or possible[0] == "reference":
        return choose(name, request)
    others = f", else {possible[1]}" if possible[1] != "reference" else ""
    on = "Hopper" if hardware.gpu == ASSUMED_GPU else hardware.gpu
    reason = f"assumed without a GPU: on {on} with all packages, auto takes this kernel{others}"
    return make_kernel(possible[0]), reason
