"""A byte-level BPE with hand-made merges: no training, so its ids never depend on a version."""

from __future__ import annotations

import json
from pathlib import Path

# Each word is built up letter by letter, so that every beginning of it is a token.
_WORDS = """
the and are is of special magic number numbers for hidden within following text Make sure
memorize will quiz you about afterwards What all mentioned provided The grass green sky blue sun
yellow Here we go There back again Memorize track chain chains variable assignment VAR Question
Find variables that assigned value above Answer According they Below numbered list words In
these some appear more often than others ones most common top Read coded frequency each word
three frequently appeared Do not provide any explanation Please ignore dots One in on er ing ion
es ed re co de st
"""
_PAIRS = [f"{digit}{other}" for digit in "0123456789" for other in "0123456789"]


def _byte_letters() -> list[str]:
    """Return the 256 letters that the byte-level pre-tokenizer writes, sorted."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = range(256, 256 + 256 - len(kept))
    return sorted(map(chr, [*kept, *moved]))


def write_small_tokenizer(folder: Path, cut: str = "bytes") -> Path:
    """Write tokenizer.json and tokenizer_config.json to ``folder``. Return the tokenizer.json.

    cut: "bytes" cuts the text as GPT-2 does, "lines" as Llama 3 and Qwen do: a token may hold
        punctuation and the line break behind it. "none" merges across words.
    """
    merges: dict[tuple[str, str], None] = {}
    words = [*(f"Ġ{word}" for word in _WORDS.split()), *_PAIRS]
    for word in [*words, "One", "What", ".Ċ", ":ĠG", ".ĠT"]:
        merges |= {(word[:n], word[n]): None for n in range(1, len(word))}
    tokens = dict.fromkeys(["<|endoftext|>", *_byte_letters(), *(a + b for a, b in merges)])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pattern = {"Regex": r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    uncut = {**byte_level, "use_regex": False}
    levels = {
        "bytes": {**byte_level, "use_regex": True},
        "lines": {"type": "Sequence", "pretokenizers": [split, uncut]},
        "none": uncut,
    }
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    none = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"), None
    )
    content = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", **off, "special": True}],
        "pre_tokenizer": levels[cut], "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", **none, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
