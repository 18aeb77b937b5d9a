"""Choose the learning rate schedule of a resumed run.

The run keeps its schedule, unless the user sets another schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mtrain_cli.config import validate
from mtrain_cli.config.schema import Config, ConfigError

# If the user sets one of these keys, the resumed run gets a new schedule.
_SCHEDULE_KEYS = ("optim.schedule", "optim.decay_steps", "optim.schedule_steps", "optim.rewarm")


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
    if lines := list(validate.schedule(resumed)):
        raise ConfigError(*lines)
    return resumed
