"""The settings of each pattern: keys under ``sparsity``, and their allowed values.

To add a pattern to mtrain, add its settings here, ``mtrain_cli/sparsity/NAME.py`` with a function
``make_pattern(settings, seed)``, and ``conf/sparsity/NAME.yaml`` with its defaults.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from mtrain_cli.config.option import (
    FRACTION,
    MOST_TOKENS,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    STEPS,
    TOKENS_OF_SEQ,
    Range,
    Variant,
    at_least,
    fits_variants,
    option,
)
from mtrain_cli.config.plugins import Plugins
from mtrain_cli.grouping import show_spans, spans

SPARSE_KINDS = ("sparse", "dense")  # of layers under `dense_layers`
BLOCKS = (16, 32, 64, 128)  # allowed block sizes of a dynamic index, in tokens
# Maximum number of columns or slashes to choose from. `sparsity.pattern.rank_keys` packs the number
# of a candidate and its share of the attention into one int64.
MOST_LINES = 1 << 24
_LINES = Range("must be between 0 and 2^31 - 1", lambda value: 0 <= value < 2**31)
_MOST_LINES = NOT_NEGATIVE.up_to(2**31 - 1, "an index numbers its columns and slashes in 32 bits")
_RELEASED_BLOCK = 128  # tokens per block in MTraining's released code


@dataclass(frozen=True)
class PatternSettings(Variant):
    """Settings of a pattern, which chooses the query-key pairs to compute.

    In a configuration, keys of other patterns are null.
    """

    name: ClassVar[str]  # as in ``sparsity=NAME``
    # Whether the index does not depend on the data. Such a pattern is only for benchmarks.
    synthetic: ClassVar[bool] = False
    # Whether small models with this pattern in every layer found fewer needles than dense ones
    # (tier a of `mtrain study learning`).
    loses_in_all_layers: ClassVar[bool] = False
    # The module with ``make_pattern(settings, seed)``; "" for mtrain_cli.sparsity.NAME.
    module: ClassVar[str] = ""
    bitmap: ClassVar[bool] = False  # whether the index is a bitmap of blocks
    # {key: alternative, which becomes 0 if the user sets only the key}
    instead: ClassVar[Mapping[str, str]] = {}

    block: int | None = None
    dense_steps: int = 0
    dense_layers: int | tuple[int, ...] | str = 0

    @property
    def pattern(self) -> str:
        return self.name

    def dense_of(self, layers: int) -> frozenset[int]:
        """Return the numbers of the dense layers of a model with this number of layers."""
        if isinstance(self.dense_layers, tuple):
            return frozenset(self.dense_layers).intersection(range(layers))
        rule, n = self.dense_rule
        if rule == "every":
            return frozenset(range(n - 1, layers, n)) if n else frozenset()
        before = {"first": 0, "middle": (layers - n) // 2, "last": layers - n}
        start = max(0, before[rule])
        return frozenset(range(layers)[start : start + n])

    @property
    def dense_rule(self) -> tuple[str, int]:
        """The rule of ``dense_layers`` and its n, if it is no list; a number n is ``last:n``."""
        rule, _, number = str(self.dense_layers or 0).rpartition(":")
        return rule or "last", int(number)

    @property
    def dense_text(self) -> str:
        """``the last 2 layers``: those that are dense in a sparse model; "" without any."""
        if not self.dense_layers:
            return ""
        if isinstance(self.dense_layers, tuple):
            numbers = show_spans(spans(sorted(self.dense_layers)))
            return f"layer{'s' * (len(self.dense_layers) > 1)} {numbers}"
        rule, n = self.dense_rule
        if rule == "every":
            return f"one layer in {n}"
        return f"the {rule} layer" if n == 1 else f"the {rule} {n} layers"

    def problems(self, seq: int) -> Iterator[str]:
        """Yield a line ``key=value: reason`` for each conflict among the settings."""
        yield from ()

    def conflicts(self, head_dim: int, tensor_parallel: int) -> Iterator[str]:
        """Yield a line ``{key}: reason`` for each conflict with the model or the workers."""
        yield from ()

    @property
    def has_learned_state(self) -> bool:
        """Whether the pattern learns in training what an evaluation needs."""
        return False

    def learned_bytes(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of what the pattern learns in one layer."""
        return 0

    @property
    def column_bound(self) -> int | None:
        """The maximum number of columns per head; None without a bound, 0 without columns."""
        return 0

    @property
    def least_columns(self) -> int:
        """The minimum number of columns per head."""
        return 0

    @property
    def least_slashes(self) -> int:
        """The minimum number of slashes per head."""
        return 1

    def slash_bound(self, blocks: int) -> int:
        """Return the most slashes per head in ``blocks`` blocks; 0 without a bound."""
        return 0

    def known_density(self, seq: int) -> float | None:
        """Return the share of causal pairs that is computed; None if it depends on the data."""
        return None


