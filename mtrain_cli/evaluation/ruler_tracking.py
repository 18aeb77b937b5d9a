"""RULER's variable tracking (arXiv:2404.06654, section 3): follow a chain of assignments."""

from __future__ import annotations

import string
from collections.abc import Callable

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.fitting import (
    Draft,
    Fitting,
    Prompts,
    Stream,
    TooShortError,
    find_size,
)
from mtrain_cli.evaluation.ruler_templates import NOISE, TRACKING
from mtrain_cli.evaluation.token_counts import TokenCounter

_EXAMPLE_TOKENS = 500  # most tokens of the solved example before the question
_EXAMPLE_VALUE = "12345"
_VARIABLES = 5  # in a chain, which has one hop less


class ChainPrompts(Prompts):
    """Prompts with one chain of assignments, without the solved example.

    step: as in `Prompts`.
    letters: letters in the name of a variable.
    value: draws the value of the first variable.
    """

    def __init__(self, step: int, letters: int, value: Callable[[Stream], str]) -> None:
        self.step = self.first = step
        self.reserved = self.reserved_in_search = 0
        self._letters, self._value = letters, value

    def probe(self, stream: Stream, size: int) -> str:
        """Return a prompt for the search."""
        while True:
            try:
                return self._question(stream, size).prompt
            except ValueError:
                continue  # two variables had one name, where RULER's search ends with an error

    def draw(self, stream: Stream, size: int, index: int) -> Draft:  # noqa: ARG002
        """Return a prompt with ``size`` lines of noise."""
        return self._question(stream, size)

    def _question(self, stream: Stream, size: int) -> Draft:
        names = [_name(stream, self._letters) for _ in range(_VARIABLES)]
        drawn = list(names)
        while len(set(drawn)) < _VARIABLES:
            drawn.append(_name(stream, self._letters))
        value = self._value(stream)
        if drawn != names:
            self._value(stream)  # RULER begins a second chain and fails
            raise ValueError("two variables have one name")
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(_VARIABLES - 1)]
        lines = [NOISE] * size
        places = sorted(stream.python.sample(range(size), len(chain)))
        for number, (place, link) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + number, link)
        context = "\n".join(lines).replace(". \n", ".\n")
        prompt = TRACKING.prompt.format(context=context, query=value, num_v=_VARIABLES)
        return Draft(prompt, tuple(names))


class TrackingPrompts(ChainPrompts):
    """Prompts with a solved example before the question.

    length: tokens of a sample.
    example: the solved example, with names and value to replace.
    example_tokens: its number of tokens.
    """

    def __init__(self, length: int, example: str, example_tokens: int) -> None:
        super().__init__(10 if length >= 4096 else 5, letters=5, value=_number)
        self.reserved = TRACKING.tokens
        self.reserved_in_search = TRACKING.tokens + example_tokens
        self._example = example

    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        """Return the example with other names and another value, and a question."""
        draft = super().draw(stream, size, index)
        example = self._example
        for name in example.split()[-_VARIABLES:]:
            example = example.replace(name, _name(stream, len(name)))
        example = example.replace(_EXAMPLE_VALUE, _number(stream))
        return Draft(f"{example}\n{draft.prompt}", draft.outputs)


def tracking_prompts(length: int, stream: Stream, counter: TokenCounter) -> TrackingPrompts:
    """Draw the solved example and return the prompts.

    Raises:
        ConfigError: the example has too many tokens.
    """
    solved = ChainPrompts(5, letters=3, value=lambda _: _EXAMPLE_VALUE)
    size = find_size(solved, stream, _EXAMPLE_TOKENS, counter)
    try:
        (fitted,) = Fitting(solved, stream, size, _EXAMPLE_TOKENS, counter).samples(1)
    except TooShortError as error:
        raise ConfigError(
            f"--tasks vt: the solved example has {error.shortest:,} tokens of {counter.name} and "
            f"may have {_EXAMPLE_TOKENS}; name the other tasks, or use a tokenizer with longer "
            "tokens"
        ) from None
    example = f"{fitted.draft.prompt} {' '.join(fitted.draft.outputs)}\n"
    (tokens,) = counter.exact([example])
    return TrackingPrompts(length, example, tokens)


def _name(stream: Stream, letters: int) -> str:
    return "".join(stream.python.choices(string.ascii_uppercase, k=letters))


def _number(stream: Stream) -> str:
    return str(stream.numpy.randint(10000, 99999))
