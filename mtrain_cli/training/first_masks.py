"""The masks of the first sequences of the data, for plans and predictions of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.open_dataset import open_dataset

MOST_READ = 8  # sequences, unless a micro-batch has more
ASSUMED = "memory and stages assume causal documents"


@dataclass(frozen=True)
class FirstMasks:
    """The masks of the first sequences of data that bring masks (`data.mask_key`).

    masks: one per sequence, without padding; none if the data cannot be read.
    micro_batch: number of sequences in a micro-batch.
    problem: why the data cannot be read; "" if they were read.
    """

    key: str
    masks: tuple[SequenceMask, ...]
    micro_batch: int
    problem: str = ""

    @cached_property
    def pairs(self) -> float:
        return sum(mask.pairs for mask in self.masks) / len(self.masks)

    @cached_property
    def typical(self) -> tuple[SequenceMask, ...]:
        """The masks of the micro-batch with the median number of pairs."""
        size = self.micro_batch
        batches = [self.masks[n : n + size] for n in range(0, len(self.masks), size)]
        batches.sort(key=lambda batch: sum(mask.pairs for mask in batch))
        return batches[(len(batches) - 1) // 2]

    def describe(self) -> str:
        if self.problem:
            return f"the masks cannot be read ({self.problem}), so causal documents are assumed"
        return f"masks of the first {with_count(len(self.masks), 'sequence')} were read; {ASSUMED}"


def first_masks(config: Config) -> FirstMasks | None:
    """Read the masks of `MOST_READ` sequences, or one micro-batch; None if data bring no masks."""
    data, each = config.data, config.train.micro_batch
    if data.mask_key is None:
        return None
    if data.path is None and data.mix is None:
        return FirstMasks(data.mask_key, (), each, "data.path is not set")
    source = repr((data, config.seq, config.seed, config.model.vocab_size, each))
    try:
        if source not in _masks:
            masks = _read(config, each)
            _masks.clear()
            _masks[source] = masks
    except ConfigError as error:
        return FirstMasks(data.mask_key, (), each, error.problems[0].rstrip("."))
    return FirstMasks(data.mask_key, _masks[source], each)


# The masks read last, by the settings that decide them, since a plan and its prediction ask twice.
_masks: dict[str, tuple[SequenceMask, ...]] = {}


def _read(config: Config, micro_batch: int) -> tuple[SequenceMask, ...]:
    dataset, rule, seq = open_dataset(config), MaskRule.of(config), config.seq
    micro_batches = max(1, min(MOST_READ, len(dataset)) // micro_batch)
    # The data repeat if they are shorter than a micro-batch.
    samples = (dataset[n % len(dataset)] for n in range(micro_batches * micro_batch))
    return tuple(rule(one.documents, seq, seq, one.slices) for one in samples)
