"""The tokens of MDS shards as a source of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_mds import PACKED, RAW, REAL, packed_samples, raw_samples, write_mds

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_extras.mds.shards import MdsSource


@pytest.mark.parametrize("name", ["packed", "packed_nd"])
def test_packed_samples_become_sequences_with_their_documents(name: str) -> None:
    """A sample as long as a sequence is one sequence. The first token of a document is not a
    target.
    """
    source = MdsSource(REAL / name, name)
    dataset = PackedDataset(source, 32, vocab_size=1000, shuffle=False)
    assert len(dataset) == (5 if name == "packed" else 3)
    for number in range(len(dataset)):
        sample, cut = dataset[number], 10 + number
        assert np.array_equal(sample.tokens, np.arange(32) + 50 * number)
        assert sample.documents.tolist() == [0] * cut + [1] * (32 - cut)
        expected = np.append(sample.tokens[1:], IGNORED)
        expected[cut - 1] = IGNORED
        assert np.array_equal(sample.labels, expected)
    whole = PackedDataset(source, 32, vocab_size=1000, shuffle=False, document_mask=False)[0]
    assert not whole.documents.any()
    assert IGNORED not in whole.labels


def test_samples_are_shuffled_whole_and_cut_into_shorter_sequences(
    make_config: Callable[..., Any],
) -> None:
    config = make_config(kind="mds", path=str(REAL / "packed"), seq=32, vocab_size=1000)
    dataset = open_dataset(config)
    firsts = [int(dataset[number].tokens[0]) for number in range(5)]
    assert sorted(firsts) == [0, 50, 100, 150, 200] != firsts
    halves = open_dataset(
        make_config(kind="mds", path=str(REAL / "packed"), seq=16, vocab_size=1000)
    )
    assert len(halves) == 10
    assert np.array_equal(np.concatenate([halves[0].tokens, halves[1].tokens]), dataset[0].tokens)
    # A document ends at token 10 of a sample, which is token 2 of its second sequence of eight.
    second = PackedDataset(MdsSource(REAL / "packed", "packed"), 8, vocab_size=1000, shuffle=False)[
        1
    ]
    assert second.documents.tolist() == [0] * 2 + [1] * 6
    assert (second.labels == IGNORED).nonzero()[0].tolist() == [1]


def test_tokens_outside_spans_and_masks_are_not_targets(tmp_path: Path) -> None:
    samples = packed_samples()[:1]
    samples[0]["indices"] = [[2, 10], [12, 32]]
    samples[0]["mask"][20:24] = 0
    dataset = PackedDataset(
        MdsSource(write_mds(tmp_path / "s", PACKED, samples), "s"),
        32,
        vocab_size=1000,
        shuffle=False,
    )
    targets = set((np.flatnonzero(dataset[0].labels != IGNORED) + 1).tolist())
    # Tokens 2 and 12 begin a document.
    assert targets == {*range(3, 10), *range(13, 20), *range(24, 32)}


def test_raw_documents_are_packed_end_to_end_and_may_be_compressed(tmp_path: Path) -> None:
    plain = PackedDataset(MdsSource(REAL / "raw", "raw"), 20, vocab_size=1000, seed=3)
    gz = PackedDataset(
        MdsSource(
            write_mds(tmp_path / "gz", RAW, raw_samples(), compression="gz", hashes=("sha1",)), "gz"
        ),
        20,
        vocab_size=1000,
        seed=3,
    )
    zstd = PackedDataset(MdsSource(REAL / "raw_zstd", "zstd"), 20, vocab_size=1000, seed=3)
    assert len(plain) == 5
    for number in range(5):
        for other in (gz, zstd):
            assert all(
                np.array_equal(getattr(plain[number], name), getattr(other[number], name))
                for name in ("tokens", "labels", "documents")
            )
    everything = np.concatenate([plain[number].tokens for number in range(5)])[: plain.num_tokens]
    assert sorted(everything.tolist()) == sorted(
        np.concatenate([sample["input_ids"] for sample in raw_samples()]).tolist()
    )


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([[0, 40]], "must be increasing spans within its 32 tokens"),
        ([[5, 3]], "must be increasing spans"),
        ([[0, 20], [10, 32]], "must be increasing spans"),
        ("text", "is not a list of (begin, end)"),
        ([[1, 2, 3]], "is not a list of (begin, end)"),
    ],
)
def test_invalid_spans_are_refused(tmp_path: Path, spans: object, expected: str) -> None:
    samples = packed_samples()[:1]
    samples[0]["indices"] = spans
    dataset = PackedDataset(
        MdsSource(write_mds(tmp_path / "s", PACKED, samples), "mine"), 32, vocab_size=1000
    )
    with pytest.raises(ConfigError) as caught:
        dataset[0]
    assert str(caught.value).startswith("mine: sample 0: indices")
    assert expected in str(caught.value)


@pytest.mark.parametrize("hashes", [(), ("sha1",)])
def test_a_changed_shard_has_another_sample_and_verify_names_it(
    tmp_path: Path, hashes: tuple[str, ...]
) -> None:
    folder = write_mds(tmp_path / "a", RAW, raw_samples(20), hashes=hashes)
    before = MdsSource(folder, "data.path=x")
    assert len(before.samples) == 5, "at most 8 of 10 shards, evenly spaced"
    for part in range(2):
        before.verify(part, 2, lambda _done, _size: None)
    shard = folder / list(before.samples)[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    if hashes:
        with pytest.raises(ConfigError, match=r"shard\.00002\.mds is corrupt: its sha1 is"):
            before.verify(0, 2, lambda _done, _size: None)
        before.verify(1, 2, lambda _done, _size: None)  # shard 2 belongs to part 0
    else:
        after = MdsSource(folder, "data.path=x")
        assert {n for n in before.samples if before.samples[n] != after.samples[n]} == {shard.name}
