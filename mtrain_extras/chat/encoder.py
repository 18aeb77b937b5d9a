"""Encode the text of a conversation, and find the tokens of its parts."""

from __future__ import annotations

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from mtrain_extras.chat.template import Span


class Encoder:
    """Encodes a text with the place of each token. The text has its special tokens by name.

    specials: ids of tokens that stand for a whole text, such as <|im_end|>; empty if there are
        none, as for bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library = None
        self.specials = np.zeros(0, np.int64)
        if isinstance(tokenizer, FileTokenizer):
            import tokenizers

            self._library = tokenizers.Tokenizer.from_str(tokenizer.content.decode("utf-8"))
            self._library.no_truncation()
            self._library.no_padding()
            self.specials = np.array([*self._library.get_added_tokens_decoder()], np.int64)

    def encode(self, text: str, location: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, int64[N], and begin and end of their characters, int64[N, 2].

        location: file and record, for messages.

        A begin is at most the end of the token before, since a tokenizer may leave out white space.
        """
        if self._library is None:
            counts = [len(character.encode("utf-8", "replace")) for character in text]
            begins = np.repeat(np.arange(len(text)), counts)
            ids = ByteTokenizer().encode([text])[0].astype(np.int64)
            return ids, np.stack([begins, begins + 1], 1)
        try:
            encoding = self._library.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises plain Exception
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{location}: the tokenizer failed on it ({reason})") from None
        ids = np.array(encoding.ids, np.int64)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
        return ids, np.stack([np.minimum(begins, before), ends], 1)

    def special_texts(self, ids: np.ndarray) -> list[str]:
        """Return the texts of the tokens that stand for a whole text among ids[N]."""
        found = np.unique(ids[np.isin(ids, self.specials)]).tolist()
        texts = [] if self._library is None else map(self._library.id_to_token, found)
        return [text for text in texts if text]


def tokens_of(span: Span, places: np.ndarray) -> np.ndarray:
    """Return the numbers of the tokens that share a character with a part of a text, int64[...]."""
    begin, end = span
    return np.flatnonzero((places[:, 0] < end) & (places[:, 1] > begin))
