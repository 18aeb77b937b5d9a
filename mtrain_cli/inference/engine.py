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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli import install_command
from mtrain_cli.attention.partials import has_triton
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.config.problem import ConfigError, cli_option
from mtrain_cli.inference.decode_step import DecodeStep, KvCache
from mtrain_cli.inference.limits import MemoryNeed
from mtrain_cli.inference.model_source import ModelSource, load_decoder
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.scorer import Scorer, attention_of, device_of
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.layer_groups import make_tensor_group
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import TENSOR, make_parameter_mesh
from mtrain_cli.training.resolution import resolve_run

END, LENGTH = "end", "length"
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
        self.decoder, self.step = load_decoder(
            source, self.choices.dtype, self.device, report, tensor, mesh
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
        """Return how many tokens of a prompt each place holds. They come before its padding."""
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
