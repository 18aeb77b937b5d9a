"""Tokenizers: UTF-8 bytes, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtrain_cli import install_command
from mtrain_cli.config import documents
from mtrain_cli.config.atomic_files import replace_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors

# Names of end tokens to look for, in this order, if no tokenizer_config.json names the end token.
_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
END_TOKEN = _USUAL_END_TOKENS[0]
SMALLEST_BPE = 256 + 1 + 1  # all bytes, the end token and one merge


class Tokenizer(Protocol):
    """The interface of a tokenizer that the data pipeline uses.

    name: name for messages and metadata.
    identity: fingerprint, which differs between tokenizers that may encode a text to different ids.
    vocab_size: number of ids. Every id is below this number.
    eos: id of the end token, which follows each document; None if the tokenizer has no end token.
    exact_pieces: whether the pieces of `corpora.split_text`, encoded one by one, give the same ids
        as the whole text.
    """

    name: str
    identity: str
    vocab_size: int
    eos: int | None
    exact_pieces: bool

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each piece, without special tokens."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids[N]. Incomplete characters become U+FFFD."""
        ...


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes. Ids 0 to 255 are bytes, 256 begin, 257 end and 258 padding.

    begin: None: training data have no begin token.

    Ids 259 to 263 are unused: 264 is a multiple of 8.
    """

    name = "bytes"
    identity = "bytes-1"
    bos, pad = 256, 258
    begin: int | None = None
    eos: int | None = 257
    vocab_size = 264
    exact_pieces = True

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Return the uint8 ids of each piece."""
        return [np.frombuffer(piece.encode("utf-8"), dtype=np.uint8) for piece in pieces]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the ids of a prompt, which begins with no special token."""
        return self.encode([text])[0]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids[N] without its special tokens."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decode_batch(self, documents: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each document without its special tokens.

        Raises:
            ConfigError: an id is outside the vocabulary.
        """
        _require_ids(documents, self)
        return [self.decode(ids) for ids in documents]


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, run by the ``tokenizers`` package.

    begin: id that the file puts before each text; None if it puts none.
    """

    def __init__(self, path: Path, content: bytes, tokenizer: Any) -> None:
        # Some files tell the tokenizer to truncate every text to 512 tokens, or to pad it. Both
        # would silently spoil a corpus.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        end = _find_end_token(path, vocabulary)
        self._tokenizer = tokenizer
        self.name = path.parent.absolute().name if path.stem == "tokenizer" else path.stem
        self.eos = None if end is None else vocabulary[end]
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()} eos:{self.eos}"
        self.vocab_size = max(vocabulary.values()) + 1
        self.content = content
        framed = tokenizer.encode("a", add_special_tokens=True)
        self.begin: int | None = framed.ids[0] if any(framed.special_tokens_mask[:1]) else None
        # SentencePiece-like tokenizers put a space before every text. If pieces are encoded one by
        # one, each of them gets such a space.
        whole, first, second = self.encode(["one two\nthree", "one two\n", "three"])
        self.exact_pieces = whole.tolist() == [*first.tolist(), *second.tolist()]

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Return the int64 ids of each piece, computed on all CPU cores."""
        encodings = self._tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the int64 ids of a prompt, with the special tokens that the file adds to texts."""
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids[N], with special tokens by name."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def decode_batch(self, documents: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each document without its special tokens, computed on all CPU cores.

        Raises:
            ConfigError: an id is outside the vocabulary.
        """
        _require_ids(documents, self)
        return self._tokenizer.decode_batch(
            [ids.tolist() for ids in documents], skip_special_tokens=True
        )


def open_tokenizer(
    choice: str, option: str = "data.tokenizer", others: tuple[str, ...] = ()
) -> ByteTokenizer | FileTokenizer:
    """Open the tokenizer that the user chose.

    Args:
        choice: ``bytes``, the path of a tokenizer.json, or a folder that holds one.
        option: configuration key or command-line option of the choice, for messages.
        others: further values that the option allows, for messages.

    Raises:
        ConfigError: the file is missing or broken, or the ``tokenizers`` package is missing.
    """
    if choice == "bytes":
        return ByteTokenizer()
    path = Path(choice).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    place = f"{option}={choice}"
    names = ", ".join(("bytes", *others))
    missing = f"{place}: no such file. Give {names}, or the path of a Hugging Face tokenizer.json."
    with explain_read_errors(f"{place}:", missing):
        content = path.read_bytes()
    return parse_tokenizer(path, content, place)


def parse_tokenizer(path: Path, content: bytes, place: str) -> FileTokenizer:
    """Return the tokenizer in the content of a tokenizer.json.

    Args:
        path: path of the file. A tokenizer_config.json beside it may name the end token.
        place: the beginning of messages.

    Raises:
        ConfigError: the content is broken, or the ``tokenizers`` package is missing.
    """
    library = _import_tokenizers(place)
    try:
        tokenizer = library.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the package raises plain Exception
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = " ".join(str(error).split())[:200] if is_text else documents.reason(error)
        raise ConfigError(f"{place}: not a Hugging Face tokenizer.json ({reason})") from None
    return FileTokenizer(path, content, tokenizer)


def train_bpe(pieces: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on ``pieces`` and write it to ``path`` atomically.

    The first ids are the end token and the 256 bytes, so the tokenizer can encode any text. The
    other ids are merges, by falling frequency.

    Args:
        vocab_size: maximum number of ids. A small corpus gives fewer ids.
    """
    assert vocab_size >= SMALLEST_BPE
    library = _import_tokenizers("--tokenizer bpe")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    replace_text(path, tokenizer.to_str(pretty=True))


def _require_ids(documents: Sequence[np.ndarray], tokenizer: Tokenizer) -> None:
    for ids in documents:
        outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
        if outside.size:
            raise ConfigError(
                f"--from-tokenizer: token {outside.max()} is outside the {tokenizer.vocab_size:,} "
                f"ids of {tokenizer.name}. Give the tokenizer that made these tokens."
            )


def _import_tokenizers(key: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        advice = f"{install_command('data')}. Or use the byte tokenizer."
        raise ConfigError(f"{key}: needs the tokenizers package: {advice}") from None
    return tokenizers


def _find_end_token(path: Path, vocabulary: dict[str, int]) -> str | None:
    """Return the name of the end token, or None if the tokenizer has no end token.

    Use the ``eos_token`` of tokenizer_config.json in the folder of ``path``. If that file names no
    token of the vocabulary, use the first of `_USUAL_END_TOKENS` in the vocabulary.
    """
    try:
        named = documents.read_json(path.with_name("tokenizer_config.json")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        named = None
    if isinstance(named, dict):
        named = named.get("content")
    candidates = (named, *_USUAL_END_TOKENS)
    return next((t for t in candidates if isinstance(t, str) and t in vocabulary), None)
