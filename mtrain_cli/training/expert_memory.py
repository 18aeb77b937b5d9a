"""Memory of the experts of one layer on one worker, for one micro-batch.

Symbols:
    T       own tokens of the worker, with padding
    S       T K pairs of a token and an expert
    C, E, K hidden size, number of experts, number of experts of a token
    I, J    width of an expert and of the shared MLP
    B       sequences of the micro-batch
    e       bytes of the compute dtype. The router computes in float32.

With expert parallelism, a worker holds the rows that arrive for its own experts. The sizes assume
that all workers receive as many rows as they send, T K.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.config.expert_settings import SIGMOID
from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.model.tiling import ONE_ADDITION
from mtrain_cli.training.expert_traffic import chunks_and_parts

_INT64 = 8
_HIGH = 4  # bytes of float32, the dtype of the router


@dataclass(frozen=True)
class ExpertMemory:
    """Sizes in bytes.

    tokens: number of own tokens.
    sequences: sequences of the micro-batch.
    e: bytes of the compute dtype.
    degree: number of workers over which the experts are dealt.
    chunks: number of chunks of tokens.
    parts: number of parts in which a worker computes its experts, if rows travel.
    recompute: whether the layer is checkpointed.
    z_loss: whether the loss has the routers' z-loss.
    """

    model: ModelConfig
    tokens: int
    sequences: int
    e: int
    degree: int = 1
    chunks: int = 1
    parts: int = 1
    recompute: bool = False
    z_loss: bool = False

    @staticmethod
    def of(config: Config, tokens: int, e: int) -> ExpertMemory:
        """Return the memory of a run's experts.

        `topology.expert_parallel=auto` counts as 1.
        """
        train, given = config.train, config.topology.expert_parallel
        degree = given if isinstance(given, int) else 1
        chunks, parts = chunks_and_parts(config, tokens, e, degree)
        return ExpertMemory(
            config.model, tokens, train.micro_batch, e, degree, chunks, parts,
            recompute=train.activation_checkpoint != "none", z_loss=bool(train.router_z_loss),
        )  # fmt: skip

    @property
    def _by_chunk(self) -> bool:
        """Whether the experts have the backward pass of several chunks or of `expert_parallel`."""
        return self.chunks > 1 or self.degree > 1

    @property
    def decision(self) -> int:
        """The router's decision: experts and order of the pairs, and loads (`routing.Decision`).

        It stays until the end of the backward pass. If rows travel, so do their orders here and
        there (`expert_parallel.Tile`).
        """
        moe = self.model.moe
        loads = _HIGH * self.sequences * moe.experts
        numbers = (7 if self.degree > 1 else 3) * _INT64
        if self.degree > 1 and self.recompute:
            numbers += _HIGH  # scores that arrived
        return numbers * self._pairs + _HIGH * moe.experts + loads

    @property
    def saved(self) -> int:
        """Tensors that autograd saves, without the inputs of the layer's norm and of the experts.

        - the router: scores E (with a z-loss, the logits, too), the chosen scores and their normed
          values K each
        - gate and up of all pairs, 2 e S I, and rows and scores that arrived, S (e C + 4). A
          checkpointed layer keeps neither if it has several chunks or rows travel
        - the shared MLP: gate, up, silu(gate) and the product, e J each.
        """
        moe = self.model.moe
        router = (1 + self.z_loss) * moe.experts
        router += moe.top_k * (2 if moe.normalize else 1)
        # Numbers of one token
        router += self.z_loss + (moe.score == SIGMOID) + moe.normalize + self.sequences
        return _HIGH * router * self.tokens + self._products + self.shared

    @property
    def _products(self) -> int:
        if self._by_chunk and self.recompute:
            return 0
        arrived = self._pairs * (self.e * self.model.hidden_size + _HIGH)
        return 2 * self._wide + (arrived if self.degree > 1 else 0)

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

        The moments are those of `_Experts.backward` or of `_by_chunks`. All of them hold the
        gradients of logits and scores and, with a shared MLP, of the experts' input:

        - scores: rows and gradient of the experts' output, and three tensors of an expert's width;
          their product with the scores is float32
        - gate: six tensors of an expert's width
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
        matrix = e * self._matrix
        shared = 3 * e * moe.shared_size * model.hidden_size
        sums = _HIGH * self.tokens * model.hidden_size + hidden * low
        held = 2 * _HIGH * self.tokens * moe.experts + (hidden if moe.shared_size else 0)
        if self._by_chunk:
            largest = self._travelling() if self.degree > 1 else self._by_chunks()
            return held + hidden + largest + shared - weights
        moments = (
            (rows + 3 * wide + (2 if low else 1) * in_high, 0),
            (rows + 4 * wide + in_high * low, 1),
            (6 * wide, 1),
            (2 * wide + rows, 3),
            (2 * wide + 2 * rows + sums, 3),
        )
        largest = max(size + matrices * matrix for size, matrices in moments)
        return held + largest + shared - weights

    def _by_chunks(self) -> int:
        """Return the bytes of a chunk and of the gradients of the weights, if no row travels.

        A chunk holds rows of the experts' input and of the gradient of their output, and gate and
        up if they are recomputed. To these it adds, in turn:

        - scores: three tensors of an expert's width, and their product with the scores in float32
        - down: four tensors of an expert's width, and the gradient of the weight
        - gate: six tensors of an expert's width, without the gradient of the output
        - weights: the gradients of gate and up, and of one weight in the compute dtype
        - input: the gradient of gate and up, and rows of the input's gradient, twice; their sum

        More than two chunks add up the gradients of the weights in float32.
        """
        rows, wide = self._sizes(self.chunks)
        low, matrix = self.e < _HIGH, self.e * self._matrix
        in_high = _HIGH * wide // self.e
        in_float = self.chunks > ONE_ADDITION
        gradients = self._gradients
        before = gradients if self.chunks > 1 else 0  # of earlier chunks
        again = 2 * wide if self.recompute else 0
        moments = (
            2 * rows + again + before,
            2 * rows + again + 3 * wide + (2 if low else 1) * in_high + before,
            2 * rows + again + 4 * wide + matrix + before,
            rows + again + 6 * wide + (before or matrix),
            rows + 2 * wide + 2 * matrix + (before or matrix),
            2 * rows + 2 * wide + self._sums + gradients,
            gradients + 2 * matrix * (in_float and low),
        )
        return max(moments)

    def _travelling(self) -> int:
        """Return the bytes of a part of the experts and of the gradients, if rows travel.

        A message has the rows that leave, until its wait, and those that arrive. A part holds rows
        of the experts' input and of the gradient of their output, and gate and up if they are
        recomputed. To these it adds, in turn:

        - scores: three tensors of an expert's width, and their product with the scores in float32
        - gate: seven tensors of an expert's width
        - input: three tensors of an expert's width, rows of the input's gradient, those that leave,
          and the gradients that return to all tokens of the chunk
        - weights: the same without the rows of the input's gradient, and the gradient of a weight
        - sum: the gradients of the chunk, and their sum.

        While a part computes, inputs of the next part and results of the previous one travel.
        """
        units = self.chunks * self.parts
        rows, wide = self._sizes(units)
        leave = rows * (self.degree - 1) // self.degree
        returned, _ = self._sizes(self.chunks)
        low, matrix = self.e < _HIGH, self.e * self._matrix
        in_high = _HIGH * wide // self.e
        in_float = self.chunks > ONE_ADDITION
        gradients = self._gradients
        before = gradients if units > 1 else 0
        again = 2 * wide if self.recompute else 0
        inputs = 2 if self.recompute else 1  # else `saved` has one of them
        back = returned * (2 if self.chunks > 1 else 1)  # also of the previous chunk
        held = before + returned * (units > 1)
        piece = matrix // self.parts
        moments = (
            inputs * 2 * leave + held,
            (inputs + 1) * rows + again + held,
            inputs * rows + again + 3 * wide + (2 if low else 1) * in_high + held,
            inputs * rows + again + 7 * wide + held,
            (inputs + 1) * rows + 3 * wide + leave + back + before,
            inputs * rows + 3 * wide + leave + back + piece + before,
            (inputs - 1) * rows + 2 * wide + leave + back + 2 * piece + (before or matrix),
            back + self._sums + gradients,
            gradients + 2 * matrix * (in_float and low),
        )
        elsewhere = 2 * inputs * leave * (units > 1) + leave * (units > 2)
        return max(moments) + elsewhere

    def _sizes(self, units: int) -> tuple[int, int]:
        """Return the bytes of one unit's rows, and of a tensor of an expert's width."""
        pairs = -(-self._pairs // units)
        model = self.model
        return self.e * pairs * model.hidden_size, self.e * pairs * model.moe.expert_size

    @property
    def _gradients(self) -> int:
        """Bytes of the gradients of all weights; float32 if more than two chunks add them up."""
        return 3 * (_HIGH if self.chunks > ONE_ADDITION else self.e) * self._matrix

    @property
    def _sums(self) -> int:
        """Bytes of the sum of the rows of a chunk, which is float32 first."""
        size = _HIGH + self.e * (self.e < _HIGH)
        return size * -(-self.tokens // self.chunks) * self.model.hidden_size

    @property
    def _matrix(self) -> int:
        """Number of elements of one projection of the worker's experts."""
        moe = self.model.moe
        return moe.experts // self.degree * moe.expert_size * self.model.hidden_size

    @property
    def _pairs(self) -> int:
        return self.tokens * self.model.moe.top_k

    @property
    def _wide(self) -> int:
        """Bytes of a tensor of an expert's width, for all pairs."""
        return self.e * self._pairs * self.model.moe.expert_size
