"""Make the plan of a run, with the memory settings that `train.memory=auto` chooses.

Settings are compared by an estimated step time (`step_seconds`), which uses counts and constants
but no measurement, so that all ranks choose the same setting.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from mtrain_cli.config.keys import show
from mtrain_cli.config.parallel_checks import refused_settings
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.launch.environment import Environment, host_memory
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.expert_traffic import ExpertRun, degrees_in_a_node, require_experts_fit
from mtrain_cli.training.flops import (
    assumed_density,
    causal_pairs,
    own_tiles,
    peak_flops,
    training_flops,
)
from mtrain_cli.training.hardware import ASSUMED_GPU, Hardware
from mtrain_cli.training.memory import MemoryEstimate, size
from mtrain_cli.training.resolution import ResolvedRun
from mtrain_cli.training.run_plan import RunPlan, message_bytes, tensor_messages
from mtrain_cli.training.state_memory import BYTES, largest_states


def make_plan(config: Config, hardware: Hardware | None = None) -> RunPlan:
    """Plan a run, including `train.memory=auto`.

    hardware: the devices of the run; None for those that `topology.device` names:
        - cpu: the CPU of this machine.
        - cuda: GPUs like those of this machine. On a machine without GPUs, absent GPUs.
        - auto: as for cuda, on a machine with GPUs. On other machines, the absent GPUs of
          `topology.cluster` if that key names a cluster, otherwise the CPU. If the CPU cannot run
          the configuration and `topology.workers` is a number, that number of absent GPUs.

    Raises:
        ConfigError: sizes are inconsistent, or the configured kernel does not support the run.
    """
    plan = RunPlan.on(hardware or _hardware_for(config), config)
    require_experts_fit(plan.config, plan.dims, plan.dtype_bytes, plan.environment.device)
    return plan if config.train.memory == "manual" else with_auto_memory(plan)


def _hardware_for(config: Config) -> Hardware:
    topology = config.topology
    if torch.cuda.is_available() or topology.device == "cpu":
        return Hardware.here(topology.device)
    why: str | None = "this machine has no GPU"
    if topology.device == "cuda":
        why = f"topology.device=cuda, but {why}"
    elif topology.cluster == "auto":
        why = _refusal_here(config) if topology.workers != "auto" else None
    return Hardware.here() if why is None else Hardware.assumed(topology, why)


def _refusal_here(config: Config) -> str | None:
    """Return why this machine's CPU cannot run a configuration, or None if the CPU can."""
    try:
        plan = RunPlan.on(Hardware.here(), config)
    except ConfigError as error:
        return f"this machine has no GPU, and its CPU refuses {error.problems[0]}"
    if plan.fits:
        return None
    needs = f"{with_count(plan.dims.workers, 'CPU worker')} would need {size(plan.host_bytes)}"
    has = f"this machine has {host_memory() / 2**30:,.0f} GiB for this process"
    return f"this machine has no GPU, and {needs}, but {has}"


