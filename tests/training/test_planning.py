"""Workers plan alike, and refuse a run that cannot fit."""

from __future__ import annotations

import re

import gloo
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.training.planning import checked_plan
from mtrain_cli.training.resolution import resolve_run


def test_a_run_that_the_machine_cannot_hold_is_refused_in_one_line():
    config = compose(["model=qwen7b", "seq=1m", "topology.device=cpu", "topology.workers=1"])
    environment = gloo.environment(0, 1)
    with pytest.raises(ConfigError) as error:
        checked_plan(config, environment, resolve_run(config, environment))
    (line,) = error.value.problems
    assert re.match(r"seq=1m: a worker needs about [\d.,]+ GiB, but has .* --dry-run", line), line


def test_a_small_run_gets_its_plan():
    config = compose(["seq=256", "topology.device=cpu"])
    environment = gloo.environment(0, 1)
    plan = checked_plan(config, environment, resolve_run(config, environment))
    assert plan.fits
    assert plan.environment == environment
