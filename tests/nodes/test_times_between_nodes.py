"""Times over limited links are those that the simulator predicts, and have its order."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from nodes import times_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MOST_ERROR = 0.2
APART = 1.2  # exchanges whose predicted times differ by this factor have the same order
BYTES_PER_US = 200 / 8


def test_times_and_their_order_are_those_of_the_simulator(tmp_path):
    found = times_table.compare("200mbit", 2, 2, tmp_path, samples=2)
    # Other programs on the machine slow some samples down, and the calibration, too.
    errors = {
        name: min((of.predicted[1] / ms - 1 for ms in of.measured), key=abs)
        for name, of in found.items()
    }
    assert max(map(abs, errors.values())) < MOST_ERROR, errors
    measured = {name: of.median for name, of in found.items()}
    for one, other in combinations(found, 2):
        slow, fast = sorted((one, other), key=lambda name: found[name].predicted[1])[::-1]
        if found[slow].predicted[1] > APART * found[fast].predicted[1]:
            assert measured[slow] > measured[fast], (slow, fast)

    # Both directions of a link carry messages at once, and one link those of two ranks.
    links = json.loads((tmp_path / "links/measurements/links/links.json").read_text())
    us = {(row["what"], row["size"]): row["us"] for row in links["times"] if row["link"] == "outer"}
    alone = (2 << 20) / BYTES_PER_US
    assert us["hop", 2 << 20] == pytest.approx(alone, rel=0.25)
    assert us["hops at once", 2 << 20] == pytest.approx(2 * alone, rel=0.25)
    assert us["all-to-all", 2 << 20] == pytest.approx(2 * alone, rel=0.25)
