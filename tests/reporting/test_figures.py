"""Figures show the numbers of the worker, rank and direction that they name."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.reporting.figures import Figure, figures
from mtrain_cli.reporting.report_source import open_source


def uneven(direction: str, rank: int, step: int) -> float:
    return (1 + 0.5 * rank + 0.1 * step) * (2 if direction == "backward" else 1)


def figures_of(folder) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures([open_source(folder)])}


def views(figure: Figure) -> dict[tuple[str, ...], list[dict]]:
    """By their labels, without that of the case."""
    return {view.labels[1:]: view.data for view in figure.views}


def test_bars_stand_at_the_ranks_that_spent_the_time(tmp_path):
    rows = rows_of(Play(ring(4), uneven))
    found = views(
        figures_of(write(tmp_path, [rows[rows["rank"] != 1]], [facts_of(ring(4))]))["ranks"]
    )
    for which, times in (("all passes", 3), ("forward", 1), ("backward", 2)):
        (bar,) = (trace for trace in found[(which,)] if trace["name"] == "attention")
        known = {
            rank: times * sum(uneven("forward", rank, step) for step in range(4))
            for rank in (0, 2, 3)
        }
        assert dict(zip(bar["x"], bar["y"], strict=True)) == pytest.approx(known, rel=1e-3)


def test_distributions_are_across_what_they_say(tmp_path):
    found = views(figures_of(recorded_once(tmp_path, Play(ring(3), uneven)))["spread"])
    names = ("lowerfence", "q1", "median", "q3", "upperfence")
    for direction in ("forward", "backward"):
        table = np.array(
            [[uneven(direction, rank, step) for step in range(3)] for rank in range(3)]
        )
        for what, axis in (
            ("across the workers of a step", 0),
            ("across the steps of a worker", 1),
        ):
            (box,) = found[direction, what]
            known = np.quantile(table, (0, 0.25, 0.5, 0.75, 1), axis=axis)
            assert box["x"] == [0, 1, 2]
            for name, values in zip(names, known, strict=True):
                assert box[name] == pytest.approx(values, rel=1e-3), (direction, what, name)


def test_heat_maps_are_of_the_direction_and_quantity_that_they_name(tmp_path):
    def pairs(direction: str, rank: int, step: int) -> float:
        return uneven(direction, rank, step) * 1000

    folder = recorded_once(
        tmp_path, Play(ring(3), uneven, pairs=pairs, link={"context": 2.5}, merge=0.4)
    )
    found = views(figures_of(folder)["heat"])
    for direction in ("forward", "backward"):
        known = np.array(
            [[uneven(direction, rank, step) for step in range(3)] for rank in range(3)]
        )
        shown = {
            what: np.array(data[0]["z"], float)
            for (of, what), data in found.items()
            if of == direction
        }
        assert shown["attention, ms"] == pytest.approx(known, rel=1e-3)
        assert shown["work: pairs"] == pytest.approx(known * 1000, rel=1e-3)
        assert shown["work: blocks"] == pytest.approx(known * 10, abs=1)
        late, exposed = shown["waiting for others, ms"], shown["waiting for links, ms"]
        assert shown["all of the step, ms"] == pytest.approx(known + 0.4 + late + exposed, rel=1e-3)
        # No link takes longer than its message; what a worker waits for others has no such end.
        assert 0 < exposed[:, 1:].max() <= 2.5 + 1e-3
        assert found[direction, "attention, ms"][0]["y"] == [0, 1, 2]
    # Rank 0 is done with its first step after 1 ms; the message of rank 2 began with the pass, and takes 2.5 ms.
    waits = {
        what: np.array(found["forward", what][0]["z"], float)[0, 1]
        for what in ("waiting for others, ms", "waiting for links, ms")
    }
    assert waits == pytest.approx(
        {"waiting for others, ms": 0, "waiting for links, ms": 2.5 - 1.4}, abs=1e-3
    )
