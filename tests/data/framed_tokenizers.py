"""Tokenizers whose post-processor puts tokens before and after each text."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from evaluation.small_tokenizer import write_small_tokenizer


def write_framed(folder: Path, single: str = "<begin> $A") -> Path:
    """Write a tokenizer.json with the tokens <begin> and <end>. Return the file.

    single: template of a text, such as ``<begin> $A <end>``; "" for no post-processor.
    """
    path = write_small_tokenizer(folder)
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<begin>", "<end>"])
    if single:
        names = [name for name in single.split() if name != "$A"]
        ids = [(name, made.token_to_id(name)) for name in names]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=ids
        )
    made.save(str(path))
    return path
