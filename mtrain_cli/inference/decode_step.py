"""One step of decoding: compute the next token of every sequence of a batch, with its cache.

A step reads and writes tensors that stay in place, runs the same operations whatever the number of
tokens so far, and never waits for the device. A CUDA graph can therefore repeat a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.partials import merge_parts, pack_part
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.layer_groups import TensorGroup
from mtrain_cli.parallel.mesh import ContextGroup

_WARM_UP_STEPS = 3  # of a CUDA graph: compile kernels, and let libraries allocate their memory


class KvCache:
    """Keys and values of all layers on one worker.

    A worker holds the keys of the tokens that the layout gives it, and of every n-th generated
    token on n workers. Their order does not matter: a new token sees all, and keys are rotated.

    keys, values: for each layer [batch, capacity + 1, kv_heads, head_dim]. All workers write each
        token to their first free slot, so that all run the same operations, but only the worker
        that holds the token counts it. A full cache needs one more slot for this.
    used: number of slots in use of each sequence, int32 [batch].
    """

    def __init__(
        self,
        model: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = batch, capacity + 1, model.num_kv_heads, model.head_dim
        # Zeros, not arbitrary memory: kernels multiply slots that are not used by 0, and 0 times
        # NaN is NaN.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]
            for _ in range(2)
        )
        self.batch, self.capacity = batch, capacity
        self.used = torch.zeros(batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(batch, device=device)

    def store(self, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of a prompt, [1, tokens, kv_heads, head_dim]."""
        tokens = k.shape[1]
        assert tokens <= self.capacity, (tokens, self.capacity)
        self.keys[layer][row, :tokens] = k[0]
        self.values[layer][row, :tokens] = v[0]

    def take_token(self, is_held: Tensor) -> Tensor:
        """Count one more token in each sequence, and return its slots for `append`, int64 [batch].

        is_held: bool tensor on the device, whether this worker holds the token.
        """
        slots = self.used.long()
        self.used += is_held
        return slots

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store a token of each sequence, [batch, 1, kv_heads, head_dim], in its slot."""
        self.keys[layer][self._rows, slots] = k[:, 0]
        self.values[layer][self._rows, slots] = v[:, 0]


class DecodeStep:
    """Computes the next token of every sequence of a batch.

    tokens: the last token of each sequence, int64 [batch, 1]. A step replaces it by the next token.
    positions: the position of that token, int64 [batch, 1].
    logits: those of the last step, [batch, vocabulary]; None before the first step.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        kernel: Kernel,
        group: ContextGroup,
        sampling: Sampling,
        max_new: int,
        tensor: TensorGroup | None = None,
    ) -> None:
        """Allocate the tensors of a step.

        group: the workers that share the cache. All workers run all steps.
        tensor: the workers that share each layer; None if this worker computes whole layers.
        """
        self._tensor = tensor
        self._decoder, self._cache, self._kernel = decoder, cache, kernel
        self._group, self._sampling = group, sampling
        batch, device = cache.batch, cache.used.device
        self.tokens, self.positions = (
            torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.logits: Tensor | None = None
        # The number of the next token, and the random number of each token.
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(max(2, max_new), batch, dtype=torch.float64, device=device)
        self._slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self._graph: Any = None

    def begin(self, logits_BV: Tensor, positions: list[int], uniforms: list[np.ndarray]) -> None:
        """Choose the first token of each sequence of a new batch, by the logits after its prompt.

        positions: number of tokens of each prompt. uniforms: random numbers of each
            (`Sampling.uniforms`). Rows of the cache after these have no prompt.
        """
        rows = len(positions)
        numbers = torch.from_numpy(np.stack(uniforms, axis=1))
        self._uniforms[: len(numbers), :rows] = numbers.to(self._uniforms.device)
        self.tokens.zero_()
        self.positions.zero_()
        # A step first moves to the position of its token.
        lengths = torch.tensor(positions, dtype=torch.int64)
        self.positions[:rows, 0] = lengths.to(self.positions.device)
        self.tokens[:rows, 0] = self._sampling.choose(logits_BV, self._uniforms[0, :rows])
        self._agree()
        self._number.fill_(1)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()

    def copy_tokens(self) -> Callable[[], list[int]]:
        """Start to copy the tokens to the host, and return a function that waits for the copy.

        A later step does not change it, so a GPU computes that while the host reads these tokens.
        """
        if not self.tokens.is_cuda:
            tokens = self.tokens[:, 0].tolist()
            return lambda: tokens
        pinned = torch.empty(self._cache.batch, dtype=torch.int64, pin_memory=True)
        pinned.copy_(self.tokens[:, 0], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> list[int]:
            copied.synchronize()
            return pinned.tolist()

        return wait

    @torch.no_grad()
    def _compute(self) -> None:
        group = self._group
        is_held = (self._number - 1) % group.size == group.rank
        self._slots.copy_(self._cache.take_token(is_held))
        self.logits = self._decoder.head(self._hidden())[:, 0]
        uniforms_B = self._uniforms.index_select(0, self._number)[0]
        self.tokens.copy_(self._sampling.choose(self.logits, uniforms_B)[:, None])
        self._agree()
        self.positions += 1
        self._number += 1

    def _hidden(self) -> Tensor:
        """Return the hidden state of the last token of each sequence, [batch, 1, hidden]."""
        if self._tensor is None:
            return self._decoder.hidden(self.tokens, self.positions, self._attend)
        own_1R = self._tensor.own(self.tokens, 0)
        own_1RC = self._decoder.hidden(own_1R, self.positions, self._attend)
        # If the tokens do not divide among the workers, the last ones are padding.
        return self._tensor.start_gather(own_1RC[0]).wait()[: self._cache.batch, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        cache = self._cache
        cache.append(layer, k, v, self._slots)
        scale = ContextAttention.scale(q.shape[-1])
        out, lse = self._kernel.decode(q, cache.keys[layer], cache.values[layer], cache.used, scale)
        if self._group.size > 1:
            part = pack_part(out, lse)
            out, _ = merge_parts(all_gather(part, self._group.size, self._group.whole))
        return out.to(q.dtype)

    def _agree(self) -> None:
        """Give all workers the tokens of the first: GPUs of other kinds may round differently."""
        if self._tensor is not None:
            self._tensor.broadcast(self.tokens)
        if self._group.size > 1:
            dist.broadcast(self.tokens, self._group.ranks[0], group=self._group.whole)

    def capture(self) -> None:
        """Record the step as a CUDA graph, which `run` then replays. Call this before `begin`.

        The steps that this method runs leave the cache empty.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                self._cache.used.zero_()
                self._number.fill_(1)
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._number.fill_(1)
        # NCCL's watchdog asks for the state of events meanwhile, on its own thread.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._compute()
        self._graph = graph
        self._cache.used.zero_()
