"""Make the pattern of a run. `config.pattern_settings` says how to add a pattern."""

from __future__ import annotations

import importlib

from mtrain_cli.config.pattern_settings import PatternSettings
from mtrain_cli.sparsity.pattern import Pattern


def make_pattern(settings: PatternSettings, seed: int) -> Pattern | None:
    """Return the pattern of a run; None for dense attention.

    Call `make_pattern` of the module that the settings name.
    """
    if settings.pattern == "dense":
        return None
    module = importlib.import_module(settings.module or f"mtrain_cli.sparsity.{settings.pattern}")
    pattern: Pattern = module.make_pattern(settings, seed)
    return pattern
