"""A model as lm-eval wants it: it turns requests into token ids and gives them to `Answers`.

This module needs the package lm-eval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.text import TextCodec
from mtrain_extras.lm_eval.requests import Answers, Continuing, Pair, Score


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate`. It cuts no request and applies no chat template.

    positions: of the model. Only `loglikelihood_rolling` divides longer texts, into windows.
    """

    def __init__(self, codec: TextCodec, positions: int, answers: Answers) -> None:
        """Prepare a model. Raises ConfigError if there is no tokenizer."""
        super().__init__()
        _ = codec.required  # refuses a model without a tokenizer
        self._codec, self._positions, self._answers = codec, positions, answers

    @property
    def eot_token_id(self) -> int:
        """The id that begins a text without a context. Raises ConfigError without such an id."""
        if self._codec.first is None:
            raise ConfigError(
                "a request has no context, and the tokenizer has no begin or end token to begin "
                "its text"
            )
        return self._codec.first

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, by default as of a prompt, with the begin token."""
        plain = add_special_tokens is False
        return self._codec.encode_plain(string) if plain else self._codec.encode(string)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[Score]:
        return self._answers.scores([(context, rest) for _, context, rest in requests])

    def loglikelihood_rolling(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002
    ) -> list[float]:
        """Return the log-probability of each text. A long text is divided as lm-eval prescribes.

        Each window starts with the begin token, which is not scored.
        """
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            tokens, begin = self.tok_encode(request.args[0]), self._codec.begin
            tokens = tokens[len(begin) :]
            is_long = len(tokens) > self._positions
            windows = get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self._positions - is_long * len(begin),
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in windows]
            pairs += [([*begin, *context] if at else context, rest)
                      for at, (context, rest) in enumerate(own)]  # fmt: skip
            counts.append(len(own))
        scores = iter(self._answers.scores(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002
    ) -> list[str]:
        by_settings: dict[Continuing, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(Continuing.of(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for how, numbers in by_settings.items():
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            found: Sequence[str] = self._answers.texts(prompts, how)
            texts |= dict(zip(numbers, found, strict=True))
        return [texts[number] for number in range(len(requests))]
