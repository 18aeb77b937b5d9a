"""Check prompts before anything is computed: ids, positions, mask and memory. Truncate nothing."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import CACHED_MASK_BYTES, MASK_BYTES, ROWS_PER_CALL, SdpaKernel
from mtrain_cli.config.mask_settings import MASKS, MaskSettings
from mtrain_cli.config.option import MOST_TOKENS
from mtrain_cli.config.problem import cli_option
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_bytes, with_count
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.launch.environment import Environment, host_memory
from mtrain_cli.model.huggingface import parameter_shapes
from mtrain_cli.parallel.layout import Contiguous
from mtrain_cli.training.attention_memory import IndexShape
from mtrain_cli.training.resolution import ResolvedRun, resolve_run

GIB = 2**30
MOST_TOGETHER = 8  # prompts whose tokens are generated together
_USABLE = 0.92  # share of the memory that tensors may take; the rest is for libraries
_SCORE_BYTES = 8  # of a logit, in float64
# Temporary tensors of a CPU call, in bytes of its mask: the mask, comparisons, and what the index
# allows. Measured under every pattern: at most 5.4, and 1.8 without one.
_BY_INDEX, _DENSE_CALL = 6, 2
_LEAST_ROWS = 16  # of a CPU call

Bytes = tuple[int, int]  # kept from layer to layer; temporary, while a layer computes attention


def require_prompts(
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    *,
    beyond: bool = False,
    names: Sequence[str] = (),
) -> None:
    """Check the ids and the lengths of prompts.

    Raises ConfigError if a prompt is empty, has an id outside the vocabulary or is too long, or new
    tokens do not see the whole cache under the model's mask.

    Args:
        prompts: token ids.
        max_new: most tokens to generate for a prompt. 0 if the prompts are only scored.
        beyond: allow positions for which the model was not trained.
        names: name of each prompt, for messages; by default its number.
    """
    vocabulary, most = source.config.model.vocab_size, source.max_position
    numbered = [f"prompt {n}" for n in range(1, len(prompts) + 1)]
    problems = []
    for name, ids in zip(
        names or (numbered if len(prompts) > 1 else ["the prompt"]), prompts, strict=True
    ):
        outside = next(((at, one) for at, one in enumerate(ids) if not 0 <= one < vocabulary), None)
        if not ids:
            problems.append(f"{name} is empty; give at least one token")
        elif outside is not None:
            problems.append(
                f"{name} has the id {outside[1]} at token {outside[0] + 1}; the model's "
                f"{vocabulary:,} ids are 0 to {vocabulary - 1}"
            )
        elif len(ids) + max_new > most and not beyond:
            fits = most - len(ids)
            exceeds = f"; with {cli_option('max_new', max_new)} it exceeds"
            exceeds = exceeds if max_new else ", more than"
            smaller = cli_option("max_new", fits) if fits > 0 else "a shorter prompt"
            problems.append(
                f"{name} has {with_count(len(ids), 'token')}{exceeds} the {most:,} positions of "
                f"the model. Give {smaller}, or add {cli_option('beyond', True)} to go on anyway"
            )
    if problems:
        raise ConfigError(*problems)
    if max_new:
        require_whole_cache(source.config.mask, max(len(ids) for ids in prompts) + max_new)


def longer_than_trained(source: ModelSource, tokens: int) -> str:
    """Return a warning if a run trained only on shorter sequences, or ""."""
    trained = source.config.seq
    if source.is_folder or tokens <= trained:
        return ""
    return (
        f"the run trained only on sequences of {trained:,} tokens (seq={trained}); longer ones may "
        "score worse"
    )


def require_known_ids(
    ids: Sequence[int] | np.ndarray, vocabulary: int, where: str, tokenizer: str
) -> None:
    """Raise ConfigError if an id of a text is not among the model's ``vocabulary`` ids.

    where, tokenizer: what needs the text, and the subject of the message.
    """
    array = np.asarray(ids)
    outside = array[(array < 0) | (array >= vocabulary)]
    if len(outside):
        raise ConfigError(
            f"{tokenizer} gives the id {outside[0]} for {where}, but the model's {vocabulary:,} "
            f"ids are 0 to {vocabulary - 1}. Give the tokenizer of the model"
        )


def require_whole_cache(mask: MaskSettings, tokens: int) -> None:
    """Raise ConfigError unless new tokens see all earlier keys and no later ones, up to ``tokens``.

    Under a prefix-LM, this is so for all queries after the prefix.
    """
    if mask.caches_whole >= tokens:
        return
    problem = f"mask {mask.describe()}: a new token sees the whole cache"
    if window := int(mask.caches_whole):
        raise ConfigError(
            f"{problem}, but this model's window ends after {window:,} tokens. Give prompts that, "
            f"with the new tokens, have at most {window:,} tokens"
        )
    fact = "sees later tokens, too" if mask.shows_later_keys else "does not see all earlier tokens"
    always = [name for name, kind in MASKS.items() if kind.caches_whole == math.inf]
    raise ConfigError(
        f"{problem}, but under this model's mask a token {fact}. Generate with a run that has "
        f"mask={', '.join(always)} or sliding_window"
    )


def require_hidden_labels(config: Config, what: str) -> None:
    """Raise ConfigError if ``what`` needs losses, but queries see later tokens."""
    if config.mask.shows_later_keys:
        raise ConfigError(
            f"mask {config.mask.describe()}: {what} needs the loss of each token, but under this "
            "mask the model sees tokens that it predicts. Give a model with mask=causal or another "
            "mask without later tokens"
        )


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
            return index.kept * len(config.pattern_layers), derived
        if kernel == "triton":
            derived += index.listed_pairs(layout.tokens_per_worker, layout.padded_seq)
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
        return min(CACHED_MASK_BYTES, whole), _DENSE_CALL * call


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of one worker, by arithmetic, in bytes."""

    capacity: int  # memory of the worker
    fixed: int  # weights and logits
    per_cached: int  # of a token in the cache
    per_token: int  # of a token of a prompt while a layer computes it
    per_attended: int  # of a token in attention, in addition
    per_tiled: int  # of a token in the MLP, in addition
    tile: int  # most bytes in the MLP; 0 means no limit
    workers: int  # number of workers that share a prompt
    attention: AttentionNeed  # index and masks

    @staticmethod
    def of(
        config: Config, environment: Environment, choices: ResolvedRun | None = None
    ) -> MemoryNeed:
        """Return the needs on a context group. ``choices``: by default as in a run."""
        choices = choices or resolve_run(config, environment)
        config = config.of_worker  # the weights and the keys of its heads
        model, workers = config.model, environment.dims.cp
        itemsize = choices.dtype.itemsize
        kv = 2 * model.num_kv_heads * model.head_dim
        width = model.num_heads * model.head_dim
        # Norm; q, k and v; q again in float32 while it is rotated; gathered keys and values.
        attended = (2 * model.hidden_size + 2 * width + 2 * kv) * itemsize + 6 * width
        attended += kv * workers * itemsize if workers > 1 else 0
        parameters = sum(map(math.prod, parameter_shapes(model).values()))
        return MemoryNeed(
            capacity=_worker_memory(config, environment),
            fixed=parameters * itemsize + MOST_TOGETHER * model.vocab_size * (4 + 4 * _SCORE_BYTES),
            per_cached=model.num_layers * kv * itemsize,
            # Residual stream, result of attention, result; cosine and sine in float32.
            per_token=(2 * model.hidden_size + width) * itemsize + 8 * model.head_dim,
            per_attended=attended,
            per_tiled=(4 * model.intermediate_size + 3 * model.hidden_size) * itemsize,
            tile=config.train.tile_mib << 20,
            workers=workers,
            attention=AttentionNeed(config, choices, environment.device, workers),
        )

    def bytes(self, prompt: int, max_new: int, together: int = 1) -> int:
        """Return the bytes that prompts of at most ``prompt`` tokens need on a worker."""
        held = -(-prompt // self.workers)
        cached = held + -(-max_new // self.workers)
        tiled = held * self.per_tiled
        tiled = min(tiled, self.tile) if self.tile else tiled
        # A layer computes attention, then the MLP.
        kept, temporary = self.attention.of(prompt)
        layer = max(held * self.per_attended + temporary, tiled)
        work = kept + held * self.per_token + layer
        return self.fixed + together * cached * self.per_cached + work

    def fits(self, prompt: int, max_new: int, together: int = 1) -> bool:
        return self.bytes(prompt, max_new, together) <= _USABLE * self.capacity

    def longest(self, max_new: int) -> int:
        """Return the length of the longest prompt that fits; 0 if none fits."""
        lengths = range(1, MOST_TOKENS + 1)
        return bisect.bisect(lengths, False, key=lambda prompt: not self.fits(prompt, max_new))

    def require_fit(self, prompt: int, max_new: int, device: str) -> int:
        """Return how many prompts can generate together. Raises ConfigError if none fits."""
        if self.fits(prompt, max_new):
            return max(n for n in range(1, MOST_TOGETHER + 1) if self.fits(prompt, max_new, n))
        given = cli_option("max_new")
        if longest := self.longest(max_new):
            advice = (
                f", and the longest that fits has {with_count(longest, 'token')}. Give a shorter "
                f"prompt, a smaller {given} or more topology.workers"
            )
        else:
            advice = (
                f", and weights and logits alone take {format_bytes(self.fixed)}. Give a smaller "
                f"{given}, more topology.workers, or topology.tensor_parallel=N, by which N "
                "workers share the weights"
            )
        raise ConfigError(
            f"a prompt of {with_count(prompt, 'token')} with {cli_option('max_new', max_new)} "
            f"needs {format_bytes(self.bytes(prompt, max_new))} per worker for weights, keys and "
            f"values; a worker has {format_bytes(_USABLE * self.capacity)} of "
            f"{'GPU memory' if device == 'cuda' else 'memory'}{advice}"
        )


def _worker_memory(config: Config, environment: Environment) -> int:
    """Return the memory of one worker in bytes: of its GPU, or its share of the host."""
    if environment.device != "cuda":
        given = config.topology.host_memory_gib
        whole = host_memory() if isinstance(given, str) else round(given * GIB)
        return whole // environment.local_workers
    given = config.topology.gpu_memory_gib
    if not isinstance(given, str):
        return round(given * GIB)
    return torch.cuda.get_device_properties(0).total_memory
