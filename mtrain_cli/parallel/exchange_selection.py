"""Choose the exchange of a run: resolve ``auto`` in the settings that say how KV moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.config.exchanges import (
    EXCHANGE_TRAITS,
    HEAD_SHARING,
    ULYSSES,
    ExchangeTraits,
    exchange_name,
)
from mtrain_cli.config.schema import ConfigError, TopologyConfig
from mtrain_cli.config.sizes import format_bytes
from mtrain_cli.parallel.buffers import Kind
from mtrain_cli.parallel.gather import most_stages
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Program, ShardSizes, Size, total_size
from mtrain_cli.parallel.ring import shorter_rings
from mtrain_cli.parallel.schedule import CONTEXT, KV, QUERIES, ScheduleOptions, make_schedule
from mtrain_cli.parallel.traffic import Nodes

# Gather KV only if it and its float32 gradient take at most _GATHER_SHARE of a GPU's memory; else
# use a ring, which holds a few shards at a time. Above _PART_SHARE, gather the heads in more and
# smaller parts, as long as there are heads to divide.
_GATHER_SHARE = 0.1
_PART_SHARE = 0.05
_ASSUMED_MEMORY = 80 << 30
# From this size on, gather in parts of the heads, so that most of the gather overlaps computation.
_CHUNK_BYTES = 64 << 20
_ACCUMULATION_BYTES = 4
# How a label gives the numbers of an exchange that exceed those of the simplest one.
_DETAILS = {
    "chunks": "parts of the heads",
    "stages": "stages of received keys",
    "stages_backward": "stages in backward",
    "prefetch": "hops ahead",
}
_ROUNDS = "gradients in bfloat16"


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange of a run and the reason for it.

    channels: the channels on which keys or queries move; empty if neither moves between workers,
        because one worker computes alone or all workers share heads (Ulysses).
    """

    name: str
    reason: str
    per_node: int
    heads: int = 1
    chunks: int = 1
    prefetch: int = 1
    circulates: str = KV
    shared_columns: bool = True
    channels: tuple[str, ...] = (CONTEXT,)
    stages: int = 0
    stages_backward: int = 0
    rounds: bool = False

    @property
    def traits(self) -> ExchangeTraits:
        return EXCHANGE_TRAITS[self.name]

    @property
    def queries_travel(self) -> bool:
        return not self.traits.gathers and self.circulates == QUERIES

    def circulates_among(self, workers: int) -> bool:
        """Whether shards circulate among the workers of a context group of this size."""
        return not self.traits.gathers and workers > self.heads

    @property
    def communicators(self) -> int:
        """Number of communicators: one for all ranks, two per channel, the rest for Ulysses."""
        return 1 + 2 * len(self.channels) + (1 + bool(self.channels) if self.heads > 1 else 0)

    def options(self, workers: int) -> ScheduleOptions:
        sizes = workers, self.per_node, self.chunks, self.prefetch
        stages = self.stages, self.stages_backward
        return ScheduleOptions(*sizes, self.circulates, self.heads, *stages, self.rounds)

    @property
    def label(self) -> str:
        shares = [f"ulysses over {self.heads}"] if self.heads > 1 else []
        moves = [self.name] if self.heads == 1 or self.channels else []
        more = [
            f"{n} {words}"
            for key, words in _DETAILS.items()
            if (n := getattr(self, key)) > (not key.startswith("stages"))
        ]
        if self.queries_travel:
            more.append("queries circulate in backward")
        more += [_ROUNDS] if self.rounds else []
        return ", then ".join(shares + moves) + (f" ({', '.join(more)})" if more else "")


@dataclass(frozen=True)
class ExchangeNeeds:
    """What the choice of an exchange depends on.

    tokens: padded length of a sequence, times the number of sequences in a micro-batch.
    columns: upper bound on the number of single columns per head; None if there is no bound.
    rounds: whether messages of gradients are rounded to bfloat16.
    """

    workers: int
    per_node: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    device_memory: int | None = None
    index: IndexRequest | None = None
    columns: int | None = 0
    rounds: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.workers // self.per_node)

    @property
    def shard(self) -> int:
        """Number of tokens of a worker, over all sequences of a micro-batch."""
        return self.tokens // self.workers

    @property
    def memory(self) -> int:
        return self.device_memory or _ASSUMED_MEMORY

    def sizes(self, tokens: int) -> ShardSizes:
        return ShardSizes(tokens, self.heads, self.kv_heads, self.head_dim, self.dtype_bytes)


