"""Kinds of data, the values of ``data.kind``: mtrain's own, and those of other packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.plugins import DATA, Plugins
from mtrain_cli.config.schema import Config, DataConfig

if TYPE_CHECKING:
    from mtrain_cli.data.corpora import Corpus
    from mtrain_cli.data.dataset import TokenSource
    from mtrain_cli.data.tokenizers import Tokenizer


class DataKind:
    """How mtrain reads a kind of data. An entry point of the group ``mtrain.data`` is an object.

    It implements `corpus` or `source`. The other methods are optional.

    expected: what ``data.path`` names, for messages.
    manifest: file that the folder of a corpus holds; "" for any folder.
    keys: keys of ``data`` that this kind reads and most others do not.
    tokenizes: whether ``data.tokenizer`` encodes the corpus; otherwise it consists of token ids.
    """

    expected = "a file or folder"
    manifest = ""
    keys: tuple[str, ...] = ()
    tokenizes = True

    def corpus(self, data: DataConfig, tokenizer: Tokenizer) -> Corpus:
        """Open the corpus ``data.path`` without reading it all, if ``tokenizes``."""
        raise NotImplementedError

    def source(self, config: Config, data: DataConfig, origin: str) -> TokenSource:
        """Open ``data.path`` unless ``tokenizes``. origin: how the user named it, for messages."""
        raise NotImplementedError

    def problems(self, _config: Config) -> Iterator[str]:
        """Yield the conflicts between keys of a run with this kind, as `validate.problems`."""
        return iter(())

    def recognizes(self, _folder: Path) -> bool:
        """Return whether ``mtrain data`` shows and decodes this folder with the methods below."""
        return False

    def decoded(self, path: str, decoder: Tokenizer, domains: tuple[str, ...]) -> Corpus:
        """Open the text of a folder of token ids. domains: those to decode; empty for all."""
        raise NotImplementedError

    def show(
        self, console: Any, path: Path, document: int, tokenizer: Tokenizer | None, *, check: bool
    ) -> None:
        """Print what a folder holds, for `mtrain data show`."""
        raise NotImplementedError


def _check(_name: str, kind: DataKind, _others: Mapping[str, DataKind]) -> None:
    if not isinstance(kind, DataKind):
        raise ValueError("it must be a DataKind")


KINDS: Plugins[DataKind] = Plugins(DATA, "mtrain_cli.data.kinds:OWN", _check)
