"""`train.memory=auto`: the fastest memory setting that fits.

The search compares settings by an estimated step time. The estimate uses only counts, not
measurements, so that all ranks choose the same setting. With `topology.expert_parallel=auto`, the
search tries every degree with every memory setting. The step time is the sum of:

    compute     executed FLOP / (0.56 x peak FLOP/s). If the density of a sparse pattern depends on
                the data, assume 10 % of the causal pairs.
    weights     transfer of `StateMemory.sent` bytes, which overlaps with compute
    rows        with expert parallelism, what rows of tokens cost (`expert_price`)
    tensors     transfer of the messages of tensor parallelism, which does not overlap
    activations transfer of offloaded activations over the host link. The transfer to the host
                overlaps with the forward pass of the offloaded layers, a quarter of their compute.
                The transfer back overlaps with their backward pass, three quarters.
    optimizer   28 bytes of memory traffic per weight of the shard, in GPU memory. With
                optim.offload, in host memory, which the machine's workers share
    tiles       0.5 ms per MLP tile and pass, and per chunk of the loss

A transfer that overlaps with compute costs a tenth of its duration. If the transfer takes longer
than the compute, the difference is added.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.expert_checks import NEED_ALL_EXPERTS
from mtrain_cli.config.pipeline_parallel import NEED_WHOLE_MODEL
from mtrain_cli.config.schema import Config
from mtrain_cli.config.tensor_parallel import NEED_WHOLE_LAYERS
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.training.expert_price import ExpertRun
from mtrain_cli.training.expert_traffic import degrees_in_a_node
from mtrain_cli.training.flops import (
    assumed_density,
    causal_pairs,
    own_tiles,
    peak_flops,
    training_flops,
)
from mtrain_cli.training.memory import GIB, MemoryEstimate
from mtrain_cli.training.received_bytes import message_bytes, tensor_messages
from mtrain_cli.training.state_memory import BYTES, largest_states

if TYPE_CHECKING:
    from mtrain_cli.training.run_plan import RunPlan

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
# Share of a GPU that may be full with optional tensors. Gaps take 5 to 6 GiB, measured.
ROOMY = 0.9

_AS_FAST = "equally fast"

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
DEGREE = "topology.expert_parallel"  # chosen by `auto` together with the memory setting
# A configuration, and its `MemorySetting.changes`.
Variant = tuple[Config, dict[str, Any]]


@dataclass(frozen=True)
class MemorySetting:
    """A configuration with its estimated memory and step time.

    changes: new values by key, for the keys of `CHOICES` that the setting changes, and the degree
        that ``topology.expert_parallel=auto`` takes.
    memory: estimated memory of one worker.
    seconds: estimated duration of an optimizer step.
    fits: whether the worker has room for `memory`.
    """

    config: Config
    changes: dict[str, Any]
    memory: MemoryEstimate
    seconds: float
    fits: bool

    @property
    def overrides(self) -> str:
        """The changes as command-line overrides."""
        return as_overrides(self.changes)


@dataclass(frozen=True)
class MemorySearch:
    """The result of a search.

    settings: all settings, fastest first.
    chosen: the fastest setting that fits. None if no setting fits.
    """

    settings: tuple[MemorySetting, ...]
    chosen: MemorySetting | None

    def rejected(self) -> list[tuple[str, str]]:
        """Return a label and the reason of the rejection for settings that were not chosen.

        Return only the fastest such setting for each value of train.activation_checkpoint. Leave
        out settings that fit and, as displayed, take as long as the chosen one. Of every other
        expert-parallel degree, return only the setting that would be chosen for it.
        """
        assert self.chosen is not None
        best = self.chosen.seconds
        rows: dict[str, tuple[str, str]] = {}
        by_degree = self._by_degree()
        for setting in by_degree.pop(_degree(self.chosen.config)):
            kind, memory = setting.config.train.activation_checkpoint, setting.memory
            reason = _compared(setting.seconds, best)
            equal = setting.fits and reason == _AS_FAST
            if setting is self.chosen or equal or kind in rows:
                continue
            if not setting.fits:
                reason += f", but needs {in_gib(memory.total)}"
                if memory.host_peak:
                    reason += f" and {in_gib(memory.host_peak)} of host memory"
            rows[kind] = (_label(setting.config, self.chosen.config), reason)
        others = (next((s for s in each if s.fits), each[0]) for each in by_degree.values())
        return [*rows.values(), *((_label_of_degree(s), _figures(s, best)) for s in others)]

    def _by_degree(self) -> dict[int | str, list[MemorySetting]]:
        """Return the settings of each expert-parallel degree, fastest first."""
        found: dict[int | str, list[MemorySetting]] = {}
        for setting in self.settings:
            found.setdefault(_degree(setting.config), []).append(setting)
        return dict(sorted(found.items()))


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
    if not config.model.moe.experts or _degree(config) != "auto":
        yield from _variants_of(plan, config)
        return
    for degree in degrees_in_a_node(config, dims, plan.environment.workers_per_node):
        change = {DEGREE: degree}
        for variant, changes in _variants_of(plan, with_values(config, change)):
            yield variant, change | changes


def _variants_of(plan: RunPlan, config: Config) -> Iterator[Variant]:
    """Yield every sensible combination of the alternatives in `CHOICES` for a configuration."""
    current = {key: get_setting(config, key) for key in CHOICES}
    free = {key: values for key, values in CHOICES.items() if current[key] == values[0]}
    topology = config.topology
    refused = set(NEED_WHOLE_LAYERS if topology.tensor_parallel > 1 else ())
    refused |= set(NEED_WHOLE_MODEL if topology.pipeline_parallel > 1 else ())
    refused |= set(NEED_ALL_EXPERTS if topology.expert_parallel != 1 else ())
    refused |= {"train.keep_mlp"} if config.model.moe.experts else set()
    free = {key: values for key, values in free.items() if key not in refused}
    for values in itertools.product(*free.values()):
        setting = current | dict(zip(free, values, strict=True))
        changes = {key: value for key, value in setting.items() if value != current[key]}
        kind, offload = setting["train.activation_checkpoint"], setting["train.offload_activations"]
        pointless = (
            "train.checkpoint_keep" in changes and kind != "sequence_selective",
            offload and kind == "none",
            "train.keep_mlp" in changes and _short_of_memory(kind, offload),
            setting["train.shard"] == "optimizer" and config.train.reduce_dtype != "float32",
            "optim.offload_gradients" in changes
            and not (setting["optim.offload"] and plan.micro_batches == 1),
        )
        if not any(pointless):
            yield with_values(config, changes), changes


def _short_of_memory(kind: str, offload: bool | int) -> bool:
    """Return whether a setting offloads or recomputes the output of attention.

    Such a setting has no room for MLP products, which are ten times as large as that output.
    """
    return bool(offload) or kind in ("sequence_selective", "full")


def with_fewest_offloaded(plan: RunPlan, config: Config, changes: dict[str, Any]) -> Variant:
    """Offload the fewest layers with which the run fits the device. If no number fits, offload all.

    The fewest layers also take the least host memory.
    """
    key, layers = "train.offload_activations", config.model.num_layers

    def holds(config: Config) -> bool:
        return plan.has_room_for(replace(plan.estimate(config), host=0, saving=0))

    if key not in changes or plan.environment.device == "cpu" or not holds(config):
        return config, changes
    # Start at 1 layer: `variants_of_plan` yields the setting without offload, too.
    counts = range(1, layers - 1)
    fewest = 1 + bisect_left(counts, True, key=lambda n: holds(with_values(config, {key: n})))
    if fewest >= layers - 1:
        return config, changes
    return with_values(config, {key: fewest}), changes | {key: fewest}


def _with_most_products(plan: RunPlan, config: Config, changes: dict[str, Any]) -> Variant:
    """Set train.keep_mlp to the most layers that leave 10 % of a GPU free, possibly none."""
    key, layers = "train.keep_mlp", config.model.num_layers

    def too_large(config: Config) -> bool:
        return not plan.has_room_for(plan.estimate(config), ROOMY)

    if key not in changes or not too_large(config):
        return config, changes
    most = bisect_left(
        range(1, layers), True, key=lambda n: too_large(with_values(config, {key: n}))
    )
    if most == 0:
        return with_values(config, {key: False}), {k: v for k, v in changes.items() if k != key}
    return with_values(config, {key: most}), changes | {key: most}


def with_products(plan: RunPlan) -> MemorySetting | None:
    """Return the run with train.keep_mlp set to the most layers that leave 10 % of a GPU free.

    Return None if the products of one layer already take too much, if the run sets train.keep_mlp,
    if the run offloads or recomputes the output of attention, or if the model has experts.
    """
    train = plan.config.train
    if plan.config.model.moe.experts:
        return None
    if train.keep_mlp or _short_of_memory(train.activation_checkpoint, train.offload_activations):
        return None
    change = {"train.keep_mlp": True}
    setting = _priced(plan, *_with_most_products(plan, with_values(plan.config, change), change))
    return setting if setting.memory != plan.memory else None


def _priced(plan: RunPlan, config: Config, changes: dict[str, Any]) -> MemorySetting:
    memory = plan.estimate(config)
    seconds = step_seconds(plan, config, memory)
    return MemorySetting(config, changes, memory, seconds, plan.has_room_for(memory))


def step_seconds(plan: RunPlan, config: Config, memory: MemoryEstimate) -> float:
    """Estimate the seconds of an optimizer step as the module's docstring describes.

    Args:
        memory: `plan.estimate(config)`.
    """
    environment, train, e = plan.environment, config.train, BYTES[plan.dtype]
    layers = config.model.num_layers
    peak = peak_flops(plan.gpu_name) or 100e12
    pairs = assumed_density(config) * causal_pairs(config.seq)
    flop = training_flops(
        config, plan.layout, sharing=plan.exchange.heads, dtype_bytes=e, pairs=pairs
    ).executed
    n = plan.micro_batches
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
    if train.offload_activations:
        down = (memory.host - states.host) / HOST_LINK
        overlapping = compute * layers_on_host(train.offload_activations, layers) / layers
        seconds += n * (_exposed(down, overlapping / 4) + _exposed(down, 3 * overlapping / 4))
    shard = ADAMW_BYTES * states.shard
    if config.optim.offload:
        sharing = min(environment.local_workers, GPUS_OF_A_HOST)
        seconds += shard * sharing / HOST_MEMORY + e * states.shard / HOST_LINK
    else:
        seconds += shard / GPU_MEMORY
    messages = sum(tensor_messages(config))
    share = layers / config.model.num_layers
    seconds += n * share * messages * message_bytes(config, plan.layout, e) / NODE_LINK
    tokens, rows = own_tiles(config, plan.layout, e)
    logits = 4 * tokens * config.model.vocab_size / (train.loss_chunk_mib << 20)
    # The chunks of experts are not priced.
    tiled = layers * (1 - config.model.expert_layers / config.model.num_layers)
    return seconds + n * TILE_SECONDS * (2 * tokens / rows * tiled + logits)


def _exposed(transfer: float, overlapping: float) -> float:
    """Return the cost in seconds of a transfer that overlaps with compute.

    transfer, overlapping: duration of the transfer and of the compute, in seconds.
    """
    return HIDDEN_COST * transfer + max(0.0, transfer - overlapping)


def nearest_to_fitting(plan: RunPlan, settings: Sequence[MemorySetting]) -> MemorySetting:
    """Return the setting closest to fitting.

    If settings fit the GPU but not the host, return the setting that needs the least host memory.
    Otherwise return the setting that needs the least device memory.
    """

    def shortfall(setting: MemorySetting) -> tuple[bool, int]:
        memory = setting.memory
        on_gpu = plan.environment.device == "cuda"
        holds = on_gpu and plan.has_room_for(replace(memory, host=0, saving=0))
        return not holds, memory.host_peak if holds else plan.device_bytes(memory)

    return min(settings, key=shortfall)


def _label(config: Config, chosen: Config) -> str:
    """Return overrides: how a setting keeps activations, and how it differs from the chosen one."""
    values = {key: get_setting(config, key) for key in CHOICES}
    kind, share = "train.activation_checkpoint", "train.checkpoint_keep"
    always = {kind, share} if values[kind] == "sequence_selective" else {kind}
    if values[kind] != "sequence_selective":
        del values[share]  # has no effect
    return as_overrides(
        {k: v for k, v in values.items() if k in always or v != get_setting(chosen, k)}
    )


def _label_of_degree(setting: MemorySetting) -> str:
    """Return a setting of another expert-parallel degree as overrides."""
    kind = "train.activation_checkpoint"
    changes = {DEGREE: _degree(setting.config), kind: get_setting(setting.config, kind)}
    return as_overrides(changes | setting.changes)


def _figures(setting: MemorySetting, best: float) -> str:
    """Return a setting's step time, compared with ``best`` seconds, and its memory."""
    word = "and" if setting.fits else "but needs"
    return f"{_compared(setting.seconds, best)} {word} {in_gib(setting.memory.total)}"


def _compared(seconds: float, best: float) -> str:
    """Compare an estimated step time with that of the chosen setting, in whole percent.

    Plans show no other time of this estimate: `simulation.estimate` predicts the time of a step.
    """
    if not (more := round(100 * (seconds / best - 1))):
        return _AS_FAST
    return f"steps take {abs(more)}% {'longer' if more > 0 else 'less time'}"


def _degree(config: Config) -> int | str:
    return config.topology.expert_parallel


def get_setting(config: Config, key: str) -> Any:
    """Return the value of a key such as "train.shard"."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def with_values(config: Config, changes: dict[str, Any]) -> Config:
    """Return `config` with other values of keys such as "train.shard"."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return config.changed(**groups)


def as_overrides(changes: dict[str, Any]) -> str:
    """Return changes as command-line overrides."""
    return " ".join(f"{key}={format_value(value)}" for key, value in changes.items())


def format_value(value: Any) -> str:
    """Format a setting's value as in an override: true, 0.5, full."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_gib(number: int) -> str:
    return f"{number / GIB:,.1f} GiB"


def duration(seconds: float) -> str:
    """Format seconds, for example as 41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"
