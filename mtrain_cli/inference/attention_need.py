"""Memory of a prompt's attention: the dynamic index, and the buffers of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import CACHED_MASK_BYTES, MASK_BYTES, ROWS_PER_CALL, SdpaKernel
from mtrain_cli.config.schema import Config
from mtrain_cli.parallel.layout import Contiguous
from mtrain_cli.training.attention_memory import IndexShape
from mtrain_cli.training.resolution import ResolvedRun

# Temporary tensors of a CPU call, in bytes of its mask: the mask, comparisons, and what the index
# allows. Measured under every pattern: at most 5.4, and 1.8 without one.
_BY_INDEX, _DENSE = 6, 2
_LEAST_ROWS = 16  # of a CPU call
_MOST_OF_16_BITS = 32767


class AttentionBytes(NamedTuple):
    """Bytes that attention needs beside queries, keys, values and its result.

    kept: from layer to layer.
    temporary: while a layer computes attention.
    """

    kept: int
    temporary: int

    def __add__(self, other: AttentionBytes) -> AttentionBytes:  # type: ignore[override]
        return AttentionBytes(self.kept + other.kept, self.temporary + other.temporary)


@dataclass(frozen=True)
class AttentionNeed:
    """The memory of attention on one worker while a prompt is computed, by arithmetic.

    device: ``cpu`` or ``cuda``.
    workers: number of workers that share the prompt.
    """

    config: Config
    choices: ResolvedRun
    device: str
    workers: int

    def of(self, prompt: int) -> AttentionBytes:
        """Return the bytes for a prompt of this many tokens."""
        if not prompt:
            return AttentionBytes(0, 0)
        return self._index(prompt) + self._kernel(-(-prompt // self.workers), prompt)

    def _index(self, prompt: int) -> AttentionBytes:
        """Return the bytes of the index, and of what the kernel derives from it."""
        pattern, kernel = self.choices.pattern, self.choices.kernel.name
        if pattern is None:
            return AttentionBytes(0, 0)
        train = replace(self.config.train, micro_batch=1)
        config = replace(self.config, seq=prompt, train=train)
        block = pattern.request().block
        layout = Contiguous(self.workers, prompt, block, unit=block)
        index = IndexShape.make(config, pattern, layout, self.choices.exchange)
        derived = index.derived(kernel) + index.counted
        if not index.bitmap:
            # The slashes and columns of all sparse layers stay: training counts their pairs at the
            # end.
            layers = config.model.num_layers - (config.sparsity.dense_layers or 0)
            return AttentionBytes(index.kept * layers, derived)
        if kernel == "triton":
            number = 2 if index.blocks <= _MOST_OF_16_BITS else 4
            derived += number * index.pairs_of_blocks(layout.tokens_per_worker, layout.padded_seq)
        return AttentionBytes(0, index.kept + derived)

    def _kernel(self, queries: int, keys: int) -> AttentionBytes:
        """Return the bytes of masks and scores, the most of any kind of layers."""
        found = self._call(self.choices.kernel.name, queries, keys, self.choices.pattern is None)
        if not self.config.sparsity.dense_layers or self.choices.dense_kernel is None:
            return found
        dense = self._call(self.choices.dense_kernel[0].name, queries, keys, is_dense=True)
        return AttentionBytes(*map(max, found, dense))

    def _call(self, kernel: str, queries: int, keys: int, is_dense: bool) -> AttentionBytes:
        """Return the bytes of masks and scores. GPU kernels have none in a forward pass."""
        heads = self.config.model.num_heads
        if kernel == ReferenceKernel.name:
            # Scores, probabilities and a temporary in float64, and which keys each query sees.
            return AttentionBytes(0, (3 * 8 * heads + 2) * queries * keys)
        if kernel != SdpaKernel.name or self.device != "cpu":
            return AttentionBytes(0, 0)
        if not is_dense:
            row = 4 * keys * heads
            call = min(max(MASK_BYTES, _LEAST_ROWS * row), queries * row)
            return AttentionBytes(0, _BY_INDEX * call)
        # Under a causal mask, a group of rows has a mask up to its last key. Other layers reuse the
        # masks if they are small together.
        later = self.config.mask.shows_later_keys
        whole = queries * 4 * (2 * keys if later else keys + ROWS_PER_CALL) // 2
        call = min(max(MASK_BYTES, _LEAST_ROWS * 4 * keys), whole)
        return AttentionBytes(min(CACHED_MASK_BYTES, whole), _DENSE * call)
