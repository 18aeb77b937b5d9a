"""The plan of a run: what its configuration resolves to on the hardware of the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch.environment import Environment, ParallelDims, resolve_environment
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.parallel.ring import shorter_rings
from mtrain_cli.parallel.schedule import make_schedule
from mtrain_cli.step.program import Message, layers, traffic
from mtrain_cli.training.attention_memory import AttentionMemory, shard_sizes
from mtrain_cli.training.expert_traffic import ExpertRun
from mtrain_cli.training.flops import (
    FlopsPerToken,
    ParameterCount,
    causal_pairs,
    own_tiles,
    parameters,
    recomputed_attention,
    training_flops,
)
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory, size
from mtrain_cli.training.pipeline_plan import PipelinePlan
from mtrain_cli.training.resolution import ResolvedRun, resolve_run
from mtrain_cli.training.state_memory import largest_states

if TYPE_CHECKING:
    from mtrain_cli.training.planning import MemorySearch

MOST_READ = 8  # sequences, unless a micro-batch has more


@dataclass(frozen=True)
class FirstMasks:
    """The masks of the first sequences of data that bring masks (`data.mask_key`).

    masks: one per sequence, without padding; none if the data cannot be read.
    micro_batch: number of sequences in a micro-batch.
    problem: why the data cannot be read; "" if they were read.
    """

    key: str
    masks: tuple[SequenceMask, ...]
    micro_batch: int
    problem: str = ""

    @cached_property
    def pairs(self) -> float:
        return sum(mask.pairs for mask in self.masks) / len(self.masks)

    @cached_property
    def typical(self) -> tuple[SequenceMask, ...]:
        """The masks of the micro-batch with the median number of pairs."""
        size = self.micro_batch
        batches = [self.masks[n : n + size] for n in range(0, len(self.masks), size)]
        batches.sort(key=lambda batch: sum(mask.pairs for mask in batch))
        return batches[(len(batches) - 1) // 2]

    def describe(self) -> str:
        if self.problem:
            return f"the masks cannot be read ({self.problem}), so causal documents are assumed"
        first = f"masks of the first {with_count(len(self.masks), 'sequence')} were read"
        return f"{first}; memory and stages assume causal documents"


def first_masks(config: Config) -> FirstMasks | None:
    """Read the masks of `MOST_READ` sequences, or one micro-batch; None if data bring no masks."""
    data, each = config.data, config.train.micro_batch
    if data.mask_key is None:
        return None
    if data.path is None and data.mix is None:
        return FirstMasks(data.mask_key, (), each, "data.path is not set")
    source = repr((data, config.seq, config.seed, config.model.vocab_size, each))
    try:
        if source not in _masks:
            masks = _read(config, each)
            _masks.clear()
            _masks[source] = masks
    except ConfigError as error:
        return FirstMasks(data.mask_key, (), each, error.problems[0].rstrip("."))
    return FirstMasks(data.mask_key, _masks[source], each)


# The masks read last, by the settings that decide them, since a plan and its prediction ask twice.
_masks: dict[str, tuple[SequenceMask, ...]] = {}


def _read(config: Config, micro_batch: int) -> tuple[SequenceMask, ...]:
    dataset, rule, seq = open_dataset(config), MaskRule.of(config), config.seq
    micro_batches = max(1, min(MOST_READ, len(dataset)) // micro_batch)
    # The data repeat if they are shorter than a micro-batch.
    samples = (dataset[n % len(dataset)] for n in range(micro_batches * micro_batch))
    return tuple(rule(one.documents, seq, seq, one.slices) for one in samples)


@dataclass(frozen=True, kw_only=True)
class ReceivedBytes:
    """How many bytes reach one worker.

    forward, backward: KV and its gradients, per layer and micro-batch.
    tensor_forward, tensor_backward: hidden states and their gradients that tensor parallelism
        moves, per layer and micro-batch.
    weights: weights and their gradients, per optimizer step.
    host: between device and host with an offloaded optimizer, per optimizer step.
    """

    forward: int
    backward: int
    weights: int
    host: int = 0
    tensor_forward: int = 0
    tensor_backward: int = 0

    def in_step(self, passes: int) -> tuple[int, int, int]:
        """Return bytes of keys, hidden states and weights in a step of layers x micro-batches."""
        keys, hidden = self.forward + self.backward, self.tensor_forward + self.tensor_backward
        return passes * keys, passes * hidden, self.weights


def tensor_messages(config: Config) -> tuple[int, int]:
    """Return the messages of hidden states in each pass of all layers, if each has one tile."""
    train, row = config.train, {Message.HIDDEN: 1}
    checkpointed = train.activation_checkpoint != "none"
    kinds = layers(config.model, checkpointed=checkpointed, tiled=True, keep_mlp=train.keep_mlp)
    return (
        sum(number * traffic(layer.forward(), row) for number, layer in kinds),
        sum(number * traffic(layer.backward(), row) for number, layer in kinds),
    )


def message_bytes(config: Config, layout: Layout, dtype_bytes: int) -> int:
    """Return the bytes of such a message that reach one worker."""
    own, _ = own_tiles(config, layout, dtype_bytes)
    return own * (config.topology.tensor_parallel - 1) * config.model.hidden_size * dtype_bytes


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

    @cached_property
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

    @cached_property
    def pipeline(self) -> PipelinePlan | None:
        """The stages; None if each worker holds the whole model."""
        if self.dims.pp == 1:
            return None
        return PipelinePlan.of(self.config, self.micro_batches, self.layout, self.dtype_bytes)

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint on disk: float32 weights and two AdamW states."""
        return 12 * self.parameters.total

    @cached_property
    def parameters(self) -> ParameterCount:
        return parameters(self.config.model)

    @cached_property
    def data_masks(self) -> FirstMasks | None:
        """The masks of the first sequences of the data; None if the data bring no masks."""
        return first_masks(self.config)

    @cached_property
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

    @cached_property
    def received(self) -> ReceivedBytes:
        """How many bytes reach one worker, with the KV that recomputation sends again.

        Messages of a pipeline (`PipelinePlan.received`) and columns of a ring are not counted.
        """
        config, layout, exchange = self._dealt(self.config), self.layout, self.exchange
        e, number = self.dtype_bytes, config.model.num_layers
        sizes = shard_sizes(config.of_worker, layout, exchange, e)
        sent_forward, sent_backward = Fraction(0), Fraction(0)
        for weight, options in shorter_rings(exchange.name, exchange.options(layout.workers)):
            schedule = make_schedule(exchange.name, options)
            forward, backward = (lower(schedule, 0, backward=b) for b in (False, True))
            sent_forward += weight * int(forward.sent(sizes))
            again = forward.recomputed(self.recompute).sent(sizes)
            sent_backward += weight * (int(backward.sent(sizes)) + int(again))
        states = largest_states(config, self.dims.workers, self.micro_batches, e)
        hidden = message_bytes(config, layout, e)
        tensor_forward, tensor_backward = tensor_messages(config)
        return ReceivedBytes(
            forward=int(sent_forward),
            backward=int(sent_backward),
            weights=states.sent(),
            host=states.over_host_link(),
            tensor_forward=tensor_forward * hidden // number,
            tensor_backward=tensor_backward * hidden // number,
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

    @cached_property
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
        return self.config.model.is_foreign or self.has_room_for(self.memory)
