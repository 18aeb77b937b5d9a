"""The schedule of a run that is resumed: the one that it had, unless the resume asks for another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mtrain_cli.config import validate
from mtrain_cli.config.schema import Config, ConfigError

_ASKED = (
    "optim.schedule",
    "optim.decay_steps",
    "optim.schedule_steps",
    "optim.rewarm",
)  # any of them asks for another schedule


def with_its_schedule(
    saved: Config, config: Config, words: Sequence[str], step: int, *, again: bool = False
) -> Config:
    """``config``, which is ``saved`` with ``words`` on top, with the schedule that a run at ``step`` goes on under.

    Without a word on the schedule it spans the steps that it did, whatever ``train.steps`` is now: behind its end the rate stays.
    A run that ended in its warm-up has no rate that fell; its schedule spans the new number of steps.
    again: the same words began this resume before, in a job that was started again, so that ``optim.rewarm=true`` is done already.

    Raises:
        ConfigError: ``optim.rewarm`` is a number, or nothing is left to train with it.
    """
    typed = {word.partition("=")[0] for word in words}
    asked = [key for key in _ASKED if key in typed or "optim" in typed]
    begin, steps = int(saved.optim.rewarm), saved.optim.schedule_steps
    if "optim.rewarm" in asked and not isinstance(config.optim.rewarm, bool):
        raise ConfigError(
            f"optim.rewarm={config.optim.rewarm}: give true, by which the schedule begins anew at the checkpoint, or false"
        )
    if config.optim.rewarm is True:
        if again and saved.optim.rewarm is not False:
            begin = int(saved.optim.rewarm)
        elif step >= config.train.steps:
            raise ConfigError(
                f"optim.rewarm=true: the run is at step {step}, its last; give more with train.steps="
            )
        else:
            begin = step
    elif "optim.rewarm" in asked:
        begin = 0
    if asked:
        steps = config.optim.schedule_steps if "optim.schedule_steps" in typed else "auto"
    elif step - begin <= saved.optim.warmup_steps:
        pass  # a trial that ended in its warm-up: no rate has fallen yet, and the schedule spans the new number of steps
    elif (
        steps == "auto"
        and config.train.steps != saved.train.steps
        and config.optim.schedule != "constant"
    ):
        steps = saved.train.steps - begin
    found = dataclasses.replace(
        config, optim=dataclasses.replace(config.optim, rewarm=begin or False, schedule_steps=steps)
    )
    if lines := list(validate.schedule(found)):
        raise ConfigError(*lines)
    return found
