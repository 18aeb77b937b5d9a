"""Keep the schedule of a resumed run, unless the resume asks for another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mtrain_cli.config import validate
from mtrain_cli.config.schema import Config, ConfigError

# Any of these keys asks for another schedule.
_SCHEDULE_KEYS = (
    "optim.schedule",
    "optim.decay_steps",
    "optim.schedule_steps",
    "optim.rewarm",
)


def keep_schedule(
    saved: Config, config: Config, words: Sequence[str], step: int, *, again: bool = False
) -> Config:
    """Return ``config`` with the schedule under which the run continues.

    Without a schedule key in ``words`` the schedule keeps its length, even if ``train.steps``
    changes; after the schedule ends the learning rate is constant. If the run stopped during
    warm-up, the schedule instead ends at the new ``train.steps``.

    Args:
        saved: the run's configuration.
        config: ``saved`` with the overrides ``words`` on top.
        step: the checkpoint's step.
        again: a restarted job repeats this resume, so ``optim.rewarm=true`` is done already.

    Raises:
        ConfigError: ``optim.rewarm`` is a number, or no steps are left for it.
    """
    typed = {word.partition("=")[0] for word in words}
    given = [key for key in _SCHEDULE_KEYS if key in typed or "optim" in typed]
    begin, steps = int(saved.optim.rewarm), saved.optim.schedule_steps
    if "optim.rewarm" in given and not isinstance(config.optim.rewarm, bool):
        raise ConfigError(
            f"optim.rewarm={config.optim.rewarm}: give true to restart the schedule at the "
            "checkpoint, or false"
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
        pass  # stopped within the warm-up, before any decay: the schedule spans the new steps
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
