"""The plan of a run: what its configuration resolves to on the hardware of the run."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.expert_traffic import ExpertRun
from mtrain_cli.training.first_masks import FirstMasks, first_masks
from mtrain_cli.training.flops import (
    FlopsPerToken,
    ParameterCount,
    causal_pairs,
    parameters,
    recomputed_attention,
    training_flops,
)
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory, size
from mtrain_cli.training.pipeline_plan import PipelinePlan
from mtrain_cli.training.received_bytes import ReceivedBytes, received_bytes
from mtrain_cli.training.resolution import ResolvedRun, resolve_run

if TYPE_CHECKING:
    from mtrain_cli.training.memory_search import MemorySearch

USABLE_HOST = 0.9  # share of host memory that plans use; the rest is for processes, files and data
USABLE = 0.95  # share of a GPU's memory that plans use; the allocator always leaves gaps
FITS = (
    f'To "fit" means to use at most {USABLE:.0%} of a GPU\'s memory and {USABLE_HOST:.0%} of the '
    "host's; gaps and other processes take the rest"
)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a configuration resolves to.

    hardware: the devices, with the memory that `topology.gpu_memory_gib` sets.
    dtype: name of the compute dtype.
    host_share: bytes of host memory that each worker may use.
    dense_kernel: name of the kernel for dense first steps or layers of a sparse run, and reason for
        the choice. None if the run has no such steps.
    search: result of `train.memory=auto`; None for manual.
    requested: the configuration before `train.memory=auto` changed it; None for manual.
    """

    config: Config
    environment: Environment
    hardware: Hardware
    layout: Layout
    exchange: ExchangeChoice
    kernel: str
    kernel_reason: str
    dtype: str
    host_share: int
    layout_reason: str = ""
    dense_kernel: tuple[str, str] | None = None
    search: MemorySearch | None = None
    requested: Config | None = None

    @classmethod
    def on(cls, hardware: Hardware, config: Config) -> RunPlan:
        """Plan a run without `train.memory=auto`.

        Raises:
            ConfigError: sizes are inconsistent, or no kernel supports the run.
        """
        config = hardware.complete(config)
        environment = resolve_environment(config, planning=True)
        return cls.of(config, environment, hardware, resolve_run(config, environment, hardware))

    @classmethod
    def of(
        cls, config: Config, environment: Environment, hardware: Hardware, choices: ResolvedRun
    ) -> RunPlan:
        gib, sharing = config.topology.host_memory_gib, hardware.workers_sharing_host(environment)
        host = hardware.host_memory / sharing if isinstance(gib, str) else round(gib * GIB)
        dense = choices.dense_kernel
        return cls(
            config=config,
            environment=environment,
            hardware=hardware.limited(config.topology),
            layout=choices.layout,
            layout_reason=choices.layout_reason,
            exchange=choices.exchange,
            kernel=choices.kernel.name,
            kernel_reason=choices.kernel_reason,
            dense_kernel=None if dense is None else (dense[0].name, dense[1]),
            dtype=str(choices.dtype).removeprefix("torch."),
            host_share=round(USABLE_HOST * host),
        )

    def with_config(self, config: Config) -> RunPlan:
        """Plan another configuration for the same hardware and, by default, number of workers.

        Raises:
            ConfigError: the mask does not fit the sequence, or as in `on`.
        """
        if wrong := list(mask_problems(config.mask, config.seq, config.sparsity.pattern)):
            raise ConfigError(*wrong)
        workers = config.topology.workers
        workers = workers if isinstance(workers, int) else self.dims.workers
        topology = {"device": self.environment.device, "workers": workers}
        return RunPlan.on(self.hardware, config.changed(topology=topology))

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
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
        sharing, e = self.exchange.heads, self.dtype_bytes
        return training_flops(self.config, self.layout, sharing=sharing, dtype_bytes=e, pairs=pairs)

    @property
    def recompute(self) -> Recompute:
        """The part of a layer's forward exchange that the backward pass runs again."""
        return recomputed_attention(self.config.train, self.layout, self.exchange.heads)

    @functools.cached_property
    def received(self) -> ReceivedBytes:
        return received_bytes(
            self._dealt(self.config),
            layout=self.layout,
            exchange=self.exchange,
            workers=self.dims.workers,
            micro_batches=self.micro_batches,
            dtype_bytes=self.dtype_bytes,
        )

    @property
    def machine(self) -> str:
        hardware = self.hardware
        if not hardware.absent and 0 < hardware.count < self.dims.workers:
            return f"GPUs like the {hardware.count} x {hardware.gpu} of this machine"
        return hardware.source

    @property
    def available_memory(self) -> str:
        if self.environment.device == "cpu":
            workers = with_count(self.environment.local_workers, "CPU worker")
            return f"{size(self.hardware.host_memory)}, shared by {workers} of this machine"
        topology = self.config.topology
        gpu = self.hardware.gpu if topology.gpu_memory_gib == "auto" else "topology.gpu_memory_gib"
        host = f"{size(self.host_share)} of host memory"
        if self.hardware.absent and topology.host_memory_gib == "auto":
            host += f" ({USABLE_HOST:.0%} of an assumed amount; set topology.host_memory_gib)"
        return f"{size(self.hardware.memory)} ({gpu}, {USABLE:.0%} of it usable) and {host}"

    def device_bytes(self, memory: MemoryEstimate) -> int:
        """Return the bytes that a worker needs on its device; on a CPU, with host memory."""
        return memory.total + (memory.host_peak if self.environment.device == "cpu" else 0)

    def has_room_for(self, memory: MemoryEstimate, usable: float = USABLE) -> bool:
        """Return whether `memory` fits a worker's host and a share `usable` of its GPU."""
        if self.environment.device == "cpu":
            needed = self.device_bytes(memory) * self.environment.local_workers
            return needed <= self.hardware.host_memory
        return memory.total <= usable * self.hardware.memory and memory.host_peak <= self.host_share

    def estimate(self, config: Config) -> MemoryEstimate:
        """Estimate the memory of a worker whose configuration has other memory settings."""
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
        # It does not depend on the memory settings.
        return AttentionMemory(
            self.config.of_worker,
            self.layout,
            self.exchange,
            self.kernel,
            self.dtype_bytes,
            self.dense_kernel and self.dense_kernel[0],
        )

    @property
    def host_bytes(self) -> int:
        return self.device_bytes(self.memory) * self.environment.local_workers

    @property
    def fits(self) -> bool:
        return self.has_room_for(self.memory)
