"""Look at the data of a run for a dry run: open them, and read no more of them than is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice

from mtrain_cli.config.schema import Config, ConfigError, DataConfig
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.dataset import PackedDataset, Sample
from mtrain_cli.data.filters import describe_left_out
from mtrain_cli.data.open_dataset import corpora_of, open_dataset, open_text, require_columns
from mtrain_cli.data.store import TokenStore
from mtrain_cli.printable import one_line

_SHOWN = 60  # characters, or tokens if there is no tokenizer, of the first document
_PIECES = 16  # pieces of a document to encode at once


def look_at_data(config: Config) -> tuple[list[str], Sample | None]:
    """Open the data of a run.

    Return lines about them for its plan, and the first sequence; None for text, which is packed
    into sequences only when the run starts. Text is tokenized only up to the number of tokens that
    the run needs.

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
    beginning = f"ids {', '.join(map(str, sample.tokens[:8].tolist()))}, ..."
    store = dataset.store if isinstance(dataset, PackedDataset) else None
    if isinstance(store, TokenStore):
        with suppress(ConfigError):  # a run does not open the tokenizer of a store
            beginning = _quoted(store.open_tokenizer().decode(sample.tokens[:_SHOWN]))
    return [dataset.describe(), f"it begins: {beginning}"], sample


def _look_at_text(config: Config, data: DataConfig) -> Iterator[str]:
    corpus, tokenizer = open_text(config, data)
    needed, tokens, first = config.seq * (data.eval_sequences + 1), 0, ""
    for document in chain.from_iterable(unit.documents(0) for unit in corpus.units):
        pieces = iter(document.pieces)
        while tokens < needed and (some := list(islice(pieces, _PIECES))):
            first = first or some[0]
            tokens += sum(map(len, tokenizer.encode(some)))
        if tokens >= needed:
            break
    else:
        open_dataset(config)  # a corpus that may be too short is read whole
    files = with_count(len(corpus.units), "file" if data.kind == "text" else "document")
    left_out = f"; {describe_left_out(corpus.left_out)}" if corpus.left_out else ""
    yield (
        f"{corpus.description}: {files}, {corpus.size / 2**20:,.3g} MiB; the run tokenizes it at "
        f"its start ({tokenizer.name}, vocabulary {tokenizer.vocab_size:,}) and caches the tokens"
        f"{left_out}"
    )
    yield f"it begins: {_quoted(first)}"


def _quoted(text: str) -> str:
    more = "..." * (len(text) > _SHOWN)
    return f'"{one_line(text[:_SHOWN])}{more}"'
