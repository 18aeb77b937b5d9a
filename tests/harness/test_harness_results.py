"""Results of lm-eval 0.4.13, as its evaluator returned them for three small tasks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mtrain_cli.evaluation.results import PERCENT, Result
from mtrain_extras.lm_eval.results import measured

KNOWN = Result("", "", 0, "dense", "", 7, 0, None, None, "")


def sample(number: int, filter_: str = "none", **metrics: Any) -> dict[str, Any]:
    return {
        "doc_id": number, "target": np.int64(number), "filtered_resps": [(-1.5, True)],
        "filter": filter_, **metrics,
    }  # fmt: skip


FOUND: dict[str, Any] = {
    "results": {
        "sums": {"name": "sums", "alias": "sums", "sample_len": 4, "acc,none": 0.75,
                 "acc_stderr,none": "N/A"},
        "more": {"sample_len": 2, "acc,none": 0.5, "exact_match,strict": 0.0,
                 "exact_match,flex": 1.0},
        "text": {"sample_len": 2, "word_perplexity,none": 12.5},
        "all": {"sample_len": 6, "acc,none": 4 / 6, "sample_count": {"acc,none": 6}},
    },
    "group_subtasks": {"all": ["sums", "more"]},
    "versions": {"sums": 1.0, "more": "Yaml", "text": 2, "all": "N/A"},
    "n-shot": {"sums": 5, "more": 0, "text": 0},
    "samples": {
        "sums": [sample(n, acc=float(n != 2)) for n in (3, 2, 1, 0)],
        "more": [
            *(sample(n, acc=float(n)) for n in range(2)),
            *(sample(n, "strict", exact_match=0.0) for n in range(2)),
            *(sample(n, "flex", exact_match=1.0) for n in range(2)),
        ],
        "text": [sample(n, word_perplexity=(-3.0, 4)) for n in range(2)],
    },
}  # fmt: skip


def test_each_metric_of_each_task_gets_a_result_with_its_error():
    found = {one.task: one for one, _ in measured(FOUND, KNOWN, {"model": "m"})}
    assert list(found) == [
        "lm-eval:sums:acc", "lm-eval:more:acc", "lm-eval:more:exact_match (strict)",
        "lm-eval:more:exact_match (flex)", "lm-eval:text:word_perplexity", "lm-eval:all:acc",
    ]  # fmt: skip
    sums = found["lm-eval:sums:acc"]
    assert (sums.score, sums.unit, sums.samples, sums.note) == (75.0, PERCENT, 4, "5-shot")
    assert sums.error == pytest.approx(100 * math.sqrt(0.25 / 4))
    assert (sums.step, sums.attention) == (7, "dense")
    text = found["lm-eval:text:word_perplexity"]
    assert (text.score, text.error, text.unit) == (12.5, None, "")
    whole = found["lm-eval:all:acc"]
    assert (whole.samples, whole.note) == (6, "group")
    # Of a mean over 4 and over 2 samples, with the errors 0.25 and 0.5.
    assert whole.error == pytest.approx(100 * math.hypot(0.25 * 4 / 6, 0.5 * 2 / 6))


def test_rows_follow_the_documents_and_fit_into_json():
    (_, rows), *_ = measured(FOUND, KNOWN, {})
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[2] == {"index": 2, "score": 0.0, "target": 2, "answers": [[-1.5, True]]}


def test_a_sample_whose_score_is_not_finite_has_none():
    found = {**FOUND, "results": {"sums": {"acc,none": math.nan}}}
    found["samples"] = {"sums": [sample(0, acc=math.nan), sample(1, acc=math.inf)]}
    ((only, rows),) = measured(found, KNOWN, {})
    assert [row["score"] for row in rows] == [None, None]
    assert (only.score, only.error) == (None, None)


def test_a_row_depends_on_the_document_and_the_prompt():
    def row(**hashes: str) -> dict[str, Any]:
        found = {**FOUND, "samples": {"sums": [{**sample(0, acc=1.0), **hashes}]}}
        found["results"] = {"sums": {"acc,none": 1.0}}
        return measured(found, KNOWN, {})[0][1][0]

    assert row(doc_hash="a", prompt_hash="b") == row(doc_hash="a", prompt_hash="b")
    assert row(doc_hash="a", prompt_hash="b") != row(doc_hash="a", prompt_hash="c")


def test_keys_tell_models_tasks_and_metrics_apart():
    keys = {one.key for origin in ("a", "b") for one, _ in measured(FOUND, KNOWN, {"m": origin})}
    assert len(keys) == 12


def test_a_score_that_is_no_mean_of_samples_has_no_error():
    found = {**FOUND, "results": {"sums": {"acc,none": 0.5}}}
    ((only, _),) = measured(found, KNOWN, {})
    assert only.error is None
    infinite = {**FOUND, "results": {"sums": {"acc,none": math.inf}}}
    assert measured(infinite, KNOWN, {})[0][0].score is None
