"""The masks of the first sequences of the data, for plans and predictions of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config, ConfigError, DataConfig
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
        """The mean number of pairs of a sequence."""
        return sum(mask.pairs for mask in self.masks) / len(self.masks)

    @cached_property
    def typical(self) -> tuple[SequenceMask, ...]:
        """The masks of the micro-batch with the median number of pairs."""
        starts = range(0, len(self.masks), self.micro_batch)
        batches = [self.masks[start : start + self.micro_batch] for start in starts]
        batches.sort(key=lambda batch: sum(mask.pairs for mask in batch))
        return batches[(len(batches) - 1) // 2]

    def describe(self) -> str:
        """Return one line that says how many masks were read, or why none were."""
        if self.problem:
            return f"the masks cannot be read ({self.problem}), so causal documents are assumed"
        count = len(self.masks)
        which = "the first sequence" if count == 1 else f"the first {count} sequences"
        return f"masks of {which} were read; {ASSUMED}"


def first_masks(config: Config) -> FirstMasks | None:
    """Read the masks of `MOST_READ` sequences, or one micro-batch; None if data bring no masks."""
    data, each = config.data, config.train.micro_batch
    if data.mask_key is None:
        return None
    if data.path is None and data.mix is None:
        return FirstMasks(data.mask_key, (), each, "data.path is not set")
    source = _Source(data, config.seq, config.seed, config.model.vocab_size, config)
    try:
        masks = _read(source, each)
    except ConfigError as error:
        return FirstMasks(data.mask_key, (), each, error.problems[0].rstrip("."))
    return FirstMasks(data.mask_key, masks, each)


@dataclass(frozen=True)
class _Source:
    """The settings on which the sequences depend. Others of ``config`` do not matter."""

    data: DataConfig
    seq: int
    seed: int
    vocab_size: int
    config: Config = field(compare=False)


@lru_cache(maxsize=4)  # a plan and its prediction ask for the same masks
def _read(source: _Source, micro_batch: int) -> tuple[SequenceMask, ...]:
    dataset, rule, seq = open_dataset(source.config), MaskRule.of(source.config), source.seq
    micro_batches = max(1, min(MOST_READ, len(dataset)) // micro_batch)
    # The data repeat if they are shorter than a micro-batch.
    samples = (dataset[n % len(dataset)] for n in range(micro_batches * micro_batch))
    return tuple(rule(one.documents, seq, seq, one.slices) for one in samples)
