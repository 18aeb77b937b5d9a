"""Figures show the numbers of the worker, rank and direction in their labels."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.reporting.plots import Figure
from mtrain_cli.reporting.report_source import open_source
from mtrain_cli.reporting.sections import figures

LATE, EXPOSED = "waiting for late peers, ms", "exposed communication, ms"


def uneven(direction: str, rank: int, step: int) -> float:
    return (1 + 0.5 * rank + 0.1 * step) * (2 if direction == "backward" else 1)


def figures_of(folder) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures([open_source(folder)])}


def views(figure: Figure) -> dict[tuple[str, ...], list[dict]]:
    """Return the traces by the labels after the case."""
    return {view.labels[1:]: view.data for view in figure.views}


def test_rank_bars_belong_to_the_ranks_that_spent_the_time(tmp_path):
    rows = rows_of(Play(ring(4), uneven))
    drawn_views = views(
        figures_of(write(tmp_path, [rows[rows["rank"] != 1]], [facts_of(ring(4))]))["ranks"]
    )
    for which, times in (("all passes", 3), ("forward", 1), ("backward", 2)):
        (bar,) = (trace for trace in drawn_views[(which,)] if trace["name"] == "attention")
        known = {
            rank: times * sum(uneven("forward", rank, step) for step in range(4))
            for rank in (0, 2, 3)
        }
        assert dict(zip(bar["x"], bar["y"], strict=True)) == pytest.approx(known, rel=1e-3)


def test_heat_maps_show_the_direction_and_quantity_in_their_labels(tmp_path):
    def pairs(direction: str, rank: int, step: int) -> float:
        return uneven(direction, rank, step) * 1000

    folder = recorded_once(
        tmp_path, Play(ring(3), uneven, pairs=pairs, link={"context": 2.5}, merge=0.4)
    )
    drawn_views = views(figures_of(folder)["heat"])
    for direction in ("forward", "backward"):
        known = np.array(
            [[uneven(direction, rank, step) for step in range(3)] for rank in range(3)]
        )
        shown = {
            quantity: np.array(data[0]["z"], float)
            for (shown_direction, quantity), data in drawn_views.items()
            if shown_direction == direction
        }
        assert shown["attention, ms"] == pytest.approx(known, rel=1e-3)
        assert shown["work: pairs"] == pytest.approx(known * 1000, rel=1e-3)
        assert shown["work: blocks"] == pytest.approx(known * 10, abs=1)
        late, exposed = shown[LATE], shown[EXPOSED]
        assert shown["whole step, ms"] == pytest.approx(known + 0.4 + late + exposed, rel=1e-3)
        # A wait for a link ends with its message; a wait for a late peer has no such bound.
        assert 0 < exposed[:, 1:].max() <= 2.5 + 1e-3
        assert drawn_views[direction, "attention, ms"][0]["y"] == [0, 1, 2]
    # Rank 0 finishes its first step after 1 ms (1.4 ms with the merge). The message of rank 2
    # starts with the pass and takes 2.5 ms.
    waits = {
        quantity: np.array(drawn_views["forward", quantity][0]["z"], float)[0, 1]
        for quantity in (LATE, EXPOSED)
    }
    assert waits == pytest.approx({LATE: 0, EXPOSED: 2.5 - 1.4}, abs=1e-3)
