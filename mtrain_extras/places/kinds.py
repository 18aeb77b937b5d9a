"""Kinds of places, and how a name or URL looks. Every command imports this."""

from __future__ import annotations

import re

# A model, a model without weights, its tokenizer.json, data.
MODEL, FOLDER, TOKENIZER, DATA = "model", "folder", "tokenizer", "data"
# A model that LoRA adapts. Its checkpoints hold adapters only, so a run that resumes needs it, too.
BASE = "base"
KEYS = {"train.init_from": MODEL, "data.tokenizer": TOKENIZER, "data.path": DATA}
_URL = re.compile(r"[a-z][\w+.-]*://")
_NAME = re.compile(r"(?!runs/|measurements/|.*\.json$)\w[\w.-]*/\w[\w.-]*(@\S+)?")  # org/name
_FETCHED = re.compile(r"/.*/(mtrain/places|models--[^/]+/snapshots)/.")  # from an earlier run


def with_adapters(kind: str, lora_rank: object) -> str:
    """Return the kind of a place in a run with ``train.lora.rank``."""
    return BASE if kind == MODEL and lora_rank and str(lora_rank) != "0" else kind


def is_url(text: object) -> bool:
    return isinstance(text, str) and _URL.match(text) is not None


def is_place(value: object, kind: str) -> bool:
    """Return whether a value is a name, a URL, or the path of what an earlier run fetched."""
    if not isinstance(value, str):
        return False
    is_name = kind != DATA and _NAME.fullmatch(value) is not None
    return is_name or is_url(value) or _FETCHED.match(value) is not None