def checked_plan(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """Plan a run in its workers. All ranks call this and get the same plan.

    Raises:
        ConfigError: the run cannot fit. The message is one line that says what would fit.
    """
    plan = RunPlan.of(config, environment, Hardware.here(environment.device), choices)
    require_experts_fit(config, plan.dims, plan.dtype_bytes, environment.device)
    if environment.device == "cuda" and environment.dims.workers > 1:
        # GPUs of one job may differ by some MiB. Plan for the smallest, so that ranks agree.
        everyone: list[list[int]] = share((plan.hardware.memory, plan.host_share))
        smallest = replace(plan.hardware, memory=min(gpu for gpu, _ in everyone))
        plan = replace(plan, hardware=smallest, host_share=min(host for _, host in everyone))
    if config.train.memory == "auto":
        plan = with_auto_memory(plan)
    require_fit(plan)
    return plan


# Keys that `auto` may change, with the default first, then the alternatives. If the user set a key
# to another value than the default, `auto` leaves it. `auto` offloads the activations of as few
# layers as necessary, and keeps the MLP products of as many layers as there is room for.
CHOICES: dict[str, tuple[Any, ...]] = {
    "train.activation_checkpoint": ("selective", "none", "sequence_selective", "full"),
    "train.checkpoint_keep": (0.5, 0.75, 0.25),
    "train.offload_activations": (False, True),
    "train.keep_mlp": (False, True),
    "train.tile_mib": (4096, 1024, 256),
    "train.loss_chunk_mib": (2048, 512, 128),
    "train.shard": ("full", "gradients", "optimizer"),
    "optim.offload": (False, True),
    "optim.offload_gradients": (False, True),
}
# The alternative that needs the least memory, whatever the other keys have. A value of another key
# may need less device memory and more host memory, or less in only some of the moments of a step.
LEAST: dict[str, Any] = {
    "train.checkpoint_keep": 0.25,
    "train.keep_mlp": False,
    "train.loss_chunk_mib": 128,
    "train.shard": "full",
}
DEGREE = "topology.expert_parallel"  # chosen by `auto` together with the memory setting
KIND, OFFLOAD = "train.activation_checkpoint", "train.offload_activations"
PRODUCTS = "train.keep_mlp"
SHORTEST_SEQ, MOST_WORKERS = 1024, 1024  # to propose
# A run that needs more than this share of a GPU is refused. Estimates err by up to 5 %.
CERTAIN = 1.05
# Share of a GPU that may be full with optional tensors. Gaps take 5 to 6 GiB, measured.
ROOMY = 0.9
# How `train.memory=auto` chooses train.keep_mlp.
KEPT = f"train.keep_mlp was chosen to leave {1 - ROOMY:.0%} of a GPU free"

# Share of peak FLOP/s in whole steps, measured on one and four H200s with 128K to 2M tokens:
# matrices reach 0.6, attention 0.4 to 0.6.
USED_OF_PEAK = 0.56
NODE_LINK = 250e9  # bytes/s into one GPU: gathers over NVLink, measured
NETWORK = 40e9  # bytes/s into one GPU: 400 Gbit/s per GPU
HOST_LINK = 50e9  # bytes/s, PCIe 5 x16, pinned, one direction
HOST_MEMORY, GPU_MEMORY = 150e9, 3.5e12  # bytes/s of a whole machine, and of one GPU
GPUS_OF_A_HOST = 8
ADAMW_BYTES = 28  # per weight: reads weight, gradient and two states, writes all but the gradient
HIDDEN_COST = 0.1  # share of an overlapped transfer that still costs time
TILE_SECONDS = 0.5e-3  # per MLP tile and pass, or chunk of the loss, in addition to its products

# A configuration, and its `MemorySetting.changes`.
Variant = tuple[Config, dict[str, Any]]


@dataclass(frozen=True)
class MemorySetting:
    """A configuration with its estimated memory and seconds of an optimizer step.

    changes: new values by key, for the keys of `CHOICES` that the setting changes, and the degree
        that ``topology.expert_parallel=auto`` takes.
    fits: whether the worker has room for `memory`.
    """

    config: Config
    changes: dict[str, Any]
    memory: MemoryEstimate
    seconds: float
    fits: bool

    @property
    def overrides(self) -> str:
        """The changes as overrides of the command line."""
        return " ".join(f"{key}={show(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class MemorySearch:
    """All settings, fastest first, and the fastest that fits; None if no setting fits."""

    settings: tuple[MemorySetting, ...]
    chosen: MemorySetting | None


def get_setting(config: Config, key: str) -> Any:
    """Return the value of a key such as "train.shard"."""
    return attrgetter(key)(config)


def with_values(config: Config, changes: dict[str, Any]) -> Config:
    """Return `config` with other values of keys such as "train.shard"."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return config.changed(**groups)


def with_auto_memory(plan: RunPlan) -> RunPlan:
    """Apply `train.memory=auto`: the fastest setting that fits, or else the closest to fitting."""
    result = search(plan)
    setting = result.chosen or nearest_to_fitting(plan, result.settings)
    return replace(plan, config=setting.config, search=result, requested=plan.config)


def search(plan: RunPlan) -> MemorySearch:
    """Estimate memory and time of every setting that `train.memory=auto` may choose for a run."""
    settings = [
        _priced(plan, *_with_most_products(plan, *with_fewest_offloaded(plan, *variant)))
        for variant in variants_of_plan(plan)
    ]
    # Of equally fast settings, prefer fewer changes, then the order of CHOICES.
    settings.sort(key=lambda setting: (round(setting.seconds, 6), len(setting.changes)))
    return MemorySearch(tuple(settings), next((s for s in settings if s.fits), None))


def variants_of_plan(plan: RunPlan) -> Iterator[Variant]:
    """Yield every sensible combination of the alternatives in `CHOICES`, for each degree."""
    config, dims = plan.config, plan.dims
    if not config.model.moe.experts or config.topology.expert_parallel != "auto":
        yield from _variants_of(plan, config)
        return
    for degree in degrees_in_a_node(config, dims, plan.environment.workers_per_node):
        change = {DEGREE: degree}
        for variant, changes in _variants_of(plan, with_values(config, change)):
            yield variant, change | changes


def _variants_of(plan: RunPlan, config: Config) -> Iterator[Variant]:
    current = {key: get_setting(config, key) for key in CHOICES}
    refused = refused_settings(config) | ({PRODUCTS} if config.model.moe.experts else set())
    free = {
        key: values
        for key, values in CHOICES.items()
        if current[key] == values[0] and key not in refused
    }
    for values in itertools.product(*free.values()):
        setting = current | dict(zip(free, values, strict=True))
        changes = {key: value for key, value in setting.items() if value != current[key]}
        kind, offload = setting[KIND], setting[OFFLOAD]
        pointless = (
            "train.checkpoint_keep" in changes and kind != "sequence_selective",
            offload and kind == "none",
            PRODUCTS in changes and _short_of_memory(kind, offload),
            setting["train.shard"] == "optimizer" and config.train.reduce_dtype != "float32",
            "optim.offload_gradients" in changes
            and not (setting["optim.offload"] and plan.micro_batches == 1),
        )
        if not any(pointless):
            yield with_values(config, changes), changes


def _short_of_memory(kind: str, offload: bool | int) -> bool:
    """Return whether a setting moves the output of attention, a tenth of the MLP products."""
    return bool(offload) or kind in ("sequence_selective", "full")


def _has_room_on_device(plan: RunPlan, memory: MemoryEstimate) -> bool:
    return plan.has_room_for(replace(memory, host=0, saving=0))


def with_fewest_offloaded(plan: RunPlan, config: Config, changes: dict[str, Any]) -> Variant:
    """Offload the fewest layers with which the run fits the device. If no number fits, offload all.

    The fewest layers also take the least host memory.
    """

    def holds(config: Config) -> bool:
        return _has_room_on_device(plan, plan.estimate(config))

    if OFFLOAD not in changes or plan.environment.device == "cpu" or not holds(config):
        return config, changes
    # Start at 1 layer: `variants_of_plan` yields the setting without offload, too.
    counts = range(1, config.model.num_layers - 1)
    fewest = 1 + bisect_left(counts, True, key=lambda n: holds(with_values(config, {OFFLOAD: n})))
    if fewest > len(counts):
        return config, changes
    return with_values(config, {OFFLOAD: fewest}), changes | {OFFLOAD: fewest}


def _with_most_products(plan: RunPlan, config: Config, changes: dict[str, Any]) -> Variant:
    """Set train.keep_mlp to the most layers that leave 10 % of a GPU free, possibly none."""

    def too_large(config: Config) -> bool:
        return not plan.has_room_for(plan.estimate(config), ROOMY)

    if PRODUCTS not in changes or not too_large(config):
        return config, changes
    counts = range(1, config.model.num_layers)
    most = bisect_left(counts, True, key=lambda n: too_large(with_values(config, {PRODUCTS: n})))
    if most == 0:
        changes = {key: value for key, value in changes.items() if key != PRODUCTS}
        return with_values(config, {PRODUCTS: False}), changes
    return with_values(config, {PRODUCTS: most}), changes | {PRODUCTS: most}


def with_products(plan: RunPlan) -> MemorySetting | None:
    """Return the run with train.keep_mlp set to the most layers that leave 10 % of a GPU free.

    Return None if there is no room, or if the run or its model excludes train.keep_mlp.
    """
    train = plan.config.train
    short = _short_of_memory(train.activation_checkpoint, train.offload_activations)
    if plan.config.model.moe.experts or train.keep_mlp or short:
        return None
    change = {PRODUCTS: True}
    setting = _priced(plan, *_with_most_products(plan, with_values(plan.config, change), change))
    return setting if setting.memory != plan.memory else None


def _priced(plan: RunPlan, config: Config, changes: dict[str, Any]) -> MemorySetting:
    memory = plan.estimate(config)
    seconds = step_seconds(plan, config, memory)
    return MemorySetting(config, changes, memory, seconds, plan.has_room_for(memory))


def step_seconds(plan: RunPlan, config: Config, memory: MemoryEstimate) -> float:
    """Estimate the seconds of an optimizer step. memory: `plan.estimate(config)`."""
    environment, train, e = plan.environment, config.train, BYTES[plan.dtype]
    layers, n = config.model.num_layers, plan.micro_batches
    peak = peak_flops(plan.hardware.gpu or ASSUMED_GPU) or 100e12
    pairs = assumed_density(config) * causal_pairs(config.seq)
    counted = training_flops(
        config, plan.layout, sharing=plan.exchange.heads, dtype_bytes=e, pairs=pairs
    )
    flop = counted.executed - counted.spared
    # Seconds of one micro-batch.
    sharing = environment.dims.cp * environment.dims.tp * environment.dims.pp
    compute = flop * config.seq * train.micro_batch / sharing / (USED_OF_PEAK * peak)
    if plan.pipeline is not None:
        compute /= 1 - plan.pipeline.played.bubble
        layers = -(-layers // environment.dims.pp)
    states = largest_states(config, environment.dims.workers, n, e)
    link = NETWORK if environment.nodes > 1 else NODE_LINK
    seconds = n * compute + _exposed(states.sent() / link, n * compute)
    shape = plan.dims, plan.layout, e, environment.workers_per_node
    rows = ExpertRun(config, *shape).row_seconds()
    seconds += rows * config.model.expert_layers / environment.dims.pp
    if train.offload_activations:  # to the host in forward, a quarter of the compute, and back
        down = (memory.host - states.host) / HOST_LINK
        overlapping = compute * layers_on_host(train.offload_activations, layers) / layers
        seconds += n * (_exposed(down, overlapping / 4) + _exposed(down, 3 * overlapping / 4))
    shard = ADAMW_BYTES * states.shard
    if config.optim.offload:
        sharing = min(environment.local_workers, GPUS_OF_A_HOST)
        seconds += shard * sharing / HOST_MEMORY + e * states.shard / HOST_LINK
    else:
        seconds += shard / GPU_MEMORY
    messages = sum(tensor_messages(config))  # of tensor parallelism, which do not overlap
    share = layers / config.model.num_layers
    seconds += n * share * messages * message_bytes(config, plan.layout, e) / NODE_LINK
    tokens, rows = own_tiles(config, plan.layout, e)
    logits = 4 * tokens * config.model.vocab_size / (train.loss_chunk_mib << 20)
    # The chunks of experts are not priced.
    tiled = layers * (1 - config.model.expert_layers / config.model.num_layers)
    return seconds + n * TILE_SECONDS * (2 * tokens / rows * tiled + logits)


def _exposed(transfer: float, overlapping: float) -> float:
    """Return the cost in seconds of a transfer that overlaps with compute."""
    return HIDDEN_COST * transfer + max(0.0, transfer - overlapping)


def nearest_to_fitting(plan: RunPlan, settings: Sequence[MemorySetting]) -> MemorySetting:
    """Return the setting that needs the least host memory of those that fit the GPU.

    If none fits the GPU, return the one that needs the least device memory.
    """

    def shortfall(setting: MemorySetting) -> tuple[bool, int]:
        memory = setting.memory
        holds = plan.environment.device == "cuda" and _has_room_on_device(plan, memory)
        return not holds, memory.host_peak if holds else plan.device_bytes(memory)

    return min(settings, key=shortfall)


def require_fit(plan: RunPlan) -> None:
    """Refuse to start a run that certainly does not fit the memory.

    Raises:
        ConfigError: the run does not fit. The message is one line that says what would fit.
    """
    if plan.search is not None and plan.search.chosen is None:
        raise ConfigError(refusal(plan, plan.search))
    if not (plan.config.model.is_foreign or plan.has_room_for(plan.memory, CERTAIN)):
        raise ConfigError(refusal(plan, search(plan)))


def refusal(plan: RunPlan, result: MemorySearch) -> str:
    """Return one line that says why a run does not fit, and what would fit."""
    auto, on_gpu = plan.config.train.memory == "auto", plan.environment.device == "cuda"
    needed = nearest_to_fitting(plan, result.settings).memory if auto else plan.memory
    needs = f"{'at least' if auto else 'about'} {size(plan.device_bytes(needed))}"
    if needed.host_peak and on_gpu:
        needs += f" and {size(needed.host_peak)} of host memory"
        if needed.saving:
            needs += f" ({size(needed.saving)} of it while a checkpoint is written)"
    if plan.dims.cp > 1 and on_gpu:
        needs += f" with topology.exchange={plan.exchange.name}"
    would = f"only a smaller model {'or more workers ' if on_gpu else ''}would fit"
    if changes := remedies(plan, result):
        would = f"fits with {', or '.join(changes)}"
    if not on_gpu:
        would += "; add --dry-run topology=h200_1x8 to plan for eight GPUs"
    seq = format_size(plan.config.seq)
    return f"seq={seq}: a worker needs {needs}, but has {plan.available_memory}; {would}"


def remedies(plan: RunPlan, result: MemorySearch) -> list[str]:
    """Return changes as command-line overrides. Each change makes the run fit on its own."""
    changes = []
    if fitting := [setting for setting in result.settings if setting.fits]:
        changes.append(min(fitting, key=lambda setting: len(setting.changes)).overrides)
    if seq := longest_seq(plan):
        changes.append(f"seq={format_size(seq)}")
    config, workers = plan.requested or plan.config, 2 * plan.dims.workers
    while plan.environment.device == "cuda" and workers <= MOST_WORKERS:
        if _config_fits(plan, config.changed(topology={"workers": workers})):
            return [*changes, f"{workers} GPUs (topology.workers={workers})"]
        workers *= 2
    return changes


def longest_seq(plan: RunPlan, *, shortest: int = SHORTEST_SEQ, most: int = 1 << 27) -> int | None:
    """Return the longest sequence that fits, in tokens; None if none of ``shortest`` or more does.

    Double `shortest` while the run fits. Then bisect the seven evenly spaced lengths below the
    first length that does not fit (such as 576k, 640k, ... below 1m). Lengths below one that fits
    are taken to fit.
    """
    config = plan.requested or plan.config
    stages = {key: getattr(plan.exchange, key) for key in ("stages", "stages_backward")}
    if plan.exchange.traits.by_mask and not any(stages.values()):
        config = config.changed(topology=stages)  # do not price stages again for each length

    def fits(seq: int) -> bool:
        return _config_fits(plan, replace(config, seq=seq))

    # A mask may need more tokens than `shortest`.
    low = next((seq for seq in (shortest, plan.config.seq) if fits(seq)), None)
    if low is None:
        return None
    known = plan.config.seq if fits(plan.config.seq) else 0
    while low < most and (2 * low <= known or fits(2 * low)):
        low *= 2
    longer = [low + eighth * low // 8 for eighth in range(8)]
    return longer[bisect_left(longer, True, lo=1, key=lambda seq: not fits(seq)) - 1]


def _config_fits(plan: RunPlan, config: Config) -> bool:
    """Return whether a run fits with this configuration, which may be invalid."""
    try:
        return _can_fit(plan.with_config(config))
    except ConfigError:
        return False


def _can_fit(plan: RunPlan) -> bool:
    """Return whether a run fits as configured or, with `train.memory=auto`, with any setting."""
    if plan.has_room_for(plan.memory):
        return True
    return plan.config.train.memory == "auto" and any(
        _variant_fits(plan, config, changes)
        for config, changes in variants_of_plan(plan)
        if is_least(plan.config, config)
    )


def is_least(config: Config, variant: Config) -> bool:
    """Return whether no other variant of `config` surely needs less memory than `variant`.

    If a run fits with any variant, it fits with one of these.
    """
    recomputes_some = variant.train.activation_checkpoint == "sequence_selective"
    return all(
        get_setting(variant, key) == least
        for key, least in LEAST.items()
        if get_setting(config, key) == CHOICES[key][0]
        and (recomputes_some or key != "train.checkpoint_keep")
    )


def _variant_fits(plan: RunPlan, config: Config, changes: dict[str, Any]) -> bool:
    """Return whether a setting fits, if need be with fewer layers offloaded."""
    memory = plan.estimate(config)
    if plan.has_room_for(memory):
        return True
    if OFFLOAD not in changes or not memory.host or not _has_room_on_device(plan, memory):
        return False
    return plan.has_room_for(plan.estimate(with_fewest_offloaded(plan, config, changes)[0]))
