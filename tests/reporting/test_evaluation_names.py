"""Results of one task, length and attention have headings that tell them apart."""

from __future__ import annotations

import dataclasses

from mtrain_cli.evaluation.results import NATS, PERCENT, Part, Result
from mtrain_cli.reporting.evaluation_figures import evaluation_figures
from mtrain_cli.reporting.evaluation_names import distinguished, named_settings
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
    found = names(ONE, *(dataclasses.replace(ONE, **other) for other in others))
    assert found == ["dense", "dense", "dense", "dense", "moba"]


def test_a_column_has_one_setting_also_if_lengths_or_steps_differ():
    for other in ({"length": 1024}, {"step": 8}):
        two = dataclasses.replace(TWO, **other)
        assert names(ONE, two) == ["dense, seed 1", "dense, seed 2"]
    (lengths, _) = evaluation_tables([ONE, dataclasses.replace(TWO, length=1024)])
    assert [column.name for column in lengths.shown] == [
        "length",
        "dense, seed 1",
        "dense, seed 2",
        "samples",
    ]
    assert [row[1:3] for row in lengths.cells()] == [["50.0 ± 1.0", "-"], ["-", "70.0 ± 1.0"]]
    unknown = dataclasses.replace(ONE, length=1024, settings=())
    assert names(ONE, unknown) == ["dense", "dense, settings not recorded"]


def test_lengths_are_told_apart_by_weights_and_texts_but_not_by_first_sequences():
    def of(length: int, folder: str, sequence: int, weights: str) -> Result:
        details = (f"in /x/{folder}", f"first sequence {sequence}", f"weights {weights}")
        return dataclasses.replace(ONE, length=length, details=details)

    one = of(512, "a", 1, "4-aa")
    assert names(one, of(1024, "a", 2, "4-aa")) == ["dense", "dense"]
    assert names(one, of(1024, "b", 2, "4-aa")) == ["dense, in a", "dense, in b"]
    assert names(one, of(1024, "a", 2, "4-bb")) == ["dense, weights 4-aa", "dense, weights 4-bb"]
    # A run has no hash of the weights that it trains, and each step has other weights.
    assert names(one, of(1024, "a", 2, "training-4")) == ["dense", "dense"]
    later = dataclasses.replace(of(512, "a", 1, "8-cc"), step=8)
    assert names(one, later) == ["dense", "dense"]


def test_tasks_of_a_suite_share_a_name_only_with_equal_settings_of_the_model():
    """A row of RULER has the mean over tasks."""
    fwe = dataclasses.replace(ONE, task="ruler:fwe", parts=(), settings=("p_v 0.9",))
    sparse = dataclasses.replace(fwe, attention="vertical_slash")
    vt = dataclasses.replace(sparse, task="ruler:vt", settings=("words.json", "p_v 0.9"))
    assert names(sparse, vt) == ["vertical_slash"] * 2
    other = dataclasses.replace(vt, settings=("words.json", "p_v 0.5"))
    assert names(sparse, other) == ["vertical_slash, p_v 0.9", "vertical_slash, p_v 0.5"]


def test_results_with_equal_settings_have_keys_that_a_later_result_does_not_change():
    """Earlier versions did not record the settings."""
    first, second, third = (
        dataclasses.replace(ONE, key=f"{digit * 16}", settings=()) for digit in "xyz"
    )
    assert names(first) == ["dense"]
    assert names(first, second) == ["dense (xxxx)", "dense (yyyy)"]
    assert names(third, first, second) == ["dense (zzzz)", "dense (xxxx)", "dense (yyyy)"]
    (one, _) = named_settings([first, second])
    assert (one.task, one.name, one.settings) == ("niah", "dense (xxxx)", (f"key {'x' * 16}",))


def loss(key: str, *settings: str, details: tuple[str, ...] = (), **changes) -> Result:
    plain = dataclasses.replace(ONE, task="perplexity", unit=NATS, key=key)
    return dataclasses.replace(plain, settings=settings, details=details, **changes)


def test_all_names_have_the_text_if_texts_differ():
    held_out = loss("a", "held-out text", "dtype float32")
    book = loss("b", "text book.txt", "dtype float32")
    sparse = loss("c", "held-out text", "block 16", "dtype float32", attention="moba")
    assert names(held_out, sparse) == ["dense", "moba"]
    found = names(held_out, book, sparse)
    assert found == ["dense, held-out text", "dense, text book.txt", "moba, held-out text"]
    # Also of other lengths, and if an earlier version did not name the held-out text.
    longer = loss("d", "dtype float32", length=1024)
    assert names(longer, book) == ["dense, held-out text", "dense, text book.txt"]


def test_texts_of_one_name_are_told_apart_by_what_differs():
    of = "text book.txt"
    one = loss("a", of, details=("in /x/a", "text begins 1", "weights 3"))
    two = loss("b", of, details=("in /x/b", "text begins 1", "weights 3"))
    assert names(one, two) == ["dense, in a", "dense, in b"]
    changed = loss("c", of, details=("in /x/b", "text begins 2", "weights 3"))
    assert names(two, changed) == ["dense, text begins 1", "dense, text begins 2"]
    again = loss("d", of, details=("in /x/b", "text begins 2", "weights 4"))
    assert names(one, two, changed, again) == [
        "dense, in a",
        "dense, in b, text begins 1",
        "dense, in b, text begins 2, weights 3",
        "dense, in b, text begins 2, weights 4",
    ]
    far = loss("e", of, details=("in /y/a", "text begins 1", "weights 3"))
    assert names(one, far) == ["dense, in /x/a", "dense, in /y/a"]


def test_only_names_with_settings_need_a_legend():
    longer = dataclasses.replace(ONE, length=1024, details=("weights 4",))
    assert named_settings([ONE, longer]) == []
    named = named_settings([ONE, TWO, longer])
    assert [(one.name, one.settings) for one in named] == [
        ("dense, seed 1", ("needles 3", "seed 1")),
        ("dense, seed 2", ("needles 3", "seed 2")),
    ]


def test_shots_of_lm_eval_tell_results_apart():
    acc = dataclasses.replace(ONE, task="lm-eval:arc:acc", length=0, note="0-shot")
    assert names(acc, dataclasses.replace(acc, note="5-shot")) == ["dense", "dense"]


def test_tables_and_figures_show_both_results():
    lengths, depths = evaluation_tables([ONE, TWO])
    assert [column.name for column in lengths.shown] == [
        "length",
        "dense, seed 1",
        "dense, seed 2",
        "samples",
    ]
    assert lengths.cells()[0][1:3] == ["50.0 ± 1.0", "70.0 ± 1.0"]
    assert [column.name for column in depths.shown] == [
        "depth",
        "512\ndense, seed 1",
        "512\ndense, seed 2",
    ]
    maps, *_ = evaluation_figures([("run", [ONE, TWO])])
    assert [view.labels for view in maps.views] == [
        ("niah, dense, seed 1, step 4",),
        ("niah, dense, seed 2, step 4",),
    ]
