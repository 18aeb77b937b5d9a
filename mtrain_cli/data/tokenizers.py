"""Tokenizers: UTF-8 bytes, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mtrain_cli import install_command
from mtrain_cli.config import documents
from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.problem import as_typed
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.printable import one_line

# Names of end tokens to look for, in this order, if no tokenizer_config.json names the end token.
# If the vocabulary has none of them, the token that the post-processor puts after a text counts.
_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
T = TypeVar("T")
END_TOKEN = _USUAL_END_TOKENS[0]
SMALLEST_BPE = 256 + 1 + 1  # all bytes, the end token and one merge


@dataclass(frozen=True)
class Begin:
    """The begin token of documents: ids that stand before the text of each. Mostly one, or none.

    name: text of these tokens.
    """

    ids: tuple[int, ...] = ()
    name: str = ""

    def __bool__(self) -> bool:
        return bool(self.ids)

    def before(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a document without its end token, or of a prompt.

        ids: ids[N] of the text, or of its first piece. A text may bring its begin token.
        """
        own = len(self.ids)
        if not own or tuple(ids[:own].tolist()) == self.ids:
            return ids
        return np.concatenate([np.array(self.ids, np.int64), ids])

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.ids))
        return f"id{'s' * (len(self.ids) > 1)} {numbers} ({one_line(self.name)})"


