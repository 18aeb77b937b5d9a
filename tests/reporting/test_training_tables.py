"""Tables of training runs: utilization of sparse runs, headings."""

from __future__ import annotations

import json

from reporting.test_tables import cells, printed

from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sheets import sheets
from mtrain_cli.reporting.training_figures import training_figure
from mtrain_cli.reporting.training_tables import training_table


def test_sparse_trainings_show_hfu_without_mfu(tmp_path):
    facts = {
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1,
        "peak_memory_gib": 90.0,
        "epoch": 0.1,
        "consumed": 1,
        "seconds": 1.0,
    }

    def run(name: str, mfu: float, hfu: float, density: float) -> ReportSource:
        shares = {
            "tokens_per_second_per_gpu": 20000.0,
            "mfu_model": mfu,
            "mfu_executed": hfu,
            "density": density,
        }
        (tmp_path / name).mkdir()
        lines = (json.dumps({"step": step, **facts, **shares}) + "\n" for step in (1, 2, 3))
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        return open_source(tmp_path / name)

    sources = [run("dense", 0.48, 0.54, 1.0), run("sparse", 3.59, 0.53, 0.05)]
    shown = cells(training_table(sources))
    assert (shown["MFU"], shown["HFU"]) == (["48.0%", "-"], ["54.0%", "53.0%"])
    assert max(map(len, printed(training_table(sources), width=80).splitlines())) <= 80
    (utilization,) = [sheet.rows for sheet in sheets(sources) if sheet.name == "training"]
    assert [(row["mfu_model"], row["mfu_executed"]) for row in utilization[2:4]] == [
        (0.48, 0.54),
        (None, 0.53),
    ]
    curves = {view.labels[0]: view.data for view in training_figure(sources).views}
    assert [line["name"] for line in curves["MFU, share of peak FLOP/s"]] == ["dense"]
    assert [line["name"] for line in curves["HFU, share of peak FLOP/s"]] == ["dense", "sparse"]


def test_headings_of_the_training_table_break_between_words():
    said = printed(training_table([]), width=80)
    assert "tokens/s" in said
    assert "/GPU" in said
    assert "tokens/s/GPU" not in said
