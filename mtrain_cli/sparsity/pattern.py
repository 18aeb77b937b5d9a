"""The interface of a pattern, which estimates a dynamic index from a layer's queries and keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import map_tensors, to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_tables import BlockGeometry, MaskTables
from mtrain_cli.attention.partials import Pair, has_triton
from mtrain_cli.config.pattern_settings import MOST_LINES, PatternSettings
from mtrain_cli.config.schema import Config, ModelConfig


class IndexGroup(Protocol):
    """The workers that estimate an index together, which call its methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, mine: Tensor) -> Tensor:
        """Replace ``mine`` (contiguous) with its sum over all workers, and return it."""

    def max(self, mine: Tensor) -> Tensor:
        """Replace ``mine`` (contiguous, no NaN) with its maximum over workers, and return it."""

    def gather(self, mine: Tensor) -> Tensor:
        """Return every worker's ``mine`` in rank order, [size, *mine.shape]."""


@dataclass(frozen=True)
class SingleWorkerGroup:
    """A group of one worker, which holds the whole sequence."""

    rank: int = 0
    size: int = 1

    def sum(self, mine: Tensor) -> Tensor:
        return mine

    def max(self, mine: Tensor) -> Tensor:
        return mine

    def gather(self, mine: Tensor) -> Tensor:
        return mine[None]


