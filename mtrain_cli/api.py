"""mtrain from Python: compose a configuration, train it, and run a model.

>>> from mtrain_cli import api
>>> run = api.train(api.compose("seq=512", "train.steps=20"))
>>> model = api.load(run, attention="dense")
>>> model.generate("def main():", max_new=20)[0].text

A mistake raises `ConfigError`, which has one line per mistake. Under torchrun, initialize
``torch.distributed`` before `load`. All processes then share each prompt, and must call the same
methods.
"""

from __future__ import annotations

import os
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.problem import ConfigError, Names
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count

if TYPE_CHECKING:
    import torch
    from lm_eval.api.model import LM
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from mtrain_cli.inference.engine import Engine
    from mtrain_cli.inference.model_source import ModelSource
    from mtrain_cli.inference.text import TextCodec
    from mtrain_cli.launch.environment import Environment
    from mtrain_cli.library.context_parallel import ContextParallel

__all__ = [
    "Config", "ConfigError", "Generation", "Model", "TokenScores", "compose", "context_parallel",
    "load", "train",
]  # fmt: skip

Prompt = str | Sequence[int]
ARGUMENTS = Names(options=False, lacks=("prompt_file",))
_TYPES: dict[type, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a text"),
    Path: ((str, os.PathLike), "a path"),
}


def checked(kind: type, **arguments: object) -> Any:
    """Return the values of arguments as ``kind``, a single one bare; ConfigError for others."""
    allowed, expected = _TYPES[kind]
    for name, value in arguments.items():
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(name, value, expected)
    values = [kind(value) for value in arguments.values()]
    return values if len(values) > 1 else values[0]


def compose(*overrides: str, config_dir: str | os.PathLike[str] | None = None) -> Config:
    """Return the configuration that `mtrain train` makes from the same arguments.

    overrides: settings such as ``"model=qwen3b"`` and ``"seq=512k"``.
    config_dir: folder with your own option files.
    """
    from mtrain_cli.composition.compose import compose as compose_words

    folder = None if config_dir is None else checked(Path, config_dir=config_dir)
    return compose_words([checked(str, override=one) for one in overrides], folder)


def train(config: Config) -> Path:
    """Train a new run on this machine as `mtrain train` does. Return the folder of the run.

    Raises:
        ConfigError: this machine cannot run the configuration. `train` leaves no folder.
        RunError: training failed or was stopped.
    """
    from mtrain_cli.commands.train import train_new_run

    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: must be a configuration from compose")
    return train_new_run(config)


def context_parallel(
    group: ProcessGroup | DeviceMesh | None = None,
    *overrides: str,
    seq: int | str,
    layout: str = "auto",
    exchange: str = "auto",
    sparsity: str = "dense",
    mask: str = "causal",
    kernel: str = "auto",
) -> ContextParallel:
    """Return attention over sequences that the processes of a group share, for any model and loop.

    All processes of the job call this together, each with its own group.

    Args:
        group: a process group, or one dimension of a mesh; None for all processes.
        overrides: settings under ``sparsity``, ``mask`` and ``topology``, model.num_layers if
            ``sparsity.dense_layers`` is not 0, and train.activation_checkpoint=full so that
            checkpointed layers do not keep the output of attention.
        seq: tokens of each sequence, such as 131072 or ``"128k"``.
        layout, exchange, kernel: values of topology.layout, topology.exchange and train.kernel.
        sparsity, mask: names of a pattern and of a mask.

    Raises:
        ConfigError: a setting is wrong, or the groups do not divide the processes.
    """
    from mtrain_cli.library.context_parallel import ContextParallel
    from mtrain_cli.library.settings import Processes, compose_settings

    processes = Processes.of(group)
    config = compose_settings(
        len(processes.ranks), [checked(str, override=one) for one in overrides], seq=str(seq),
        layout=layout, exchange=exchange, sparsity=sparsity, mask=mask, kernel=kernel,
    )  # fmt: skip
    return ContextParallel(config, processes)


