"""The kinds of data that mtrain reads itself."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli.config.data_kinds import DataKind
from mtrain_cli.config.schema import Config, DataConfig
from mtrain_cli.data.arrays import SUFFIXES, open_array
from mtrain_cli.data.checked_files import require_folder
from mtrain_cli.data.corpora import Corpus, stdlib_corpus
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import Tokenizer


class _Stdlib(DataKind):
    expected = ""

    def corpus(self, _data: DataConfig, _tokenizer: Tokenizer) -> Corpus:
        return stdlib_corpus()


class _Text(DataKind):
    expected = "a .txt, .md, .py, .jsonl, .json or .parquet file, or a folder of them"
    keys = ("text_key",)

    def corpus(self, data: DataConfig, _tokenizer: Tokenizer) -> Corpus:
        assert data.path is not None
        return text_corpus(data.path, data.text_key)


class _Tokens(DataKind):
    expected = "the output of `mtrain data prepare`, or a .npy or .bin of token ids"
    manifest = "meta.json"
    keys = ("token_dtype", "too_long")
    tokenizes = False

    def source(self, config: Config, data: DataConfig, origin: str) -> TokenStore:
        path = Path(data.path or "").expanduser()
        if path.suffix in SUFFIXES and not path.is_dir():
            return open_array(path, origin, data.token_dtype, config.model.vocab_size)
        array = f"or a {' or '.join(SUFFIXES)} file of token ids"
        require_folder(path, origin, f"written by `mtrain data prepare`, {array}")
        return TokenStore.open(path, origin)


OWN: dict[str, DataKind] = {"stdlib": _Stdlib(), "text": _Text(), "tokens": _Tokens()}
