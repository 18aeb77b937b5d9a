"""Replay recorded indices: count work and bytes for other layouts, exchanges and worker counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.index import (
    BlockBitmap,
    GatedBitmap,
    Index,
    StartBitmap,
    VerticalSlash,
)
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.exchanges import HEAD_SHARING
from mtrain_cli.config.schema import ConfigError, TopologyConfig
from mtrain_cli.config.sizes import divisors
from mtrain_cli.parallel.cast_rows import cast_shares
from mtrain_cli.parallel.dispatch import Balancer, RowPrices
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds, choose_exchange
from mtrain_cli.parallel.layout import Balanced, Layout, make_layout
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.program import Program, ShardSizes
from mtrain_cli.parallel.schedule import Schedule, make_schedule
from mtrain_cli.records.imbalance import Imbalance, imbalance
from mtrain_cli.records.index_file import RecordedIndices, RecordedSetup
from mtrain_cli.simulation.work_counts import (
    BACKWARD,
    FLOP_PER_PAIR,
    FORWARD,
    StepWork,
    WorkCounter,
)

PASSES = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class ReplaySetup:
    """One configuration to replay. options: settings of its exchange; None for automatic ones."""

    layout: str
    exchange: str
    workers: int
    per_node: int
    options: TopologyConfig | None = None


@dataclass(frozen=True)
class ReplayedPass:
    """One pass of a replayed configuration.

    degrees: imbalance degrees of pairs, averaged over layers. Gathered columns count as an extra
        step, which the step degree ignores.
    pairs: int64 [workers], in all layers.
    sent: bytes that a worker sends in a layer, with gathered columns; mean over layers.
    """

    degrees: Imbalance
    pairs: IntArray
    sent: float


@dataclass(frozen=True)
class ReplayedSetup:
    """One replayed configuration. exchange: its label, with the options of ``auto``."""

    setup: ReplaySetup
    exchange: str
    padded_seq: int
    layers: tuple[int, ...]
    passes: dict[str, ReplayedPass]

    @property
    def shares(self) -> np.ndarray:
        """Return each worker's share of the FLOP of both passes, [workers]."""
        flop = np.sum([FLOP_PER_PAIR[name] * p.pairs for name, p in self.passes.items()], axis=0)
        return flop / max(1, int(flop.sum()))


class InvalidSetup(ConfigError):
    """An impossible configuration. about: the field of `ReplaySetup` that is wrong."""

    def __init__(self, setup: ReplaySetup, about: str, reason: str) -> None:
        self.about, self.value, self.reason = about, getattr(setup, about), reason
        key = "gpus_per_node" if about == "per_node" else about
        super().__init__(f"topology.{key}={self.value}: {reason}")