@dataclass(frozen=True)
class Generation:
    """What a model generated for one prompt. Comparison ignores the times.

    text: the new text; None if the model has no tokenizer.
    ids: the new token ids, without the id that ended the text.
    finish: ``end`` if an end token came, ``length`` after ``max_new`` tokens.
    decode_seconds: time of the new tokens after the first, of all prompts computed together.
    """

    text: str | None
    ids: list[int]
    prompt_tokens: int
    finish: str
    prefill_seconds: float = field(compare=False)
    decode_seconds: float = field(compare=False)


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens of a text, except the first, on the CPU.

    losses: -log p(token | earlier tokens) in nats, float32 [tokens - 1].
    is_greedy: whether greedy decoding would choose the token, bool [tokens - 1]. If several tokens
        are equally likely, the lowest id counts as the choice.
    """

    losses: torch.Tensor
    is_greedy: torch.Tensor


class Model:
    """A model that `load` has loaded."""

    def __init__(self, engine: Engine, codec: TextCodec) -> None:
        self._engine, self._codec = engine, codec

    @property
    def source(self) -> ModelSource:
        """The path and the configuration of the model."""
        return self._engine.source

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt. The model needs a tokenizer."""
        with ARGUMENTS.in_errors():
            return self._codec.encode(checked(str, text=text))

    @ARGUMENTS.in_errors()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        ignore_end: bool = False,
        beyond: bool = False,
    ) -> list[Generation]:
        """Continue prompts, and return one `Generation` for each.

        Args:
            prompts: a prompt or several, as text or as token ids.
            max_new: maximum number of tokens to generate for a prompt.
            temperature, top_p, top_k, seed: see `inference.sampling.Sampling`.
            ignore_end: continue after a token that ends a text.
            beyond: allow more positions than the model was trained for.

        Raises:
            ConfigError: an argument has a wrong type or is out of range, or a prompt is empty or
                too long, has an id outside the vocabulary, or does not fit the memory.
        """
        from mtrain_cli.inference.limits import require_prompts
        from mtrain_cli.inference.sampling import Sampling

        sampling = Sampling(
            *checked(float, temperature=temperature, top_p=top_p),
            *checked(int, top_k=top_k, seed=seed),
        )
        sampling.require_valid()
        if checked(int, max_new=max_new) < 1:
            raise ConfigError(f"max_new={max_new}: must be at least 1")
        ignore_end, beyond = checked(bool, ignore_end=ignore_end, beyond=beyond)
        given = parsed_prompts("prompts", prompts)
        ids = [self.encode(one) if isinstance(one, str) else one for one in given]
        if not ids:
            return []
        require_prompts(self.source, ids, max_new, beyond=beyond)
        stop = frozenset() if ignore_end else self._codec.stop
        return [
            Generation(
                text=self._codec.decode(c.ids),
                ids=c.ids,
                prompt_tokens=c.prompt_tokens,
                finish=c.finish,
                prefill_seconds=c.prefill_seconds,
                decode_seconds=c.decode_seconds,
            )
            for c in self._engine.generate(ids, int(max_new), sampling, stop)
        ]

    def token_losses(self, tokens: Prompt, *, beyond: bool = False) -> torch.Tensor:
        """Return the losses of `token_scores`, float32 [tokens - 1], in nats."""
        return self.token_scores(tokens, beyond=beyond).losses

    @ARGUMENTS.in_errors()
    def token_scores(self, tokens: Prompt, *, beyond: bool = False) -> TokenScores:
        """Return the losses of all tokens except the first, and whether each is the most likely.

        The model attends with its pattern, as for a prompt.

        Args:
            beyond: allow more positions than the model was trained for.

        Raises:
            ConfigError: there are fewer than two tokens, too many, or ids outside the vocabulary,
                an argument has a wrong type, or the model sees the tokens that it predicts.
        """
        from mtrain_cli.inference.limits import require_hidden_labels, require_prompts

        beyond = checked(bool, beyond=beyond)
        ids = self.encode(tokens) if isinstance(tokens, str) else token_ids("tokens", tokens)
        if len(ids) < 2:
            raise ConfigError(
                f"tokens: has {with_count(len(ids), 'token')}; give at least 2, since the first "
                "has no loss"
            )
        require_hidden_labels(self.source.config, "a score")
        require_prompts(self.source, [ids], 0, beyond=beyond)
        return TokenScores(*self._engine.token_scores(ids))

    @ARGUMENTS.in_errors()
    def lm_eval(self, *, beyond: bool = False) -> LM:
        """Return this model for `lm_eval.simple_evaluate`, which needs the extra lm-eval.

        Requests that the model cannot compute raise `ConfigError`. No request is truncated.
        beyond: allow more positions than the model was trained for.
        """
        from mtrain_cli.evaluation.runner import find

        if (lm_eval := find("lm-eval")) is None:
            raise ConfigError("lm_eval: this installation lacks mtrain_extras; reinstall mtrain")
        beyond = checked(bool, beyond=beyond)
        model: LM = lm_eval.adapter(self._engine, self._codec, self.source, beyond)
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, name, ARGUMENTS.in_errors()(getattr(model, name)))
        return model