@dataclass(frozen=True)
class MaskedPositions:
    """The masks of a batch, and this worker's positions, on the host and on the device.

    shards: ascending block numbers of each worker. All workers have the same number of blocks.
    cache: what patterns derive from these fields. All layers share this cache.
    """

    masks: Sequence[SequenceMask]
    geometry: BlockGeometry
    shards: tuple[IntArray, ...]
    rank: int = 0
    group: IndexGroup = field(default_factory=SingleWorkerGroup)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(
        masks: Sequence[SequenceMask],
        block: int,
        shards: Sequence[IntArray] | None = None,
        rank: int = 0,
        *,
        bitmap: bool = False,
    ) -> MaskedPositions:
        """Build the positions of one worker on the host, with `SingleWorkerGroup`.

        shards: ascending positions of each worker; None if one worker has the whole sequence.
        """
        padded = masks[0].padded
        shards = shards or [np.arange(padded, dtype=np.int64)]
        numbers = tuple(_numbers(positions // block) for positions in shards)
        blocks_per_worker = [len(blocks) for blocks in numbers]
        if len(set(blocks_per_worker)) > 1 or sum(blocks_per_worker) != -(-padded // block):
            raise ValueError(
                f"The workers hold {blocks_per_worker} blocks of {block} tokens. An index needs "
                "whole blocks, and the same number of blocks on each worker."
            )
        tables = MaskTables.make(masks, block, bitmap=bitmap, rows=numbers[rank])
        return MaskedPositions(masks, tables.between(shards[rank], shards[rank]), numbers, rank)

    def to(self, device: torch.device | str) -> MaskedPositions:
        return map_tensors(self, lambda tensor: to_device(tensor, device))

    def with_group(self, group: IndexGroup) -> MaskedPositions:
        assert (group.rank, group.size) == (self.rank, len(self.shards))
        return replace(self, group=group)

    @property
    def tables(self) -> MaskTables:
        return self.geometry.tables

    @property
    def device(self) -> torch.device:
        return self.tables.device

    @property
    def numbers(self) -> IntArray:
        """Block numbers of this worker, int64 [local blocks], ascending."""
        return self.shards[self.rank]

    @cached_property
    def host_positions(self) -> IntArray:
        """Positions of this worker's slots, padding included, int64 [local blocks * block]."""
        block = self.tables.block
        return (self.numbers[:, None] * block + np.arange(block)).reshape(-1)

    @cached_property
    def positions(self) -> Tensor:
        block = self.tables.block
        within = torch.arange(block, device=self.device)
        return (self.geometry.query_blocks.long()[:, None] * block + within).flatten()

    @property
    def padded(self) -> bool:
        return any(mask.length < self.tables.blocks * self.tables.block for mask in self.masks)

    def num_tokens(self, sequence: int) -> int:
        """Return how many of this worker's slots hold a token of a sequence instead of padding."""
        return int(np.searchsorted(self.host_positions, self.masks[sequence].length))

    def in_blocks(self, tokens: Tensor, sequence: int) -> Tensor:
        """Return a sequence's local tokens with zeros as padding, [local blocks, block, ...].

        tokens: [local tokens, heads, head_dim].
        """
        num_tokens = self.num_tokens(sequence)
        missing = len(self.host_positions) - num_tokens
        padded = torch.nn.functional.pad(tokens[:num_tokens], (0, 0, 0, 0, 0, missing))
        return padded.unflatten(0, (-1, self.tables.block))

    def gather_blocks(self, mine: Tensor) -> Tensor:
        """Return the tokens of all workers in sequence order, [batch, tokens, heads, dim].

        mine: [batch, local blocks, tokens per block, heads, dim].
        """
        if "order of blocks" not in self.cache:
            order = np.argsort(np.concatenate(self.shards))
            self.cache["order of blocks"] = to_device(order, mine.device)
        gathered = self.group.gather(mine).transpose(0, 1).flatten(1, 2)
        return gathered.index_select(1, self.cache["order of blocks"]).flatten(1, 2)

    def visible(self, sequence: int, rows: Tensor, keys: int) -> Tensor:
        """Return which of the first ``keys`` local keys each query sees, bool [rows, keys]."""
        position = self.positions[:keys]
        first = self.tables.first[sequence, rows][:, None]
        return (position >= first) & (position <= rows[:, None])


def _numbers(blocks: IntArray) -> IntArray:
    """Return the distinct values of an ascending array."""
    return blocks[np.diff(blocks, prepend=-1) > 0]


class Pattern(Protocol):
    """The interface that every pattern implements: estimate an index from queries and keys.

    The same queries and keys give the same index on any number of workers, apart from near ties,
    which rounding decides.

    synthetic: whether the index does not depend on the data: for benchmarks only.
    """

    name: ClassVar[str]
    synthetic: ClassVar[bool]

    def request(self) -> IndexRequest:
        """Return the kind of index that the pattern makes, from which a kernel is chosen."""

    def describe(self) -> str:
        """Return one line for banners that says what the pattern chooses."""

    def probed_rows(self, length: int) -> Tensor:
        """Return the positions of the queries that choose the index for all queries, int64 [rows].

        Recall is measured on the others. No positions if every query, or a seed, chooses its own.
        """

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> Index:
        """Return the whole index, but of a bitmap only the query blocks of this worker.

        All workers of ``masked.group`` call this together, without gradients.
        """


@runtime_checkable
class LearningPattern(Pattern, Protocol):
    """A pattern with tensors that learn in training, outside of the model's parameters.

    learns: whether `estimate` updates them, as in training steps. The workers of a context group
        make the same updates.
    """

    learns: bool

    def state(
        self, model: ModelConfig, layers: Sequence[int], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the tensors of these layers, by ``LAYER.NAME``; {} if the settings need none.

        The first call makes them, equal on all workers. LAYER.updates counts a layer's updates.
        """

    def learned(self) -> dict[str, Tensor]:
        """Return `state` of the layers that exist so far."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the layers by what `learned` returned. Raises ConfigError if it does not fit."""


@contextmanager
def learning(pattern: Pattern | None) -> Iterator[None]:
    """Let a pattern learn from the queries and keys of the steps within."""
    if not isinstance(pattern, LearningPattern):
        yield
        return
    pattern.learns = True
    try:
        yield
    finally:
        pattern.learns = False


def learned_state(
    pattern: Pattern | None, config: Config, layers: Iterable[int], device: torch.device
) -> dict[str, Tensor]:
    """Return the `LearningPattern.state` of the sparse layers among these; {} without any."""
    if not isinstance(pattern, LearningPattern):
        return {}
    dense = config.sparsity.dense_of(config.model.num_layers)
    return pattern.state(config.model, sorted(set(layers) - dense), device)


def layers_without_learning(state: Mapping[str, Tensor]) -> int:
    """Return how many layers of a `LearningPattern.state` have not learned yet."""
    return sum(name.endswith(".updates") and not updates for name, updates in state.items())


NO_ROWS = torch.empty(0, dtype=torch.int64)


def display_name(pattern: Pattern) -> str:
    return f"{pattern.name} (SYNTHETIC)" if pattern.synthetic else pattern.name


# Mass is a share of attention, between 0 and 1. Sums of integer units are exact in any order.
MASS_UNITS = 2.0**38
_MASS_BITS = 38
MOST_UNITS = (1 << _MASS_BITS) - 1
_NUMBER_BITS = MOST_LINES.bit_length() - 1
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


def to_mass_units(mass: Tensor) -> Tensor:
    """Convert non-negative floats to multiples of 1 / `MASS_UNITS`, int64. NaN and inf become 0."""
    return torch.nan_to_num(mass, nan=0.0, posinf=0.0).mul_(MASS_UNITS).round_().long()


def base_rank_keys(forced: Tensor, numbers: Tensor, n: int) -> Tensor:
    """Return the part of `rank_keys` that does not depend on the mass, int64 [..., candidates].

    numbers: int64 [candidates], the candidates' numbers, from 0 to n - 1.
    """
    assert n <= MOST_LINES
    return (forced.long() << 62) | (n - 1 - numbers)


def rank_keys(units: Tensor, without_mass: Tensor) -> Tensor:
    """Return an int64 key per candidate: the larger the key, the better the rank.

    Forced candidates rank first, then more mass, then lower numbers. No two keys are equal, so the
    keys of several workers can be sorted together.

    units: int64 [..., candidates], mass in units, at most `MOST_UNITS`.
    """
    # Bits of a key: 1 for forced, 38 for the mass, 24 for the number.
    return torch.add(without_mass, units, alpha=1 << _NUMBER_BITS)


@dataclass(frozen=True)
class Selection:
    """The candidates that `select_by_mass` selects, from their `rank_keys`.

    order: rank keys [..., candidates], the largest first.
    total: total mass of all candidates in units, int64 [..., 1].
    crossing: whether to select the candidate that crosses the share.
    """

    order: Tensor
    total: Tensor
    share: float | Tensor
    at_least: int
    n: int
    crossing: bool

    @staticmethod
    def of(
        order: Tensor, total: Tensor, share: float | Tensor, at_least: int, at_most: int, n: int,
        *, crossing: bool = True,
    ) -> Selection:  # fmt: skip
        """Make a selection from keys in any order, with the ``at_most`` largest among them."""
        order = torch.topk(order, min(at_most, order.shape[-1]), dim=-1).values
        return Selection(order, total, share, at_least, n, crossing)

    def pairs(self) -> Pair:
        """Return what `select_by_mass` does."""
        if selection_usable(self.order):
            return self._run("pairs")
        candidates = self.n - 1 - (self.order & _NUMBER_MASK)
        masses = (self.order >> _NUMBER_BITS) & MOST_UNITS
        # Multiplying by a host scalar of another dtype needs no kernel for the conversion.
        limit = (
            self.share * self.total.double()
            if isinstance(self.share, Tensor)
            else self.total * torch.tensor(self.share, dtype=torch.float64)
        )
        held = masses.cumsum(-1)
        kept = (held.sub_(masses) if self.crossing else held) < limit
        kept[..., : self.at_least].fill_(True)
        return candidates, kept

    def numbers(self) -> Tensor:
        """Return the numbers of those selected and n for the others, int32, like ``order``."""
        if selection_usable(self.order):
            return self._run("numbers")[0]
        candidates, kept = self.pairs()
        return torch.where(kept, candidates.int(), self.n)

    def flags(self) -> Tensor:
        """Return whether each number is selected, bool [..., n]."""
        if selection_usable(self.order):
            return self._run("flags")[1]
        candidates, kept = self.pairs()
        return kept.new_zeros(*kept.shape[:-1], self.n).scatter_(-1, candidates, kept)

    def _run(self, form: str) -> Pair:
        from mtrain_cli.kernels.triton import selection

        return selection.select(
            self.order, self.total, self.share, self.at_least, self.n, self.crossing,
            _NUMBER_BITS, _MASS_BITS, form,
        )  # fmt: skip


def selection_usable(order: Tensor) -> bool:
    # A program holds a row.
    return order.is_cuda and order.shape[-1] <= 8192 and has_triton()


def select_by_mass(
    mass: Tensor, share: float | Tensor, forced: Tensor, at_least: int, at_most: int
) -> Pair:
    """Select the fewest candidates that hold a share of the mass (MTraining, algorithm 1).

    The selection includes the candidate that crosses the share.

    mass: float [..., n], not negative, with sums of at most 1; or the same in units, int64.
    forced: bool [n] or like mass, whether to select a candidate whatever its mass.

    Returns:
        Numbers of the candidates, int64 [..., min(at_most, n)], best first, and which are selected.
    """
    n = mass.shape[-1]
    units = (to_mass_units(mass) if mass.is_floating_point() else mass).clamp(max=MOST_UNITS)
    order = rank_keys(units, base_rank_keys(forced, torch.arange(n, device=mass.device), n))
    candidates, kept = Selection.of(
        order, units.sum(-1, keepdim=True), share, at_least, at_most, n
    ).pairs()
    return candidates, kept | forced.expand_as(mass).gather(-1, candidates)


def make_pattern(settings: PatternSettings, seed: int) -> Pattern | None:
    """Return the pattern of a run; None for dense attention."""
    if settings.pattern == "dense":
        return None
    module = importlib.import_module(settings.module or f"mtrain_cli.sparsity.{settings.pattern}")
    pattern: Pattern = module.make_pattern(settings, seed)
    return pattern


_DENSE_SHARE = 4  # one layer in four; with the last two of eight dense, small models lost nothing


def remarks(config: Config) -> list[str]:
    sparsity, layers = config.sparsity, config.model.num_layers
    if sparsity.dense_steps >= config.train.steps:
        return [
            f"no step is sparse: sparsity.dense_steps={sparsity.dense_steps} must be below "
            f"train.steps={config.train.steps}"
        ]
    if not sparsity.loses_in_all_layers or sparsity.dense_layers or layers == 1:
        return []
    dense = max(1, layers // _DENSE_SHARE)
    last = replace(sparsity, dense_layers=dense).dense_text
    return [
        "every layer is sparse: such models found fewer needles than dense ones in `mtrain study "
        f"learning` (docs/studies.md); sparsity.dense_layers={dense} keeps {last} dense"
    ]
