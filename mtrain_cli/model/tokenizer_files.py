"""The tokenizer files of an exported model, and the ids of its special tokens.

AutoTokenizer of transformers opens them; the byte tokenizer becomes a ``tokenizer.json``. Writing
needs neither transformers nor the tokenizers library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import json_object
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import Begin, ByteTokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_IDS: Mapping[str, Any] = dict.fromkeys(TOKEN_IDS)
_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", GENERATION_CONFIG,
    "tokenization_as_it_stands.py",
)  # fmt: skip
# The texts of the byte tokenizer's special tokens. They should not occur in documents: transformers
# would read such a text as one token, where mtrain reads its bytes.
BYTE_SPECIALS = {"bos": "<|mtrain:begin|>", "eos": "<|mtrain:end|>", "pad": "<|mtrain:padding|>"}
# For a qwen2 model, transformers 5 replaces the normalizer and pre-tokenizer of tokenizer.json by
# Qwen's, unless auto_map names a class, which it runs only with trust_remote_code.
_CODE = "tokenization_as_it_stands.py"
_CODE_CONTENT = (
    b'"""Loads tokenizer.json as it stands, also where transformers has a tokenizer of its own for '
    b'this kind of model."""\n\n'
    b"from transformers import PreTrainedTokenizerFast\n\n\n"
    b"class AsItStands(PreTrainedTokenizerFast):\n    pass\n"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Content of the files of a tokenizer by file name, and ids of its special tokens.

    ids: bos_token_id, eos_token_id and pad_token_id, as in config.json.
    begin: what documents started with in training; None for what the tokenizer prescribes.
    """

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=lambda: NO_IDS)
    begin: Begin | None = None

    def for_family(self, family: str) -> TokenizerFiles:
        """Return files with which transformers gives these token ids for a model of ``family``."""
        config = _parse_object(self.files.get(TOKENIZER_CONFIG, b"{}"))
        is_qwen2 = str(config.get("tokenizer_class")).removesuffix("Fast") == "Qwen2Tokenizer"
        if family != "qwen2" or is_qwen2 or "auto_map" in config or TOKENIZER not in self.files:
            return self
        config["auto_map"] = {"AutoTokenizer": [None, f"{_CODE.removesuffix('.py')}.AsItStands"]}
        files = {**self.files, TOKENIZER_CONFIG: _json(config), _CODE: _CODE_CONTENT}
        return replace(self, files=files)

    def write(self, folder: Path) -> None:
        """Write the files to a folder. Add the ids to generation_config.json."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        generation = _parse_object(self.files.get(GENERATION_CONFIG, b"{}"))
        known = {key: value for key, value in self.ids.items() if value is not None}
        ids = {key: value for key, value in known.items() if generation.get(key) is None}
        if not _includes(generation.get("eos_token_id"), self.ids["eos_token_id"]):
            ids["eos_token_id"] = self.ids["eos_token_id"]
        if ids:
            (folder / GENERATION_CONFIG).write_bytes(_json(generation | ids))


class NoTokenizerError(ConfigError):
    """A Hugging Face folder has no tokenizer."""


def of_folder(folder: Path, eos: int | None = None) -> TokenizerFiles:
    """Return the tokenizer of a Hugging Face folder, with the ids of its config.json.

    eos: id of the token that ends a document, for a folder that names none. Without tokenizer files
        it raises NoTokenizerError, and ConfigError if a file cannot be read.
    """
    files = {name: _read(folder / name) for name in _FILES if (folder / name).is_file()}
    if not files.keys() - {GENERATION_CONFIG}:
        raise NoTokenizerError(
            f"{folder}: has no tokenizer files. Give a folder with tokenizer.json."
        )
    ids = token_ids(folder)
    if TOKENIZER in files:
        files, ids = _complete(files, ids, _named_eos(files, eos))
    return TokenizerFiles(str(folder), files, ids)


def of_file(path: Path, eos: int | None) -> TokenizerFiles:
    """Return the tokenizer in a tokenizer.json. eos: token that ends documents; None if unknown."""
    return TokenizerFiles(str(path), *_complete({TOKENIZER: _read(path)}, NO_IDS, eos))


def exported_bytes() -> bytes:
    """Return the tokenizer.json of the byte tokenizer."""
    return of_bytes().files[TOKENIZER]


def encodes_bytes(file: Path) -> bool:
    """Return whether mtrain wrote this tokenizer.json for a model that it trained on bytes."""
    try:
        return file.read_bytes() == exported_bytes()
    except OSError:
        return False


def of_bytes() -> TokenizerFiles:
    """Return the byte tokenizer: ids 0 to 255 are bytes."""
    numbers = {name: getattr(ByteTokenizer, name) for name in BYTE_SPECIALS}
    added = [
        {"id": number, "content": BYTE_SPECIALS[name], "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for name, number in sorted(numbers.items(), key=lambda item: item[1])
    ]
    off = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), False)
    byte_level = {"type": "ByteLevel", **off}
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level, "model": model,
    }  # fmt: skip
    token_ids = {f"{name}_token_id": number for name, number in numbers.items()}
    return TokenizerFiles(
        "bytes", *_complete({TOKENIZER: _json(content)}, token_ids, ByteTokenizer.eos)
    )


def token_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of special tokens in a folder's config.json. A missing id is None."""
    path = folder / "config.json"
    config = _parse_object(_read(path)) if path.is_file() else {}
    return {key: config.get(key) for key in TOKEN_IDS}


def _complete(
    files: Mapping[str, bytes], ids: Mapping[str, Any], eos: int | None
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files with a tokenizer_config.json, and the ids with ``eos`` as the end token."""
    # The end token of config.json may be wrong: some families have 1 and 2 with every tokenizer.
    ids = dict(ids)
    if not _includes(ids["eos_token_id"], eos):
        ids["eos_token_id"] = eos
    if TOKENIZER_CONFIG in files:
        return dict(files), ids
    names = {number: token for token, number in _added_tokens(files[TOKENIZER]).items()}
    # This class loads tokenizer.json unchanged. The class of an architecture might replace the
    # pre-tokenizer.
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key in TOKEN_IDS:
        first = ids[key][0] if isinstance(ids[key], list) and ids[key] else ids[key]
        if isinstance(first, int) and first in names:
            config[key.removesuffix("_id")] = names[first]
    return {**files, TOKENIZER_CONFIG: _json(config)}, ids


def _includes(ids: object, wanted: object) -> bool:
    """Return whether ``ids`` include all of ``wanted``. None in ``wanted`` asks for nothing."""
    known, asked = (value if isinstance(value, list) else [value] for value in (ids, wanted))
    return wanted is None or wanted == ids or all(one in known for one in asked)


def _named_eos(files: Mapping[str, bytes], default: int | None) -> int | None:
    """Return the id of the end token in tokenizer_config.json, or else ``default``."""
    named = _parse_object(files.get(TOKENIZER_CONFIG, b"{}")).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if not isinstance(named, str):
        return default
    return _added_tokens(files[TOKENIZER]).get(named, default)


def _added_tokens(tokenizer: bytes) -> dict[str, int]:
    """Return the id of each token in a tokenizer.json, by the token's text."""
    content = _parse_object(tokenizer)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids = {str(token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # a Unigram model lists pairs of token and score
        scored = ((n, e) for n, e in enumerate(vocabulary) if isinstance(e, list) and e)
        ids = {str(entry[0]): number for number, entry in scored}
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            ids[str(entry.get("content"))] = entry["id"]
    return ids


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level tokenizer."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _parse_object(content: bytes) -> dict[str, Any]:
    return json_object(content) or {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
