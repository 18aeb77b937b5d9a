"""`train.memory=auto`: the fastest memory setting that fits, and remedies if none fits.

The search compares settings by an estimated step time. The estimate uses only counts, not
measurements, so that all ranks choose the same setting. The step time is the sum of:

    compute     executed FLOP / (0.56 x peak FLOP/s). If the density of a sparse pattern depends on
                the data, assume 10 % of the causal pairs.
    weights     transfer of `StateMemory.sent` bytes, which overlaps with compute
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

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.exchanges import exchange_name
from mtrain_cli.config.expert_checks import NEED_ALL_EXPERTS
from mtrain_cli.config.pipeline_parallel import NEED_WHOLE_MODEL
from mtrain_cli.config.schema import Config, ConfigError, TopologyConfig
from mtrain_cli.config.sizes import format_size
from mtrain_cli.config.tensor_parallel import NEED_WHOLE_LAYERS
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.training.flops import (
    allowed_pairs,
    causal_pairs,
    own_tiles,
    peak_flops,
    training_flops,
)
from mtrain_cli.training.memory import GIB, MemoryEstimate
from mtrain_cli.training.state_memory import BYTES, largest_states
from mtrain_cli.training.tensor_traffic import backward_messages, forward_messages, message_bytes

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
ASSUMED_DENSITY = 0.1
TILE_SECONDS = 0.5e-3  # per MLP tile and pass, or chunk of the loss, in addition to its products
# Share of a GPU that may be full with optional tensors. Gaps take 5 to 6 GiB, measured.
ROOMY = 0.9

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
# Advice on a run that the CPU of a machine refuses.
PLAN_FOR_GPUS = "topology=h200_1x8 to plan for eight GPUs"
NO_CHECKPOINTS = {"train.checkpoint_every": 0, "train.checkpoint_at_end": False}
# A configuration, and its `MemorySetting.changes`.
Variant = tuple[Config, dict[str, Any]]


@dataclass(frozen=True)
class MemorySetting:
    """A configuration with its estimated memory and step time.

    changes: new values by key, for the keys of `CHOICES` that the setting changes.
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
        return _overrides(self.changes)


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
        out settings that fit and, as displayed, take as long as the chosen one.
        """
        assert self.chosen is not None
        best = duration(self.chosen.seconds)
        rows: dict[str, tuple[str, str]] = {}
        for setting in self.settings:
            kind, memory = setting.config.train.activation_checkpoint, setting.memory
            equal = setting.fits and duration(setting.seconds) == best
            if setting is self.chosen or equal or kind in rows:
                continue
            reason = f"{duration(setting.seconds)} per step"
            if not setting.fits:
                reason += f", but needs {_gib(memory.total)}"
                if memory.host_peak:
                    reason += f" and {_gib(memory.host_peak)} of host memory"
            rows[kind] = (_label(setting.config, self.chosen.config), reason)
        return list(rows.values())


def search(plan: RunPlan) -> MemorySearch:
    """Estimate memory and time of every setting that `train.memory=auto` may choose for a run."""
    settings = [
        _priced(plan, *_with_most_products(plan, *_with_fewest_offloaded(plan, *variant)))
        for variant in _variants(plan)
    ]
    # Of equally fast settings, prefer fewer changes, then the order of CHOICES.
    settings.sort(key=lambda setting: (round(setting.seconds, 6), len(setting.changes)))
    return MemorySearch(tuple(settings), next((s for s in settings if s.fits), None))


def _variants(plan: RunPlan) -> Iterator[Variant]:
    """Yield every sensible combination of the alternatives in `CHOICES`."""
    config = plan.config
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
            yield _with(config, changes), changes


def _short_of_memory(kind: str, offload: bool | int) -> bool:
    """Return whether a setting offloads or recomputes the output of attention.

    Such a setting has no room for MLP products, which are ten times as large as that output.
    """
    return bool(offload) or kind in ("sequence_selective", "full")


def _with_fewest_offloaded(plan: RunPlan, config: Config, changes: dict[str, Any]) -> Variant:
    """Offload the fewest layers with which the run fits the device. If no number fits, offload all.

    The fewest layers also take the least host memory.
    """
    key, layers = "train.offload_activations", config.model.num_layers

    def holds(config: Config) -> bool:
        return plan.has_room_for(replace(plan.estimate(config), host=0, saving=0))

    if key not in changes or plan.environment.device == "cpu" or not holds(config):
        return config, changes
    # Start at 1 layer: `_variants` yields the setting without offload, too.
    counts = range(1, layers - 1)
    fewest = 1 + bisect_left(counts, True, key=lambda n: holds(_with(config, {key: n})))
    if fewest >= layers - 1:
        return config, changes
    return _with(config, {key: fewest}), changes | {key: fewest}


def _with_most_products(plan: RunPlan, config: Config, changes: dict[str, Any]) -> Variant:
    """Set train.keep_mlp to the most layers that leave 10 % of a GPU free, possibly none."""
    key, layers = "train.keep_mlp", config.model.num_layers

    def too_large(config: Config) -> bool:
        return not plan.has_room_for(plan.estimate(config), ROOMY)

    if key not in changes or not too_large(config):
        return config, changes
    most = bisect_left(range(1, layers), True, key=lambda n: too_large(_with(config, {key: n})))
    if most == 0:
        return _with(config, {key: False}), {k: v for k, v in changes.items() if k != key}
    return _with(config, {key: most}), changes | {key: most}


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
    setting = _priced(plan, *_with_most_products(plan, _with(plan.config, change), change))
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
    pairs = density(config) * causal_pairs(config.seq)
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
    messages = forward_messages(config.model) + backward_messages(config)
    share = layers / config.model.num_layers
    seconds += n * share * messages * message_bytes(config, plan.layout, e) / NODE_LINK
    tokens, rows = own_tiles(config, plan.layout, e)
    logits = 4 * tokens * config.model.vocab_size / (train.loss_chunk_mib << 20)
    # The chunks of experts are not priced.
    tiled = layers * (1 - config.model.expert_layers / config.model.num_layers)
    return seconds + n * TILE_SECONDS * (2 * tokens / rows * tiled + logits)


def density(config: Config) -> float:
    """Return the share of causal pairs that attention computes, in a sequence of one document.

    If the share depends on the data, return `ASSUMED_DENSITY`, or the share that the mask allows if
    that is less.
    """
    known = config.sparsity.known_density(config.seq)
    found = ASSUMED_DENSITY if known is None else known
    if config.mask.kind == "causal":
        return found
    allowed = allowed_pairs(config) / causal_pairs(config.seq)
    return allowed if config.sparsity.pattern == "dense" else min(found, allowed)


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


def refusal(plan: RunPlan, result: MemorySearch) -> str:
    """Return one line that says why a run does not fit, and what would fit."""
    auto, on_gpu = plan.config.train.memory == "auto", plan.environment.device == "cuda"
    needed = nearest_to_fitting(plan, result.settings).memory if auto else plan.memory
    needs = f"{'at least' if auto else 'about'} {_gib(plan.device_bytes(needed))}"
    if needed.host_peak and on_gpu:
        needs += f" and {_gib(needed.host_peak)} of host memory"
        if needed.saving:
            # Only a checkpoint needs host memory, unless activations or the optimizer are there.
            part = f"{_gib(needed.saving)} of it " if needed.host else ""
            needs += f" ({part}while a checkpoint is written)"
    if plan.dims.cp > 1 and on_gpu:
        needs += f" with topology.exchange={plan.exchange.name}"
    would = f"only a smaller model {'or more workers ' if on_gpu else ''}would fit"
    if changes := remedies(plan, result):
        would = f"fits with {', or '.join(changes)}"
    if not on_gpu:
        would += f"; add --dry-run {PLAN_FOR_GPUS}"
    seq = format_size(plan.config.seq)
    return f"seq={seq}: a worker needs {needs}, but has {plan.available_memory}; {would}"


def remedies(plan: RunPlan, result: MemorySearch) -> list[str]:
    """Return changes as command-line overrides. Each change makes the run fit on its own.

    Return at most one change of each kind: memory settings, exchange, no checkpoints, a shorter
    sequence, more workers.
    """
    changes = []
    fitting = [setting for setting in result.settings if setting.fits]
    if fitting:
        changes.append(min(fitting, key=lambda setting: len(setting.changes)).overrides)
    if exchange := _other_exchange(plan):
        changes.append(exchange)
    without_saving = _with(plan.requested or plan.config, NO_CHECKPOINTS)
    if plan.memory.saving and _can_fit(plan.replan(without_saving)):
        changes.append(_overrides(NO_CHECKPOINTS))
    if seq := longest_seq(plan):
        changes.append(f"seq={format_size(seq)}")
    if workers := _fewest_workers(plan):
        changes.append(f"{workers} GPUs (topology.workers={workers})")
    return changes


def _other_exchange(plan: RunPlan) -> str | None:
    """Return overrides of `topology` that make the run fit, or None if no such override exists.

    The overrides raise `topology.chunks`, or switch to a ring or an all-gather.
    """
    config, cp, exchange = plan.requested or plan.config, plan.dims.cp, plan.exchange
    if plan.environment.device == "cpu":
        return None
    gather, ring = (_exchange_change(config.topology, exchange, gathers=g) for g in (True, False))
    candidates = [gather, ring]
    if (exchange.traits.gathers and cp > exchange.heads) or cp == 1:
        kv_heads = max(1, config.of_worker.model.num_kv_heads // exchange.heads)
        more = range(exchange.chunks + 1, kv_heads + 1)
        candidates = [{"chunks": n} for n in more if kv_heads % n == 0]
        candidates += [ring] if cp > 1 else []
    elif config.topology.circulates != "auto":
        candidates.append({"circulates": "auto"})
    for change in candidates:
        with contextlib.suppress(ConfigError):
            if _can_fit(plan.replan(config.changed(topology=change))):
                return " ".join(f"topology.{key}={value}" for key, value in change.items())
    return None


def _exchange_change(
    topology: TopologyConfig, exchange: ExchangeChoice, *, gathers: bool
) -> dict[str, Any]:
    """Return the new values of `topology` for an all-gather or a ring.

    Reset the key that only the other exchange reads.
    """
    name = exchange_name(gathers=gathers, hierarchical=exchange.traits.hierarchical)
    unused = "circulates" if gathers else "chunks"
    reset = {unused: "auto"} if getattr(topology, unused) != "auto" else {}
    return {"exchange": name, **reset}


def longest_seq(plan: RunPlan, *, shortest: int = 1024, most: int = 1 << 27) -> int | None:
    """Return the longest sequence that fits, in tokens. Return None if none was found.

    Double `shortest` while the run fits. Then bisect the seven evenly spaced lengths below the
    first length that does not fit (such as 576k, 640k, ... below 1m). With `train.memory=auto`, a
    sequence fits if the run fits with any setting. Lengths below one that fits are taken to fit.

    Args:
        shortest, most: smallest and largest length to try.
    """

    config = plan.requested or plan.config
    if plan.exchange.traits.by_mask and plan.exchange.stages == 1:
        # Do not price stages again for each length.
        config = config.changed(topology={"stages": 1})

    def fits(seq: int) -> bool:
        try:
            other = plan.replan(replace(config, seq=seq))
        except ConfigError:
            return False
        return _can_fit(other)

    # A mask may need more tokens than `shortest`.
    low = next((seq for seq in (shortest, plan.config.seq) if fits(seq)), None)
    if low is None:
        return None
    known = plan.config.seq if fits(plan.config.seq) else 0
    while low < most and (2 * low <= known or fits(2 * low)):
        low *= 2
    longer = [low + eighth * low // 8 for eighth in range(8)]
    return longer[bisect_left(longer, True, lo=1, key=lambda seq: not fits(seq)) - 1]


def _fewest_workers(plan: RunPlan, most: int = 1024) -> int | None:
    """Return a larger number of workers with which the run fits.

    Double the planned number until the run fits. Return None if no number up to `most` fits.
    """
    config, environment = plan.requested or plan.config, plan.environment
    if environment.device == "cpu":
        return None
    workers = 2 * environment.dims.workers
    while workers <= most:
        try:
            other = plan.replan(config.changed(topology={"workers": workers}))
        except ConfigError:
            return None
        if _can_fit(other):
            return workers
        workers *= 2
    return None


def _can_fit(plan: RunPlan) -> bool:
    """Return whether a run fits as configured or, with `train.memory=auto`, with any setting."""
    if plan.has_room_for(plan.memory):
        return True
    return plan.config.train.memory == "auto" and any(
        _variant_fits(plan, config, changes)
        for config, changes in _variants(plan)
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
    if "train.offload_activations" not in changes or not memory.host:
        return False
    if not plan.has_room_for(replace(memory, host=0, saving=0)):
        return False
    return plan.has_room_for(plan.estimate(_with_fewest_offloaded(plan, config, changes)[0]))


def _label(config: Config, chosen: Config) -> str:
    """Return overrides: how a setting keeps activations, and how it differs from the chosen one."""
    values = {key: get_setting(config, key) for key in CHOICES}
    kind, share = "train.activation_checkpoint", "train.checkpoint_keep"
    always = {kind, share} if values[kind] == "sequence_selective" else {kind}
    if values[kind] != "sequence_selective":
        del values[share]  # has no effect
    return _overrides(
        {k: v for k, v in values.items() if k in always or v != get_setting(chosen, k)}
    )


def get_setting(config: Config, key: str) -> Any:
    """Return the value of a key such as "train.shard"."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def _with(config: Config, changes: dict[str, Any]) -> Config:
    """Return `config` with other values of keys such as "train.shard"."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return config.changed(**groups)


def _overrides(changes: dict[str, Any]) -> str:
    """Return changes as command-line overrides."""
    return " ".join(f"{key}={format_value(value)}" for key, value in changes.items())


def format_value(value: Any) -> str:
    """Format a setting's value as in an override: true, 0.5, full."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(number: int) -> str:
    return f"{number / GIB:,.1f} GiB"


def duration(seconds: float) -> str:
    """Format seconds, for example as 41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"
