"""Tables of evaluations: dense beside sparse, standard errors, and no mean of unlike tasks."""

from __future__ import annotations

import dataclasses
import io

from mtrain_cli.console import Console
from mtrain_cli.evaluation.results import NATS, PERCENT, Part, Result
from mtrain_cli.reporting.evaluation_tables import evaluation_tables, show_evaluations
from mtrain_cli.reporting.table import Table

NIAH = Result(
    "k", "niah", 8192, "dense", "", 100, 10, 97.5, 1.25, PERCENT,
    parts=(Part(0, 10, 20, 95.0, 2.0), Part(90, 100, 20, 100.0, 0.0)),
)  # fmt: skip
SPARSE = dataclasses.replace(NIAH, attention="moba", score=50.0, error=None, note="sparse rows")


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
