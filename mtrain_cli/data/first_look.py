"""Look at the data of a run for a dry run: open them, and read no more of them than is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice

import numpy as np

from mtrain_cli.config.schema import Config, ConfigError, DataConfig
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.dataset import Dataset, PackedDataset, Sample
from mtrain_cli.data.filters import describe_left_out
from mtrain_cli.data.open_dataset import check_vocabulary, corpora_of, open_dataset, require_columns
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import open_corpus
from mtrain_cli.data.tokenizers import Tokenizer, choose_begin, open_tokenizer
from mtrain_cli.printable import one_line

_SHOWN = 60  # characters, or tokens if there is no tokenizer, of the first document
_PIECES = 16  # pieces of a document to encode at once
_READ_WHOLE = 1 << 24  # bytes of the last file up to which it is read to its last document


def look_at_data(config: Config) -> tuple[list[str], Sample | None]:
    """Open the data of a run.

    Return lines about them for its plan, and the first sequence; None for text, which is packed
    into sequences only when the run starts.

    Text is tokenized only up to the number of tokens that the run needs. So a dry run reads the
    first documents of a large corpus, and the last file if it is small.

    Raises:
        ConfigError: the run would end with this error.
    """
    data = config.data
    if data.kind in ("text", "stdlib"):
        require_columns(config)
        parts = [part for _, part in corpora_of(data)]
        return [line for part in parts for line in _look_at_text(config, part)], None
    dataset = open_dataset(config)
    sample = dataset[0]
    return [dataset.describe(), f"it begins: {_beginning(dataset, sample.tokens)}"], sample


def _beginning(dataset: Dataset, tokens: np.ndarray) -> str:
    """Return the first tokens of a sequence as text, or as ids without a tokenizer."""
    store = dataset.store if isinstance(dataset, PackedDataset) else None
    if isinstance(store, TokenStore):
        with suppress(ConfigError):  # a run does not open the tokenizer of a store
            return _quoted(store.open_tokenizer().decode(tokens[:_SHOWN]))
    return f"ids {', '.join(map(str, tokens[:8].tolist()))}, ..."


def _look_at_text(config: Config, data: DataConfig) -> Iterator[str]:
    tokenizer = open_tokenizer(data.tokenizer)
    choose_begin(tokenizer, data.bos)
    check_vocabulary(config, tokenizer.vocab_size, f"data.tokenizer={data.tokenizer}")
    corpus = open_corpus(data)
    needed, tokens, first = config.seq * (data.eval_sequences + 1), 0, ""
    for pieces in _pieces(corpus):
        first = first or pieces[0]
        tokens += sum(len(ids) for ids in tokenizer.encode(pieces))
        if tokens >= needed:
            break
    else:
        open_dataset(config)  # a corpus that may be too short is read whole
    _read_last(corpus)
    files = with_count(len(corpus.units), "file" if data.kind == "text" else "document")
    left_out = f"; {describe_left_out(corpus.left_out)}" if corpus.left_out else ""
    yield (
        f"{corpus.description}: {files}, {corpus.size / 2**20:,.3g} MiB; the run tokenizes it at "
        f"its start ({_named(tokenizer)}) and caches the tokens{left_out}"
    )
    yield f"it begins: {_quoted(first)}"


def _pieces(corpus: Corpus) -> Iterator[list[str]]:
    for document in chain.from_iterable(unit.documents(0) for unit in corpus.units):
        pieces = iter(document.pieces)
        while some := list(islice(pieces, _PIECES)):
            yield some


def _read_last(corpus: Corpus) -> None:
    """Read the last document of the last file, or its first one if the file is large."""
    last = corpus.units[-1]
    most = None if last.size <= _READ_WHOLE else 1
    for document in deque(islice(last.documents(0), most), maxlen=1):
        deque(islice(document.pieces, _PIECES), maxlen=0)


def _named(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.name}, vocabulary {tokenizer.vocab_size:,}"


def _quoted(text: str) -> str:
    more = "..." * (len(text) > _SHOWN)
    return f'"{one_line(text[:_SHOWN])}{more}"'