@dataclass(frozen=True)
class DenseSettings(PatternSettings):
    """Dense attention: every pair that the mask allows."""

    name: ClassVar[str] = "dense"

    def known_density(self, seq: int) -> float:
        return 1.0


@dataclass(frozen=True)
class SparseSettings(PatternSettings):
    """The keys that all sparse patterns share.

    block: tokens per block; a pattern chooses pairs in units of blocks
    dense_steps: number of steps of dense attention at the start of training
    dense_layers: layers with dense attention: a number of them at the end of the model, a list of
        layers counted from 0, or first:n, middle:n, last:n, or every:n (n-1, 2n-1, ...)
    """

    block: int = option(
        Range("must be 16, 32, 64 or 128", lambda value: value in BLOCKS), tokens=True
    )
    dense_steps: int = option(NOT_NEGATIVE.up_to(*STEPS), default=0, kw_only=True)
    dense_layers: int | tuple[int, ...] | str = option(
        NOT_NEGATIVE.up_to(10_000, "the maximum of model.num_layers"),
        expected="first:n, middle:n, last:n, every:n, a list of layers such as [0,5,11], or a "
        "number of last layers",
        words="(first|middle|last|every):[0-9]{1,9}",
        default=0,
        kw_only=True,
    )


@dataclass(frozen=True)
class VerticalSlashSettings(SparseSettings):
    """Slashes and columns, with a number of each that depends on the data (MTraining, alg. 1).

    slash_unit: what p_s and max_slashes count: block diagonals (block), as in the paper, or single
        diagonals of tokens (token), as in MTraining's released code, which also leaves out the line
        that crosses a share, and probes the last queries in a row
    last_q: number of queries that each probe window samples, spread evenly over whole blocks
    windows: number of probe windows, evenly spaced, the last at the end of the sequence. If
        documents are packed, a single window probes only the last document
    p_v: share of the probed attention that the columns must cover
    p_s: share of the probed attention that the slashes must cover
    p_of: what p_v and p_s are shares of: all the probed attention (all), or only the attention
        outside the columns and slashes that are always chosen (rest)
    joint: choose columns by the attention that the slashes leave uncovered
    index_per: what has an index of its own: each query head, or each group of query heads that
        shares a key-value head
    sink_tokens: number of columns at the start of the sequence that are always chosen
    min_columns: minimum number of columns per head
    max_columns: maximum number of columns per head; 0 = no limit
    min_slashes: minimum number of slashes per head; from 2 on, the two slashes nearest to the main
        diagonal are always chosen
    max_slashes: maximum number of slashes per head; 0 = no limit
    """

    name: ClassVar[str] = "vertical_slash"
    loses_in_all_layers: ClassVar[bool] = True

    slash_unit: str = option(("block", "token"), default="block", kw_only=True)
    p_of: str = option(("all", "rest"), default="all", kw_only=True)
    last_q: int = option(POSITIVE.up_to(*TOKENS_OF_SEQ))
    windows: int = option(POSITIVE.up_to(*TOKENS_OF_SEQ))
    p_v: float = option(SHARE)
    p_s: float = option(SHARE)
    joint: bool = option()
    index_per: str = option(("query_head", "kv_group"))
    sink_tokens: int = option(_LINES)
    min_columns: int = option(_LINES)
    max_columns: int = option(_MOST_LINES)
    min_slashes: int = option(
        Range("must be between 1 and 2^31 - 1", lambda value: 1 <= value < 2**31)
    )
    max_slashes: int = option(_MOST_LINES)

    def problems(self, seq: int) -> Iterator[str]:
        least = max(self.min_columns, self.sink_tokens)
        for name, low in (("columns", least), ("slashes", self.min_slashes)):
            if 0 < (most := getattr(self, f"max_{name}")) < low:
                allowed = f"0 (no limit) or at least {low}, the minimum"
                yield f"sparsity.max_{name}={most}: give {allowed}"
        if self.slash_unit == "token" and self.block != _RELEASED_BLOCK:
            yield (
                f"sparsity.block={self.block}: sparsity.slash_unit=token is MTraining's released "
                f"rule, which has blocks of {_RELEASED_BLOCK} tokens; give {_RELEASED_BLOCK}, or "
                "sparsity.slash_unit=block"
            )
        if self.slash_unit == "token" and self.min_slashes > 2:
            yield (
                f"sparsity.min_slashes={self.min_slashes}: with sparsity.slash_unit=token, a head "
                "needs 1 or 2 block diagonals, the nearest ones; give 1 or 2"
            )
        if seq > MOST_LINES:
            yield f"seq={seq}: sparsity.pattern={self.name} takes at most {MOST_LINES} tokens"
        if 1 <= seq < self.last_q:
            yield f"sparsity.last_q={self.last_q}: is above seq={seq}; give at most {seq}"
        elif self.last_q >= 1 and 1 <= seq < self.windows * self.last_q:
            yield (
                f"sparsity.windows={self.windows}: windows of sparsity.last_q={self.last_q} "
                f"queries would overlap; seq={seq} has room for at most {seq // self.last_q}"
            )

    @property
    def column_bound(self) -> int | None:
        return self.max_columns or None

    @property
    def least_columns(self) -> int:
        return self.min_columns

    @property
    def least_slashes(self) -> int:
        return self.min_slashes

    def slash_bound(self, blocks: int) -> int:
        if self.slash_unit == "block" or not self.max_slashes:
            return self.max_slashes
        # Diagonals 0 and 1 are kept, and a diagonal of tokens touches at most two of blocks.
        return min(blocks, 2 + 2 * self.max_slashes)


