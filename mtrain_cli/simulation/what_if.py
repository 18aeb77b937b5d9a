"""Replay recorded indices under other layouts, exchanges and workers: exact work and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np
import torch

from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, Index, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.config.schema import ConfigError, TopologyConfig
from mtrain_cli.parallel.exchange_bytes import ShardSizes, pass_bytes
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds, choose_exchange
from mtrain_cli.parallel.layout import Layout, make_layout
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
_SUM_BYTES = 4  # column gradients are summed in float32


@dataclass(frozen=True)
class ReplaySetup:
    """One configuration to replay.

    exchange: a value of ``topology.exchange``.
    per_node: workers of a node.
    options: take ``ulysses``, ``chunks``, ``prefetch``, ``circulates`` and ``columns`` from here;
        None for the defaults.
    """

    layout: str
    exchange: str
    workers: int
    per_node: int
    options: TopologyConfig | None = None


@dataclass(frozen=True)
class ReplayedPass:
    """One pass of a replayed configuration.

    degrees: imbalance of work, mean over layers. Columns that are gathered once count as one more
        step when comparing workers, but not when comparing the steps of a worker.
    pairs: int64 [workers], over all layers.
    sent: bytes a layer of the worker that sends the most, mean over layers, with gathered columns.
    """

    degrees: Imbalance
    pairs: IntArray
    sent: float


@dataclass(frozen=True)
class ReplayedSetup:
    """One replayed configuration.

    exchange: with the options that ``auto`` chose.
    padded_seq: tokens after padding.
    passes: by name.
    """

    setup: ReplaySetup
    exchange: str
    padded_seq: int
    layers: tuple[int, ...]
    passes: dict[str, ReplayedPass]

    @property
    def flop(self) -> IntArray:
        """int64 [workers]: FLOP of both passes, divided by head_dim."""
        return sum(
            (FLOP_PER_PAIR[name] * found.pairs for name, found in self.passes.items()),
            np.zeros(self.setup.workers, np.int64),
        )

    @property
    def shares(self) -> np.ndarray:
        """[workers]: share of both passes' FLOP."""
        return self.flop / max(1, int(self.flop.sum()))


class InvalidSetup(ValueError):
    """An impossible configuration. about, value: the field of `ReplaySetup` that is to blame."""

    def __init__(self, setup: ReplaySetup, about: str, reason: str) -> None:
        super().__init__(reason)
        self.about, self.value = about, getattr(setup, about)