_LABEL = re.compile(
    r"(?:ulysses over (?P<heads>\d+))?(?:, then )?(?P<name>\w+)?(?: \((?P<more>.*)\))?"
)


def parse_label(label: str, workers: int, per_node: int) -> tuple[str, ScheduleOptions] | None:
    """Return the name of the exchange and the options that an `ExchangeChoice.label` describes.

    The name is ``all_gather`` if the label names only the sharing of heads (Ulysses). Return None
    if this version of mtrain does not know the label.
    """
    match = _LABEL.fullmatch(label)
    if match is None or (match["name"] is None and match["heads"] is None):
        return None
    if match["name"] is not None and match["name"] not in EXCHANGE_TRAITS:
        return None
    details = match["more"].split(", ") if match["more"] else []
    numbers: dict[str, Any] = {
        key: int(detail.split()[0])
        for key, words in _DETAILS.items()
        for detail in details
        if detail.endswith(words)
    }
    circulates = QUERIES if any(words.startswith("queries") for words in details) else KV
    heads = int(match["heads"] or 1)
    options = ScheduleOptions(workers, per_node, circulates=circulates, heads=heads, **numbers)
    options = replace(options, rounds=_ROUNDS in details)
    return match["name"] or HEAD_SHARING[ULYSSES], options


def short_label(label: str) -> str:
    """Shorten an `ExchangeChoice.label` for a table with a legend, such as ``all_gather in 2``."""
    return re.sub(r" \((\d+) parts of the heads\)$", r" in \1", label)


