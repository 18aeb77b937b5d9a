"""Open the dataset that a configuration describes: one corpus, or a mixture of several."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.schema import Config, ConfigError, DataConfig
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.corpora import Corpus, describe_left_out
from mtrain_cli.data.dataset import PackedDataset, Sample, TokenSource
from mtrain_cli.data.mixture import Dataset, MixedDataset, parse_mix
from mtrain_cli.data.store import StoreMeta, TokenStore
from mtrain_cli.data.token_cache import cached_store
from mtrain_cli.data.token_documents import TokenDocument
from mtrain_cli.data.tokenizers import FileTokenizer, Tokenizer, choose_begin, open_tokenizer

_PIECES = 16  # pieces of a document to encode at once


def open_dataset(config: Config) -> Dataset:
    """Open the dataset of a configuration.

    A corpus of text is tokenized once for all workers and later runs (see `token_cache`).
    """
    data = config.data
    require_columns(config)
    if data.mix is None:
        ((origin, data),) = corpora_of(data)
        return _open_part(config, data, origin, data.eval_sequences)
    weights = parse_mix(data.mix)
    parts = {}
    for (name, weight), (origin, part) in zip(weights.items(), corpora_of(data), strict=True):
        held_out = max(1, round(data.eval_sequences * weight)) if data.eval_sequences else 0
        parts[name] = _open_part(config, part, origin, held_out)
    return MixedDataset(parts, weights)


def require_columns(config: Config) -> None:
    """Check that the corpora have the columns of `data.mask_key` and `data.positions_key`.

    In a mixture, a corpus may have no column: its documents are causal, and have their positions in
    the sequence. Only meta.json is read.
    """
    data = config.data
    for option, name in (("mask_key", data.mask_key), ("positions_key", data.positions_key)):
        if name is None:
            continue
        metas = _metas(data)
        is_anywhere = any(meta and getattr(meta, option) for meta in metas.values())
        for origin, meta in metas.items():
            own = getattr(meta, option) if meta else ""
            if own != name and (own or not is_anywhere):
                columns = ", ".join(meta.keys if meta else ()) or "none"
                raise ConfigError(
                    f"data.{option}={name}: {origin} has no such column. Its columns: {columns}. "
                    f"`mtrain data prepare --{option.replace('_', '-')}` adds one."
                )
            largest = meta.columns.largest_position if meta else -1
            if option == "positions_key" and largest >= config.seq:
                raise ConfigError(
                    f"data.{option}={name}: {origin} has positions up to {largest:,}; set "
                    f"seq={largest + 1} or more, not seq={config.seq}"
                )


def most_intervals(config: Config) -> int:
    """Return the most separate intervals of keys that a query sees under the mask of a run.

    Masks from the data count as 1 if the data are missing, as they may be in a plan.
    """
    data = config.data
    if data.mask_key is None:
        return config.mask.intervals(config.seq)
    if data.path is None:
        return 1
    return max(meta.columns.intervals if meta else 1 for meta in _metas(data).values())


def corpora_of(data: DataConfig) -> list[tuple[str, DataConfig]]:
    """Return (origin, settings) of each corpus. origin: how the user named it, for messages."""
    if data.mix is None:
        return [(f"data.path={data.path}" if data.path else f"data={data.kind}", data)]
    parts = []
    for name in parse_mix(data.mix):
        path = str(Path(data.path, name) if data.path else Path(name).expanduser())
        parts.append((f"data.mix: {name}: {path}", replace(data, path=path)))
    return parts


def open_text(config: Config, data: DataConfig) -> tuple[Corpus, Tokenizer]:
    """Open a corpus of text, and the tokenizer for it."""
    tokenizer = open_tokenizer(data.tokenizer)
    choose_begin(tokenizer, data.bos)
    _check_vocabulary(config, tokenizer.vocab_size, f"data.tokenizer={data.tokenizer}")
    return KINDS[data.kind].corpus(data, tokenizer), tokenizer


def _metas(data: DataConfig) -> dict[str, StoreMeta | None]:
    """Return the metadata of each token store by origin; None for arrays."""
    folders = {origin: Path(part.path or "").expanduser() for origin, part in corpora_of(data)}
    return {
        origin: StoreMeta.read(folder, origin) if folder.is_dir() else None
        for origin, folder in folders.items()
    }


def _open_part(config: Config, data: DataConfig, origin: str, held_out: int) -> PackedDataset:
    """Open one corpus, whose settings are ``data``, and hold sequences out of training."""
    store, location = _open_source(config, data, origin)
    if store.meta.whole:
        location += _require_short(config, data, store, origin)
    elif store.meta.num_tokens < config.seq:
        raise ConfigError(
            f"seq={config.seq}: {origin} holds only {store.meta.num_tokens:,} tokens, less than "
            f"one sequence of {config.seq:,}. Give a longer corpus or a smaller seq."
        )
    dataset = PackedDataset(
        store,
        config.seq,
        seed=config.seed,
        shuffle=data.shuffle,
        document_mask=data.document_mask,
        masked=data.mask_key is not None,
        positioned=data.positions_key is not None,
        location=location,
        vocab_size=config.model.vocab_size,
        held_out=held_out,
        too_long=data.too_long,
    )
    if dataset.sequences <= held_out:
        raise ConfigError(
            f"data.eval_sequences={config.data.eval_sequences}: {origin} has only "
            f"{dataset.sequences} sequences of {config.seq:,} tokens, so none would be left to "
            "train on. Hold out fewer, use a smaller seq, or give a longer corpus."
        )
    if not store.meta.vocab_size or data.mask_key is not None:
        dataset[0]  # fails before the run starts if an id is too large or a mask is damaged
    return dataset


def _require_short(config: Config, data: DataConfig, store: TokenSource, origin: str) -> str:
    """Return a phrase on conversations that lose all targets when cut to ``seq``, or raise."""
    lengths = np.diff(store.offsets)
    long = np.flatnonzero(lengths > config.seq)
    allowed = {"error": 0, "skip": lengths.size - 1, "truncate_left": lengths.size}
    if long.size <= allowed[data.too_long]:
        cut = long.tolist() if data.too_long == "truncate_left" else []
        ends = (store.read(n, lengths[n] - config.seq + 1, lengths[n]).targets for n in cut)
        silent = sum(end is not None and not end.any() for end in ends)
        return f"; {with_count(silent, 'cut document')} without a target" if silent else ""
    place = f"{origin}: document {long[0]}"
    if KINDS[data.kind].tokenizes:
        units = open_text(config, data)[0].units
        documents = chain.from_iterable(unit.documents(0) for unit in units)
        kept = (one.name for one in documents if one.tokens is not None and not one.left_out)
        place = next(islice(kept, int(long[0]), None), place)
    raise ConfigError(
        f"{place}: has {lengths[long[0]]:,} tokens, more than seq={config.seq} "
        f"({with_count(len(long), 'document')} of {lengths.size:,}). Set data.too_long=skip or "
        "truncate_left, or a larger seq."
    )


def _open_source(config: Config, data: DataConfig, origin: str) -> tuple[TokenSource, str]:
    """Return the tokens of a corpus, and a phrase for messages that says where the tokens are."""
    if not KINDS[data.kind].tokenizes:
        source, location = KINDS[data.kind].source(config, data, origin), f"mapped from {data.path}"
        if isinstance(source, TokenStore) and (source.folder or Path()).is_dir():
            if not source.meta.files:
                location += ", prepared by an earlier mtrain without checksums"
            owner = f"the token store {data.path} (tokenizer {source.meta.tokenizer})"
            _check_vocabulary(config, source.meta.vocab_size, owner)
        return source, location
    corpus, tokenizer = open_text(config, data)
    store, location = cached_store(corpus, tokenizer)
    if isinstance(tokenizer, FileTokenizer):
        digest = hashlib.sha256(tokenizer.content).hexdigest()[:32]
        store = replace(store, samples={**store.samples, "the tokenizer": digest})
    return store, location


def _check_vocabulary(config: Config, needed: int, owner: str) -> None:
    if config.model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: {owner} has {needed:,} ids. Set "
            f"model.vocab_size={needed} or more, or auto."
        )


def first_conversation(config: Config) -> tuple[TokenDocument, Tokenizer] | None:
    """Return the first document of a corpus whose documents have targets; None without."""
    data = corpora_of(config.data)[0][1]
    if not KINDS[data.kind].tokenizes or data.path is None:
        return None
    corpus, tokenizer = open_text(config, data)
    units = corpus.units if corpus.fields is not None else ()
    first = next((d.tokens for unit in units for d in unit.documents(0) if d.tokens), None)
    return None if first is None else (first, tokenizer)


def look_at_data(config: Config) -> tuple[list[str], Sample | None]:
    """Open the data of a run.

    Return lines about them for its plan, and the first sequence; None for text, which is packed
    into sequences only when the run starts. Text is tokenized only up to the number of tokens that
    the run needs.
    """
    data = config.data
    if KINDS[data.kind].tokenizes:
        require_columns(config)
        parts = [part for _, part in corpora_of(data)]
        return [_look_at_text(config, part) for part in parts], None
    dataset = open_dataset(config)
    return [dataset.describe()], dataset[0]


def _look_at_text(config: Config, data: DataConfig) -> str:
    corpus, tokenizer = open_text(config, data)
    needed, tokens = config.seq * (data.eval_sequences + 1), 0
    for document in chain.from_iterable(unit.documents(0) for unit in corpus.units):
        pieces = iter(document.pieces)
        tokens += 0 if document.tokens is None else document.tokens.ids.size
        while tokens < needed and (some := list(islice(pieces, _PIECES))):
            tokens += sum(map(len, tokenizer.encode(some)))
        if tokens >= needed:
            break
    else:
        open_dataset(config)  # a corpus that may be too short is read whole
    files = with_count(len(corpus.units), "document" if data.kind == "stdlib" else "file")
    left_out = f"; {describe_left_out(corpus.left_out)}" if corpus.left_out else ""
    return (
        f"{corpus.description}: {files}, {corpus.size / 2**20:,.3g} MiB; the run tokenizes it at "
        f"its start ({tokenizer.name}, vocabulary {tokenizer.vocab_size:,}) and caches the tokens"
        f"{left_out}"
    )
