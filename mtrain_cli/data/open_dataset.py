"""Open the dataset that a configuration describes: one corpus, or a mixture of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtrain_cli.config.schema import Config, ConfigError, DataConfig
from mtrain_cli.data.arrays import SUFFIXES, open_array
from mtrain_cli.data.checked_files import require_folder
from mtrain_cli.data.dataset import Dataset, PackedDataset, TokenSource
from mtrain_cli.data.mixture import MixedDataset, parse_mix
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import open_corpus
from mtrain_cli.data.token_cache import cached_store
from mtrain_cli.data.tokenizers import open_tokenizer

_ARRAYS = f"{' or '.join(SUFFIXES)} file of token ids"


def open_dataset(config: Config) -> Dataset:
    """Open the dataset of a configuration.

    A corpus of text is tokenized once for all workers and later runs (see `token_cache`).

    Raises:
        ConfigError: the corpus, tokenizer or store is missing or broken; the corpus has more token
            ids than the model; or the corpus is shorter than one sequence.
    """
    data = config.data
    if data.mix is None:
        origin = f"data.path={data.path}" if data.path else f"data={data.kind}"
        return _open_part(config, data, origin, data.eval_sequences)
    weights = parse_mix(data.mix)
    parts = {}
    for name, weight in weights.items():
        path = str(Path(data.path, name) if data.path else Path(name).expanduser())
        held_out = max(1, round(data.eval_sequences * weight)) if data.eval_sequences else 0
        parts[name] = _open_part(
            config, replace(data, path=path), f"data.mix: {name}: {path}", held_out
        )
    return MixedDataset(parts, weights)


def _open_part(config: Config, data: DataConfig, origin: str, held_out: int) -> PackedDataset:
    """Open one corpus.

    Args:
        data: settings of the corpus: ``config.data`` with the path of this corpus.
        origin: how the user named the corpus, for messages.
        held_out: number of sequences to hold out of training.
    """
    store, location = _open_source(config, data, origin)
    if store.meta.num_tokens < config.seq:
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
        location=location,
        vocab_size=config.model.vocab_size,
        held_out=held_out,
    )
    if dataset.sequences <= held_out:
        raise ConfigError(
            f"data.eval_sequences={config.data.eval_sequences}: {origin} has only "
            f"{dataset.sequences} sequences of {config.seq:,} tokens, so none would be left to "
            "train on. Hold out fewer, use a smaller seq, or give a longer corpus."
        )
    if not store.meta.vocab_size:
        dataset[0]  # fails before the run starts if a token id is outside the model's vocabulary
    return dataset


def _open_source(config: Config, data: DataConfig, origin: str) -> tuple[TokenSource, str]:
    """Return the tokens of a corpus, and a phrase for messages that says where the tokens are."""
    if data.kind == "mds":
        from mtrain_cli.data.mds_source import MdsSource

        if not data.path:
            needed = "a folder of MDS shards, or data.mix with several folders"
            raise ConfigError(f"data.path is not set: data=mds needs {needed}")
        return MdsSource(data.path, origin), f"mapped from {data.path}"
    if data.kind == "tokens":
        if not data.path:
            raise ConfigError(
                "data.path is not set: data=tokens needs a folder written by "
                f"`mtrain data prepare`, or a {_ARRAYS}"
            )
        path, location = Path(data.path).expanduser(), f"mapped from {data.path}"
        if path.suffix in SUFFIXES and not path.is_dir():
            return open_array(path, origin, data.token_dtype, config.model.vocab_size), location
        require_folder(path, origin, f"written by `mtrain data prepare`, or a {_ARRAYS}")
        store = TokenStore.open(data.path, origin)
        owner = f"the token store {data.path} (tokenizer {store.meta.tokenizer})"
        _check_vocabulary(config, store.meta.vocab_size, owner)
        return store, location
    tokenizer = open_tokenizer(data.tokenizer)
    _check_vocabulary(config, tokenizer.vocab_size, f"data.tokenizer={data.tokenizer}")
    return cached_store(open_corpus(data), tokenizer)


def _check_vocabulary(config: Config, needed: int, owner: str) -> None:
    if config.model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: {owner} has {needed:,} ids. Set "
            f"model.vocab_size={needed} or more, or auto."
        )
