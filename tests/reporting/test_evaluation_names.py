"""Results of one task, length and attention have headings that tell them apart."""

from __future__ import annotations

import dataclasses

from mtrain_cli.evaluation.results import PERCENT, Part, Result
from mtrain_cli.reporting.evaluation_figures import evaluation_figures
from mtrain_cli.reporting.evaluation_names import distinguished
from mtrain_cli.reporting.evaluation_tables import evaluation_tables

ONE = Result(
    "a", "niah", 512, "dense", "", 4, 2, 50.0, 1.0, PERCENT, parts=(Part(0, 10, 2, 50.0),),
    settings=("needles 3", "seed 1"),
)  # fmt: skip
TWO = dataclasses.replace(ONE, key="b", score=70.0, settings=("needles 3", "seed 2"))


def names(*results: Result) -> list[str]:
    return [result.attention for result in distinguished(results)]


def test_the_heading_has_the_settings_that_differ():
    assert names(ONE) == ["dense"]
    assert names(ONE, TWO) == ["dense, seed 1", "dense, seed 2"]
    longer = dataclasses.replace(ONE, length=1024)
    assert names(ONE, TWO, longer) == ["dense, seed 1", "dense, seed 2", "dense, seed 1"]


def test_other_lengths_steps_tasks_and_attentions_need_no_settings():
    others = [{"length": 1024}, {"step": 8}, {"task": "perplexity"}, {"attention": "moba"}]
    found = names(ONE, *(dataclasses.replace(TWO, **other) for other in others))
    assert found == ["dense", "dense", "dense", "dense", "moba"]


def test_results_with_equal_settings_are_numbered():
    """Weights may differ, and earlier versions did not record the settings."""
    assert names(ONE, dataclasses.replace(ONE, key="c")) == ["dense (1)", "dense (2)"]
    old = [dataclasses.replace(ONE, key=key, settings=()) for key in "xy"]
    assert names(*old, ONE) == ["dense (1)", "dense (2)", "dense (3)"]


def test_shots_of_lm_eval_tell_results_apart():
    acc = dataclasses.replace(ONE, task="lm-eval:arc:acc", length=0, note="0-shot")
    assert names(acc, dataclasses.replace(acc, note="5-shot")) == ["dense", "dense"]


def test_tables_and_figures_show_both_results():
    lengths, depths = evaluation_tables([ONE, TWO])
    assert lengths.heads == ("length", "dense, seed 1", "dense, seed 2", "samples")
    assert lengths.rows[0][1:3] == ["50.0 ± 1.0", "70.0 ± 1.0"]
    assert depths.heads == ("depth", "512\ndense, seed 1", "512\ndense, seed 2")
    maps, *_ = evaluation_figures([("run", [ONE, TWO])])
    assert [view.labels for view in maps.views] == [
        ("niah, dense, seed 1, step 4",),
        ("niah, dense, seed 2, step 4",),
    ]
