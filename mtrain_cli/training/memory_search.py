"""`train.memory=auto`: the fastest way of using memory that fits, by closed forms of both; and what would help where nothing fits.

The time of a step is reckoned from counts alone, so every rank of every run finds the same:

    compute     executed FLOP / (0.56 x peak), pairs of a sparse pattern at its density, or 10 % of the causal ones where data decide
    weights     bytes of `StateMemory.sent` / link; beside computation, of which a tenth is lost, and what is longer than it
    activations bytes offloaded / host link, down beside the forward pass (a quarter of compute) of these layers, up beside their
                backward pass, counted likewise
    optimizer   28 bytes a weight of a shard through the GPU's memory, or through that of the host, which its workers share
    tiles       20 us for each tile of a layer and micro-batch
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.model.tiling import tile_rows
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.training.flops import causal_pairs, peak_flops, training_flops
from mtrain_cli.training.memory import GIB, MemoryEstimate, estimate_memory
from mtrain_cli.training.state_memory import BYTES, StateMemory

if TYPE_CHECKING:
    from mtrain_cli.training.run_plan import RunPlan

USED_OF_PEAK = 0.56  # of whole steps as measured on one and four H200s, 128K to 2M tokens: products 0.6, attention 0.4 to 0.6
NODE_LINK, NETWORK = (
    250e9,
    40e9,
)  # bytes a second that reach one GPU: gathers over NVLink as measured; 400 Gbit/s a GPU
HOST_LINK = 50e9  # PCIe 5 x16, pinned, one direction
HOST_MEMORY, GPU_MEMORY = 150e9, 3.5e12  # bytes a second; of a whole machine, of one GPU
GPUS_OF_A_HOST = 8
ADAMW_BYTES = 28  # a weight: reads weight, gradient and two states, writes all but the gradient
HIDDEN_COST = 0.1  # of a transfer beside computation
ASSUMED_DENSITY = 0.1
TILE_SECONDS = 0.5e-3  # of a tile of the MLP and pass, beyond its products; of a chunk of the loss, which adds to the gradient of the head
ROOMY = 0.9  # of a GPU: what may stay but need not leaves more to the gaps between the allocator's blocks, 5 to 6 GiB as measured

# What `auto` may change: the default, and what else is tried. A key with another value than the default was given, and stays. Of the
# activations that may be offloaded, those of as few layers leave as will do; products of the MLP stay in as many layers as there is room
# for.
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
    """A configuration with what it takes. changes: of the keys of `CHOICES`, those that differ from the configuration asked about."""

    config: Config
    changes: dict[str, Any]
    memory: MemoryEstimate
    seconds: float
    fits: bool

    @property
    def overrides(self) -> str:
        return " ".join(f"{key}={format_value(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class MemorySearch:
    """All settings, fastest first; chosen: the first that fits, None where none does."""

    settings: tuple[MemorySetting, ...]
    chosen: MemorySetting | None

    def rejected(self) -> list[tuple[str, str]]:
        """For each way of keeping activations its fastest other setting: (words, reason)."""
        assert self.chosen is not None
        rows: dict[str, tuple[str, str]] = {}
        for setting in self.settings:
            kind = setting.config.train.activation_checkpoint
            if setting is self.chosen or kind in rows:
                continue
            reason = f"{_seconds(setting.seconds)} a step"
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
    """Every setting that ``train.memory=auto`` may take for a run that is planned otherwise, priced."""
    settings = [
        _priced(plan, *_with_most_products(plan, *_with_fewest_offloaded(plan, *variant)))
        for variant in _variants(plan)
    ]
    # The fewer changes, the better, where the time is the same; and then the order of CHOICES.
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
    """Whoever has to save there, or computes attention twice, has no room for what is ten times as large as its output."""
    return bool(offload) or kind in ("sequence_selective", "full")


def _with_fewest_offloaded(
    plan: RunPlan, config: Config, changes: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """A variant with the fewest layers on the host with which the device holds the rest; with all of them where it never does. The host
    holds more the more layers leave, so no other number could do where this one does not.
    """
    key, layers = "train.offload_activations", config.model.num_layers

    def holds(config: Config) -> bool:
        return plan.has_room_for(replace(_memory(plan, config), host=0, saving=0))

    if key not in changes or plan.environment.device == "cpu" or not holds(config):
        return config, changes
    # 0 is another variant.
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
    """A variant with the products of as many layers' MLPs as there is ample room for; of none where there is none for any."""
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
    """The same run with the products of as many layers' MLPs kept as there is ample room for. None where that changes nothing: there is
    room for none, all are kept anyway, or what is saved elsewhere says that there is none.
    """
    train = plan.config.train
    if train.keep_mlp or _short_of_memory(train.activation_checkpoint, train.offload_activations):
        return None
    change = {"train.keep_mlp": True}
    result = _priced(plan, *_with_most_products(plan, _with(plan.config, change), change))
    return result if result.memory != plan.memory else None


def _priced(plan: RunPlan, config: Config, changes: dict[str, Any]) -> MemorySetting:
    memory = _memory(plan, config)
    return MemorySetting(
        config, changes, memory, step_seconds(plan, config, memory), plan.has_room_for(memory)
    )


def _memory(plan: RunPlan, config: Config) -> MemoryEstimate:
    return estimate_memory(
        config,
        workers=plan.environment.workers,
        layout=plan.layout,
        exchange=plan.exchange,
        kernel=plan.kernel,
        dtype_bytes=BYTES[plan.dtype],
        cuda=plan.environment.device == "cuda",
    )


