"""Opening the dataset of a configuration."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from masked_documents import FIELDS, masked_store, without_checksums
from test_dataset import _store

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.open_dataset import most_intervals, open_dataset
from mtrain_cli.data.store import StoreMeta
from mtrain_cli.data.token_documents import TokenFields
from mtrain_cli.data.tokenizers import ByteTokenizer, open_tokenizer


def test_open_dataset_reads_the_standard_library_by_default(base_config: Config) -> None:
    dataset = open_dataset(base_config)
    assert len(dataset) > 500
    assert dataset.num_tokens > 4 << 20
    assert dataset.vocab_size == 264
    assert len(dataset.fingerprint) == 64
    assert "standard library of Python 3" in dataset.describe()
    sample = dataset[0]
    valid = sample.labels != IGNORED
    assert np.array_equal(sample.labels[:-1][valid[:-1]], sample.tokens[1:][valid[:-1]])


def test_open_dataset_reads_text_with_both_tokenizers(
    make_config, jsonl: Callable[..., Path], bpe_file: Path
) -> None:
    path = str(jsonl(["the quick dog", "", "a lazy fox"] * 20))
    by_bytes = open_dataset(make_config(kind="text", path=path, shuffle=False))
    assert by_bytes.num_tokens == 20 * (13 + 1 + 10 + 1)
    assert ByteTokenizer().decode(by_bytes[0].tokens).startswith("the quick doga lazy fox")
    by_bpe = open_dataset(
        make_config(kind="text", path=path, tokenizer=str(bpe_file), vocab_size=300)
    )
    assert by_bpe.num_tokens < by_bytes.num_tokens
    assert by_bpe.fingerprint != by_bytes.fingerprint


def _line(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        open_dataset(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_corpus_shorter_than_one_sequence_is_refused_with_both_numbers(
    make_config, jsonl: Callable[..., Path]
) -> None:
    path = jsonl(["short"])
    assert _line(make_config(kind="text", path=str(path))) == (
        f"seq=64: data.path={path} holds only 6 tokens, less than one sequence of 64. Give a "
        "longer corpus or a smaller seq."
    )


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_sizes(
    make_config, tmp_path: Path, bpe_file: Path
) -> None:
    assert (
        _line(make_config(vocab_size=256))
        == "model.vocab_size=256: data.tokenizer=bytes has 264 ids. "
        "Set model.vocab_size=264 or more, or auto."
    )
    _prepared(tmp_path / "s", [50])
    line = _line(make_config(kind="tokens", path=str(tmp_path / "s"), vocab_size=100))
    assert line.startswith("model.vocab_size=100: the token store")
    assert "has 264 ids. Set model.vocab_size=264 or more" in line
    needed = open_tokenizer(str(bpe_file)).vocab_size
    assert f"data.tokenizer={bpe_file} has {needed} ids" in _line(
        make_config(tokenizer=str(bpe_file), vocab_size=needed - 1)
    )


def _prepared(folder: Path, lengths: list[int]) -> StoreMeta:
    store = _store(lengths)
    folder.mkdir()
    store.tokens.tofile(folder / "tokens.bin")
    store.offsets.tofile(folder / "documents.bin")
    store.meta.write(folder)
    return store.meta


def test_tokens_are_read_from_a_store_and_damage_is_reported(make_config, tmp_path: Path) -> None:
    meta = _prepared(tmp_path / "s", [50, 60, 70])
    config = make_config(kind="tokens", path=str(tmp_path / "s"))
    dataset = open_dataset(config)
    assert (dataset.num_tokens, dataset.fingerprint) == (180, meta.sha256)
    assert f"mapped from {tmp_path / 's'}" in dataset.describe()
    content = np.fromfile(tmp_path / "s" / "tokens.bin", "<u2")
    content[:] = 999
    content.tofile(tmp_path / "s" / "tokens.bin")
    with pytest.raises(
        ConfigError, match=r"token 999 is outside the store's vocabulary of 264 ids\. The store is"
    ):
        open_dataset(config)[0]
    (tmp_path / "s" / "tokens.bin").write_bytes(b"")
    assert "tokens.bin has 0 bytes, but meta.json implies 360" in _line(config)


def test_masks_and_positions_are_read_if_they_are_named(make_config, tmp_path: Path) -> None:
    path = str(masked_store(tmp_path))
    both = make_config(kind="tokens", path=path, mask_key="mask", positions_key="at")
    sample = open_dataset(both)[0]
    assert sample.slices.shape[1] == 5
    assert sample.positions.max() == 15
    plain = make_config(kind="tokens", path=path)
    assert (open_dataset(plain)[0].slices, open_dataset(plain)[0].positions) == (None, None)
    assert (most_intervals(both), most_intervals(plain)) == (2, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"mask_key": "masks"},
            "data.mask_key=masks: data.path=PATH has no such column. Its columns: mask, at. "
            "`mtrain data prepare --mask-key` adds one.",
        ),
        (
            {"positions_key": "mask"},
            "data.positions_key=mask: data.path=PATH has no such column. Its columns: mask, at. "
            "`mtrain data prepare --positions-key` adds one.",
        ),
        (
            {"positions_key": "at", "seq": 15},
            "data.positions_key=at: data.path=PATH has positions up to 15; set seq=16 or more, "
            "not seq=15",
        ),
    ],
)
def test_a_column_that_does_not_fit_is_refused(make_config, tmp_path, data, message) -> None:
    path = str(masked_store(tmp_path))
    line = _line(make_config(kind="tokens", path=path, **data))
    assert line == message.replace("PATH", path)


def test_a_mixture_may_hold_corpora_without_columns(make_config, tmp_path: Path) -> None:
    masked_store(tmp_path)
    _prepared(tmp_path / "plain", [100, 100])
    mix = {"store": 0.5, "plain": 0.5}
    given = {"kind": "tokens", "path": str(tmp_path), "mix": mix}
    config = make_config(**given, mask_key="mask", positions_key="at")
    dataset = open_dataset(config)
    assert most_intervals(config) == 2
    assert all(dataset[number].slices is not None for number in range(len(dataset)))
    plain = dataset.parts["plain"][1]
    assert plain.positions.tolist() == list(range(64))
    assert {kind for *_, kind in plain.slices.tolist()} == {1}
    assert "has no such column" in _line(make_config(**given, mask_key="other"))
    only_masks = TokenFields(FIELDS.tokens, FIELDS.mask)
    masked_store(tmp_path / "more", only_masks)
    (tmp_path / "more" / "store").rename(tmp_path / "masks")
    mixed = {**given, "mix": {"masks": 0.5, "plain": 0.5}}
    assert "data.mix: masks: " in _line(make_config(**mixed, positions_key="at"))


def test_a_damaged_mask_of_the_first_sequence_fails_before_the_run(make_config, tmp_path) -> None:
    store = masked_store(tmp_path)
    slices = np.fromfile(store / "slices.bin", "<i8")
    slices[:] = -1
    slices.tofile(without_checksums(store) / "slices.bin")
    data = {"kind": "tokens", "path": str(store), "seq": 16}
    open_dataset(make_config(**data))
    with pytest.raises(ConfigError, match=r"slices\.bin is corrupt: it holds impossible values"):
        open_dataset(make_config(**data, mask_key="mask"))
