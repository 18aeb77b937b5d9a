"""`train.memory=auto`: the fastest memory setting that fits, and remedies if none fits.

Step time is estimated from counts alone, so every rank of every run chooses the same setting:

    compute     executed FLOP / (0.56 x peak). Sparse patterns count pairs by their density, or 10 %
                of the causal pairs if the data determine the density.
    weights     transfer time = bytes of `StateMemory.sent` / link. It overlaps with compute, so it
                costs a tenth of itself, plus any excess over compute.
    activations transfer time = bytes offloaded / host link. It overlaps with the offloaded layers'
                forward pass (down, a quarter of compute) and backward pass (up, the rest). Each
                direction costs a tenth of itself, plus any excess over its pass.
    optimizer   28 bytes per weight of a shard through GPU memory, or through the host's memory,
                which its workers share
    tiles       0.5 ms per tile of a layer and pass, and per chunk of the loss
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.exchanges import exchange_name
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.model.tiling import tile_rows
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.training.flops import causal_pairs, peak_flops, training_flops
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory
from mtrain_cli.training.state_memory import BYTES, StateMemory

if TYPE_CHECKING:
    from mtrain_cli.training.run_plan import RunPlan

# Whole steps measured on one and four H200s, 128K to 2M tokens: matrices 0.6, attention 0.4-0.6.
USED_OF_PEAK = 0.56
NODE_LINK = 250e9  # bytes/s into one GPU: gathers over NVLink, measured
NETWORK = 40e9  # bytes/s into one GPU: 400 Gbit/s each
HOST_LINK = 50e9  # bytes/s, PCIe 5 x16, pinned, one direction
HOST_MEMORY, GPU_MEMORY = 150e9, 3.5e12  # bytes/s; of a whole machine, of one GPU
GPUS_OF_A_HOST = 8
ADAMW_BYTES = 28  # per weight: reads weight, gradient and two states, writes all but the gradient
HIDDEN_COST = 0.1  # share of an overlapped transfer that still costs time
ASSUMED_DENSITY = 0.1
TILE_SECONDS = 0.5e-3  # per MLP tile and pass in addition to its products; per chunk of the loss
ROOMY = 0.9  # of a GPU; optional tensors must leave room for gaps, measured as 5 to 6 GiB

# Keys that `auto` may change: the default first, then the alternatives. A key that the user set to
# another value stays. `auto` offloads the activations of as few layers as necessary, and keeps the
# MLP products of as many layers as there is room for.
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
NO_CHECKPOINTS = {"train.checkpoint_every": 0, "train.checkpoint_at_end": False}


@dataclass(frozen=True)
class MemorySetting:
    """A configuration with its estimated memory and step time.

    changes: keys of `CHOICES` that differ from the configuration of the search.
    memory: per worker.
    seconds: estimated time of a step.
    fits: whether the memory fits.
    """

    config: Config
    changes: dict[str, Any]
    memory: MemoryEstimate
    seconds: float
    fits: bool

    @property
    def overrides(self) -> str:
        """The changes as command-line overrides."""
        return " ".join(f"{key}={format_value(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class MemorySearch:
    """All settings, fastest first, and the first one that fits (None if none does)."""

    settings: tuple[MemorySetting, ...]
    chosen: MemorySetting | None

    def rejected(self) -> list[tuple[str, str]]:
        """Return (label, reason) for the fastest setting not chosen, by checkpointing mode."""
        assert self.chosen is not None
        rows: dict[str, tuple[str, str]] = {}
        for setting in self.settings:
            kind = setting.config.train.activation_checkpoint
            if setting is self.chosen or kind in rows:
                continue
            reason = f"{_seconds(setting.seconds)} per step"
            if not setting.fits:
                host = (
                    f" and {_gib(setting.memory.host_peak)} of host memory"
                    if setting.memory.host_peak
                    else ""
                )
                reason += f", but needs {_gib(setting.memory.total)}{host}"
            rows[kind] = (_label(setting.config, self.chosen.config), reason)
        return list(rows.values())


def search(plan: RunPlan) -> MemorySearch:
    """Price every setting that `train.memory=auto` may choose for the run of `plan`."""
    settings = [
        _priced(plan, *_with_most_products(plan, *_with_fewest_offloaded(plan, *variant)))
        for variant in _variants(plan)
    ]
    # Ties go to fewer changes, then to the order of CHOICES.
    settings.sort(key=lambda setting: (round(setting.seconds, 6), len(setting.changes)))
    return MemorySearch(
        tuple(settings), next((setting for setting in settings if setting.fits), None)
    )


def _variants(plan: RunPlan) -> Iterator[tuple[Config, dict[str, Any]]]:
    config = plan.config
    current = {key: get_setting(config, key) for key in CHOICES}
    free = {key: values for key, values in CHOICES.items() if current[key] == values[0]}
    usual_share = CHOICES["train.checkpoint_keep"][0]
    for values in itertools.product(*free.values()):
        setting = current | dict(zip(free, values, strict=True))
        kind = setting["train.activation_checkpoint"]
        if (
            kind != "sequence_selective"
            and "train.checkpoint_keep" in free
            and setting["train.checkpoint_keep"] != usual_share
        ):
            continue
        if kind == "none" and setting["train.offload_activations"]:
            continue
        if (
            "train.keep_mlp" in free
            and setting["train.keep_mlp"]
            and _short_of_memory(kind, setting["train.offload_activations"])
        ):
            continue
        if setting["train.shard"] == "optimizer" and config.train.reduce_dtype != "float32":
            continue
        offload_gradients = setting["optim.offload_gradients"] and "optim.offload_gradients" in free
        if offload_gradients and not (setting["optim.offload"] and plan.micro_batches == 1):
            continue
        changes = {key: value for key, value in setting.items() if value != current[key]}
        yield _with(config, changes), changes


def _short_of_memory(kind: str, offload: bool | int) -> bool:
    """Return whether a setting already drops smaller tensors, so MLP products would not fit.

    MLP products are ten times as large as attention's output.
    """
    return bool(offload) or kind in ("sequence_selective", "full")


def _with_fewest_offloaded(
    plan: RunPlan, config: Config, changes: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Offload the fewest layers with which the run fits the device, or all if it never fits.

    Each further layer takes more host memory, so if the fewest do not fit the host, no number does.
    """
    key, layers = "train.offload_activations", config.model.num_layers

    def holds(config: Config) -> bool:
        return plan.has_room_for(replace(_memory(plan, config), host=0, saving=0))

    if key not in changes or plan.environment.device == "cpu" or not holds(config):
        return config, changes
    # 0 layers is a variant of its own.
    fewest = 1 + bisect_left(
        range(1, layers - 1), True, key=lambda n: holds(_with(config, {key: n}))
    )
    return (
        (config, changes)
        if fewest >= layers - 1
        else (_with(config, {key: fewest}), changes | {key: fewest})
    )


