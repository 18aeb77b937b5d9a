"""Draw the timeline of one iteration: the compute stream and incoming messages of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtrain_cli.parallel.recording import COMPUTING, DIRECTIONS, GAP, KINDS, PASS, RECEIVE, WAIT
from mtrain_cli.records.analysis import CaseAnalysis
from mtrain_cli.records.record_files import WORDS
from mtrain_cli.records.record_sums import LATE, select
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.report_source import ReportSource, typical_rows

BARS = 12_000  # most bars in all timelines of a page together
_RANKS, _LAYERS = 16, 6  # most ranks and layers of a case
_COLUMNS = (
    *("case", "iteration", "micro", "layer", "direction", "step", "rank", "phase", "link"),
    *("start_us", "dur_us", "late_us", "peer"),
)
Rows = dict[str, np.ndarray]


def timeline_figure(cases: Sequence[tuple[str, ReportSource, CaseAnalysis]]) -> plots.Figure:
    """Draw the iteration with the median pass time, for each case."""
    views: list[plots.FigureView] = []
    notes: dict[str, list[str]] = {}  # remark -> labels of the cases to which it applies
    for label, source, case in cases:
        layers, ranks = plots.evenly(case.layers, _LAYERS), _ranks_shown(case)
        rows = _rows(source, case, layers)
        passes = [(layer, direction) for layer in layers for direction in case.directions]
        most = BARS // max(1, len(cases)) // max(1, len(passes))
        cut = 0
        for layer, direction in passes:
            mine = (rows["layer"] == layer) & (rows["direction"] == DIRECTIONS.index(direction))
            mine &= np.isin(rows["rank"], ranks)
            if mine.any():
                data, left_out = _traces(select(rows, mine), ranks, most)
                labels = (label, f"layer {layer}, {direction}")
                views.append(plots.FigureView(labels, data, _layout(ranks)))
                cut += left_out
        remark = f"iteration {case.typical}, which has the median pass time"
        if len(ranks) < len(case.present):
            remark += f"; {len(ranks)} of {len(case.present)} ranks"
        if len(layers) < len(case.layers):
            remark += f"; {len(layers)} of {len(case.layers)} layers"
        if cut:
            remark += f"; without the {cut:,} shortest phases"
        notes.setdefault(remark, []).append(label)
    title = "Timeline of one iteration"
    return plots.Figure("timeline", title, ("case", "pass"), views, _note(notes))


def _note(notes: Mapping[str, Sequence[str]]) -> str:
    """Return the remarks as sentences."""
    if len(notes) == 1:
        (remark,) = notes
        return f"{remark[0].upper()}{remark[1:]}."
    shown = [f"{', '.join(labels)}: {remark}." for remark, labels in list(notes.items())[:4]]
    rest = sum(len(labels) for labels in list(notes.values())[4:])
    return " ".join(shown) + (f" {rest} more cases show other iterations." if rest else "")


def _rows(source: ReportSource, case: CaseAnalysis, layers: Sequence[int]) -> Rows:
    assert source.recorded is not None
    rows = typical_rows(source.recorded, case, _COLUMNS, layers)
    return select(rows, rows["micro"] == rows["micro"].min())


def _ranks_shown(case: CaseAnalysis) -> list[int]:
    blamed = [c.rank for c in case.causes if c.rank is not None and c.rank in case.present][:4]
    rest = [rank for rank in case.present if rank not in blamed]
    return sorted({*blamed, *plots.evenly(rest, _RANKS - len(blamed))})


def _layout(ranks: Sequence[int]) -> dict:
    y = plots.named_rows([f"rank {rank}" for rank in ranks])
    x = plots.axis("ms since the pass started")
    height = 150 + 30 * len(ranks)
    return plots.layout(height, x, y, barmode="overlay", bargap=0, hovermode="closest")


@dataclass(frozen=True)
class _Bars:
    """Rows of records as bars."""

    rows: Rows
    y: np.ndarray
    start: np.ndarray
    duration: np.ndarray

    @staticmethod
    def of(rows: Rows, ranks: Sequence[int], zero: float) -> _Bars:
        """Return the rows as bars.

        zero: start of the timeline, in microseconds.
        """
        y = np.searchsorted(ranks, rows["rank"]).astype(float)
        return _Bars(rows, y, (rows["start_us"] - zero) / 1e3, rows["dur_us"] / 1e3)

    def trace(self, mine: np.ndarray, name: str, colour: str, peer: str = "") -> plots.Trace:
        peers = self.rows["peer"][mine].tolist()
        steps = self.rows["step"][mine].tolist()
        return plots.bar(
            plots.numbers(self.duration[mine]),
            plots.numbers(self.y[mine]),
            colour,
            f"{name}, step %{{customdata[0]}}: %{{x:.3f}} ms {peer}",
            name=name,
            base=plots.numbers(self.start[mine], 6),
            width=0.5,
            customdata=[[s, "several" if p < 0 else p] for s, p in zip(steps, peers, strict=True)],
        )


def _traces(rows: Rows, ranks: Sequence[int], most: int) -> tuple[list[plots.Trace], int]:
    """Return bars of the longest phases of a pass, and the number of phases left out."""
    passes = select(rows, rows["phase"] == KINDS.index(PASS))
    zero = float((passes if len(passes["rank"]) else rows)["start_us"].min())
    shown = [KINDS.index(kind) for kind in (*COMPUTING, RECEIVE) if kind != GAP]
    kept = np.flatnonzero(np.isin(rows["phase"], shown) & (rows["dur_us"] > 0))
    left_out = max(0, len(kept) - most)
    if left_out:
        kept = np.sort(kept[np.argsort(-rows["dur_us"][kept], kind="stable")[:most]])
    rows = {name: values[kept] for name, values in rows.items()}
    bars = _Bars.of(rows, ranks, zero)
    # A grey bar for the whole pass lies below the phases, so gaps between phases show grey.
    every = np.ones(len(passes["rank"]), bool)
    whole = _Bars.of(passes, ranks, zero).trace(every, GAP, plots.COLOURS[GAP])
    whole["hoverinfo"] = "skip"
    del whole["hovertemplate"]
    data = [whole]
    for kind in (kind for kind in COMPUTING if kind != GAP):
        mine = rows["phase"] == KINDS.index(kind)
        if kind == WAIT:
            data += _waits(bars, mine)
        else:
            data.append(bars.trace(mine, kind, plots.COLOURS[kind]))
    below = replace(bars, y=bars.y + 0.36)
    received = rows["phase"] == KINDS.index(RECEIVE)
    for link in np.unique(rows["link"][received]).tolist():
        mine, colour = received & (rows["link"] == link), "#5b5b5b" if link % 2 else "#9a8c7a"
        trace = below.trace(
            mine, f"message, {WORDS['link'][link]}", colour, "from %{customdata[1]}"
        )
        data.append({**trace, "width": 0.14, "opacity": 0.8})
    return [trace for trace in data if trace["x"]], left_out


def _waits(bars: _Bars, mine: np.ndarray) -> list[plots.Trace]:
    rows = bars.rows
    late = np.clip(rows["late_us"] / 1e3, 0, bars.duration)
    exposed = replace(bars, start=bars.start + late, duration=bars.duration - late)
    for_rank, from_rank = "for rank %{customdata[1]}", "from rank %{customdata[1]}"
    colour = plots.COLOURS[LATE]
    data = [
        replace(bars, duration=late).trace(mine & (late > 0), plots.LATE_LABEL, colour, for_rank)
    ]
    for link in np.unique(rows["link"][mine]).tolist():
        of_link = mine & (rows["link"] == link) & (exposed.duration > 0)
        name = WORDS["link"][link]
        data.append(
            exposed.trace(of_link, plots.exposed_label(name), plots.link_colour(name), from_rank)
        )
    return data
