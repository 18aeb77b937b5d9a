"""Memory of a prompt's attention: the dynamic index, and the buffers of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

Bytes = tuple[int, int]  # kept from layer to layer; temporary, while a layer computes attention


@dataclass(frozen=True)
class AttentionNeed:
    """The memory of attention on one of the workers that share a prompt, by arithmetic.

    It comes on top of queries, keys, values and the result. device: ``cpu`` or ``cuda``.
    """

    config: Config
    choices: ResolvedRun
    device: str
    workers: int

    def of(self, prompt: int) -> Bytes:
        """Return the bytes for a prompt of this many tokens."""
        if not prompt:
            return 0, 0
        index, kernel = self.index(prompt), self.kernel(-(-prompt // self.workers), prompt)
        return index[0] + kernel[0], index[1] + kernel[1]

    def index(self, prompt: int) -> Bytes:
        """Return the bytes of the index, and of what the kernel derives from it."""
        pattern, kernel = self.choices.pattern, self.choices.kernel.name
        if pattern is None:
            return 0, 0
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
            return index.kept * layers, derived
        if kernel == "triton":
            number = 2 if index.blocks <= _MOST_OF_16_BITS else 4
            derived += number * index.pairs_of_blocks(layout.tokens_per_worker, layout.padded_seq)
        return 0, index.kept + derived

    def kernel(self, queries: int, keys: int) -> Bytes:
        """Return the bytes of masks and scores, the most of any kind of layers."""
        choices = self.choices
        own = self._call(choices.kernel.name, queries, keys, choices.pattern is None)
        if not self.config.sparsity.dense_layers or choices.dense_kernel is None:
            return own
        dense = self._call(choices.dense_kernel[0].name, queries, keys, is_dense=True)
        return max(own[0], dense[0]), max(own[1], dense[1])

    def _call(self, kernel: str, queries: int, keys: int, is_dense: bool) -> Bytes:
        """Return the bytes of masks and scores. GPU kernels have none in a forward pass."""
        heads = self.config.model.num_heads
        if kernel == ReferenceKernel.name:
            # Scores, probabilities and a temporary in float64, and which keys each query sees.
            return 0, (3 * 8 * heads + 2) * queries * keys
        if kernel != SdpaKernel.name or self.device != "cpu":
            return 0, 0
        if not is_dense:
            row = 4 * keys * heads
            return 0, _BY_INDEX * min(max(MASK_BYTES, _LEAST_ROWS * row), queries * row)
        # Under a causal mask, a group of rows has a mask up to its last key. Other layers reuse the
        # masks if they are small together.
        later = self.config.mask.shows_later_keys
        whole = queries * 4 * (2 * keys if later else keys + ROWS_PER_CALL) // 2
        call = min(max(MASK_BYTES, _LEAST_ROWS * 4 * keys), whole)
        return min(CACHED_MASK_BYTES, whole), _DENSE * call
