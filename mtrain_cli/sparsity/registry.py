"""The patterns there are. One is added by one class, one entry here, and one file under conf/sparsity/."""

from __future__ import annotations

from collections.abc import Callable

from mtrain_cli.config.schema import SparsityConfig
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.sparsity.xattention import XAttentionPattern


def _vertical_slash(s: SparsityConfig, seed: int) -> Pattern:  # noqa: ARG001
    return VerticalSlashPattern(
        block=s.block,
        last_q=s.last_q,
        windows=s.windows,
        p_v=s.p_v,
        p_s=s.p_s,
        joint=s.joint,
        sink_tokens=s.sink_tokens,
        min_bars=s.min_bars,
        max_bars=s.max_bars,
        min_slashes=s.min_slashes,
        max_slashes=s.max_slashes,
        per_group=s.index_per == "kv_group",
    )


def _xattention(s: SparsityConfig, seed: int) -> Pattern:  # noqa: ARG001
    return XAttentionPattern(block=s.block, stride=s.stride, threshold=s.threshold)


def _moba(s: SparsityConfig, seed: int) -> Pattern:  # noqa: ARG001
    return MobaPattern(block=s.block, chunk=s.chunk, top_k=s.top_k)


def _fixed(s: SparsityConfig, seed: int) -> Pattern:
    return FixedPattern(block=s.block, slashes=s.slashes, bars=s.bars, density=s.density, seed=seed)


_PATTERNS: dict[str, Callable[[SparsityConfig, int], Pattern]] = {
    "vertical_slash": _vertical_slash,
    "xattention": _xattention,
    "moba": _moba,
    "fixed": _fixed,
}


def make_pattern(sparsity: SparsityConfig, seed: int) -> Pattern | None:
    """The pattern of a run; None for dense."""
    return None if sparsity.pattern == "dense" else _PATTERNS[sparsity.pattern](sparsity, seed)