def _with_most_products(
    plan: RunPlan, config: Config, changes: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Keep the MLP products of as many layers as there is ample room for, possibly none."""
    key, layers = "train.keep_mlp", config.model.num_layers
    if key not in changes or plan.has_room_for(_memory(plan, config), ROOMY):
        return config, changes
    most = bisect_left(
        range(1, layers),
        True,
        key=lambda n: not plan.has_room_for(_memory(plan, _with(config, {key: n})), ROOMY),
    )
    if most == 0:
        return _with(config, {key: False}), {
            other: value for other, value in changes.items() if other != key
        }
    return _with(config, {key: most}), changes | {key: most}


def with_products(plan: RunPlan) -> MemorySetting | None:
    """Return the same run with the MLP products of as many layers as there is ample room for.

    Return None if there is no room, if all are kept already, or if the run drops smaller tensors.
    """
    train = plan.config.train
    if train.keep_mlp or _short_of_memory(train.activation_checkpoint, train.offload_activations):
        return None
    change = {"train.keep_mlp": True}
    setting = _priced(plan, *_with_most_products(plan, _with(plan.config, change), change))
    return setting if setting.memory != plan.memory else None


def _priced(plan: RunPlan, config: Config, changes: dict[str, Any]) -> MemorySetting:
    memory = _memory(plan, config)
    return MemorySetting(
        config, changes, memory, step_seconds(plan, config, memory), plan.has_room_for(memory)
    )


def _memory(plan: RunPlan, config: Config) -> MemoryEstimate:
    return estimate_memory(
        config,
        workers=plan.dims.workers,
        layout=plan.layout,
        exchange=plan.exchange,
        kernel=plan.kernel,
        dtype_bytes=BYTES[plan.dtype],
        cuda=plan.environment.device == "cuda",
    )


def step_seconds(plan: RunPlan, config: Config, memory: MemoryEstimate) -> float:
    """Estimate the seconds of an optimizer step, to compare settings; see the module docstring."""
    environment, train, e = plan.environment, config.train, BYTES[plan.dtype]
    peak = peak_flops(plan.gpu_name) or 100e12
    pairs = density(config) * causal_pairs(config.seq)
    flop = training_flops(config, plan.layout, dtype_bytes=e, pairs=pairs).executed
    n = plan.micro_batches
    # Seconds of one micro-batch.
    compute = flop * config.seq * train.micro_batch / environment.dims.cp / (USED_OF_PEAK * peak)
    states = StateMemory(config, environment.dims.workers, n, e)
    link = NETWORK if environment.nodes > 1 else NODE_LINK
    seconds = n * compute + _exposed(states.sent() / link, n * compute)
    if train.offload_activations:
        down = (memory.host - states.host) / HOST_LINK
        overlapping = (
            compute
            * layers_on_host(train.offload_activations, config.model.num_layers)
            / config.model.num_layers
        )
        seconds += n * (_exposed(down, overlapping / 4) + _exposed(down, 3 * overlapping / 4))
    shard = ADAMW_BYTES * states.shard
    if config.optim.offload:
        seconds += (
            shard * min(environment.local_workers, GPUS_OF_A_HOST) / HOST_MEMORY
            + e * states.shard / HOST_LINK
        )
    else:
        seconds += shard / GPU_MEMORY
    tokens = plan.layout.tokens_per_worker * train.micro_batch
    tiles = tokens / tile_rows(
        tokens, config.model.hidden_size, config.model.intermediate_size, e, train.tile_mib << 20
    )
    logits = 4 * tokens * config.model.vocab_size / (train.loss_chunk_mib << 20)
    return seconds + n * TILE_SECONDS * (2 * tiles * config.model.num_layers + logits)


def density(config: Config) -> float:
    """Return the share of causal pairs that attention computes, or an assumption."""
    known = config.sparsity.known_density(config.seq)
    return ASSUMED_DENSITY if known is None else known


def _exposed(transfer: float, overlapping: float) -> float:
    """Return the exposed seconds of a transfer that overlaps with `overlapping` seconds of work."""
    return HIDDEN_COST * transfer + max(0.0, transfer - overlapping)


def nearest_to_fitting(plan: RunPlan, settings: Sequence[MemorySetting]) -> MemorySetting:
    """Return the setting closest to fitting: on GPUs by device memory, then by host memory."""

    def shortfall(setting: MemorySetting) -> tuple[bool, int]:
        memory = setting.memory
        holds = plan.environment.device == "cuda" and plan.has_room_for(
            replace(memory, host=0, saving=0)
        )
        return not holds, memory.host_peak if holds else plan.device_bytes(memory)

    return min(settings, key=shortfall)


def refusal(plan: RunPlan, result: MemorySearch) -> str:
    """Explain in one line why a run does not fit, and what would make it fit."""
    auto = plan.config.train.memory == "auto"
    needed = nearest_to_fitting(plan, result.settings).memory if auto else plan.memory
    qualifier = "at least " if auto else "about "
    exchange_note = (
        f" with topology.exchange={plan.exchange.name}"
        if plan.dims.cp > 1 and plan.environment.device == "cuda"
        else ""
    )
    host = ""
    if needed.host_peak and plan.environment.device == "cuda":
        saving = (
            f" ({_gib(needed.saving)} of it while a checkpoint is written)" if needed.saving else ""
        )
        host = f" and {_gib(needed.host_peak)} of host memory{saving}"
    changes = remedies(plan, result)
    nothing = (
        "only a smaller model or more workers would fit"
        if plan.environment.device == "cuda"
        else "only a smaller model would fit"
    )
    would = f"fits with {', or '.join(changes)}" if changes else nothing
    needs = f"{qualifier}{_gib(plan.device_bytes(needed))}{host}{exchange_note}"
    seq = format_size(plan.config.seq)
    return f"seq={seq}: a worker needs {needs}, but has {plan.available_memory}; {would}"


def remedies(plan: RunPlan, result: MemorySearch) -> list[str]:
    """Return changes that each make a run fit, shortest first.

    Tries memory settings, the exchange, no checkpoints, a shorter sequence, more workers.
    """
    changes = []
    fitting = [setting for setting in result.settings if setting.fits]
    if fitting:
        fewest = min(len(setting.changes) for setting in fitting)
        changes.append(
            next(setting.overrides for setting in fitting if len(setting.changes) == fewest)
        )
    exchange = _other_exchange(plan)
    if exchange:
        changes.append(exchange)
    if plan.memory.saving and _can_fit(
        plan.replan(_with(plan.requested or plan.config, NO_CHECKPOINTS))
    ):
        changes.append(
            " ".join(f"{key}={format_value(value)}" for key, value in NO_CHECKPOINTS.items())
        )
    seq = longest_seq(plan)
    if seq:
        changes.append(f"seq={format_size(seq)}")
    workers = _fewest_workers(plan)
    if workers:
        changes.append(f"{workers} GPUs (topology.workers={workers})")
    return changes


def _other_exchange(plan: RunPlan) -> str | None:
    """Find an exchange that fits: fewer heads at once, a ring, or gathered keys."""
    config, cp, exchange = plan.requested or plan.config, plan.dims.cp, plan.exchange
    if plan.environment.device == "cpu":
        return None
    gather, ring = (
        {"exchange": exchange_name(gathers=g, hierarchical=exchange.traits.hierarchical)}
        for g in (True, False)
    )
    kv_heads = max(1, config.model.num_kv_heads // exchange.heads)
    candidates: list[dict[str, Any]] = [gather, ring]
    if (exchange.traits.gathers and cp > exchange.heads) or cp == 1:
        candidates = [
            *({"chunks": n} for n in range(exchange.chunks + 1, kv_heads + 1) if kv_heads % n == 0),
            *([ring] if cp > 1 else []),
        ]
    elif config.topology.circulates != "auto":
        candidates.append({"circulates": "auto"})
    for change in candidates:
        # Reset a setting that only the previous exchange uses.
        for key, only in (("circulates", "ring"), ("chunks", "all_gather")):
            if only not in change.get("exchange", only) and getattr(config.topology, key) != "auto":
                change[key] = "auto"
        with contextlib.suppress(ConfigError):
            if _can_fit(plan.replan(replace(config, topology=replace(config.topology, **change)))):
                return " ".join(f"topology.{key}={value}" for key, value in change.items())
    return None


def longest_seq(plan: RunPlan, *, shortest: int = 1024, most: int = 1 << 27) -> int | None:
    """Return the longest sequence that fits the plan; `train.memory=auto` may use any setting.

    Tries eighths of powers of two. Returns None if the shortest length does not fit.
    """

    def fits(seq: int) -> bool:
        try:
            other = plan.replan(replace(plan.requested or plan.config, seq=seq))
        except ConfigError:
            return False
        return _can_fit(other)

    if not fits(shortest):
        return None
    low = shortest
    while low < most and fits(2 * low):
        low *= 2
    # Eighths of a power of two: 512k, 576k, 640k, ...
    return max(
        (
            low + eighth * low // 8
            for eighth in range(8)
            if eighth == 0 or fits(low + eighth * low // 8)
        ),
        default=low,
    )


def _fewest_workers(plan: RunPlan, most: int = 1024) -> int | None:
    """Return the fewest workers that fit, doubling the planned number."""
    config, environment = plan.requested or plan.config, plan.environment
    if environment.device == "cpu":
        return None
    workers = 2 * environment.dims.workers
    while workers <= most:
        topology = replace(config.topology, workers=workers)
        try:
            other = plan.replan(replace(config, topology=topology))
        except ConfigError:
            return None
        if _can_fit(other):
            return workers
        workers *= 2
    return None


def _can_fit(plan: RunPlan) -> bool:
    """Return whether a run fits as configured; under `train.memory=auto`, with any setting."""
    if plan.has_room_for(plan.memory):
        return True
    return plan.config.train.memory == "auto" and any(
        plan.has_room_for(_memory(plan, _with_fewest_offloaded(plan, *variant)[0]))
        for variant in _variants(plan)
    )


def _label(config: Config, chosen: Config) -> str:
    """Describe how a setting keeps activations, and how else it differs from the chosen one."""
    activation_keys = ("train.activation_checkpoint", "train.checkpoint_keep")
    train = config.train
    share = (
        f" {train.checkpoint_keep:g}" if train.activation_checkpoint == "sequence_selective" else ""
    )
    others = [
        f"{key}={format_value(get_setting(config, key))}"
        for key in CHOICES
        if key not in activation_keys and get_setting(config, key) != get_setting(chosen, key)
    ]
    return f"{train.activation_checkpoint}{share}{' with ' if others else ''}{' '.join(others)}"


def get_setting(config: Config, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def _with(config: Config, changes: dict[str, Any]) -> Config:
    for group in ("train", "optim"):
        values = {
            key.partition(".")[2]: value
            for key, value in changes.items()
            if key.startswith(f"{group}.")
        }
        if values:
            config = replace(config, **{group: replace(getattr(config, group), **values)})  # type: ignore[arg-type]
    return config


def format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(number: int) -> str:
    return f"{number / GIB:,.1f} GiB"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:,.3g} s"
        if seconds < 120
        else f"{seconds / 60:,.3g} min"
        if seconds < 7200
        else f"{seconds / 3600:,.3g} h"
    )