@dataclass(frozen=True)
class ReplayCase:
    """A configuration with everything that its work and messages follow from."""

    setup: ReplaySetup
    layout: Layout
    choice: ExchangeChoice
    schedule: Schedule
    counter: WorkCounter
    sizes: ShardSizes

    @cached_property
    def scheduled(self) -> dict[str, int]:
        """Bytes of the worker that sends the most, by pass, without gathered columns."""
        ranks = range(self.setup.workers)
        return {
            name: max(
                pass_bytes(self.schedule, r, self.sizes, backward=name == BACKWARD) for r in ranks
            )
            for name in PASSES
        }

    def sent(self, direction: str, index: Index | None) -> float:
        """Bytes of the worker that sends the most in a pass, with gathered columns."""
        largest = self.scheduled[direction]
        if not self.counter.gathers_columns or not isinstance(index, VerticalSlash):
            return largest
        # An all-reduce sends every number about twice.
        width = -(-index.columns.shape[-1] // COLUMN_TILE) * COLUMN_TILE
        groups = self.counter.groups
        heads = index.heads[1] // self.schedule.heads
        numbers = 2 * index.heads[0] * heads * width * self.sizes.head_dim
        return largest + 2 * (groups - 1) / groups * numbers * (
            _SUM_BYTES if direction == BACKWARD else self.sizes.dtype_bytes
        )


def replay(
    recorded: RecordedIndices,
    pattern: str,
    setups: Sequence[ReplaySetup],
    layers: Sequence[int] | None = None,
) -> list[ReplayedSetup]:
    """Replay recorded indices under other configurations.

    Args:
        pattern: a label of the file.
        layers: None for all.

    Raises:
        InvalidSetup: one of the configurations is impossible.
        ConfigError: the file is damaged, or holds only a part of an index.
    """
    layers = tuple(recorded.layers(pattern) if layers is None else layers)
    first = index_of(recorded, pattern, layers[0])
    cases = [
        make_case(
            recorded.setup,
            recorded.masks,
            setup,
            first,
            recorded.setup.columns.get(pattern, _AS_INDEX),
        )
        for setup in setups
    ]
    replayed: list[dict[str, list[tuple[Imbalance, IntArray, float]]]] = [
        {name: [] for name in PASSES} for _ in cases
    ]
    for layer in layers:
        index = index_of(recorded, pattern, layer)
        for case, passes in zip(cases, replayed, strict=True):
            fitted = None if index is None else resized(index, case.counter.blocks)
            for name, work in case.counter.count(fitted).items():
                passes[name].append((degrees(work), work.total_pairs, case.sent(name, fitted)))
    return [
        ReplayedSetup(
            case.setup,
            case.choice.label,
            case.layout.padded_seq,
            layers,
            {name: _mean(passes[name]) for name in PASSES},
        )
        for case, passes in zip(cases, replayed, strict=True)
    ]


def degrees(work: StepWork) -> Imbalance:
    """Return the imbalance of the pairs of one pass of a layer."""
    across = imbalance(np.column_stack([work.pairs, work.column_pairs]))
    return replace(across, step=imbalance(work.pairs).step)


def _mean(layers: Sequence[tuple[Imbalance, IntArray, float]]) -> ReplayedPass:
    all_degrees = [d for d, _, _ in layers]
    mean = Imbalance(
        **{
            name: fmean(getattr(d, name) for d in all_degrees)
            for name in ("worker", "step", "total", "critical")
        }
    )
    return ReplayedPass(
        mean,
        np.sum([pairs for _, pairs, _ in layers], axis=0),
        fmean(sent for _, _, sent in layers),
    )


def index_of(recorded: RecordedIndices, pattern: str, layer: int) -> Index | None:
    """Return the recorded index of a layer; None if attention was dense.

    Raises:
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


_AS_INDEX = -1  # the number of single columns in the index


def make_case(
    recorded: RecordedSetup,
    batch_masks: Sequence[SequenceMask],
    setup: ReplaySetup,
    index: Index | None,
    columns: int | None = _AS_INDEX,
    choice: ExchangeChoice | None = None,
) -> ReplayCase:
    """Prepare a configuration.

    Args:
        recorded: shapes.
        batch_masks: of the sequences of the batch, with any padding.
        index: of any layer.
        columns: the most columns of a head.
        choice: the exchange of ``setup``, if it was chosen already.

    Raises:
        InvalidSetup: the configuration is impossible.
    """
    block = None if index is None else index.block
    width = index.columns.shape[-1] if isinstance(index, VerticalSlash) else 0
    workers, per_node = setup.workers, min(setup.per_node, setup.workers)
    piece = block or (recorded.block_size if setup.layout == "striped" else 1)
    if workers * piece > recorded.seq:
        most = max(1, recorded.seq // piece)
        raise InvalidSetup(
            setup,
            "workers",
            f"{recorded.seq} tokens in blocks of {piece} are too few for so many workers; allowed: "
            f"1 to {most}",
        )
    if workers % per_node:
        divisors = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
        raise InvalidSetup(
            setup, "per_node", f"does not divide {workers} workers; allowed: {divisors}"
        )
    if block and setup.layout == "striped" and recorded.block_size % block:
        raise InvalidSetup(
            setup,
            "layout",
            f"its stripes of {recorded.block_size} tokens, as recorded, do not hold whole blocks "
            f"of {block}",
        )
    layout = make_layout(setup.layout, workers, recorded.seq, recorded.block_size, unit=block or 1)
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
        index=IndexRequest(block, bitmap, chunk) if block else None,
        columns=width if columns == _AS_INDEX else columns,
        needs_out=recorded.needs_out,
    )
    choice = choice or _choice(setup, needs)
    schedule = make_schedule(choice.name, choice.options(workers))
    masks = [repadded(mask, layout.padded_seq) for mask in batch_masks]
    counter = WorkCounter.make(
        schedule, layout, masks, recorded.heads, block, shared_columns=choice.shared_columns
    )
    sizes = ShardSizes(
        layout.tokens_per_worker * len(masks),
        recorded.heads,
        recorded.kv_heads,
        recorded.head_dim,
        recorded.dtype_bytes,
        recorded.needs_out,
    )
    return ReplayCase(setup, layout, choice, schedule, counter, sizes)


def _choice(setup: ReplaySetup, needs: ExchangeNeeds) -> ExchangeChoice:
    try:
        return choose_exchange(topology_of(setup), needs)
    except ConfigError:
        fitting = []
        for workers in range(1, needs.heads + 1):
            per_node = min(setup.per_node, workers)
            if workers % per_node == 0 and _accepted(
                replace(setup, workers=workers), replace(needs, workers=workers, per_node=per_node)
            ):
                fitting.append(str(workers))
        raise InvalidSetup(
            setup,
            "exchange",
            f"cannot share {needs.heads} query heads and {needs.kv_heads} key-value heads among "
            f"{setup.workers} workers in nodes of "
            f"{needs.per_node}; allowed with it: --workers {','.join(fitting)}",
        ) from None


def _accepted(setup: ReplaySetup, needs: ExchangeNeeds) -> bool:
    try:
        choose_exchange(topology_of(setup), needs)
    except ConfigError:
        return False
    return True


def topology_of(setup: ReplaySetup) -> TopologyConfig:
    """Return the topology settings by which the exchange of a setup is chosen."""
    if setup.options is not None:
        return replace(
            setup.options,
            workers=setup.workers,
            gpus_per_node=setup.per_node,
            layout=setup.layout,
            exchange=setup.exchange,
        )
    return TopologyConfig(
        device="auto",
        workers=setup.workers,
        context_parallel="auto",
        gpus_per_node=setup.per_node,
        gpu_memory_gib="auto",
        host_memory_gib="auto",
        layout=setup.layout,
        exchange=setup.exchange,
        ulysses="auto",
        chunks="auto",
        prefetch=1,
        circulates="auto",
        columns="auto",
        block_size=0,
        timeout_s=0,
    )


def repadded(mask: SequenceMask, padded: int) -> SequenceMask:
    """Return the mask of the same sequence padded to another number of positions."""
    first = np.zeros(padded, np.int64)
    first[: mask.length] = mask.first[: mask.length]
    return SequenceMask(first, mask.length)


def resized(index: Index, blocks: int) -> Index:
    """Return the same choice of pairs for a sequence with more or less padding, in blocks."""
    if blocks == index.blocks:
        return index
    more = max(0, blocks - index.blocks)
    if isinstance(index, BlockBitmap):
        bits = torch.nn.functional.pad(index.bits, (0, more, 0, more))[:, :, :blocks, :blocks]
        whole = BlockBitmap.whole(index.block, bits.contiguous())
        if not isinstance(index, GatedBitmap):
            return whole
        wide = max(0, blocks * index.block // (32 * index.chunk) + 1 - index.gates.shape[-1])
        gates = torch.nn.functional.pad(index.gates, (0, wide, 0, more * index.block))[
            :, :, : blocks * index.block
        ]
        return GatedBitmap(
            whole.block, whole.blocks, whole.bits, whole.rows, gates.contiguous(), index.chunk
        )
    assert isinstance(index, VerticalSlash)
    slashes = torch.nn.functional.pad(index.slashes, (0, more))[..., :blocks]
    # Unused columns point to the end of the sequence.
    unused = min(blocks, index.blocks) * index.block
    return VerticalSlash(
        index.block,
        blocks,
        slashes,
        index.columns.masked_fill(index.columns >= unused, blocks * index.block),
    )


def setups_of(
    layouts: Sequence[str], exchanges: Sequence[str], workers: Sequence[int], per_node: int
) -> Iterator[ReplaySetup]:
    """Yield every combination; worker counts vary slowest."""
    for n in workers:
        for layout in layouts:
            for exchange in exchanges:
                yield ReplaySetup(layout, exchange, n, per_node)
