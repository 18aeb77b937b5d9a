"""Tables for the terminal and CSV have the numbers of the analysis, and fit."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from rich.console import Console
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.reporting import figures, tables
from mtrain_cli.reporting.report_source import ReportSource, open_source, shortened
from mtrain_cli.reporting.terminal import show_sources


def printed(item, *, width: int = 100, colour: bool = False) -> str:
    file = io.StringIO()
    Console(
        file=file, width=width, force_terminal=colour, color_system="256" if colour else None
    ).print(item)
    return file.getvalue()


def heavy(_direction: str, rank: int, step: int) -> float:
    return 3.0 if (rank, step) == (1, 2) else 1.0


@pytest.fixture
def source(tmp_path) -> ReportSource:
    return open_source(
        recorded_once(
            tmp_path / "one",
            Play(ring(4), heavy, link={"context": 0.3}),
            layers=(0, 1),
            iterations=2,
        )
    )


def test_the_summary_has_every_figure_in_100_columns(source):
    (case,) = source.cases
    text = printed(tables.summary_table(source.cases))
    assert max(map(len, text.splitlines())) <= 100
    for value in (case.time.worker, case.work.worker, case.time.step):
        assert f"{value.mean:.2f} ±{value.std:.2f}" in text
    assert f"{case.computation.total.mean:.3f}" in text
    assert f"context {tables.ms(case.exposed['context'])}" in text
    assert "…" not in text


def cells(table) -> dict[str, list[str]]:
    return {
        str(column.header).replace("\n", " "): [str(cell) for cell in column.cells]
        for column in table.columns
    }


def test_waits_for_late_peers_and_exposed_communication_are_apart(tmp_path):
    # Rank 1 starts 1.5 ms late. Messages take 3 ms and overlap with 1 ms of computation. So rank 0
    # waits 0.5 ms for rank 1 and 3 ms for the link; rank 1 waits only 0.5 ms, for the link.
    rows = rows_of(Play(ring(2), link={"context": 3.0}, starts={1: 1.5}), directions=("forward",))
    (case,) = open_source(write(tmp_path, [rows], [facts_of(ring(2))])).cases
    (waits,) = cells(tables.summary_table([case]))["waits ms late peers exposed"]
    assert waits == "0.25\ncontext 1.75"
    shares = cells(tables.bins_table([case]))
    assert (shares["ms"], shares["late"], shares["exposed context"]) == (["4"], ["6.2%"], ["43.8%"])


def test_sentences_for_narrow_terminals_have_the_numbers_of_the_tables(tmp_path):
    def skewed(direction: str, rank: int, step: int) -> float:
        return (1 + 0.3 * rank + 0.7 * (step == 2)) * (1.7 if direction == "backward" else 1)

    what = Play(
        ring(4),
        skewed,
        pairs=lambda _d, r, s: 1000 + 300 * r + 500 * s,
        link={"context": 1.4},
        index=0.2,
        merge=0.1,
        starts={2: 4.0},
    )
    source = open_source(recorded_once(tmp_path, what, layers=(0, 1), iterations=2))
    summary, bins = (
        cells(tables.summary_table(source.cases)),
        cells(tables.bins_table(source.cases)),
    )
    lines = printed(tables.summary_lines(source.cases), width=400).splitlines()
    for line, name in ((lines[1], "worker"), (lines[2], "step")):
        time, work = summary[f"imbalance of {name}s time work"][0].split("\n")
        assert line == f"  {name} imbalance: time {time}, work {work}"
        assert time != work
    forward, backward = summary["pass ms forward backward"][0].split("\n")
    assert lines[3] == f"  pass of a layer, ms: forward {forward}, backward {backward}"
    in_steps, in_all = (
        f"{float(share):.1%}" for share in summary["computed per step total"][0].split("\n")
    )
    assert in_steps != in_all
    assert lines[4] == f"  computed {in_steps} per step, {in_all} total"
    shares = ", ".join(f"{name} {share}" for name, (share,) in bins.items() if share.endswith("%"))
    assert lines[5] == f"  {bins['ms'][0]} ms per iteration: {shares}"
    for name in ("index", "attention", "merge", "late", "exposed context"):
        assert name in shares


def test_every_table_of_several_runs_names_the_run(tmp_path):
    sources = [
        open_source(recorded_once(tmp_path / name, Play(ring(2), times)))
        for name, times in (("left", heavy), ("right", rising))
    ]
    for table in (tables.summary_table, tables.bins_table):
        assert cells(table([s.cases[0] for s in sources], ["left", "right"]))["run"] == [
            "left",
            "right",
        ]
        assert "run" not in cells(table(sources[0].cases))
    for width in (80, 120):
        file = io.StringIO()
        show_sources(Console(file=file, width=width), sources)
        lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
        for name in ("left", "right"):
            assert f"{name}, dense striped ring, forward: attention by worker and step" in lines
            assert f"{name}, dense striped ring: why workers wait" in lines
            starts = (
                f"{name}: dense striped ring, 1 sample" if width == 80 else f"{name} dense striped"
            )
            before = lines[
                : lines.index("left, dense striped ring, forward: attention by worker and step")
            ]
            assert sum(line.startswith(starts) for line in before) == (
                1 if width == 80 else 2
            )  # the summary, and the time breakdown


def rising(direction: str, rank: int, step: int) -> float:
    return (1.0 + rank + step) * (3 if direction == "backward" else 1)


def test_a_heat_map_shows_the_direction_in_its_title(tmp_path):
    (case,) = open_source(recorded_once(tmp_path, Play(ring(2), rising))).cases
    for direction, sums in (("forward", (3, 5)), ("backward", (9, 15))):
        lines = printed(tables.heat_map(case, direction)).splitlines()
        assert f"{direction}: attention" in lines[0]
        assert [float(line.split()[-1]) for line in lines[1:3]] == pytest.approx(sums, rel=1e-2)


def test_shares_of_the_bins_add_up(source):
    line = next(
        line for line in printed(tables.bins_table(source.cases)).splitlines() if "%" in line
    )
    shares = [float(word.removesuffix("%")) for word in line.split() if word.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_a_heat_map_is_darkest_where_most_is_computed_without_colours(source):
    lines = printed(tables.heat_map(source.cases[0], "forward")).splitlines()[1:5]
    cells = [line[9:17] for line in lines]
    assert cells[1][4:6] == "██"
    assert sum(line.count("█") for line in cells) == 2
    assert "\x1b[" not in "".join(lines)
    assert "\x1b[" in printed(tables.heat_map(source.cases[0], "forward"), colour=True)


@pytest.mark.parametrize(
    ("shape", "folded"),
    [((4, 4), (4, 4)), ((33, 5), (17, 5)), ((128, 100), (32, 25)), ((1, 1), (1, 1))],
)
def test_folding_keeps_the_maximum(shape, folded):
    table = np.random.default_rng(0).random(shape)
    small, was_folded = tables.fold(table, 32)
    assert small.shape == folded
    assert small.max() == table.max()
    assert was_folded == (shape != folded)
    rows, columns = (-(-a // b) for a, b in zip(shape, folded, strict=True))
    assert small[0, 0] == table[:rows, :columns].max()


def test_a_folded_heat_map_says_so(tmp_path):
    (case,) = open_source(recorded_once(tmp_path, Play(ring(40)))).cases
    text = printed(tables.heat_map(case, "forward"))
    assert "each cell is the maximum of 2 workers x 2 steps" in text
    assert len(text.splitlines()) <= 32 + 3
    assert max(map(len, text.splitlines())) <= 100


def test_sheets_are_read_back_with_their_numbers(source, tmp_path):
    (case,) = source.cases
    found = {sheet.name: sheet for sheet in tables.sheets([source])}
    assert set(found) == {"summary", "steps", "time_by_rank", "layers", "causes"}
    with found["steps"].write(tmp_path).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * 4
    (row,) = [r for r in rows if (r["direction"], r["worker"], r["step"]) == ("forward", "1", "2")]
    assert float(row["attention_ms"]) == pytest.approx(3.0, rel=1e-5)
    with found["time_by_rank"].write(tmp_path).open() as file:
        for line in csv.DictReader(file):
            bins = [
                float(value)
                for name, value in line.items()
                if name.endswith("_ms") and name != "pass_ms"
            ]
            assert sum(bins) == pytest.approx(float(line["pass_ms"]), rel=1e-4)
    with found["summary"].write(tmp_path).open() as file:
        assert float(next(csv.DictReader(file))["time_worker_id"]) == pytest.approx(
            case.time.worker.mean, rel=1e-5
        )
    assert len(found["causes"].rows) == len(case.causes) > 0


def noisy(folder, seed: int, scale: float = 1.0) -> ReportSource:
    random = np.random.default_rng(seed)
    parts = []
    for i in range(6):
        times = random.normal(1, 0.05, (2, 4, 4)) * scale
        parts.append(
            rows_of(
                Play(ring(4), lambda d, r, s, t=times: float(t[int(d == "backward"), r, s])),
                iteration=i,
            )
        )
    return open_source(write(folder, parts, [facts_of(ring(4))]))


def test_only_differences_beyond_noise_are_shown(tmp_path):
    first, same, slower = (
        noisy(tmp_path / "a", 1),
        noisy(tmp_path / "b", 2),
        noisy(tmp_path / "c", 3, 1.3),
    )
    found = {(row.run, row.what): row for row in tables.comparison([first, same, slower])}
    assert found["b", "forward ms"].verdict == "within noise"
    assert found["c", "forward ms"].verdict == "more"
    assert found["c", "forward ms"].ratio == pytest.approx(1.3, rel=0.1)
    # No number that could be read as a gain or a cost.
    assert found["b", "forward ms"].difference == "within noise"
    assert found["c", "forward ms"].difference.startswith("+")
    assert found["c", "worker imbalance, work"].ratio == 1
    text = printed(tables.compare_table([first, same, slower]))
    assert "within noise" in text
    assert max(map(len, text.splitlines())) <= 100


def test_one_sample_has_no_noise_to_compare_with(tmp_path):
    both = [open_source(recorded_once(tmp_path / name, Play(ring(2)))) for name in "ab"]
    assert {row.verdict for row in tables.comparison(both)} == {"too few samples to tell"}


def test_ranks_are_shortened():
    assert shortened([1, 4, 5, 6, 9]) == "1, 4-6, 9"
    assert shortened(range(0, 60, 2)).endswith(" and more")


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
    shown = cells(tables.training_table(sources))
    assert (shown["MFU"], shown["HFU"]) == (["48.0%", "-"], ["54.0%", "53.0%"])
    assert max(map(len, printed(tables.training_table(sources), width=80).splitlines())) <= 80
    rows = tables.training_sheet(sources)
    utilization = [dict(zip(rows.columns, row, strict=True)) for row in rows.rows]
    assert [(row["mfu_model"], row["mfu_executed"]) for row in utilization[2:4]] == [
        (0.48, 0.54),
        (None, 0.53),
    ]
    curves = {view.labels[0]: view.data for view in figures.training_figure(sources).views}
    assert [line["name"] for line in curves["MFU, share of peak FLOP/s"]] == ["dense"]
    assert [line["name"] for line in curves["HFU, share of peak FLOP/s"]] == ["dense", "sparse"]


def test_headings_of_the_training_table_break_between_words():
    said = printed(tables.training_table([]), width=80)
    assert "tokens/s" in said
    assert "/GPU" in said
    assert "tokens/s/GPU" not in said
