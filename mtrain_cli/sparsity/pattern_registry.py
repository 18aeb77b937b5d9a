"""The patterns there are. One is added by

- its class, and an entry here that makes it of a configuration;
- its name and keys in `config.schema.PATTERN_KEYS`, with a field of `SparsityConfig` for each key that is new;
- conf/sparsity/NAME.yaml with its defaults, and null in conf/sparsity/dense.yaml for each key that is new;
- in `config.validate` the range of each such key, and bounds between keys, if any;
- in `training.resolution.exchange_needs` the most columns of its index, if it has any.
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


def _own(sparsity: SparsityConfig, *others: str) -> dict[str, Any]:
    """The keys of its pattern but for ``others`` and those of the run; `config.validate` has made sure that they are there."""
    keys = (name for name in PATTERN_KEYS[sparsity.pattern] if name not in ("dense_steps", *others))
    values = {name: getattr(sparsity, name) for name in keys}
    assert None not in values.values(), values
    return values


_PATTERNS: dict[str, Callable[[SparsityConfig, int], Pattern]] = {
    "vertical_slash": lambda s, _: VerticalSlashPattern(
        **_own(s, "index_per"), per_group=s.index_per == "kv_group"
    ),
    "xattention": lambda s, _: XAttentionPattern(**_own(s)),
    "moba": lambda s, _: MobaPattern(**_own(s, "gate"), by_query=s.gate == "query"),
    "fixed": lambda s, seed: FixedPattern(**_own(s), seed=seed),
}


def make_pattern(sparsity: SparsityConfig, seed: int) -> Pattern | None:
    """The pattern of a run; None for dense."""
    return None if sparsity.pattern == "dense" else _PATTERNS[sparsity.pattern](sparsity, seed)
