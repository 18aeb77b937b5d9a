"""Tokenizers with a chat template, made in the test: bytes, and the special tokens of templates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import tokenizers
import trl

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_SPECIAL = re.compile(
    r"<\|[^|<>{}%]{1,40}\|>|<｜[^｜{}]{1,40}｜>|<(?:bos|eos|start_of_turn|end_of_turn|end_of_utterance|turn\|)>|<tool_call\|>|<\|(?:turn|tool_response|tool_call)>|</?s>"
)


def template(name: str) -> str:
    """Return the text of a template that TRL ships."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def write_tokenizer(folder: Path, chat_template: str, more: tuple[str, ...] = ()) -> Path:
    """Write tokenizer.json and tokenizer_config.json. Return the first.

    The special tokens are those that the template spells out, and ``more``.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = list(dict.fromkeys([*_SPECIAL.findall(chat_template), "<bos>", "<eos>", *more]))
    vocabulary = {token: number for number, token in enumerate([*alphabet, *special])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    made.save(str(path))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