NO_BEGIN = Begin()


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes. Ids 0 to 255 are bytes, 256 begin, 257 end and 258 padding.

    identity: fingerprint, which differs between tokenizers that may encode a text to different ids.
    begin: begin token of documents and prompts, empty for none.
    prescribed: what ``begin`` is unless the user chose. named: what it is if the user wants one and
        none is prescribed.
    eos: id of the end token, which follows each document; None without.
    exact_pieces: whether the pieces of `corpora.split_text`, encoded one by one, give the same ids
        as the whole text.
    """

    name = "bytes"
    identity = "bytes-1"
    bos, pad = 256, 258
    prescribed = begin = NO_BEGIN
    named = Begin((256,), "<|mtrain:begin|>")
    eos: int | None = 257
    vocab_size = 264  # a multiple of 8; ids 259 to 263 are unused
    exact_pieces = True

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Return the uint8 ids of each piece."""
        return [np.frombuffer(piece.encode("utf-8"), dtype=np.uint8) for piece in pieces]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids[N] without its special tokens."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decode_batch(self, documents: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each document without its special tokens."""
        _require_ids(documents, self)
        return [self.decode(ids) for ids in documents]


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, run by the ``tokenizers`` package; see `ByteTokenizer`.

    prescribed: begin token that the post-processor of the file puts before each text. Its end
        tokens are not used: a prompt goes on, and a document ends with ``eos``.
    named: begin token that tokenizer_config.json names.
    """

    def __init__(self, path: Path, content: bytes, tokenizer: Any, place: str) -> None:
        # Some files tell the tokenizer to truncate every text to 512 tokens, or to pad it. Both
        # would silently spoil a corpus.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"{place}: its vocabulary is empty; use another tokenizer")
        self._tokenizer, self._place = tokenizer, place
        self.name = path.parent.absolute().name if path.stem == "tokenizer" else path.stem
        self.vocab_size = max(vocabulary.values()) + 1
        self.content = content
        for text in "a", "0", ".", "é", "中", "the", next(iter(vocabulary)):
            framed = _call(place, tokenizer.encode, text, add_special_tokens=True)
            is_text = [at for at, special in enumerate(framed.special_tokens_mask) if not special]
            if is_text:
                break
        before = framed.ids[: is_text[0]] if is_text else []
        if before and max(before) >= self.vocab_size:
            raise ConfigError(
                f"{place}: its post-processor puts id {max(before)} before each text, which is "
                f"outside the {self.vocab_size:,} ids of its vocabulary; use another tokenizer"
            )
        after = framed.tokens[is_text[-1] + 1 :] if is_text else []
        self.prescribed = Begin(tuple(before), "".join(framed.tokens[: len(before)]))
        named = _named_token(path, "bos_token", vocabulary)
        self.named = NO_BEGIN if named is None else Begin((vocabulary[named],), named)
        self.begin = self.prescribed
        candidates = (_named_token(path, "eos_token", vocabulary), *_USUAL_END_TOKENS, *after[:1])
        self.eos = next((vocabulary[t] for t in candidates if t in vocabulary), None)
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()} eos:{self.eos}"
        # SentencePiece-like tokenizers put a space before every text. If pieces are encoded one by
        # one, each of them gets such a space.
        whole, first, second = self.encode(["one two\nthree", "one two\n", "three"])
        self.exact_pieces = whole.tolist() == [*first.tolist(), *second.tolist()]

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Return the int64 ids of each piece, computed on all CPU cores."""
        method = self._tokenizer.encode_batch_fast
        encodings = _call(self._place, method, list(pieces), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids[N], with special tokens by name."""
        method, numbers = self._tokenizer.decode, np.asarray(ids).tolist()
        return _call(self._place, method, numbers, skip_special_tokens=False)

    def decode_batch(self, documents: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each document without its special tokens, on all CPU cores."""
        _require_ids(documents, self)
        method, numbers = self._tokenizer.decode_batch, [ids.tolist() for ids in documents]
        return _call(self._place, method, numbers, skip_special_tokens=True)


Tokenizer = ByteTokenizer | FileTokenizer


def _call(place: str, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a method of the package, and raise ConfigError if it raises an error or panics."""
    try:
        return method(*arguments, **options)
    except BaseException as error:
        # A panic is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
    raise ConfigError(f"{place}: the tokenizer failed on a text ({reason}); use another tokenizer")


def choose_begin(tokenizer: Tokenizer, bos: bool | str, option: str = "data.bos=") -> None:
    """Set the begin token of documents.

    Args:
        bos: value of ``data.bos``. ``auto`` follows the post-processor of the tokenizer.
        option: key or command-line option of ``bos``, for messages.
    """
    if bos != "auto":
        tokenizer.begin = (tokenizer.prescribed or tokenizer.named) if bos else NO_BEGIN
    if bos is True and not tokenizer.begin:
        raise no_begin_token(option, tokenizer.name)


def no_begin_token(option: str, tokenizer: str) -> ConfigError:
    """Return the error for a begin token that a tokenizer lacks."""
    return ConfigError(
        f"{option}true: the tokenizer {tokenizer} has no begin token: its post-processor adds "
        "none, and no tokenizer_config.json in its folder names a bos_token. Leave it out."
    )


def describe_begin(tokenizer: Tokenizer) -> str:
    """Return how documents start; "" if the tokenizer has nothing to put there."""
    if tokenizer.begin:
        return f"each document starts with {tokenizer.begin}"
    if tokenizer.prescribed:
        return f"documents start without {tokenizer.prescribed}, which their tokenizer would add"
    return ""


def documents_identity(tokenizer: Tokenizer) -> str:
    """Return a fingerprint that differs between tokenizers that make documents of other ids."""
    begin = f" begin:{','.join(map(str, tokenizer.begin.ids))}" if tokenizer.begin else ""
    return f"{tokenizer.identity}{begin}"


def open_tokenizer(
    choice: str, option: str = "data.tokenizer", others: tuple[str, ...] = ()
) -> Tokenizer:
    """Open the tokenizer that the user chose.

    Args:
        choice: ``bytes``, the path of a tokenizer.json, or a folder that holds one.
        option: configuration key or command-line option of the choice, for messages.
        others: further values that the option allows, for messages.
    """
    if choice == "bytes":
        return ByteTokenizer()
    path = Path(choice).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    place = as_typed(option, choice)
    names = ", ".join(("bytes", *others))
    missing = f"{place}: no such file. Give {names}, or the path of a Hugging Face tokenizer.json."
    with explain_read_errors(f"{place}:", missing):
        content = path.read_bytes()
    return parse_tokenizer(path, content, place)


def parse_tokenizer(path: Path, content: bytes, place: str) -> FileTokenizer:
    """Return the tokenizer in the content of the tokenizer.json at ``path``.

    A tokenizer_config.json beside it may name the end token. place: the beginning of messages.
    """
    library = _import_tokenizers(place)
    try:
        tokenizer = library.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the package raises plain Exception
        is_text = not isinstance(error, UnicodeDecodeError)
        said = " ".join(str(error).split())[:200]
        reason = said if is_text else documents.reason(error)
        raise ConfigError(f"{place}: not a Hugging Face tokenizer.json ({reason})") from None
    return FileTokenizer(path, content, tokenizer, place)


def train_bpe(pieces: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE of at most ``vocab_size`` ids, and write it to ``path`` atomically.

    The first ids are the end token and the 256 bytes, so the tokenizer can encode any text. The
    other ids are merges, by falling frequency.
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


def _named_token(path: Path, key: str, vocabulary: dict[str, int]) -> str | None:
    """Return the token that tokenizer_config.json beside ``path`` names; None without."""
    try:
        named = documents.read_json(path.with_name("tokenizer_config.json")).get(key)
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) and named in vocabulary else None
