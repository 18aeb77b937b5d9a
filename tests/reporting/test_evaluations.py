"""Tables and figures of evaluations: dense beside sparse, errors, no mean of unlike tasks."""

from __future__ import annotations

import dataclasses
import io

from mtrain_cli.console import Console
from mtrain_cli.evaluation.results import NATS, PERCENT, Part, Result
from mtrain_cli.reporting.evaluations import (
    distinguished,
    evaluation_figures,
    evaluation_tables,
    named_settings,
    show_evaluations,
)
from mtrain_cli.reporting.plots import STYLES
from mtrain_cli.reporting.table import Table

NIAH = Result(
    "k", "niah", 8192, "dense", "", 100, 10, 97.5, 1.25, PERCENT,
    parts=(Part(0, 10, 20, 95.0, 2.0), Part(90, 100, 20, 100.0, 0.0)),
)  # fmt: skip
SPARSE = dataclasses.replace(NIAH, attention="moba", score=50.0, error=None, note="sparse rows")

ONE = Result(
    "a", "niah", 512, "dense", "", 4, 2, 50.0, 1.0, PERCENT, parts=(Part(0, 10, 2, 50.0),),
    settings=("needles 3", "seed 1"),
)  # fmt: skip
TWO = dataclasses.replace(ONE, key="b", score=70.0, settings=("needles 3", "seed 2"))


def heads(table: Table) -> list[str]:
    return [column.name for column in table.shown]


def ruler(task: str, score: float, error: float | None = 3.0, **changes) -> Result:
    plain = dataclasses.replace(NIAH, task=f"ruler:{task}", score=score, error=error, parts=())
    return dataclasses.replace(plain, **changes)


def test_attentions_stand_beside_each_other():
    table, depths = evaluation_tables([NIAH, SPARSE])
    assert heads(table) == ["length", "dense", "moba", "samples"]
    assert table.cells() == [["8k", "97.5 ± 1.2", "50.0", "10"]]
    assert table.note == "sparse rows"
    assert heads(depths) == ["depth", "8k\ndense", "8k\nmoba"]
    assert depths.cells()[1] == ["90-100%", "100.0 ± 0.0", "100.0 ± 0.0"]


def test_the_mean_of_ruler_leaves_out_other_haystacks_and_needs_every_task():
    rows = [ruler("vt", 80.0, 3.0), ruler("cwe", 60.0, 4.0), ruler("niah_single_2@book", 0.0)]
    (table,) = evaluation_tables(rows)
    assert heads(table)[2:] == ["vt", "cwe", "niah_single_2@book", "mean"]
    assert table.cells()[0][-1] == "70.0 ± 2.5"  # sqrt(3^2 + 4^2) / 2
    assert "mean without niah_single_2@book" in table.note
    (table,) = evaluation_tables([*rows, ruler("vt", 1.0, length=512)])
    assert [row[-1] for row in table.cells()] == ["-", "70.0 ± 2.5"]


def test_checkpoints_have_tables_of_their_own_by_their_steps():
    tables = evaluation_tables([NIAH, dataclasses.replace(NIAH, step=5)])
    assert [t.title for t in tables if "by" not in t.title] == [
        "niah, % ± standard error, step 5",
        "niah, % ± standard error, step 100",
    ]


def test_key_tokens_have_columns():
    loss = dataclasses.replace(
        NIAH, task="perplexity", unit=NATS, score=2.5, error=0.01, parts=(),
        key_tokens=Part(256, 8192, 1234, 1.5, 0.2),
    )  # fmt: skip
    (table,) = evaluation_tables([loss])
    assert heads(table) == ["length", "dense", "dense\nkey tokens", "key\ntokens", "samples"]
    assert table.cells() == [["8k", "2.5000 ± 0.0100", "1.5000 ± 0.2000", "1,234", "10"]]
    without = dataclasses.replace(loss, attention="moba", key_tokens=None)
    (table,) = evaluation_tables([loss, without])
    assert heads(table)[1:4] == ["dense", "moba", "dense\nkey tokens"]


def test_names_cannot_steer_the_terminal():
    out = io.StringIO()
    name = dataclasses.replace(NIAH, task="file:\x1b[31mred[bold]", parts=())
    show_evaluations(Console(file=out, width=120), [name])
    assert "\x1b" not in out.getvalue()
    assert "red[bold]" in out.getvalue()
    show_evaluations(Console(file=out), [])
    assert "no results" in out.getvalue()


def test_tasks_of_lm_eval_have_a_row_per_metric():
    acc = dataclasses.replace(NIAH, task="lm-eval:arc:acc", length=0, parts=(), note="5-shot")
    sparse = dataclasses.replace(acc, attention="moba", score=96.0, error=None)
    words = dataclasses.replace(
        acc, task="lm-eval:text:word_perplexity", score=12.34567, error=None, unit="", note="0-shot"
    )
    (table,) = evaluation_tables([acc, sparse, words])
    assert heads(table) == ["task", "metric", "shots", "dense", "moba", "samples"]
    assert table.cells() == [
        ["arc", "acc, %", "5-shot", "97.5 ± 1.2", "96.0", "10"],
        ["text", "word_perplexity", "0-shot", "12.3457", "-", "10"],
    ]


def test_no_metric_of_lm_eval_is_too_large_for_the_table():
    task = "lm-eval:wiki:word_perplexity"
    huge = dataclasses.replace(NIAH, task=task, score=2.3e21, error=None, unit="", parts=())
    (table,) = evaluation_tables([huge])
    assert table.cells() == [["wiki", "word_perplexity", "", "2.3e+21", "10"]]


