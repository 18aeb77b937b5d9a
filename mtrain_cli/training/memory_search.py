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
from dataclasses import replace
from typing import Any

from mtrain_cli.config.parallel_checks import NEED_ALL_EXPERTS, NEED_WHOLE_LAYERS, NEED_WHOLE_MODEL
from mtrain_cli.config.schema import Config
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
from mtrain_cli.training.hardware import ASSUMED_GPU
from mtrain_cli.training.memory import MemoryEstimate
from mtrain_cli.training.memory_setting import (
    CHOICES,
    DEGREE,
    MemorySearch,
    MemorySetting,
    Variant,
    get_setting,
    with_values,
)
from mtrain_cli.training.received_bytes import message_bytes, tensor_messages
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.state_memory import BYTES, largest_states

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
# How `train.memory=auto` chooses train.keep_mlp.
KEPT = f"train.keep_mlp was chosen to leave {1 - ROOMY:.0%} of a GPU free"


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
    """Return whether a setting moves the output of attention, a tenth of the MLP products."""
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
    peak = peak_flops(plan.hardware.gpu or ASSUMED_GPU) or 100e12
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
    """Return the cost in seconds of a transfer that overlaps with compute."""
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