@dataclass(frozen=True)
class XAttentionSettings(SparseSettings):
    """Blocks chosen by the sums of attention scores along antidiagonals.

    stride: side of the squares of scores whose antidiagonals are summed; must divide sparsity.block
    threshold: share of the scores of a row of blocks that the chosen blocks must cover
    """

    name: ClassVar[str] = "xattention"
    loses_in_all_layers: ClassVar[bool] = True
    bitmap: ClassVar[bool] = True

    stride: int = option(POSITIVE.up_to(max(BLOCKS), "no block is larger"))
    threshold: float = option(SHARE)

    def problems(self, seq: int) -> Iterator[str]:
        if self.stride >= 1 and self.block % self.stride:
            yield (
                f"sparsity.stride={self.stride}: does not divide sparsity.block={self.block}; give "
                "a power of two up to it"
            )


@dataclass(frozen=True)
class MobaSettings(SparseSettings):
    """A few large chunks of keys per query.

    chunk: number of keys per chunk, a multiple of sparsity.block
    top_k: number of chunks that a query (or block of queries) attends to, including its own chunk
    gate: choose chunks for each query, or for each block of queries
    """

    name: ClassVar[str] = "moba"
    loses_in_all_layers: ClassVar[bool] = True
    bitmap: ClassVar[bool] = True

    chunk: int = option(POSITIVE.up_to(*TOKENS_OF_SEQ), tokens=True)
    top_k: int = option(POSITIVE.up_to(MOST_TOKENS, "the maximum of seq"))
    gate: str = option(("query", "block"))

    def problems(self, seq: int) -> Iterator[str]:
        if self.block >= 1 and self.chunk % self.block:
            yield (
                f"sparsity.chunk={self.chunk}: must be a multiple of sparsity.block={self.block}"
            )