def names(*results: Result) -> list[str]:
    return [result.attention for result in distinguished(results)]


def test_the_heading_has_the_settings_that_differ():
    assert names(ONE) == ["dense"]
    for other in ({}, {"length": 1024}, {"step": 8}):
        two = dataclasses.replace(TWO, **other)
        assert names(ONE, two) == ["dense, seed 1", "dense, seed 2"]
    others = [{"length": 1024}, {"step": 8}, {"task": "perplexity"}, {"attention": "moba"}]
    found = names(ONE, *(dataclasses.replace(ONE, **other) for other in others))
    assert found == ["dense", "dense", "dense", "dense", "moba"]
    unknown = dataclasses.replace(ONE, length=1024, settings=())
    assert names(ONE, unknown) == ["dense", "dense"]


def test_results_with_equal_settings_have_the_beginning_of_their_keys():
    first, second = (dataclasses.replace(ONE, key=digit * 16, settings=()) for digit in "xy")
    assert names(first) == ["dense"]
    assert names(second, first) == ["dense (yyyy)", "dense (xxxx)"]
    assert named_settings([first, second])[0] == f"niah: dense (xxxx): key {'x' * 16}"


def test_all_names_have_the_text_if_texts_differ():
    loss = dataclasses.replace(ONE, task="perplexity", unit=NATS, settings=("held-out text",))
    book = dataclasses.replace(loss, key="b", settings=("text book.txt",))
    sparse = dataclasses.replace(loss, attention="moba", settings=("held-out text", "block 16"))
    assert names(loss, sparse) == ["dense", "moba"]
    found = names(loss, book, sparse)
    assert found == ["dense, held-out text", "dense, text book.txt", "moba, held-out text"]


def test_only_names_with_settings_need_a_legend():
    longer = dataclasses.replace(ONE, length=1024, details=("weights 4",))
    assert named_settings([ONE, longer]) == []
    assert named_settings([ONE, TWO]) == [
        "niah: dense, seed 1: needles 3; seed 1",
        "niah: dense, seed 2: needles 3; seed 2",
    ]


def test_shots_of_lm_eval_tell_results_apart():
    acc = dataclasses.replace(ONE, task="lm-eval:arc:acc", length=0, note="0-shot")
    assert names(acc, dataclasses.replace(acc, note="5-shot")) == ["dense", "dense"]


def test_tables_and_figures_show_both_results():
    lengths, depths = evaluation_tables([ONE, TWO])
    assert heads(lengths) == ["length", "dense, seed 1", "dense, seed 2", "samples"]
    assert lengths.cells()[0][1:3] == ["50.0 ± 1.0", "70.0 ± 1.0"]
    assert heads(depths) == ["depth", "512\ndense, seed 1", "512\ndense, seed 2"]
    maps, _ = evaluation_figures([("run", [ONE, TWO])])
    assert [view.labels for view in maps.views] == [
        ("niah, dense, seed 1, step 4",),
        ("niah, dense, seed 2, step 4",),
    ]


def test_a_map_has_a_row_per_depth_and_a_column_per_length():
    longer = dataclasses.replace(NIAH, length=65536, parts=(Part(0, 10, 20, 40.0),))
    maps, _ = evaluation_figures([("run", [NIAH, longer, SPARSE])])
    assert [view.labels for view in maps.views] == [
        ("niah, dense, step 100",), ("niah, moba, step 100",),
    ]  # fmt: skip
    (heat,) = maps.views[0].data
    assert (heat["x"], heat["y"]) == (["8k", "64k"], ["0-10%", "90-100%"])
    assert heat["z"] == [[95.0, 40.0], [100.0, None]]


def test_losses_have_a_line_per_length_and_attention_with_errors():
    parts = (Part(0, 128, 9, 3.0, 0.1), Part(128, 256, 9, 2.0, None))
    loss = dataclasses.replace(NIAH, task="perplexity", unit=NATS, parts=parts)
    maps, contexts = evaluation_figures([("<run>", [loss]), ("b", [loss])])
    assert maps.views == []
    lines = contexts.views[0].data
    assert (lines[0]["x"], lines[0]["y"]) == ([128, 256], [3.0, 2.0])
    assert lines[0]["error_y"]["array"] == [0.196, 0.0]
    assert lines[0]["name"].startswith("&lt;run&gt;, 8k dense")


def test_many_lines_of_losses_look_different_or_are_left_out_with_a_word():
    parts = (Part(0, 128, 9, 3.0, 0.1), Part(128, 256, 9, 2.0, None))
    one = dataclasses.replace(NIAH, task="perplexity", unit=NATS, parts=parts)
    many = [dataclasses.replace(one, key=str(n), step=n) for n in range(12)]
    _, contexts = evaluation_figures([("run", many)])
    looks = {
        (line["line"]["color"], line["line"]["dash"], line["marker"]["symbol"])
        for line in contexts.views[0].data
    }
    assert len(looks) == 12
    assert "Shows" not in contexts.note
    many = [dataclasses.replace(one, key=str(n), step=n) for n in range(STYLES + 3)]
    _, contexts = evaluation_figures([("run", many)])
    lines = contexts.views[0].data
    assert (len(lines), lines[0]["name"]) == (STYLES, "8k dense, step 3")
    assert f"Shows {STYLES} of {STYLES + 3} lines, those of the newest checkpoints" in contexts.note
