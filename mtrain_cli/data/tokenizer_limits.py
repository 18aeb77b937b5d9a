"""Keep a hostile or broken tokenizer.json from a panic, and from texts of gigabytes.

The package ``tokenizers`` does what the file says. A chain of replacements can make a text
exponentially longer, and an expression can try exponentially many ways to match. The package then
panics, which Python sees as an exception that is no `Exception`.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mtrain_cli.config.schema import ConfigError

T = TypeVar("T")
# A tokenizer may make a text this many times as long, in bytes of UTF-8. Of the public ones known
# to us, T5's comes closest: at most 33 * 7 * 7 = 1,617 times, in theory.
MOST_GROWTH = 2048
# The most that one letter becomes, in bytes of UTF-8, measured over all of Unicode.
_LETTERS = {"NFC": 3.0, "NFD": 3, "NFKC": 11, "NFKD": 11, "BertNormalizer": 5}
_LETTERS |= {"Lowercase": 1.5, "Nmt": 1, "StripAccents": 1, "Strip": 1}
# A character map with longer replacements, in bytes, is no Unicode step: NFKC's longest has 33.
_USUAL_MAP = 33
_PARTS = ("normalizers", "pretokenizers", "decoders")  # keys of a sequence
_PROBE = 64  # repetitions; an expression that tries all ways to match them does not end


def call(place: str, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a method of the package.

    Args:
        place: the beginning of the message.

    Raises:
        ConfigError: the method raises an error or panics.
    """
    try:
        return method(*arguments, **options)
    except BaseException as error:
        # The class of a panic cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
    raise ConfigError(f"{place}: the tokenizer failed on a text ({reason}); use another tokenizer")


def require_bounded(tokenizer: Any, place: str) -> None:
    """Check what a tokenizer may do to any text, before it sees one.

    Raises:
        ConfigError: a text can become more than `MOST_GROWTH` times as long, or an expression
            backtracks too much.
    """
    growth = {"encode": _growth([tokenizer.normalizer, tokenizer.pre_tokenizer])}
    growth["decode"] = _growth([tokenizer.decoder])
    for action, factor in growth.items():
        if factor > MOST_GROWTH:
            raise ConfigError(
                f"{place}: its steps to {action} can make a text {factor:,.3g} times as long; "
                f"mtrain allows {MOST_GROWTH:,} times. Give another tokenizer."
            )
    components = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
    patterns = [step.get("pattern") for component in components for step in _steps(component)]
    if sources := {one["Regex"] for one in patterns if isinstance(one, dict) and "Regex" in one}:
        with _quiet():
            for source in sorted(sources):
                _probe(source, place)


def _steps(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder in their order."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    steps = []
    while waiting:
        step = waiting.pop()
        inner = [one for key in _PARTS for one in step.get(key, ())]
        waiting += reversed(inner)
        steps += [] if inner else [step]
    return steps


def _growth(components: list[Any]) -> float:
    """Return how many times as long a text of one byte or more can become, in bytes of UTF-8.

    Unicode steps in a row count once, by the largest: a text in a normal form stays as it is. A
    character map is such a step too if it is the first one and `_USUAL_MAP` allows it.
    """
    total = letters = 1.0
    maps = 0
    for step in [step for component in components for step in _steps(component)]:
        kind = step.get("type")
        own, is_map = _LETTERS.get(str(kind), 0.0), kind == "Precompiled"
        if is_map:
            own, maps = max(11.0, _longest(step["precompiled_charsmap"])), maps + 1
        if own and not (is_map and (maps > 1 or own > _USUAL_MAP)):
            letters = max(letters, own)
            continue
        total, letters = total * letters * max(1.0, own), 1.0
        if kind == "Replace":
            pattern, content = step["pattern"], len(step["content"].encode())
            # An expression may match before and after every letter, without one.
            found = len(pattern.get("String", "").encode())
            total *= max(1.0, content / found) if found else 1 + 2 * content
        elif kind == "Prepend":
            total += len(step["prepend"].encode())
        elif kind == "Metaspace":  # for a space, and before each word
            total *= 1 + 2 * len(step["replacement"].encode())
        elif kind == "ByteLevel":  # a byte of a letter that is not ASCII becomes two
            total *= 2
    return total * letters


def _longest(encoded: str) -> float:
    """Return the bytes of the longest replacement of a character map; infinity if it is broken."""
    # The map has the size of a trie as uint32, the trie, and replacements that end with NUL.
    try:
        content = base64.b64decode(encoded, validate=True)
    except ValueError:
        return math.inf
    start = 4 + int.from_bytes(content[:4], "little")
    return max(map(len, content[start:].split(b"\0"))) if 4 < start <= len(content) else math.inf


def _probe(source: str, place: str) -> None:
    """Let an expression match runs of its own letters, and of its pairs of neighbours."""
    import tokenizers

    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(source), "isolated")
    pairs = {first + second for first, second in itertools.pairwise(source)}
    for part in [*sorted({*source, *"a 1\n"})[:200], *sorted(pairs)[:200]]:
        try:
            call("", split.pre_tokenize_str, part * _PROBE + "\0")
        except ConfigError:
            shown = json.dumps(source if len(source) <= 60 else f"{source[:60]}...")
            raise ConfigError(
                f"{place}: its regular expression {shown} backtracks too much on {_PROBE} "
                f"repetitions of {json.dumps(part)}; use another tokenizer"
            ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a panic prints from stderr. Only for moments in which nothing else prints."""
    with tempfile.TemporaryFile() as nowhere:
        try:
            kept = os.dup(2)
        except OSError:  # stderr is closed
            yield
            return
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