@ARGUMENTS.in_errors()
def load(
    path: str | os.PathLike[str],
    *overrides: str,
    attention: str | None = None,
    device: str = "auto",
    tokenizer: str | os.PathLike[str] | None = None,
) -> Model:
    """Load a model into this process.

    If the newest checkpoint of a run is damaged or incomplete, `load` uses an older one and gives a
    warning (`warnings`).

    In a group of torch.distributed, all processes share each prompt. Groups of
    ``topology.tensor_parallel`` processes share each layer. ``topology.workers`` may only be the
    number of processes.

    Args:
        path: a Hugging Face folder, a run, or a checkpoint.
        overrides: settings under ``sparsity`` and ``topology``, train.kernel, train.dtype and
            train.compile.
        attention: the pattern for prompts, such as ``"dense"``; None for the pattern of the run.
        device: ``cpu``, ``cuda`` or ``auto``.
        tokenizer: folder with a tokenizer to use instead of the model's.

    Raises:
        ConfigError: the path names no model, its weights are damaged, or a setting is wrong.
    """
    model = checked(Path, path=path)
    folder = None if tokenizer is None else checked(Path, tokenizer=tokenizer)
    words = [checked(str, override=one) for one in overrides]
    words.append(f"topology.device={checked(str, device=device)}")
    if attention is not None:
        both = next((one for one in words if one.startswith(("sparsity=", "sparsity.pat"))), None)
        if both is not None:
            raise ConfigError(f"attention={attention}: {both} gives a pattern, too; leave one out")
        words.append(f"sparsity={checked(str, attention=attention)}")
    source = _open(model, words, attention)
    from mtrain_cli.inference.engine import Engine
    from mtrain_cli.inference.text import open_codec

    codec = open_codec(source, folder)
    environment = _environment(source.config)

    def warn(line: str) -> None:
        if not environment.rank:
            warnings.warn(line, stacklevel=2)

    return Model(Engine(source, environment, warn), codec)


def _open(path: Path, words: list[str], attention: str | None) -> ModelSource:
    from mtrain_cli.config.pattern_settings import PATTERNS
    from mtrain_cli.config.suggest import no_such
    from mtrain_cli.inference.model_source import open_source, servable_patterns

    if attention is not None and attention not in PATTERNS:
        reason = no_such("pattern", attention, servable_patterns())
        raise ConfigError(f"attention={attention}: {reason}")
    if _group_size() > 1 and not any(one.startswith("topology.workers=") for one in words):
        words = ["topology.workers=auto", *words]
    with Names(other={} if attention is None else {"sparsity": "attention"}).in_errors():
        return open_source(path, words)


def _group_size() -> int:
    """Return the number of processes of torch.distributed; 1 without a group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _environment(config: Config) -> Environment:
    """Return the environment of this process: alone, or in the group of torch.distributed."""
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.job import Job

    world = _group_size()
    if world > 1:
        import torch.distributed as dist

        rank = dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        job = Job("torchrun", rank, world, local_rank, local_size, master_addr="", master_port=0)
        return resolve_environment(config, job=job)
    environment = resolve_environment(config)
    if environment.dims.workers > 1:
        raise ConfigError(
            f"topology.workers={environment.dims.workers}: this process computes alone. Use "
            "`mtrain generate`, or start the processes and torch.distributed with torchrun"
        )
    return environment


def token_ids(name: str, value: object) -> list[int]:
    """Return token ids, or raise ConfigError for anything else."""
    ids = []
    for at, item in enumerate(map(_plain, _items(name, value, "a text or token ids")), 1):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise ConfigError(f"{name}: token {at} is {reprlib.repr(item)}; ids are whole numbers")
        ids.append(int(item))
    return ids


def parsed_prompts(name: str, value: object) -> list[str | list[int]]:
    """Return a list of prompts, each a text or token ids. A single prompt becomes a list of one."""
    value = _plain(value)
    if isinstance(value, str):
        return [value]
    items = [_plain(one) for one in _items(name, value, "a text, token ids, or a list of these")]
    if items and isinstance(items[0], Real):
        return [token_ids(name, items)]
    return [
        item if isinstance(item, str) else token_ids(f"{name}: prompt {at}", item)
        for at, item in enumerate(items, 1)
    ]


def _items(name: str, value: object, expected: str) -> list[object]:
    value = _plain(value)
    # Bytes would pass as ids, and a set has no order.
    wrong = isinstance(value, str | bytes | bytearray | Mapping | Set)
    if wrong or not isinstance(value, Iterable):
        raise _wrong(name, value, expected)
    return list(value)


def _plain(value: object) -> object:
    """Return a tensor or an array as a list or a number."""
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name}={reprlib.repr(value)}: must be {expected}")
