"""What a run resolves to on the machine it runs on: kernel, exchange, layout and arithmetic, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mtrain_cli.attention.kernel import Kernel, KernelRequest
from mtrain_cli.attention.registry import choose
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.selection import choose_exchange
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.registry import make_pattern


@dataclass(frozen=True)
class Choices:
    """Facts behind the word `auto`. pattern: None for dense attention; dense_kernel computes the first steps if those are to be dense."""

    layout: Layout
    exchange: str
    exchange_reason: str
    kernel: Kernel
    kernel_reason: str
    dtype: torch.dtype
    compile: bool
    pattern: Pattern | None = None
    dense_kernel: Kernel | None = None


def compute_dtype(config: Config, device: str) -> torch.dtype:
    """auto = bfloat16 on a GPU, float32 on a CPU."""
    name = config.train.dtype
    if name == "auto":
        name = "bfloat16" if device == "cuda" else "float32"
    return getattr(torch, name)


def check_one_worker(config: Config, cp: int) -> None:
    """Raises ConfigError if a dynamic index is asked for over several workers."""
    if config.sparsity.pattern != "dense" and cp > 1:
        raise ConfigError(
            f"sparsity.pattern={config.sparsity.pattern}: is computed by one worker a sequence so far, not "
            f"topology.context_parallel={cp}; give topology.workers=1 (or topology.context_parallel=1), or sparsity=dense"
        )


def make_choices(config: Config, environment: Environment) -> Choices:
    """Raises ConfigError if the configured kernel cannot serve the run, or nothing serves its pattern over that many workers."""
    model, topology = config.model, config.topology
    layout = make_layout(topology.layout, environment.cp, config.seq, topology.block_size)
    dtype = compute_dtype(config, environment.device)
    memory = capability = None
    if environment.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory, capability = properties.total_memory, (properties.major, properties.minor)
    exchange, exchange_reason = choose_exchange(
        topology.exchange,
        workers=environment.cp,
        tokens=layout.padded_seq * config.train.micro_batch,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=dtype.itemsize,
        device_memory=memory,
    )
    request = KernelRequest(
        device=environment.device,
        capability=capability,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        deterministic=config.train.deterministic,
    )
    pattern = make_pattern(config.sparsity, config.seed)
    dense_kernel = None
    if pattern is not None:
        check_one_worker(config, environment.cp)
        if config.sparsity.dense_steps:
            named = config.train.kernel if config.train.kernel != "triton" else "auto"
            dense_kernel, _ = choose(named, request)
        request = replace(request, index=pattern.request())
    kernel, kernel_reason = choose(config.train.kernel, request)
    compiled = environment.device == "cuda" if config.train.compile == "auto" else bool(config.train.compile)
    return Choices(layout, exchange, exchange_reason, kernel, kernel_reason, dtype, compiled, pattern, dense_kernel)
