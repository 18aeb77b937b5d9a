"""Loss by context, short contexts and key tokens."""

from __future__ import annotations

import numpy as np
import pytest
from evaluation.evaluated_runs import small_run
from inference.small_models import engine, tokens

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation import perplexity
from mtrain_cli.evaluation.measurement import Cell
from mtrain_cli.evaluation.perplexity import (
    HELD_OUT,
    Perplexity,
    TextSequence,
    key_places,
    short_losses,
    text_hash,
)
from mtrain_cli.evaluation.results import Result

RESULT = Result("k", "perplexity", 300, "dense", "", 3, 1, None, None, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engine(small_run(tmp_path_factory.mktemp("perplexity")))


def measured(model, sequence: TextSequence, **options) -> tuple[dict, Perplexity]:
    own = Perplexity({len(sequence.ids): [sequence]}, "text", **options)
    (cell,) = own.cells()
    (row,) = own.measure(model, cell, list(own.items(cell)))
    return row, own


def test_buckets_add_up_to_the_loss(model):
    sequence = TextSequence(np.array(tokens(300), np.int32))
    row, own = measured(model, sequence)
    losses = model.token_losses(tokens(300)).double().numpy()
    assert row["score"] == pytest.approx(losses.mean())
    assert [bucket[:3] for bucket in row["buckets"]] == [
        [0, 128, 128], [128, 256, 128], [256, 300, 43],
    ]  # fmt: skip
    assert row["buckets"][1][3] == pytest.approx(losses[128:256].mean())
    parts = own.result([row, row], RESULT).parts
    assert [(part.begin, part.count) for part in parts] == [(0, 256), (128, 256), (256, 86)]


def test_settings_name_the_text_and_details_where_it_is():
    sequences = {n: [TextSequence(np.array(tokens(128)[:n], np.int32))] for n in (64, 128)}
    own, other = Perplexity(sequences, "/x/a/book.txt"), Perplexity(sequences, HELD_OUT)
    short, long = own.cells()
    assert (own.labels(short), other.labels(short)) == (("text book.txt",), ("held-out text",))
    folder, begins, first = own.details(short)
    assert folder == "in /x/a"
    assert own.details(long)[1] == begins
    assert own.details(long)[2] != first
    assert other.details(short) == ("", begins, first)


def test_one_text_has_one_key_however_its_path_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sequences = {64: [TextSequence(np.array(tokens(64), np.int32))]}
    cell = Perplexity(sequences, "x").cells()[0]
    spelled = ("book.txt", "./book.txt", str(tmp_path / "book.txt"), "a/../book.txt")
    settings = [Perplexity(sequences, each).settings(cell) for each in spelled]
    assert all(each == settings[0] for each in settings)
    assert Perplexity(sequences, "a/book.txt").settings(cell) != settings[0]
    assert Perplexity(sequences, HELD_OUT).settings(cell)["origin"] == HELD_OUT


def test_borders_of_documents_do_not_count_and_context_starts_again(model):
    documents = np.repeat([0, 1], [140, 160]).astype(np.int32)
    row, _ = measured(model, TextSequence(np.array(tokens(300), np.int32), documents))
    assert row["tokens"] == 298
    assert [bucket[:3] for bucket in row["buckets"]] == [[0, 128, 256], [128, 256, 42]]


def test_means_are_those_of_all_tokens(model):
    sequences = [
        TextSequence(
            np.array(tokens(300, seed), np.int32), np.repeat([0, 1], sizes).astype(np.int32)
        )
        for seed, sizes in enumerate(([140, 160], [2, 298]))
    ]
    rows = [measured(model, one, short=64, keys={text_hash(one.ids): keys}, key_label="o")[0]
            for one, keys in zip(sequences, ([80], [9, 100, 200]), strict=True)]  # fmt: skip
    losses = [model.token_losses(one.ids.tolist(), one.documents).numpy() for one in sequences]
    (_, own) = measured(model, sequences[0], short=64, keys={text_hash(sequences[0].ids): []})
    result = own.result(rows, RESULT)
    counted = [np.delete(loss, at - 1) for loss, at in zip(losses, (140, 2), strict=True)]
    assert result.score == pytest.approx(np.concatenate(counted).mean(), rel=1e-6)
    second = np.concatenate([losses[0][128:139], losses[0][268:], losses[1][130:258]])
    assert result.parts[1].count == len(second)
    assert result.parts[1].score == pytest.approx(second.mean(), rel=1e-6)
    assert result.key_tokens is not None
    keys = [losses[0][80], *losses[1][[9, 100, 200]]]
    assert result.key_tokens.score == pytest.approx(np.mean(keys), rel=1e-6)


@pytest.mark.parametrize(("length", "kept"), [(50, 0), (81, 0), (82, 0), (300, 0), (300, 1)])
def test_short_losses_see_a_short_context_behind_the_begin_token(model, length, kept):
    ids, short = tokens(length), 64
    found = short_losses(model, ids, short, kept=kept)
    whole = model.token_losses(ids).numpy()
    np.testing.assert_allclose(found[: short + 16], whole[: short + 16], rtol=1e-4)
    for place in (place for place in (80, 100, length - 2) if 80 <= place < length - 1):
        # A window of 80 tokens counts for its last 16: its first place follows 64 tokens.
        begin = 80 + (place - 80) // 16 * 16 - short
        window = model.token_losses([*ids[:kept], *ids[begin : place + 2]]).numpy()
        assert found[place] == pytest.approx(window[-1], rel=1e-4)


def test_key_tokens_gain_more_than_two_nats_and_are_likely():
    long = np.array([0.5, 0.5, 1.9, 2.1, 0.5])
    short = np.array([2.4, 2.6, 4.0, 9.0, 9.0])
    counted = np.array([True, True, True, True, False])
    assert key_places(long, short, counted).tolist() == [1, 2]


def test_tokens_with_less_context_than_the_short_one_are_not_key(model, monkeypatch):
    monkeypatch.setattr(perplexity, "LEAST_GAIN", -100.0)
    monkeypatch.setattr(perplexity, "LEAST_LOG_P", -100.0)
    documents = np.repeat([0, 1], [140, 160]).astype(np.int32)
    row, _ = measured(model, TextSequence(np.array(tokens(300), np.int32), documents), short=64)
    assert row["keys"] == [*range(64, 139), *range(140 + 64, 299)]
    assert row["short"] == 64


def test_given_key_tokens_are_used_and_missing_ones_refused(model):
    sequence = TextSequence(np.array(tokens(300), np.int32))
    keys = {text_hash(sequence.ids): [100, 200]}
    row, own = measured(model, sequence, short=64, keys=keys, key_label="other")
    losses = model.token_losses(tokens(300)).double().numpy()
    assert row["key_loss"] == pytest.approx(losses[[100, 200]].mean())
    result = own.result([row], RESULT)
    assert result.key_tokens is not None
    assert (result.key_tokens.count, result.note) == (2, "key tokens from other")
    with pytest.raises(ConfigError, match="--keys-from other: holds no whole key tokens"):
        measured(model, sequence, short=64, keys={}, key_label="other")


@pytest.mark.parametrize("places", [["x"], [1.5], [True], [-1], [299], {"1": 2}, 7])
def test_damaged_key_tokens_are_refused(places):
    sequence = TextSequence(np.array(tokens(300), np.int32))
    own = Perplexity({300: [sequence]}, "text", short=64, keys={text_hash(sequence.ids): places})
    with pytest.raises(ConfigError, match="holds no whole key tokens"):
        next(own.items(Cell("perplexity", 300)))
    row = {"score": 1.0, "tokens": 299, "buckets": [], "keys": places, "key_loss": 1.0}
    with pytest.raises(ValueError, match="outside its text"):
        own.result([row], RESULT)
    assert own.result([{**row, "keys": [0, 298]}], RESULT).key_tokens is not None
