"""Token stores whose documents bring masks and rotary positions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.mask_definitions import question

from mtrain_cli.data.corpora import EVERYTHING, Filters
from mtrain_cli.data.prepare import prepare_store
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import token_corpus
from mtrain_cli.data.token_documents import RecordKey, TokenFields

FIELDS = TokenFields(
    RecordKey("ids", "--tokens-key"), RecordKey("mask", "--mask-key"), RecordKey("at", "--at-key")
)


def question_record(first: int, answers: int, length: int) -> dict[str, Any]:
    """A question of `first` tokens, and answers of `length` tokens that do not see each other."""
    size = first + answers * length
    return {
        "ids": [97 + number % 13 for number in range(size)],
        "mask": question(first, answers, length).tolist(),
        "at": [*range(first), *list(range(first, first + length)) * answers],
    }


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepared(
    source: Path, out: Path, fields: TokenFields = FIELDS, filters: Filters = EVERYTHING
) -> TokenStore:
    corpus = token_corpus(str(source), fields)
    return prepare_store(corpus, out, "bytes", None, lambda _: None, filters)


def masked_store(folder: Path, fields: TokenFields = FIELDS) -> Path:
    """The folder of a store of 20 questions, with 2 intervals of keys and positions up to 15."""
    folder.mkdir(parents=True, exist_ok=True)
    source = write_jsonl(folder / "documents.jsonl", [question_record(10, 4, 6)] * 20)
    prepared(source, folder / "store", fields)
    return folder / "store"


def without_checksums(folder: Path) -> Path:
    """Make a store one of an earlier version, whose meta.json has no checksum of each file."""
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "files": {}}))
    return folder
