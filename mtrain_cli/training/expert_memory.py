"""Memory of the experts of one layer on one worker, for one micro-batch.

Symbols:
    T       own tokens of the worker, with padding
    S       T K pairs of a token and an expert
    C, E, K hidden size, number of experts, number of experts of a token
    I, J    width of an expert and of the shared MLP
    B       sequences of the micro-batch
    e       bytes of the compute dtype. The router computes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.config.expert_settings import SIGMOID
from mtrain_cli.config.schema import ModelConfig

_INT64 = 8
_HIGH = 4  # bytes of float32, the dtype of the router


@dataclass(frozen=True)
class ExpertMemory:
    """Sizes in bytes.

    tokens: number of own tokens.
    sequences: sequences of the micro-batch.
    e: bytes of the compute dtype.
    """

    model: ModelConfig
    tokens: int
    sequences: int
    e: int

    @property
    def decision(self) -> int:
        """The router's decision: experts and order of the pairs, and loads (`routing.Decision`).

        It stays until the end of the backward pass.
        """
        moe = self.model.moe
        loads = _HIGH * self.sequences * moe.experts
        return 3 * _INT64 * self._pairs + _HIGH * moe.experts + loads

    @property
    def saved(self) -> int:
        """Tensors that autograd saves, without the inputs of the layer's norm and of the experts.

        - the router: its float32 input and weight unless e = 4, logits and scores E each (with
          sigmoid scores, their shares, too), the chosen scores and their normed values K each
        - gate and up of all pairs, 2 e S I
        - the shared MLP: gate, up, silu(gate) and the product, e J each.
        """
        model, moe = self.model, self.model.moe
        router = (3 if moe.score == SIGMOID else 2) * moe.experts
        router += moe.top_k * (2 if moe.normalize else 1)
        router += 1 + (moe.score == SIGMOID) + moe.normalize + self.sequences  # of one token
        inputs = 0 if self.e == _HIGH else model.hidden_size * (self.tokens + moe.experts)
        return _HIGH * (router * self.tokens + inputs) + 2 * self._wide + self.shared

    @property
    def shared(self) -> int:
        """The part of `saved` that the shared MLP frees before the experts' backward pass."""
        return 4 * self.e * self.tokens * self.model.moe.shared_size

    @property
    def inputs(self) -> int:
        """Which sequence each token belongs to (`routing.Routing`)."""
        return self.tokens * (2 * _INT64 + 1 + self.sequences)

    def in_backward(self, weights: int) -> int:
        """Return the peak bytes of the experts' backward pass beyond `saved` and ``weights``.

        The moments are those of `_Experts.backward`. All of them hold the gradients of logits and
        scores and, with a shared MLP, of the experts' input:

        - scores: rows and gradient of the experts' output, and three tensors of an expert's width;
          their product with the scores is float32
        - gate: seven tensors of an expert's width
        - weights: the gradient of gate and up, and the input of the experts
        - input: the gradient of gate and up, and rows of the input's gradient twice; their sum is
          float32.

        Args:
            weights: bytes of the gradients of all weights of the layer. Those that do not exist yet
                are subtracted.
        """
        model, moe, e = self.model, self.model.moe, self.e
        rows, wide = e * self._pairs * model.hidden_size, self._wide
        hidden = e * self.tokens * model.hidden_size
        low = self.e < _HIGH
        in_high = _HIGH * wide // e
        matrix = e * moe.experts * moe.expert_size * model.hidden_size
        shared = 3 * e * moe.shared_size * model.hidden_size
        sums = _HIGH * self.tokens * model.hidden_size + hidden * low
        held = 2 * _HIGH * self.tokens * moe.experts + (hidden if moe.shared_size else 0)
        moments = (
            (rows + 3 * wide + (2 if low else 1) * in_high, 0),
            (rows + 4 * wide + in_high * low, 1),
            (7 * wide, 1),
            (2 * wide + rows, 3),
            (2 * wide + 2 * rows + sums, 3),
        )
        largest = max(size + matrices * matrix for size, matrices in moments)
        return held + largest + shared - weights

    @property
    def _pairs(self) -> int:
        return self.tokens * self.model.moe.top_k

    @property
    def _wide(self) -> int:
        """Bytes of a tensor of an expert's width, for all pairs."""
        return self.e * self._pairs * self.model.moe.expert_size
