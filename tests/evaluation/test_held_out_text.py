"""Whole sequences from files, one document each, and from what a run held out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from data.framed_tokenizers import write_framed

from mtrain_cli.composition import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.store import StoreMeta, Stretch
from mtrain_cli.data.tokenizers import NO_BEGIN, ByteTokenizer, open_tokenizer
from mtrain_cli.evaluation.perplexity import (
    TextSequence,
    _joined,
    left_out_of_files,
    sequences_of_files,
    sequences_of_run,
    store_of_files,
)


def test_each_document_gives_one_sequence_before_any_gives_two(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 25)
    (tmp_path / "b.txt").write_text("b" * 12)
    (tmp_path / "c.txt").write_text("c" * 5)  # too short
    tokenizer = ByteTokenizer()
    store = store_of_files(str(tmp_path), "text", tokenizer)
    found = sequences_of_files(store, tokenizer, 10, 5)
    assert [bytes(one.ids.astype(np.uint8)) for one in found] == [b"a" * 10, b"b" * 10, b"a" * 10]
    assert len(sequences_of_files(store, tokenizer, 10, 2)) == 2
    (tmp_path / "d.pdf").write_text("d" * 25)
    left_out = left_out_of_files(store_of_files(str(tmp_path), "text", tokenizer), 10)
    assert left_out == "left out: 1 of other kinds, 1 shorter than 10 tokens"
    message = f"--text {tmp_path}: no document has 64 tokens; the longest has 26"
    with pytest.raises(ConfigError, match=message):
        sequences_of_files(store, tokenizer, 64, 5)


def test_context_counts_within_documents():
    documents = np.array([0, 0, 1, 1, 1, 2], np.int32)
    assert TextSequence(np.zeros(6, np.int32), documents).earlier.tolist() == [0, 1, 0, 1, 2, 0]
    assert TextSequence(np.zeros(3, np.int32)).earlier.tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def config():
    return compose.compose(["seq=512", "data.eval_sequences=4"])


def test_held_out_sequences_are_cut_and_joined(config):
    samples = open_dataset(config).held_out
    halves = sequences_of_run(config, 256, 3)
    np.testing.assert_array_equal(halves[1].ids, samples[0].tokens[256:])
    (double,) = sequences_of_run(config, 1024, 1)
    np.testing.assert_array_equal(double.ids, np.concatenate([s.tokens for s in samples[:2]]))


def test_documents_go_on_across_held_out_sequences(config):
    samples = open_dataset(config).held_out
    (double,) = sequences_of_run(config, 1024, 1)
    documents = np.zeros(1024, np.int32) if double.documents is None else double.documents
    goes_on = samples[0].labels[-1] >= 0
    assert (documents[511] == documents[512]) == goes_on
    np.testing.assert_array_equal(np.diff(documents[:512]), np.diff(samples[0].documents))


def test_tokens_without_a_label_belong_to_the_text():
    lengths, targets = [5, 1, 7, 6, 1], np.ones(20, bool)
    targets[[10, 11, 17, 18]] = False  # such as a question, whose answer alone is a target

    class Source:
        meta = StoreMeta(
            dtype="uint16", tokenizer="", num_documents=5, num_tokens=20, sha256="", source=""
        )
        offsets = np.cumsum([0, *lengths])
        folder, samples, verify = None, {}, None

        def read(self, unit: int, start: int, stop: int) -> Stretch:
            begin = int(self.offsets[unit])
            tokens = np.arange(begin + start, begin + stop)
            return Stretch(tokens, None, targets[begin + start : begin + stop])

    samples = PackedDataset(Source(), 6, shuffle=False, vocab_size=99)._sample
    ids, documents = _joined([samples(number) for number in range(4)])
    np.testing.assert_array_equal(ids, np.arange(20))
    np.testing.assert_array_equal(documents, np.repeat(range(5), lengths))


@pytest.mark.parametrize(
    ("data", "length", "message"),
    [
        ({"eval_sequences": 0}, 256, "held out no text"),
        ({}, 8192, "held out 4 sequences of at most 512 tokens"),
        ({"mask_key": "mask"}, 256, "has its own masks or positions"),
        ({"mix": "{a: 1}"}, 1024, "do not follow each other"),
    ],
)
def test_text_that_a_run_lacks_is_refused(config, data, length, message):
    changed = dataclasses.replace(config, data=dataclasses.replace(config.data, **data))
    with pytest.raises(ConfigError, match=message):
        sequences_of_run(changed, length, 1)


def test_every_window_of_a_file_starts_with_the_begin_token(tmp_path):
    tokenizer = open_tokenizer(str(write_framed(tmp_path / "tokenizer")))
    (tmp_path / "a.txt").write_text(text := "The grass is green. The sky is blue. " * 20)
    store = store_of_files(str(tmp_path / "a.txt"), "text", tokenizer)
    found = sequences_of_files(store, tokenizer, 50, 4)
    (begin,) = tokenizer.begin.ids
    assert [one.ids[0] for one in found] == [begin] * 4
    joined = np.concatenate([one.ids[1:] for one in found])
    np.testing.assert_array_equal(joined, tokenizer.encode([text])[0][: 4 * 49])
    tokenizer.begin = NO_BEGIN
    store = store_of_files(str(tmp_path / "a.txt"), "text", tokenizer)
    (first, *_) = sequences_of_files(store, tokenizer, 50, 4)
    np.testing.assert_array_equal(first.ids, tokenizer.encode([text])[0][:50])
