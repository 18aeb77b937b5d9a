"""The registry of patterns. To add one, write

- its class, and an entry here that makes it from a configuration;
- its name and keys in `config.schema.PATTERN_KEYS`, and a field of `SparsityConfig` for each new
    key;
- conf/sparsity/NAME.yaml with its defaults, and null in conf/sparsity/dense.yaml for each new key;
- in `config.validate`, the range of each new key and any bounds between keys;
- in `training.resolution.exchange_needs`, the most columns of its index, if it has any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtrain_cli.config.schema import PATTERN_KEYS, SparsityConfig
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.sparsity.xattention import XAttentionPattern


def _pattern_keys(sparsity: SparsityConfig, *excluded: str) -> dict[str, Any]:
    """Return the values of the pattern's keys, without ``excluded`` and ``dense_steps``.

    `config.validate` has made sure that all are set.
    """
    keys = (
        name for name in PATTERN_KEYS[sparsity.pattern] if name not in ("dense_steps", *excluded)
    )
    values = {name: getattr(sparsity, name) for name in keys}
    assert None not in values.values(), values
    return values


_PATTERNS: dict[str, Callable[[SparsityConfig, int], Pattern]] = {
    "vertical_slash": lambda s, _: VerticalSlashPattern(
        **_pattern_keys(s, "index_per"), per_group=s.index_per == "kv_group"
    ),
    "xattention": lambda s, _: XAttentionPattern(**_pattern_keys(s)),
    "moba": lambda s, _: MobaPattern(**_pattern_keys(s, "gate"), by_query=s.gate == "query"),
    "fixed": lambda s, seed: FixedPattern(**_pattern_keys(s), seed=seed),
}


def make_pattern(sparsity: SparsityConfig, seed: int) -> Pattern | None:
    """Return the pattern of a run; None for dense attention."""
    return None if sparsity.pattern == "dense" else _PATTERNS[sparsity.pattern](sparsity, seed)