@dataclass(frozen=True)
class BlockTopkSettings(SparseSettings):
    """Key blocks for each block of queries, by the largest attention of any of its queries.

    density: share of the causal pairs that each layer computes, forced blocks included; 0 =
        sparsity.threshold decides
    threshold: least bound of an attention probability that chooses a block: with exact scores, no
        pair above it is lost; 0 = sparsity.density decides
    row_cap: most blocks of a row of blocks, as a multiple of its share of the density
    score: exact = products of whole queries and keys; learned = of projections that learn in
        training where the queries of each group look
    rank: dimensions of a projection
    index_per: what has an index of its own: each query head, or each group of query heads that
        shares a key-value head
    """

    name: ClassVar[str] = "block_topk"
    bitmap: ClassVar[bool] = True
    instead: ClassVar[Mapping[str, str]] = {"threshold": "density"}

    density: float = option(FRACTION)
    threshold: float = option(FRACTION)
    row_cap: float = option(at_least(1).up_to(10**6, "no sequence has so many blocks"))
    score: str = option(("exact", "learned"))
    rank: int = option(POSITIVE.up_to(1024, "no head is wider"))
    index_per: str = option(("query_head", "kv_group"))

    def problems(self, seq: int) -> Iterator[str]:
        if bool(self.density) == bool(self.threshold):
            given = f"sparsity.density={self.density:.10g}"
            yield f"{given}: with sparsity.threshold={self.threshold:.10g}; give one of the two"
        elif self.block >= 1 and 0 < self.density < (least := self.forced_share(seq)):
            yield (
                f"sparsity.density={self.density:.10g}: a block of queries always sees itself, the "
                f"block before it and the first one, which are {least:.4f} of the pairs of {seq:,} "
                f"tokens; give at least {math.ceil(1e4 * least) / 1e4:g}, or a longer sequence"
            )

    def conflicts(self, head_dim: int, tensor_parallel: int) -> Iterator[str]:
        if self.score != "learned":
            return
        learned = "{sparsity.score} has one index for each KV head"
        if self.rank > head_dim >= 1:
            yield "{sparsity.rank}: must be at most {model.head_dim}"
        if self.index_per != "kv_group":
            yield f"{{sparsity.index_per}}: {learned}; give kv_group"
        if tensor_parallel > 1:
            allowed = "give 1, or sparsity.score=exact"
            yield f"{{topology.tensor_parallel}}: {learned}, on one worker; {allowed}"

    @property
    def has_learned_state(self) -> bool:
        return self.score == "learned"

    def learned_bytes(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of two projections and their Adam moments in float32."""
        numbers = (heads + kv_heads) * head_dim * self.rank
        return 3 * 4 * numbers if self.has_learned_state else 0

    def forced_share(self, seq: int) -> float:
        """Return the share of causal pairs that every index of this pattern computes."""
        blocks, block = -(-seq // self.block), self.block
        others = max(0, blocks - 1) + max(0, blocks - 2)
        pairs = blocks * block * (block + 1) / 2 + others * block**2
        return min(1.0, pairs / (blocks * block * (blocks * block + 1) / 2)) if seq else 1.0

    def known_density(self, seq: int) -> float | None:
        return self.density or None


@dataclass(frozen=True)
class FixedSettings(SparseSettings):
    """Random slashes and columns, chosen by the seed. Only for measurements of speed.

    slashes: number of slashes per head; if you set it without density, density becomes 0
    columns: number of columns per head
    density: share of the causal blocks that slashes fill; 0 = sparsity.slashes sets their number
    """

    name: ClassVar[str] = "fixed"
    synthetic: ClassVar[bool] = True
    instead: ClassVar[Mapping[str, str]] = {"slashes": "density"}

    slashes: int = option(_MOST_LINES)
    columns: int = option(_MOST_LINES)
    density: float = option(FRACTION)

    def problems(self, seq: int) -> Iterator[str]:
        if bool(self.density) == bool(self.slashes):
            given = f"sparsity.slashes={self.slashes}"
            yield f"{given}: with sparsity.density={self.density:.10g}; give one of the two"

    @property
    def column_bound(self) -> int:
        return self.columns

    def slash_bound(self, blocks: int) -> int:
        # Random slashes are denser near the main diagonal, where slashes are longest. So at most
        # this number of slashes reaches the density.
        return self.slashes or min(blocks, int(self.density * blocks) + 2)

    def known_density(self, seq: int) -> float | None:
        return min(1.0, self.density + 2 * self.columns / seq) if self.density else None


OWN: dict[str, type[PatternSettings]] = {
    settings.name: settings
    for settings in (
        DenseSettings,
        VerticalSlashSettings,
        XAttentionSettings,
        MobaSettings,
        BlockTopkSettings,
        FixedSettings,
    )
}
PATTERNS: Plugins[type[PatternSettings]] = Plugins(
    "mtrain.patterns", f"{__name__}:OWN", functools.partial(fits_variants, PatternSettings, "name")
)


def pattern_keys(pattern: str) -> tuple[str, ...]:
    """Return the names of a pattern's keys. An unknown pattern has none."""
    return PATTERNS[pattern].own_keys() if pattern in PATTERNS else ()
