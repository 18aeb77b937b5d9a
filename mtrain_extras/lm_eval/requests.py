"""What lm-eval asks of a model: scores of continuations, and texts that go on until a string."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.problem import ConfigError, cli_option
from mtrain_cli.inference.limits import require_whole_cache
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.sampling import Sampling

Pair = tuple[list[int], list[int]]  # ids of a context and of its continuation
Score = tuple[float, bool]  # log p of the continuation, and whether it is greedy
MOST_NEW = 256  # tokens to generate if a task gives no number, as in lm-eval's own models
# Names that tasks use for the number of new tokens, the first given counts.
_MOST_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = (*_MOST_NEW, "until", "do_sample", "temperature", "top_p", "top_k")
GREEDY = Sampling()


@dataclass(frozen=True)
class Continuing:
    """How to go on with a prompt."""

    max_new: int  # most tokens to generate
    until: tuple[str, ...] = ()  # strings that end the text. The text does not contain them.
    sampling: Sampling = GREEDY

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Continuing:
        """Return what the generation settings of a task mean; ConfigError for unknown ones."""
        for key, value in settings.items():
            if key not in _KNOWN:
                raise ConfigError(
                    f"generation_kwargs {key}={value}: mtrain does not support this setting; "
                    f"allowed: {', '.join(_KNOWN)}"
                )
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        if not all(isinstance(one, str) for one in until):
            raise ConfigError(f"generation_kwargs until={until}: must be texts")
        given = [settings[key] for key in _MOST_NEW if settings.get(key) is not None]
        sampled = settings.get("do_sample")
        temperature = settings.get("temperature", 1.0 if sampled else 0.0)
        try:
            max_new = int(given[0]) if given else MOST_NEW
            sampling = Sampling(
                float(temperature) if sampled is not False else 0.0,
                float(settings.get("top_p") or 1.0),
                int(settings.get("top_k") or 0),
            )
        except (TypeError, ValueError):
            raise ConfigError(f"generation_kwargs {dict(settings)}: must be numbers") from None
        if max_new < 1:
            raise ConfigError(f"generation_kwargs max_gen_toks={max_new}: must be at least 1")
        sampling.require_valid()
        return Continuing(max_new, tuple(one for one in until if one), sampling)

    def cut(self, text: str) -> str:
        """Return a text up to the first string that ends it."""
        for one in self.until:
            text = text.partition(one)[0]
        return text


def request_names(prompts: Sequence[list[int]], how: Continuing) -> list[str]:
    """Return a name for the text that follows each prompt, which does not depend on the others.

    Equal greedy texts have one name. Each sample of one prompt is another, so its name counts them.
    """
    about = [how.max_new, list(how.until), asdict(how.sampling)]
    copies: dict[str, int] = {}
    names = []
    for prompt in prompts:
        name = request_hash(["texts", prompt, *about])
        number = copies[name] = copies.get(name, -1) + 1 if how.sampling.temperature else 0
        names.append(f"{name}-{number}")
    return names


def request_hash(request: list[Any]) -> str:
    return hashlib.sha256(json.dumps(request, separators=(",", ":")).encode()).hexdigest()[:24]


class Answers(Protocol):
    """Answers requests. What it does not answer, it refuses with a `ConfigError`."""

    def scores(self, pairs: Sequence[Pair]) -> list[Score]: ...

    def texts(self, prompts: Sequence[list[int]], how: Continuing) -> list[str]:
        """Return the text that follows each prompt. Each sampled text has a seed of its own."""
        ...


@dataclass
class Plan:
    """Counts requests instead of answering them, and refuses those that are too long.

    positions, vocabulary: of the model.
    lengths: tokens of each request, those to generate included.
    generates: whether a request asks for a text.
    """

    positions: int
    vocabulary: int
    beyond: bool = False  # allow more tokens than the model has positions
    task: str = ""  # name of the task for messages; "" if unknown
    mask: MaskSettings = CAUSAL  # mask of the model. New tokens must see the whole cache.

    def __post_init__(self) -> None:
        self.lengths: list[int] = []
        self.generates = False

    @staticmethod
    def of(source: ModelSource, *, beyond: bool = False) -> Plan:
        """Return a plan without requests for a model."""
        config = source.config
        return Plan(source.max_position, config.model.vocab_size, beyond, mask=config.mask)

    def scores(self, pairs: Sequence[Pair]) -> list[Score]:
        for context, continuation in pairs:
            if not context or not continuation:
                part = "continuation" if context else "context"
                raise ConfigError(f"{self._place}a request has a {part} without tokens")
            self._count([*context, *continuation], -1)  # the last token needs no position
        return [(0.0, False)] * len(pairs)

    def texts(self, prompts: Sequence[list[int]], how: Continuing) -> list[str]:
        self.generates = self.generates or bool(prompts)
        for prompt in prompts:
            if not prompt:
                raise ConfigError(f"{self._place}a request has an empty prompt")
            self._count(prompt, how.max_new)
            try:
                require_whole_cache(self.mask, len(prompt) + how.max_new)
            except ConfigError as error:
                raise ConfigError(*(f"{self._place}{one}" for one in error.problems)) from None
        return [""] * len(prompts)

    @property
    def _place(self) -> str:
        return f"--tasks {self.task}: " if self.task else ""

    def _count(self, ids: list[int], new: int) -> None:
        """Count a request of these ids and some new tokens."""
        outside = next((one for one in ids if not 0 <= one < self.vocabulary), None)
        if outside is not None:
            raise ConfigError(
                f"{self._place}a request has the id {outside}; the model's "
                f"{self.vocabulary:,} ids are 0 to {self.vocabulary - 1}"
            )
        if len(ids) + new > self.positions and not self.beyond:
            room = f" and {new:,} new ones" if new > 0 else ""
            raise ConfigError(
                f"{self._place}a request has {len(ids):,} tokens{room}, more than the "
                f"{self.positions:,} positions of the model. mtrain cuts no request: leave out the "
                f"task, give a smaller {cli_option('num_fewshot')}, or add "
                f"{cli_option('beyond', True)} to go on anyway"
            )
        self.lengths.append(len(ids) + max(new, 0))
