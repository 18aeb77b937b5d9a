"""Count the tokens of long texts: exactly, or fast by adding up the counts of words seen before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtrain_cli.data.tokenizers import Tokenizer

# Where to cut a text so that a tokenizer would not join both sides: before white space, as GPT-2
# does, or behind line breaks, as Llama 3 and Qwen do.
_CUTS = (re.compile(r"\s*\S+|\s+"), re.compile(r"[^\S\n]*\S+\n*|\s+"))
_MOST_KEPT = 1 << 18  # pieces to remember, about 50 MB


class TokenCounter:
    """Counts tokens without special tokens.

    tokenizer: its `encode` uses all cores for a list of texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = tokenizer.name
        self._tokenizer = tokenizer
        self._cut: re.Pattern[str] | None = None
        self._known: dict[str, int] = {}

    def exact(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return [len(ids) for ids in self._tokenizer.encode(texts)]

    def estimate(self, text: str) -> int:
        """Return the sum of the tokens of the words of a text.

        It equals the number of tokens of the text if the tokenizer never joins two words. The first
        call counts exactly and chooses how to cut words.
        """
        if self._cut is None:
            (tokens,) = self.exact([text])
            self._cut = min(_CUTS, key=lambda cut: abs(self._sum(cut, text) - tokens))
        return self._sum(self._cut, text)

    def _sum(self, cut: re.Pattern[str], text: str) -> int:
        pieces = cut.findall(text)
        missing = list({piece for piece in pieces if piece not in self._known})
        if missing:
            if len(self._known) > _MOST_KEPT:
                self._known.clear()
                missing = list(set(pieces))
            self._known.update(zip(missing, self.exact(missing), strict=True))
        return sum(map(self._known.__getitem__, pieces))
