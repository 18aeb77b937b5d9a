"""Needles by forced scoring: an engine that knows the answers gets 100, one that errs less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluation.evaluated_runs import small_run
from inference.small_models import engine

from mtrain_cli.data.corpora import stdlib_corpus
from mtrain_cli.data.needles import NeedleSettings, needle_documents
from mtrain_cli.data.tokenizers import ByteTokenizer
from mtrain_cli.evaluation.measurement import Cell
from mtrain_cli.evaluation.request import EvaluationRequest, NeedleOptions, Weights
from mtrain_cli.evaluation.results import Result
from mtrain_cli.evaluation.retrieval import Retrieval, open_retrieval, python_item

RESULT = Result("k", "niah", 2048, "dense", "", 3, 1, None, None, "")
CELL = Cell("niah", 2048)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The sky is blue. " * 40)
    options = NeedleOptions(haystack=str(path), needles=3)
    request = EvaluationRequest(
        "niah", "", "", (Weights("", True, None, ""),), ("dense",), (2048,), 1, niah=options
    )
    opened = open_retrieval(request, ByteTokenizer())
    return next(opened.items(CELL))


@pytest.fixture(scope="module")
def python() -> dict:
    settings = NeedleSettings(4096, 8, 0.25, 1)
    (document,) = needle_documents(stdlib_corpus(), ByteTokenizer(), settings, 1)
    item = python_item(document, ByteTokenizer())
    assert bytes(item["ids"]).decode() == document.text
    for (first, last), question in zip(item["answers"], document.questions, strict=True):
        assert bytes(item["ids"][first:last]).decode() == f" {question.answer}"
    return item


def score_with(item: dict, wrong: set[int]) -> tuple[dict, Result]:
    """Score an item with an engine that errs at some places."""

    def copying(_ids, places):
        assert list(places) == sorted(places)
        hits = torch.tensor([place not in wrong for place in places])
        return torch.where(hits, 0.0, 5.0), hits

    own = Retrieval([2048], lambda _: iter([item]), {})
    scorer: Any = SimpleNamespace(token_scores=copying)
    (row,) = own.measure(scorer, CELL, [item])
    return row, own.result([row], RESULT)


@pytest.mark.parametrize("form", ["sentences", "python"])
def test_a_model_that_copies_scores_100_and_one_wrong_token_fails_an_answer(request, form):
    item = request.getfixturevalue(form)
    row, result = score_with(item, set())
    assert (row["score"], result.score) == (100.0, 100.0)
    last = item["answers"][1][1] - 1
    row, result = score_with(item, {last})
    count = len(item["answers"])
    assert row["score"] == pytest.approx(100 * (count - 1) / count)
    assert [hit for _, hit in row["hits"]].index(0) == 1
    assert row["nats"][1] == 5.0
    assert sum(part.count for part in result.parts) == count
    missed = next(p for p in result.parts if p.score is not None and p.score < 100)
    assert missed.begin <= 100 * item["depths"][1] <= missed.end


@pytest.mark.parametrize("form", ["sentences", "python"])
def test_random_weights_score_0(tmp_path, request, form):
    item = request.getfixturevalue(form)
    own = Retrieval([2048], lambda _: iter([item]), {})
    (row,) = own.measure(engine(small_run(tmp_path)), CELL, [item])
    assert row["score"] == 0.0
    assert all(cost > 1.0 for cost in row["nats"])


def test_a_depth_has_the_mean_of_its_questions():
    rows = [{"score": 0.0, "hits": [[0.05, 1]]}, {"score": 0.0, "hits": [[0.05, 0]] * 3}]
    (part,) = Retrieval([2048], lambda _: iter([]), {}).result(rows, RESULT).parts
    assert (part.count, part.score) == (4, 25.0)


def test_sparse_answers_are_said():
    own = Retrieval([2048], lambda _: iter([]), {})
    sparse = Result("k", "niah", 2048, "moba", "", 3, 1, None, None, "")
    assert "sparse, too" in own.result([], sparse).note
    assert own.result([], RESULT).note == ""
