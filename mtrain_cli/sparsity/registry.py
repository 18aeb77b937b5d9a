"""The patterns there are. One is added by one class, one entry here, and one file under conf/sparsity/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtrain_cli.config.schema import SparsityConfig
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.sparsity.xattention import XAttentionPattern


def _own(sparsity: SparsityConfig, *names: str) -> dict[str, Any]:
    """The keys of one pattern; `config.validate` has made sure that they are there."""
    values = {name: getattr(sparsity, name) for name in names}
    assert None not in values.values(), values
    return values


def _vertical_slash(s: SparsityConfig, seed: int) -> Pattern:  # noqa: ARG001
    budgets = _own(s, "p_v", "p_s", "joint", "sink_tokens", "min_bars", "max_bars", "min_slashes", "max_slashes")
    return VerticalSlashPattern(**_own(s, "block", "last_q", "windows"), **budgets, per_group=s.index_per == "kv_group")


def _xattention(s: SparsityConfig, seed: int) -> Pattern:  # noqa: ARG001
    return XAttentionPattern(**_own(s, "block", "stride", "threshold"))


def _moba(s: SparsityConfig, seed: int) -> Pattern:  # noqa: ARG001
    return MobaPattern(**_own(s, "block", "chunk", "top_k"))


def _fixed(s: SparsityConfig, seed: int) -> Pattern:
    return FixedPattern(**_own(s, "block", "slashes", "bars", "density"), seed=seed)


_PATTERNS: dict[str, Callable[[SparsityConfig, int], Pattern]] = {
    "vertical_slash": _vertical_slash,
    "xattention": _xattention,
    "moba": _moba,
    "fixed": _fixed,
}


def make_pattern(sparsity: SparsityConfig, seed: int) -> Pattern | None:
    """The pattern of a run; None for dense."""
    return None if sparsity.pattern == "dense" else _PATTERNS[sparsity.pattern](sparsity, seed)