@dataclass(frozen=True)
class ReplayCase:
    """A configuration with everything that determines its work and its messages."""

    setup: ReplaySetup
    layout: Layout
    choice: ExchangeChoice
    schedule: Schedule
    counter: WorkCounter
    sizes: ShardSizes
    _programs: dict[tuple[bool, Traits], Program] = field(
        default_factory=dict, repr=False, compare=False
    )

    def program(self, *, backward: bool, columns: bool, copies_parts: bool = False) -> Program:
        """Return rank 0's program. Options: see `lowering.Traits`."""
        key = backward, Traits(columns, copies_parts)
        if key not in self._programs:
            self._programs[key] = lower(self.schedule, 0, backward=backward, traits=key[1])
        return self._programs[key]

    def sizes_under(self, index: Index | None) -> ShardSizes:
        """Return the shard sizes for the number of columns per head of this index."""
        width = index.columns.shape[-1] if isinstance(index, VerticalSlash) else 0
        tiled = -(-width // COLUMN_TILE) * COLUMN_TILE
        return replace(self.sizes, columns=width, column_width=tiled)

    def sent(self, direction: str, index: Index | None) -> float:
        """Return the bytes that a worker sends in a pass, with gathered columns."""
        columns = self.counter.gathers_columns and isinstance(index, VerticalSlash)
        program = self.program(backward=direction == BACKWARD, columns=columns)
        return program.sent(self.sizes_under(index))


def replay(
    recorded: RecordedIndices,
    pattern: str,
    setups: Sequence[ReplaySetup],
    layers: Sequence[int] | None = None,
    cluster: Cluster | None = None,
) -> list[ReplayedSetup]:
    """Replay recorded indices under other configurations.

    Args:
        pattern: label of the indices in the file, such as the name of a pattern.
        layers: numbers of the layers; None for all.
        cluster: its rates decide which rows the balanced layout moves; None for H200s.

    Raises:
        ConfigError: a configuration is impossible, or the file lacks a part of an index.
    """
    layers = tuple(recorded.layers(pattern) if layers is None else layers)
    full = recorded.full
    others = (layer for layer in layers if full is None or layer not in full.layers)
    first = index_of(recorded, pattern, next(others, layers[0]))
    columns = recorded.setup.columns.get(pattern, _AS_INDEX)
    kinds = () if full is None else full.kinds(recorded.masks)
    prices = RowPrices.on(cluster, recorded.setup.heads, recorded.setup.kv_heads)

    def cases_of(masks: Sequence[SequenceMask]) -> list[ReplayCase]:
        return [
            make_case(recorded.setup, masks, setup, first, columns, prices=prices, kinds=kinds)
            for setup in setups
        ]

    cases = cases_of(recorded.masks)
    of_full = cases if full is None else cases_of(full.masks)
    replayed: list[dict[str, list[tuple[Imbalance, IntArray, float]]]] = [
        {name: [] for name in PASSES} for _ in cases
    ]
    for layer in layers:
        index = index_of(recorded, pattern, layer)
        is_full = full is not None and layer in full.layers
        for case, passes in zip(of_full if is_full else cases, replayed, strict=True):
            fitted = None if index is None else resized(index, case.counter.blocks)
            for name, work in case.counter.count(fitted).items():
                passes[name].append((degrees(work), work.total_pairs, case.sent(name, fitted)))
    found = []
    for case, of_layers in zip(cases, replayed, strict=True):
        means = {name: _mean(of_layers[name]) for name in PASSES}
        padded_seq = case.layout.padded_seq
        found.append(ReplayedSetup(case.setup, case.choice.label, padded_seq, layers, means))
    return found


def degrees(work: StepWork) -> Imbalance:
    across = imbalance(np.column_stack([work.pairs, work.column_pairs]))
    return replace(across, step=imbalance(work.pairs).step)


def _mean(layers: Sequence[tuple[Imbalance, IntArray, float]]) -> ReplayedPass:
    degrees, pairs, sent = zip(*layers, strict=True)
    names = ("worker", "step", "total", "critical")
    mean = Imbalance(**{name: fmean(getattr(d, name) for d in degrees) for name in names})
    return ReplayedPass(mean, np.sum(pairs, axis=0), fmean(sent))


def index_of(recorded: RecordedIndices, pattern: str, layer: int) -> Index | None:
    """Return the recorded index of a layer; None if attention was dense.

    ConfigError: the file is damaged, or holds only a part of the index.
    """
    index = recorded.index(pattern, layer)
    if isinstance(index, BlockBitmap) and len(index.rows) < index.blocks:
        raise ConfigError(
            f"{recorded.path}: layer {layer} of {pattern} has {len(index.rows)} of {index.blocks} "
            "query blocks; a replay needs all of them"
        )
    if index is not None and index.heads != (len(recorded.masks), recorded.setup.heads):
        raise ConfigError(
            f"{recorded.path}: layer {layer} of {pattern} is damaged; record it again"
        )
    return index


_AS_INDEX = -1  # stands for the number of single columns that the index has


def make_case(
    recorded: RecordedSetup,
    batch_masks: Sequence[SequenceMask],
    setup: ReplaySetup,
    index: Index | None,
    columns: int | None = _AS_INDEX,
    choice: ExchangeChoice | None = None,
    prices: RowPrices | None = None,
    kinds: Sequence[tuple[Sequence[SequenceMask], int]] = (),
) -> ReplayCase:
    """Prepare a configuration.

    Args:
        batch_masks: one mask per sequence. Their padding is adjusted to the layout.
        index: the index of any layer; None for dense attention.
        columns: largest number of single columns per head of an index; None if unknown.
        choice: the exchange that was already chosen for ``setup``; None to choose an exchange.
        prices: of rows, for the balanced layout; None for those on H200s.
        kinds: masks and number of each kind of layer, for the balanced layout.

    Raises:
        InvalidSetup: the configuration is impossible.
    """
    block = None if index is None else index.block
    width = index.columns.shape[-1] if isinstance(index, VerticalSlash) else 0
    workers, per_node = setup.workers, min(setup.per_node, setup.workers)
    _check(setup, recorded, block, per_node)
    if setup.layout == Balanced.name:
        shared = choice.heads if choice else workers if setup.exchange in HEAD_SHARING else 1
        prices = prices or RowPrices.on(None, recorded.heads, recorded.kv_heads)
        masks_of_kinds, layers = zip(*(kinds or ((batch_masks, 1),)), strict=True)
        layout: Layout = Balancer(
            workers, recorded.seq, block or 1, shared, per_node, prices, layers, recorded.chunk
        ).layout(masks_of_kinds)
    else:
        layout = make_layout(
            setup.layout, workers, recorded.seq, recorded.block_size, unit=block or 1
        )
    bitmap = isinstance(index, BlockBitmap)
    chunk = index.chunk if isinstance(index, GatedBitmap) else 0
    needs = ExchangeNeeds(
        workers=workers,
        per_node=per_node,
        tokens=layout.padded_seq * len(batch_masks),
        heads=recorded.heads,
        kv_heads=recorded.kv_heads,
        head_dim=recorded.head_dim,
        dtype_bytes=recorded.dtype_bytes,
        index=IndexRequest(block, bitmap, chunk, isinstance(index, StartBitmap)) if block else None,
        columns=width if columns == _AS_INDEX else columns,
    )
    choice = choice or choose_exchange(topology_of(setup), needs)
    schedule = make_schedule(choice.name, choice.options(workers))
    masks = [mask.repadded(layout.padded_seq) for mask in batch_masks]
    counter = WorkCounter.make(
        schedule, layout, masks, recorded.heads, block, shared_columns=choice.shared_columns
    )
    casts, crossing = cast_shares(schedule, layout, masks, per_node, block)
    sizes = needs.sizes(layout.tokens_per_worker * len(masks))
    sizes = replace(sizes, sequences=len(masks), casts=casts, crossing=crossing)
    return ReplayCase(setup, layout, choice, schedule, counter, sizes)


def _check(setup: ReplaySetup, recorded: RecordedSetup, block: int | None, per_node: int) -> None:
    workers, stripe = setup.workers, recorded.block_size
    require_enough_blocks(setup, recorded.seq, block, stripe, workers)
    if setup.layout == Balanced.name and recorded.chunk is not None:
        chunks = -(-recorded.seq // recorded.chunk)
        if chunks < workers:
            why = f"{recorded.seq} tokens in chunks of {recorded.chunk} are too few for {workers}"
            raise InvalidSetup(setup, "workers", f"{why} workers; allowed: 1 to {chunks}")
    if workers % per_node:
        why = f"does not divide {workers} workers; allowed: {divisors(workers)}"
        raise InvalidSetup(setup, "per_node", why)
    if block and setup.layout == "striped" and stripe % block:
        why = f"its stripes of {stripe} tokens, as recorded, do not hold whole blocks of {block}"
        raise InvalidSetup(setup, "layout", why)


def require_enough_blocks(
    setup: ReplaySetup, seq: int, block: int | None, stripe: int, sharing: int
) -> None:
    """Raise InvalidSetup if a sequence has fewer blocks than it has workers.

    Args:
        block: tokens per block of the index; None if there is no index.
        stripe: tokens per block of a striped layout.
    """
    piece = block or (stripe if setup.layout == "striped" else 1)
    if sharing * piece > seq:
        raise InvalidSetup(
            setup,
            "workers",
            f"{seq} tokens in blocks of {piece} are too few for {sharing} workers; "
            f"allowed: 1 to {max(1, seq // piece)}",
        )


def topology_of(setup: ReplaySetup) -> TopologyConfig:
    options: dict[str, Any] = {field.name: "auto" for field in fields(TopologyConfig)}
    options |= {"prefetch": 1, "block_size": 0, "timeout_s": 0}
    return replace(
        setup.options or TopologyConfig(**options),
        workers=setup.workers,
        gpus_per_node=setup.per_node,
        layout=setup.layout,
        exchange=setup.exchange,
    )


def resized(index: Index, blocks: int) -> Index:
    """Return an index with the same pairs for a sequence that is padded to ``blocks`` blocks."""
    if blocks == index.blocks:
        return index
    more = max(0, blocks - index.blocks)
    if isinstance(index, BlockBitmap):
        bits = torch.nn.functional.pad(index.bits, (0, more, 0, more))[:, :, :blocks, :blocks]
        whole = BlockBitmap.whole(index.block, bits.contiguous())
        if isinstance(index, StartBitmap):
            starts = torch.nn.functional.pad(index.starts, (0, more, 0, more))
            starts = starts[:, :, :blocks, :blocks].contiguous()
            return StartBitmap(whole.block, whole.blocks, whole.bits, whole.rows, starts)
        if not isinstance(index, GatedBitmap):
            return whole
        wide = max(0, blocks * index.block // (32 * index.chunk) + 1 - index.gates.shape[-1])
        gates = torch.nn.functional.pad(index.gates, (0, wide, 0, more * index.block))
        gates = gates[:, :, : blocks * index.block].contiguous()
        return GatedBitmap(whole.block, whole.blocks, whole.bits, whole.rows, gates, index.chunk)
    assert isinstance(index, VerticalSlash)
    slashes = torch.nn.functional.pad(index.slashes, (0, more))[..., :blocks]
    # Unused columns have the position after the end of the sequence.
    unused = min(blocks, index.blocks) * index.block
    columns = index.columns.masked_fill(index.columns >= unused, blocks * index.block)
    return VerticalSlash(index.block, blocks, slashes, columns)
