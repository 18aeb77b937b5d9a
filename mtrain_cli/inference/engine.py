"""A model that reads prompts and generates tokens, on one worker or on a context group.

A prompt is computed like a sequence of training, sharded by the layout, under the model's pattern.
Each worker stores the keys and values of its tokens. New tokens attend to all keys of all workers.
With tensor parallelism, a worker stores the keys of its heads, for the tokens of its tensor group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli import install_command
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.partials import has_triton, merge_parts, pack_part
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.config.problem import ConfigError, cli_option
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.inference.limits import MemoryNeed
from mtrain_cli.inference.model_source import ModelSource, load_decoder
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.scorer import Scorer, attention_of
from mtrain_cli.launch.environment import Environment
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.layer_groups import TensorGroup, make_tensor_group
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import TENSOR, ContextGroup, make_parameter_mesh
from mtrain_cli.sparsity.pattern import learned_state
from mtrain_cli.training.hardware import device_of
from mtrain_cli.training.resolution import resolve_run

END, LENGTH = "end", "length"
_WARM_UP_STEPS = 3  # of a CUDA graph: compile kernels, and let libraries allocate their memory
Ids = Sequence[int]
OnToken = Callable[[int, int], None]


@dataclass
class Completion:
    """The tokens generated for one prompt.

    ids: the generated ids, without the id that ended the text.
    finish: `END` if an end token came, `LENGTH` if ``max_new`` tokens were generated.
    decode_seconds: time to generate all tokens after the first, for all prompts of the batch.
    """

    prompt_tokens: int  # number of tokens of the prompt
    ids: list[int] = field(default_factory=list)
    finish: str = LENGTH
    prefill_seconds: float = 0.0  # time to compute the prompt
    decode_seconds: float = 0.0


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

    A step reads and writes tensors that stay in place, runs the same operations whatever the number
    of tokens so far, and never waits for the device, so that a CUDA graph can repeat it.

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


@dataclass(frozen=True)
class _Decoding:
    """A cache, and the step that extends its sequences by at most ``max_new`` tokens."""

    cache: KvCache
    step: DecodeStep
    max_new: int
    sampling: Sampling

    def suffices(
        self, batch: int, most: int, capacity: int, max_new: int, sampling: Sampling
    ) -> bool:
        """Return whether prompts of these sizes fit. most: largest batch worth its memory."""
        return (
            batch <= self.cache.batch <= most
            and capacity <= self.cache.capacity <= 2 * capacity
            and self.max_new >= max_new
            and self.sampling == sampling
        )


class Engine(Scorer):
    """A model on this worker. All workers call each method together.

    choices: kernel, layout, exchange and pattern for a prompt of the model's training length.
    decode_kernel: name of the kernel for new tokens.
    step: optimizer steps of the checkpoint; None for a Hugging Face folder.
    """

    def __init__(
        self,
        source: ModelSource,
        environment: Environment,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Load the model, or raise ConfigError. With several workers, the process group must exist.

        report: called with the reason why a damaged checkpoint is skipped.
        """
        timeout = timedelta(seconds=source.config.topology.timeout_s)
        tensor = make_tensor_group(
            environment.rank, environment.dims, device_of(environment), timeout
        )
        super().__init__(source.config, environment, tensor=tensor)
        self.source = source
        self.decode_kernel = self.choices.kernel.name
        if environment.device == "cuda" and self.decode_kernel != ReferenceKernel.name:
            if not has_triton():
                hint = install_command("cuda")
                raise ConfigError(f"new tokens need triton, which is not installed ({hint})")
            self.decode_kernel = "triton"
        self._kept: _Decoding | None = None
        mesh = None
        if tensor is not None:
            mesh = make_parameter_mesh(environment.dims, environment.device)[TENSOR]
        layers = range(self.config.model.num_layers)
        learned = learned_state(self.choices.pattern, self.config, layers, self.device)
        self.decoder, self.step = load_decoder(
            source, self.choices.dtype, self.device, report, tensor, mesh, learned
        )

    @torch.no_grad()
    def hidden(
        self, ids: Ids, store: Callable[[int, Tensor, Tensor], None] | None = None
    ) -> tuple[Tensor, Layout]:
        """Compute a prompt. Return this place's hidden states [1, tokens, hidden], and the layout.

        Workers of a tensor group share a place. ``store`` takes layer, k and v, padding included.
        """
        batch, layout = self._batch(ids)
        own_1RC = self.decoder.hidden(batch.tokens, batch.positions, attention_of(batch, store))
        return self._of_place(own_1RC, layout), layout

    @torch.no_grad()
    def prefill(self, ids: Ids, cache: KvCache, row: int) -> Tensor:
        """Compute a prompt into a row of the cache, and return the last logits [1, vocabulary]."""
        held = self.held(ids)[self.group.rank]

        def store(layer: int, k: Tensor, v: Tensor) -> None:
            cache.store(layer, row, k[:, :held], v[:, :held])

        x_1NC, layout = self.hidden(ids, store)
        cache.used[row] = held
        return self.decoder.head(self._last(x_1NC, layout, len(ids)))[:, 0]

    def _last(self, x_1NC: Tensor, layout: Layout, tokens: int) -> Tensor:
        """Return the hidden state of a prompt's last token, [1, 1, hidden], on all workers."""
        if self.group.size == 1:
            return x_1NC[:, tokens - 1 : tokens]
        at = [np.flatnonzero(layout.positions(r) == tokens - 1) for r in range(self.group.size)]
        owner = next(rank for rank, places in enumerate(at) if len(places))
        last = x_1NC.new_empty(1, 1, x_1NC.shape[-1])
        if owner == self.group.rank:
            place = int(at[owner][0])
            last.copy_(x_1NC[:, place : place + 1])
        dist.broadcast(last, self.group.ranks[owner], group=self.group.whole)
        return last

    def held(self, ids: Ids) -> list[int]:
        """Return how many tokens of a prompt each context rank holds, before its padding."""
        layout = resolve_run(self._config_for(len(ids)), self.environment).layout
        return [int((layout.positions(r) < len(ids)).sum()) for r in range(layout.workers)]

    def generate(
        self,
        prompts: Sequence[Ids],
        max_new: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        on_token: OnToken | None = None,
        ended: Callable[[Ids], bool] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[Completion]:
        """Generate tokens, and yield the completion of each prompt in order.

        Raises ConfigError if the keys and values of a prompt do not fit the memory.

        Args:
            prompts: token ids, checked by `limits.require_prompts`.
            stop: ids that end a text.
            on_token: called with the number of a prompt, from 0, and each of its new ids.
            ended: returns whether new ids end a text, for endings other than an id.
            seeds: seed of each prompt, so that its sample does not depend on the other prompts.
                None for the seed of ``sampling`` and the number of the prompt.
        """
        most = self._most_together(max(map(len, prompts)), max_new)
        together = min(most, len(prompts))
        # Equal on all workers: they record a CUDA graph, with its messages, together or not at all.
        held = max(max(self.held(ids)) for ids in prompts)
        # Workers share the new tokens, and no later token sees the last one.
        capacity = max(1, held + -(-(max_new - 1) // self.group.size))
        # A GPU would record its graph again for a smaller batch. A CPU would compute idle rows.
        most = most if self.device.type == "cuda" else together
        decoding = self._decoding(together, most, capacity, max_new, sampling)
        uniforms = [
            sampling.uniforms(number, max_new)
            if seeds is None
            else replace(sampling, seed=seeds[number]).uniforms(0, max_new)
            for number in range(len(prompts))
        ]
        for first in range(0, len(prompts), together):
            chosen = slice(first, first + together)

            def takes(row: int, token: int, new: list[int], first: int = first) -> bool:
                """Keep a token, and return whether it ends the text."""
                if token not in stop:
                    new.append(token)
                    if on_token is not None:
                        on_token(first + row, token)
                return token in stop or (ended is not None and ended(new))

            yield from self._generate(prompts[chosen], max_new, uniforms[chosen], takes, decoding)

    def _most_together(self, longest: int, max_new: int) -> int:
        """Return how many prompts can generate together, the least of workers of unequal memory."""
        own, problem = 0, None
        try:
            need = MemoryNeed.of(self.config, self.environment, self.choices)
            own = need.require_fit(longest, max_new, self.device.type)
        except ConfigError as error:
            problem = error
        if self.environment.dims.workers > 1:
            # On the device: the group of a Python script may serve no other tensors.
            least = torch.tensor(own, device=self.device)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            own = int(least)
        if problem is not None:
            raise problem
        if not own:
            given = cli_option("max_new", max_new)
            what = f"a prompt of {longest:,} tokens with {given}"
            raise ConfigError(f"{what} does not fit the memory of another worker; give less")
        return own

    def _decoding(
        self, batch: int, most: int, capacity: int, max_new: int, sampling: Sampling
    ) -> _Decoding:
        """Return a cache and its step: the previous ones if they suffice, recorded on a GPU."""
        sampling = replace(sampling, seed=0)  # the step gets random numbers, not the seed
        kept = self._kept
        if kept is None or not kept.suffices(batch, most, capacity, max_new, sampling):
            self._kept = kept = None  # free the memory first
            model = self.config.of_worker.model
            cache = KvCache(model, batch, capacity, self.choices.dtype, self.device)
            step = DecodeStep(
                self.decoder, cache, self.choices.kernel, self.group, sampling, max_new, self.tensor
            )
            if self.device.type == "cuda" and max_new > 1:
                step.capture()
            self._kept = kept = _Decoding(cache, step, max_new, sampling)
        return kept

    def _generate(
        self,
        prompts: Sequence[Ids],
        max_new: int,
        uniforms: list[np.ndarray],
        takes: Callable[[int, int, list[int]], bool],
        decoding: _Decoding,
    ) -> list[Completion]:
        """Generate tokens for prompts that fit the cache together."""
        cache, step = decoding.cache, decoding.step
        cache.used.zero_()
        completions, logits = [Completion(len(ids)) for ids in prompts], []
        for row, ids in enumerate(prompts):
            started = self._now()
            logits.append(self.prefill(ids, cache, row))
            completions[row].prefill_seconds = self._now() - started
        step.begin(torch.cat(logits), [len(ids) for ids in prompts], uniforms)
        open_rows = set(range(len(prompts)))
        started = self._now()
        # A GPU computes the next tokens while the host reads these, and a step after the last token
        # of all texts is wasted. A CPU would only be late.
        ahead = self.device.type == "cuda"
        for number in range(max_new):
            if number and not ahead:
                step.run()
            copied = step.copy_tokens()
            if ahead and number + 1 < max_new:
                step.run()
            for row, token in enumerate(copied()[: len(prompts)]):
                if row in open_rows and takes(row, token, completions[row].ids):
                    completions[row].finish = END
                    open_rows.remove(row)
            if not open_rows:
                break
        for completion in completions:
            completion.decode_seconds = self._now() - started
        return completions

    def _now(self) -> float:
        """Return the time in seconds, after the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
