"""Configurations and corpora for the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import Config


@pytest.fixture(scope="session")
def base_config() -> Config:
    return compose([])


@pytest.fixture
def make_config(base_config: Config) -> Callable[..., Config]:
    """Return a default configuration with other ``data`` fields, ``seq``, ``seed`` and
    ``vocab_size``.
    """

    def make(*, seq: int = 64, seed: int = 0, vocab_size: int = 264, **data: Any) -> Config:
        model = replace(base_config.model, vocab_size=vocab_size)
        return replace(
            base_config, seq=seq, seed=seed, model=model, data=replace(base_config.data, **data)
        )

    return make


@pytest.fixture(autouse=True)
def cache_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own cache folder, so that nothing is written to the user's."""
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root / "mtrain" / "tokens"


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write a .jsonl file with one text per line."""

    def write(texts: list[str], name: str = "corpus.jsonl", key: str = "text") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(
                json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts)
            ),
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE as a Hugging Face tokenizer.json."""
    from mtrain_cli.data.tokenizers import train_bpe

    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["the quick brown fox jumps over the lazy dog\nand the dog sleeps\n" * 20], 300, path)
    return path