def step_seconds(plan: RunPlan, config: Config, memory: MemoryEstimate) -> float:
    """Of an optimizer step, by the counts at the head of this file: for comparing settings, not a promise."""
    environment, train, e = plan.environment, config.train, BYTES[plan.dtype]
    peak = peak_flops(plan.gpu_name) or 100e12
    pairs = density(config) * causal_pairs(config.seq)
    flop = training_flops(config, plan.layout, dtype_bytes=e, pairs=pairs).executed
    n = plan.micro_batches
    compute = (
        flop * config.seq * train.micro_batch / environment.cp / (USED_OF_PEAK * peak)
    )  # of a micro-batch
    states = StateMemory(config, environment.workers, n, e)
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
    """Share of the causal pairs that attention computes, as far as the configuration says."""
    if config.sparsity.pattern == "dense":
        return 1.0
    if config.sparsity.pattern == "fixed" and config.sparsity.density:
        return min(1.0, config.sparsity.density + 2 * (config.sparsity.columns or 0) / config.seq)
    return ASSUMED_DENSITY


def _exposed(transfer: float, overlapping: float) -> float:
    return HIDDEN_COST * transfer + max(0.0, transfer - overlapping)


def nearest_to_fitting(plan: RunPlan, settings: Sequence[MemorySetting]) -> MemorySetting:
    """Of settings that do not fit, the one that lacks least: on GPUs with the fewest bytes of one, or, where these suffice, of the host."""

    def shortfall(setting: MemorySetting) -> tuple[bool, int]:
        memory = setting.memory
        holds = plan.environment.device == "cuda" and plan.has_room_for(replace(memory, host=0, saving=0))
        return not holds, memory.host_peak if holds else plan.device_bytes(memory)

    return min(settings, key=shortfall)


def refusal(plan: RunPlan, result: MemorySearch) -> str:
    """One line on a run that does not fit: what it needs, and the shortest lists of changes that would do."""
    auto = plan.config.train.memory == "auto"
    needed = nearest_to_fitting(plan, result.settings).memory if auto else plan.memory
    qualifier = "at least " if auto else "about "
    exchange_note = (
        f" with topology.exchange={plan.exchange.name}"
        if plan.environment.cp > 1 and plan.environment.device == "cuda"
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
    return f"seq={format_size(plan.config.seq)}: a worker needs {qualifier}{_gib(plan.device_bytes(needed))}{host}{exchange_note}, of {plan.available_memory}; {would}"


def remedies(plan: RunPlan, result: MemorySearch) -> list[str]:
    """Changes of which each would make a run fit: of the ways of using memory with the fewest keys, of the exchange, of what is
    saved, of the length, of the workers.
    """
    changes = []
    fitting = [setting for setting in result.settings if setting.fits]
    if fitting:
        fewest = min(len(setting.changes) for setting in fitting)
        changes.append(next(setting.overrides for setting in fitting if len(setting.changes) == fewest))
    exchange = _other_exchange(plan)
    if exchange:
        changes.append(exchange)
    if plan.memory.saving and _can_fit(
        plan.replan(_with(plan.requested or plan.config, NO_CHECKPOINTS))
    ):
        changes.append(" ".join(f"{key}={format_value(value)}" for key, value in NO_CHECKPOINTS.items()))
    seq = longest_seq(plan)
    if seq:
        changes.append(f"seq={format_size(seq)}")
    workers = _fewest_workers(plan)
    if workers:
        changes.append(f"{workers} GPUs (topology.workers={workers})")
    return changes


def _other_exchange(plan: RunPlan) -> str | None:
    """The change of the exchange that would do: fewer heads at once, or of gathered keys a ring; in place of a ring gathered keys."""
    config, environment, exchange = plan.requested or plan.config, plan.environment, plan.exchange
    if environment.device == "cpu":
        return None
    form = "hierarchical_" if exchange.name.startswith("hierarchical") else ""
    gather, ring = ({"exchange": f"{form}{name}"} for name in ("all_gather", "ring"))
    kv_heads = max(1, config.model.num_kv_heads // exchange.heads)
    candidates: list[dict[str, Any]] = [gather, ring]
    if ("all_gather" in exchange.name and environment.cp > exchange.heads) or environment.cp == 1:
        candidates = [
            *({"chunks": n} for n in range(exchange.chunks + 1, kv_heads + 1) if kv_heads % n == 0),
            *([ring] if environment.cp > 1 else []),
        ]
    elif config.topology.circulates != "auto":
        candidates.append({"circulates": "auto"})
    for change in candidates:
        # What was given for the other kind goes with it.
        for key, only in (("circulates", "ring"), ("chunks", "all_gather")):
            if only not in change.get("exchange", only) and getattr(config.topology, key) != "auto":
                change[key] = "auto"
        with contextlib.suppress(ConfigError):
            if _can_fit(plan.replan(replace(config, topology=replace(config.topology, **change)))):
                return " ".join(f"topology.{key}={value}" for key, value in change.items())
    return None


def longest_seq(plan: RunPlan, *, shortest: int = 1024, most: int = 1 << 27) -> int | None:
    """The longest sequence that fits with the settings of a plan, or under ``train.memory=auto`` with any, to an eighth below; None where
    the shortest does not.
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
    """The fewest workers, doubled from what is planned, that would do."""
    config, environment = plan.requested or plan.config, plan.environment
    if environment.device == "cpu":
        return None
    workers = 2 * environment.workers
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
    """Whether a run fits as it is configured, which may be with whatever fits."""
    if plan.has_room_for(plan.memory):
        return True
    return plan.config.train.memory == "auto" and any(
        plan.has_room_for(_memory(plan, _with_fewest_offloaded(plan, *variant)[0]))
        for variant in _variants(plan)
    )


def _label(config: Config, chosen: Config) -> str:
    """How activations are kept, and what else differs from the chosen setting."""
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
