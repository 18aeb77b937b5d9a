"""Turn prompts into token ids, and generated ids into text, also while they are generated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mtrain_cli.config import resolved_file
from mtrain_cli.config.documents import json_object
from mtrain_cli.config.problem import ConfigError, cli_option, if_has
from mtrain_cli.data.tokenizers import (
    NO_BEGIN,
    ByteTokenizer,
    FileTokenizer,
    describe_begin,
    parse_tokenizer,
)
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.launch.run_dir import RESOLVED, run_of
from mtrain_cli.launch.temporary_folders import private_folder
from mtrain_cli.model.tokenizer_files import (
    GENERATION_CONFIG,
    TOKENIZER,
    NoTokenizerError,
    TokenizerFiles,
    exported_bytes,
    of_folder,
    token_ids,
)

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of a part of a character


@dataclass(frozen=True)
class TextCodec:
    """The tokenizer of a model. Prompts start as documents did in training.

    first: id that begins a text without a prompt: the begin token, or the end token of the text
        before; None if the tokenizer has neither.
    """

    tokenizer: ByteTokenizer | FileTokenizer | None  # None if the model has none
    stop: frozenset[int]  # ids that end a text
    missing: str = ""  # why there is no tokenizer; "" if there is one
    first: int | None = None

    @property
    def begin(self) -> tuple[int, ...]:
        """The ids that stand before each prompt."""
        return () if self.tokenizer is None else self.tokenizer.begin.ids

    @property
    def starts(self) -> str:
        """How prompts and documents start; "" if the tokenizer has nothing to put there."""
        return "" if self.tokenizer is None else describe_begin(self.tokenizer)

    @property
    def required(self) -> ByteTokenizer | FileTokenizer:
        """The tokenizer. Raises ConfigError if the model has none."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.missing}. Give {cli_option('tokenizer', 'FOLDER')}")
        return self.tokenizer

    def encode(self, text: str, name: str = "the prompt") -> list[int]:
        """Return the ids of a prompt. ``name`` is for messages.

        Raises ConfigError if the model has no tokenizer, or the prompt is not Unicode text.
        """
        if self.tokenizer is None:
            how = if_has("prompt_file", ': --prompt-file FILE.jsonl with lines {"ids": [1, 2]}')
            raise ConfigError(
                f"{self.missing}. Give {cli_option('tokenizer', 'FOLDER')}, or prompts as token "
                f"ids{how}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name} is not Unicode text: character {error.start + 1} is half of a "
                "surrogate pair, or a byte that is not UTF-8"
            ) from None
        return self.tokenizer.begin.before(self.tokenizer.encode([text])[0]).tolist()

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens. There must be a tokenizer."""
        return self.required.encode([text])[0].tolist()

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens. There must be a tokenizer."""
        known = [one for one in ids if 0 <= one < self.required.vocab_size]
        return self.required.decode_batch([np.asarray(known, dtype=np.int64)])[0]

    def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of ids; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(np.asarray(ids, dtype=np.int64))


def open_codec(source: ModelSource, folder: str | Path | None = None) -> TextCodec:
    """Open the tokenizer of a model, or that of a folder. Raises ConfigError if it is damaged."""
    if folder is not None:
        folder = Path(folder)
        given = cli_option("tokenizer", folder)
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "no such folder"
            raise ConfigError(f"{given}: {reason}; give a folder with tokenizer.json")
        files = None if source.is_folder else _files_of_run(source)[0]
        # Without a begin token in training, there is none before prompts.
        begin = NO_BEGIN if files is not None and files.begin == NO_BEGIN else None
        try:
            return codec_of_files(replace(of_folder(folder), begin=begin))
        except ConfigError as error:
            raise ConfigError(*(cli_option("tokenizer", p) for p in error.problems)) from None
    if source.is_folder:
        with contextlib.suppress(NoTokenizerError):
            return codec_of_files(of_folder(source.path))
        stop = _ids([token_ids(source.path)["eos_token_id"]])
        return TextCodec(None, stop, f"{source.path}: has no tokenizer")
    files, reason = _files_of_run(source)
    if files is None:
        return TextCodec(None, frozenset(), f"{source.path}: has no tokenizer ({reason})")
    return codec_of_files(files)


def _files_of_run(source: ModelSource) -> tuple[TokenizerFiles | None, str]:
    from mtrain_cli.training.conversion import tokenizer_of_run

    run = run_of(source.path)
    return tokenizer_of_run(resolved_file.load(run / RESOLVED), run)


def codec_of_files(files: TokenizerFiles) -> TextCodec:
    """Return the codec of tokenizer files. Raises ConfigError if the files are damaged."""
    tokenizer: ByteTokenizer | FileTokenizer
    if files.name == ByteTokenizer.name or files.files.get(TOKENIZER) == exported_bytes():
        tokenizer = ByteTokenizer()
    elif TOKENIZER not in files.files:
        raise ConfigError(f"{files.name}: has no {TOKENIZER}; mtrain reads no other tokenizer")
    else:
        with private_folder() as folder:
            files.write(folder)
            content, place = files.files[TOKENIZER], f"{files.name}: {TOKENIZER}"
            tokenizer = parse_tokenizer(folder / TOKENIZER, content, place)
    generation = json_object(files.files.get(GENERATION_CONFIG, b"{}")) or {}
    stop = _ids([generation.get("eos_token_id"), files.ids["eos_token_id"]])
    if not stop and tokenizer.eos is not None:
        stop = frozenset([tokenizer.eos])
    if files.begin is not None:
        tokenizer.begin = files.begin
    first = tokenizer.begin.ids[0] if tokenizer.begin else tokenizer.eos
    return TextCodec(tokenizer, stop, first=min(stop, default=None) if first is None else first)


def _ids(values: Iterable[object]) -> frozenset[int]:
    """Return the ids among ``values``, which are ids, lists of ids, or anything else."""
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return frozenset(one for one in flat if isinstance(one, int) and not isinstance(one, bool))


class TextStream:
    """Turns ids into text as they come; a piece appears when its characters are complete."""

    def __init__(self, decode: Callable[[Sequence[int]], str | None]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # number of ids whose text has appeared
        self._start = 0  # first id to decode again: some tokenizers look at the previous token

    def add(self, token: int) -> str:
        """Add an id. Return the new text, which may be empty."""
        self._ids.append(token)
        text = self._new()
        if text is None:
            return f"{token} "
        if text.endswith(_INCOMPLETE) or not text:
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text that has not appeared: an incomplete character at the end."""
        return self._new() or ""

    def _new(self) -> str | None:
        before = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        return None if text is None or before is None else text[len(before) :]
