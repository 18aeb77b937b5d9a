"""The entry point of `data=mds`."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli.config.data_kinds import DataKind
from mtrain_cli.config.schema import Config, DataConfig
from mtrain_cli.console import Console
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_extras.mds.shards import INDEX, MdsSource, mds_corpus, mds_folders


class _Mds(DataKind):
    expected = f"a folder of MDS shards with an {INDEX}"
    manifest = INDEX
    tokenizes = False

    def source(self, _config: Config, data: DataConfig, origin: str) -> MdsSource:
        return MdsSource(Path(data.path or "").expanduser(), origin)

    def recognizes(self, folder: Path) -> bool:
        return bool(mds_folders(folder))

    def decoded(self, path: str, decoder: Tokenizer, domains: tuple[str, ...]) -> Corpus:
        return mds_corpus(path, decoder, domains)

    def show(
        self,
        console: Console,
        path: Path,
        document: int,
        tokenizer: Tokenizer | None,
        *,
        check: bool,
    ) -> None:
        from mtrain_extras.mds.show import show_shards

        show_shards(console, path, document, tokenizer, check=check)


MDS = _Mds()