def gathered_bytes(needs: ExchangeNeeds, heads: int = 1, chunks: int = 1) -> int:
    """Return how many bytes of gathered tensors all-gather holds in a layer's backward pass.

    With more than one part of the heads (``chunks``), the KV of two parts is in memory at a time.
    """
    made = _gathered(needs.workers, heads, chunks, needs.rounds)
    size = made.of(needs.sizes(tokens=1), heads)
    return int(size * needs.tokens // needs.workers)


@cache
def _gathered(workers: int, heads: int, chunks: int, rounds: bool) -> Size:
    options = ScheduleOptions(workers, workers, chunks, heads=heads, rounds=rounds)
    schedule = make_schedule(exchange_name(gathers=True, hierarchical=False), options)
    program = lower(schedule, 0, backward=True)
    buffers = [Kind.KEYS.at(0), Kind.DKEYS.at(0), Kind.SHARDS.at(0)]
    buffers += [Kind.KEYS.at(1)] if chunks > 1 else []
    return total_size(program.sizes[buffer] for buffer in buffers)


def ring_backward_bytes(needs: ExchangeNeeds, circulates: str) -> int:
    """Return how many bytes a worker of a ring sends per hop in a layer's backward pass."""
    return int(_backward_of_two(circulates, needs.rounds).sent(needs.sizes(needs.shard)))


@cache
def _backward_of_two(circulates: str, rounds: bool) -> Program:
    """Return the backward program of a two-worker ring, in which every shard hops once."""
    ring = exchange_name(gathers=False, hierarchical=False)
    schedule = make_schedule(ring, ScheduleOptions(2, 2, circulates=circulates, rounds=rounds))
    return lower(schedule, 0, backward=True)


def choose_exchange(topology: TopologyConfig, needs: ExchangeNeeds) -> ExchangeChoice:
    """Choose the exchange of a run."""
    needs = replace(needs, rounds=topology.gradient_dtype == "bfloat16")
    heads = _head_ranks(topology, needs)
    nodes = Nodes.of_groups(needs.workers, needs.per_node, heads)
    if topology.exchange in HEAD_SHARING:
        name = HEAD_SHARING[topology.exchange]
        reason = "as configured: every worker computes whole sequences for its heads"
    elif topology.exchange != "auto":
        name, reason = topology.exchange, "as configured"
    elif nodes.workers == 1:
        name, reason = HEAD_SHARING[ULYSSES], "the workers only split the heads among themselves"
        if heads == 1:
            parts = _chunks(topology, needs, name, nodes.workers, heads)
            calls = f"; one kernel call for each of {parts} parts of the heads" if parts > 1 else ""
            reason = f"one worker holds the whole sequence, so nothing moves{calls}"
    else:
        name, reason = _fastest(topology, needs, nodes, heads)
    choice = ExchangeChoice(
        name,
        reason,
        min(needs.per_node, needs.workers),
        heads=heads,
        chunks=_chunks(topology, needs, name, nodes.workers, heads),
        prefetch=1 if EXCHANGE_TRAITS[name].gathers else topology.prefetch,
        circulates=_circulates(topology, needs, name),
        shared_columns=_shared_columns(topology, needs),
        stages=_stages(topology, name, nodes, "stages"),
        stages_backward=_stages(topology, name, nodes, "stages_backward"),
        rounds=needs.rounds and nodes.workers > 1,
    )
    for key in ("stages", "stages_backward"):
        if (given := getattr(topology, key)) not in ("auto", found := getattr(choice, key)):
            reason += f"; topology.{key}={given} means {found}, the most for these workers"
    _, options = shorter_rings(name, choice.options(needs.workers))[0]
    return replace(choice, reason=reason, channels=make_schedule(name, options).channels)


def _head_ranks(topology: TopologyConfig, needs: ExchangeNeeds) -> int:
    """Return how many workers share heads by trading tokens for heads (Ulysses); 1 if none do."""
    key, among_all = f"topology.exchange={topology.exchange}", topology.exchange in HEAD_SHARING
    heads = needs.workers if among_all else 1
    if topology.ulysses != "auto":
        assert isinstance(topology.ulysses, int)
        if among_all and topology.ulysses != needs.workers:
            raise ConfigError(
                f"topology.ulysses={topology.ulysses}: {key} always splits the heads among all "
                f"{needs.workers} workers of a sequence. For fewer, set topology.exchange to the "
                "exchange that moves keys between the head groups, such as ring"
            )
        key = f"topology.ulysses={topology.ulysses}"
        heads = topology.ulysses
    fits = [u for u in range(1, needs.workers + 1) if _heads_fit(u, needs)]
    if heads not in fits:
        sharing = f"{heads} of {needs.workers}" if heads != needs.workers else heads
        raise ConfigError(
            f"{key}: cannot share {needs.heads} query heads and {needs.kv_heads} key-value heads "
            f"among {sharing} workers in nodes of {needs.per_node}; allowed for "
            f"topology.ulysses: {', '.join(map(str, fits))}"
        )
    return heads


def _heads_fit(u: int, needs: ExchangeNeeds) -> bool:
    whole_nodes = (
        needs.workers <= needs.per_node or needs.per_node % u == 0 or u % needs.per_node == 0
    )
    shared = needs.heads % u == 0 and (needs.kv_heads % u == 0 or u % needs.kv_heads == 0)
    return needs.workers % u == 0 and shared and whole_nodes


def _fastest(
    topology: TopologyConfig, needs: ExchangeNeeds, groups: Nodes, heads: int
) -> tuple[str, str]:
    given = topology.chunks if isinstance(topology.chunks, int) else None
    chunks = given or _fewest_chunks(needs, heads)
    size = gathered_bytes(needs, heads, chunks)
    across = groups.several
    nodes = f"; every shard crosses to each of {needs.nodes} nodes once" if across else ""
    calls = "one collective and one kernel call a layer"
    if chunks > 1:
        calls = f"one collective and one kernel call for each of {chunks} parts of the heads"
    # If the user sets the number of parts, use all_gather in these parts.
    gathers = size <= _GATHER_SHARE * needs.memory or (given or 1) > 1
    name, at_once = exchange_name(gathers=gathers, hierarchical=across), format_bytes(size)
    if gathers:
        return name, f"{calls}; gathered KV and dKV take {at_once} at once{nodes}"
    most = f"{_GATHER_SHARE:.0%} of {needs.memory / 2**30:.0f} GiB"
    return name, f"gathered KV and dKV would take {at_once} at once, over {most}{nodes}"


def _divisors(heads: int) -> list[int]:
    return [n for n in range(1, heads + 1) if heads % n == 0]


def _fewest_chunks(needs: ExchangeNeeds, heads: int) -> int:
    """Return the number of equal parts of the heads to gather one after the other."""
    # More than two parts only save memory: they mean more and smaller kernel calls, and hide little
    # more communication.
    kv_heads = max(1, needs.kv_heads // heads)
    large = needs.tokens * 2 * kv_heads * needs.head_dim * needs.dtype_bytes >= 2 * _CHUNK_BYTES
    least = 2 if large and kv_heads % 2 == 0 else 1
    return _fewest(kv_heads, needs, lambda n: gathered_bytes(needs, heads, n), least)


def _fewest(kv_heads: int, needs: ExchangeNeeds, size: Callable[[int], int], least: int = 1) -> int:
    parts = [n for n in _divisors(kv_heads) if n >= least]
    return next((n for n in parts if size(n) <= _PART_SHARE * needs.memory), parts[-1])


def _chunks(
    topology: TopologyConfig, needs: ExchangeNeeds, name: str, groups: int, heads: int
) -> int:
    kv_heads = max(1, needs.kv_heads // heads)
    gathers = EXCHANGE_TRAITS[name].gathers
    if topology.chunks == "auto":
        if not gathers or (groups == 1 and heads > 1):
            return 1
        if groups > 1:
            return _fewest_chunks(needs, heads)
        # A single worker computes the parts one by one.
        size = needs.shard * needs.heads * needs.head_dim * _ACCUMULATION_BYTES
        return _fewest(kv_heads, needs, lambda n: size // n)
    assert isinstance(topology.chunks, int)
    if topology.chunks > 1 and not gathers:
        raise _refusal(topology, "chunks", name, lambda traits: traits.gathers)
    if kv_heads % topology.chunks:
        raise ConfigError(
            f"topology.chunks={topology.chunks}: does not divide the {kv_heads} key-value heads "
            f"of a worker; allowed: {', '.join(map(str, _divisors(kv_heads)))}"
        )
    return topology.chunks


def _stages(topology: TopologyConfig, name: str, groups: Nodes, key: str) -> int:
    # With ``auto``, `training.layout_choice` decides later, because it depends on the mask.
    given, traits = getattr(topology, key), EXCHANGE_TRAITS[name]
    if given == "auto":
        return 0
    if given and not traits.by_mask:
        raise _refusal(topology, key, name, lambda traits: traits.by_mask)
    nodes = groups.count if traits.hierarchical else 1
    return min(given, most_stages(nodes, groups.workers // nodes))


def _refusal(
    topology: TopologyConfig, key: str, name: str, fits: Callable[[ExchangeTraits], bool]
) -> ConfigError:
    """Return the error that a setting fits other exchanges than the one in use."""
    *names, last = (name for name, traits in EXCHANGE_TRAITS.items() if fits(traits))
    names_text = f"{', '.join(names)} and {last}" if names else last
    resolved = f" (here: {name})" if topology.exchange == "auto" else ""
    return ConfigError(
        f"topology.{key}={getattr(topology, key)}: works only with {names_text}, not with "
        f"topology.exchange={topology.exchange}{resolved}. Set topology.{key}=auto"
    )


def _circulates(topology: TopologyConfig, needs: ExchangeNeeds, name: str) -> str:
    rings = not EXCHANGE_TRAITS[name].gathers
    bitmap = needs.index is not None and needs.index.bitmap
    if topology.circulates == "queries" and not rings:
        raise _refusal(topology, "circulates", name, lambda traits: not traits.gathers)
    if topology.circulates != "auto":
        return topology.circulates
    # With a block bitmap, queries from other workers would need those workers' rows of the bitmap.
    if not rings or bitmap or needs.workers == 1:
        return KV
    return min(KV, QUERIES, key=lambda circulates: ring_backward_bytes(needs, circulates))


def _shared_columns(topology: TopologyConfig, needs: ExchangeNeeds) -> bool:
    if topology.columns != "auto":
        return topology.columns == "once"
    # An all-reduce sends each number about twice. Computing columns in the steps sends nothing
    # extra: the keys travel anyway.
    if needs.columns is None:
        return False
    return 2 * needs.heads * needs.columns < (needs.workers - 1) * needs.shard * needs.kv_heads
