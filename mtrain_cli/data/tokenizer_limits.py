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
# to us, T5's comes closest: at most 11 * 7 * 7 = 539 times, in theory.
MOST_GROWTH = 1024
# The most that one letter becomes, in bytes of UTF-8, measured over all of Unicode.
_LETTERS = {"NFC": 3.0, "NFD": 3, "NFKC": 11, "NFKD": 11, "BertNormalizer": 5}
_LETTERS |= {"Lowercase": 1.5, "Nmt": 1, "StripAccents": 1, "Strip": 1}
# The most by which a character map may grow a text and still count as a Unicode step: that of NFKC
# has a replacement of 33 bytes.
_USUAL_MAP = 33 / 2
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

    Unicode steps in a row count once, by the largest: a text in a normal form stays as it is. The
    first character map is one of them, as in ALBERT's; each further one multiplies.
    """
    total = letters = 1.0
    maps = 0
    for step in [step for component in components for step in _steps(component)]:
        kind = step.get("type")
        own = _LETTERS.get(str(kind), 0.0)
        if kind == "Precompiled":
            own, maps = _map_growth(step["precompiled_charsmap"]), maps + 1
        if own and (kind != "Precompiled" or (maps == 1 and own <= _USUAL_MAP)):
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


def _map_growth(encoded: str) -> float:
    """Return the growth by a character map of SentencePiece; infinity if it cannot be read.

    The map has the size of a double-array trie of uint32, the trie, and replacements that end with
    NUL. A key of one byte counts as it is; a longer key may have the longest replacement.
    """
    try:
        content = base64.b64decode(encoded, validate=True)
        start = 4 + int.from_bytes(content[:4], "little")
        trie, texts = memoryview(content[4:start]).cast("I"), content[start:]
        if len(content) < start or not trie:
            return math.inf
    except (ValueError, TypeError):
        return math.inf
    longest = max(map(len, texts.split(b"\0")))
    growth = max(11.0, longest / 2)
    root = _offset(trie[0])
    for letter in range(1, 256):
        at = root ^ letter
        if at < len(trie) and trie[at] & 0x800001FF == 0x100 | letter:  # a leaf
            at ^= _offset(trie[at])
            if at < len(trie):
                growth = max(growth, len(texts[trie[at] & 0x7FFFFFFF :].partition(b"\0")[0]))
    return growth


def _offset(unit: int) -> int:
    """Return the distance from a node of a double-array trie to its children."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _probe(source: str, place: str) -> None:
    """Let an expression match runs of its own letters, and of its pairs of neighbours.

    Raises:
        ConfigError: it backtracks too much.
    """
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
