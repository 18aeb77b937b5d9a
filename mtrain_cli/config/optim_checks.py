"""Check the keys under ``optim``, and choose the learning rate schedule of a resumed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from mtrain_cli.config.keys import conflict
from mtrain_cli.config.schema import Config, ConfigError

# If the user sets one of these keys, the resumed run gets a new schedule.
_SCHEDULE_KEYS = ("optim.schedule", "optim.decay_steps", "optim.schedule_steps", "optim.rewarm")


def problems(config: Config) -> Iterator[str]:
    """Yield the conflicts of the optimizer and its schedule."""
    optim = config.optim
    if optim.skip_spikes and not config.run.spike_sigma:
        yield (
            "{optim.skip_spikes}: needs {run.spike_sigma!s} to define a spike; give it a number of "
            "at least 3, such as 8"
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield "{optim.betas}: each must be at least 0 and below 1"
    if optim.offload_gradients and not optim.offload:
        yield (
            "{optim.offload_gradients}: needs {optim.offload!s}=true, which runs the optimizer in "
            "host memory; give both"
        )
    yield from _schedule(config)


def _schedule(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.decay_steps != "auto" and optim.schedule == "constant":
        yield (
            "{optim.decay_steps}: {optim.schedule} never decays; give optim.decay_steps=auto, or "
            "optim.schedule=cosine, linear or wsd"
        )
    begin = 0 if optim.rewarm is True else int(optim.rewarm)
    span = config.train.steps - begin
    if isinstance(optim.schedule_steps, int):
        span = optim.schedule_steps
        if optim.schedule != "constant" and span <= optim.warmup_steps:
            yield (
                "{optim.schedule_steps}: must be above {optim.warmup_steps}, or no steps are left "
                "for the decay"
            )
            return
    if optim.schedule != "wsd" or not isinstance(optim.decay_steps, int):
        return
    # The last warm-up step is the first at the peak.
    most = span - 1 - optim.warmup_steps
    if optim.decay_steps > most:
        allowed = f"allowed: 1 to {most}" if most >= 1 else "give fewer optim.warmup_steps"
        yield (
            f"{{optim.decay_steps}}: the schedule has {span} steps, and {optim.warmup_steps} of "
            f"them are warm-up ({{optim.warmup_steps!s}}); {allowed}"
        )


def keep_schedule(
    saved: Config, config: Config, words: Sequence[str], step: int, *, again: bool = False
) -> Config:
    """Return ``config`` with the schedule with which the run continues.

    If ``words`` sets no key of `_SCHEDULE_KEYS`, the schedule keeps its length, even if
    ``train.steps`` changes. After the end of the schedule, the learning rate is constant. If the
    run stopped during warm-up, however, the schedule ends at the new ``train.steps``.

    Args:
        saved: configuration of the run so far.
        config: ``saved`` with the overrides ``words`` applied.
        words: overrides that the user gave to resume the run.
        step: step of the checkpoint.
        again: whether a restarted job repeats this resume. The first attempt has then already
            carried out ``optim.rewarm=true``.

    Raises:
        ConfigError: ``optim.rewarm`` is a number; ``optim.rewarm=true`` but no steps are left; or
            settings of the schedule contradict each other.
    """
    typed = {word.partition("=")[0] for word in words}
    given = [key for key in _SCHEDULE_KEYS if key in typed or "optim" in typed]
    begin, steps = int(saved.optim.rewarm), saved.optim.schedule_steps
    if "optim.rewarm" in given and not isinstance(config.optim.rewarm, bool):
        raise ConfigError(
            f"optim.rewarm={config.optim.rewarm}: give true to restart the schedule at the "
            "checkpoint, or false to keep the schedule"
        )
    if config.optim.rewarm is True:
        if again and saved.optim.rewarm is not False:
            begin = int(saved.optim.rewarm)
        elif step >= config.train.steps:
            raise ConfigError(
                f"optim.rewarm=true: the run is at its last step, {step}; raise train.steps"
            )
        else:
            begin = step
    elif "optim.rewarm" in given:
        begin = 0
    if given:
        steps = config.optim.schedule_steps if "optim.schedule_steps" in typed else "auto"
    elif step - begin <= saved.optim.warmup_steps:
        pass  # the run stopped before any decay, so the schedule spans the new train.steps
    elif (
        steps == "auto"
        and config.train.steps != saved.train.steps
        and config.optim.schedule != "constant"
    ):
        steps = saved.train.steps - begin
    resumed = dataclasses.replace(
        config, optim=dataclasses.replace(config.optim, rewarm=begin or False, schedule_steps=steps)
    )
    if lines := [conflict(resumed, line) for line in _schedule(resumed)]:
        raise ConfigError(*lines)
    return resumed
