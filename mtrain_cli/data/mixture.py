"""Mix several corpora by weight: choose a corpus and one of its sequences for every number n.

n counts the sequences of a run. The choice is a pure function of n, so all workers agree, and
a checkpoint needs one integer.

The sampler chooses corpora in blocks of consecutive numbers. Among the first m numbers, where m is
a whole number of blocks, corpus d occurs floor(W_d m) - floor(W_(d-1) m) times, with W_d the sum of
the weights of corpora 0 to d. Within a block, a random permutation orders the corpora. Each corpus
finishes an epoch, a new permutation of all its sequences, before it begins the next.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.config.documents import read_yaml, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import Report
from mtrain_cli.data.dataset import PackedDataset, Sample
from mtrain_cli.data.sampler import Permutation, Sampler, cached_permutation, mix64

_SCALE = 40  # weights are multiples of 2^-40
_MIN_BLOCK = 64
_KEPT_BLOCKS = 4


def parse_mix(mix: Mapping[str, float] | str) -> dict[str, float]:
    """Return the weight of each corpus by name. The weights add up to 1.

    mix: weights by name, or the path of a YAML file of weights by name.
    """
    content: Any = mix
    origin = f"data.mix={mix}" if isinstance(mix, str) else "data.mix"
    if isinstance(mix, str):
        try:
            content = read_yaml(Path(mix).expanduser())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{origin}: cannot be read as YAML ({reason(error)})") from None
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{origin}: must be weights by name, such as {{code: 0.3, book: 0.7}}")
    weights = {}
    for name, given in content.items():
        try:
            weights[str(name)] = float(given)  # YAML 1.1 reads 1e-3 as text
        except (TypeError, ValueError, OverflowError):
            weights[str(name)] = math.nan
    total = sum(weights.values())
    for name, given in content.items():
        weight = weights[str(name)]
        if not 0 < weight < math.inf or weight < 1e-5 * total:
            raise ConfigError(
                f"{origin}: the weight of {name} is {given}. It must be above 0, "
                "and at least 1e-5 of the total. Leave out corpora that you do not want."
            )
    return {name: weight / total for name, weight in weights.items()}


class MixtureSampler(Sampler):
    """The order of the sequences of a `MixedDataset`.

    sizes: number of sequences of each corpus. Dataset indices number one corpus after another.
    weights: weight of each corpus.
    """

    def __init__(self, sizes: list[int], weights: list[float], seed: int) -> None:
        super().__init__(sum(sizes), seed)
        self.sizes = sizes
        self._in_order_from = 0
        self._block = functools.lru_cache(_KEPT_BLOCKS)(self._deal_block)
        self._starts = np.cumsum([0, *sizes]).tolist()
        total = sum(weights)
        reached = accumulate(weights, initial=0)
        self._cumulative = [round(weight / total * (1 << _SCALE)) for weight in reached]
        smallest_share = min(b - a for a, b in pairwise(self._cumulative)) / (1 << _SCALE)
        self.block = max(_MIN_BLOCK, 1 << math.ceil(math.log2(2 / smallest_share)))

    def locate(self, number: int) -> tuple[int, int]:
        """Return (corpus, number of earlier sequences from it) of the run's sequence ``number``."""
        block, slot = divmod(number, self.block)
        corpora, counts = self._block(block)
        return int(corpora[slot]), int(counts[slot])

    def _deal_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the results of `locate` for every number of a block, int32 and int64[block]."""
        before, after = (self._counts_before(b * self.block) for b in (block, block + 1))
        quotas = np.array(after) - np.array(before)
        slots = Permutation(self.block, mix64(self.seed, -1, block)).images()
        ends = np.cumsum(quotas)
        corpora = np.searchsorted(ends, slots, side="right").astype(np.int32)
        # Earlier versions could start an epoch of a corpus before the previous one ended.
        if block < self._in_order_from:
            return corpora, np.array(before)[corpora] + slots - (ends - quotas)[corpora]
        counts = np.empty(self.block, np.int64)
        for corpus, (first, quota) in enumerate(zip(before, quotas, strict=True)):
            counts[corpora == corpus] = np.arange(first, first + quota)
        return corpora, counts

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint.

        From block number ``in_order_from`` on, a corpus finishes an epoch before it begins the
        next. Earlier versions of mtrain mixed two epochs of a corpus within a block.
        """
        return {**super().state(), "in_order_from": self._in_order_from}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from ``state()``. A state of an earlier version keeps its block."""
        super().load_state(state)
        self._in_order_from = int(state.get("in_order_from", -(-self.consumed // self.block)))
        self._block.cache_clear()

    def sequence(self, number: int) -> int:
        """Return the dataset index of the run's sequence ``number``."""
        if number < 0:
            raise ValueError(f"Sequence numbers start at 0, not {number}.")
        corpus, count = self.locate(number)
        epoch, position = divmod(count, self.sizes[corpus])
        key = mix64(self.seed, corpus, epoch)
        return self._starts[corpus] + cached_permutation(self.sizes[corpus], key)(position)

    def _counts_before(self, number: int) -> list[int]:
        """Return how many of the first ``number`` sequences, whole blocks, each corpus gets."""
        reached = [weight * number >> _SCALE for weight in self._cumulative]
        return [b - a for a, b in pairwise(reached)]


class MixedDataset:
    """Several datasets, drawn by weight. Indices number one dataset's sequences after another's."""

    def __init__(self, parts: dict[str, PackedDataset], weights: dict[str, float]) -> None:
        self.parts, self.weights = parts, weights
        self._datasets = list(parts.values())
        self._starts = np.cumsum([0, *(len(part) for part in self._datasets)])
        facts = [f"{name} {weights[name]!r} {part.fingerprint}" for name, part in parts.items()]
        self.fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        self.samples = {
            f"{name}/{file}": digest
            for name, part in parts.items()
            for file, digest in part.samples.items()
        }
        self.num_tokens = sum(part.num_tokens for part in self._datasets)
        self.vocab_size = max(part.vocab_size for part in self._datasets)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} does not exist; allowed: 0 to {len(self) - 1}")
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._datasets[part][index - int(self._starts[part])]

    @property
    def held_out(self) -> list[Sample]:
        """The held-out sequences of all corpora, which no training step reads."""
        return [sample for part in self._datasets for sample in part.held_out]

    def verify(self, part: int, parts: int, report: Report) -> None:
        for dataset in self._datasets:
            dataset.verify(part, parts, report)

    def sampler(self, seed: int) -> MixtureSampler:
        sizes = [len(part) for part in self._datasets]
        return MixtureSampler(sizes, [self.weights[name] for name in self.parts], seed)

    def describe(self) -> str:
        """Return one line with the weight and the number of sequences of each corpus."""
        shares = ", ".join(
            f"{name} {self.weights[name]:.1%} of {len(part):,}{part.left_out}"
            for name, part in self.parts.items()
        )
        seq = self._datasets[0].seq
        return (
            f"mixture of {len(self.parts)} corpora, {self.num_tokens:,} tokens; weight and number "
            f"of sequences of {seq:,}: {shares}"
        )


# Numbered sequences for training, their order, and held-out sequences.
Dataset = PackedDataset | MixedDataset
