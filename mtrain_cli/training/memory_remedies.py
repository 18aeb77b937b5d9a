"""Why a run does not fit, and which changes make it fit."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from dataclasses import replace
from typing import Any

from mtrain_cli.config.exchanges import exchange_name
from mtrain_cli.config.schema import Config, ConfigError, TopologyConfig
from mtrain_cli.config.sizes import format_size
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.training.memory_search import (
    nearest_to_fitting,
    search,
    variants_of_plan,
    with_fewest_offloaded,
)
from mtrain_cli.training.memory_setting import (
    CHOICES,
    MemorySearch,
    as_overrides,
    get_setting,
    in_gib,
    with_values,
)
from mtrain_cli.training.run_plan import RunPlan

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
SHORTEST_SEQ = 1024  # shortest sequence to propose
# A run that needs more than this share of a GPU is refused. Estimates err by up to 5 %.
CERTAIN = 1.05
NO_CHECKPOINTS = {"train.checkpoint_every": 0, "train.checkpoint_at_end": False}


def require_fit(plan: RunPlan) -> None:
    """Refuse to start a run that certainly does not fit the memory.

    Raises:
        ConfigError: the run does not fit. The message is one line that says what would fit.
    """
    if plan.search is not None and plan.search.chosen is None:
        raise ConfigError(refusal(plan, plan.search))
    if plan.environment.device == "cuda" and not plan.has_room_for(plan.memory, CERTAIN):
        raise ConfigError(refusal(plan, search(plan)))


def refusal(plan: RunPlan, result: MemorySearch) -> str:
    """Return one line that says why a run does not fit, and what would fit."""
    auto, on_gpu = plan.config.train.memory == "auto", plan.environment.device == "cuda"
    needed = nearest_to_fitting(plan, result.settings).memory if auto else plan.memory
    needs = f"{'at least' if auto else 'about'} {in_gib(plan.device_bytes(needed))}"
    if needed.host_peak and on_gpu:
        needs += f" and {in_gib(needed.host_peak)} of host memory"
        if needed.saving:
            # Only a checkpoint needs host memory, unless activations or the optimizer are there.
            part = f"{in_gib(needed.saving)} of it " if needed.host else ""
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
    without_saving = with_values(plan.requested or plan.config, NO_CHECKPOINTS)
    if plan.memory.saving and _can_fit(plan.with_config(without_saving)):
        changes.append(as_overrides(NO_CHECKPOINTS))
    if seq := longest_seq(plan):
        changes.append(f"seq={format_size(seq)}")
    if workers := _fewest_workers(plan):
        changes.append(f"{workers} GPUs (topology.workers={workers})")
    return changes


def _other_exchange(plan: RunPlan) -> str | None:
    """Return `topology.chunks`, or a ring or an all-gather, if one of these makes the run fit."""
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
            if _can_fit(plan.with_config(config.changed(topology=change))):
                return " ".join(f"topology.{key}={value}" for key, value in change.items())
    return None


def _exchange_change(
    topology: TopologyConfig, exchange: ExchangeChoice, *, gathers: bool
) -> dict[str, Any]:
    """Return the new values of `topology` for an all-gather or a ring."""
    name = exchange_name(gathers=gathers, hierarchical=exchange.traits.hierarchical)
    # Only the other exchange reads this key.
    unused = "circulates" if gathers else "chunks"
    reset = {unused: "auto"} if getattr(topology, unused) != "auto" else {}
    return {"exchange": name, **reset}


def longest_seq(plan: RunPlan, *, shortest: int = SHORTEST_SEQ, most: int = 1 << 27) -> int | None:
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
            other = plan.with_config(replace(config, seq=seq))
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
    """Double the planned workers until the run fits. Return None if `most` do not fit, either."""
    config, environment = plan.requested or plan.config, plan.environment
    if environment.device == "cpu":
        return None
    workers = 2 * environment.dims.workers
    while workers <= most:
        try:
            other = plan.with_config(config.changed(topology={"workers": workers}))
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
    if "train.offload_activations" not in changes or not memory.host:
        return False
    if not plan.has_room_for(replace(memory, host=0, saving=0)):
        return False
    return plan.has_room_for(plan.estimate(with_fewest_offloaded(plan, config, changes)[0]))
