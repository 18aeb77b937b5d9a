"""Figures of sparsity have the numbers of their rows."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain_cli.reporting.sparsity import sparsity_figure


def rows(pattern: str, at: int) -> list[dict[str, Any]]:
    """Two layers and heads; layer 1 keeps less."""
    return [
        {
            "pattern": pattern,
            "step": at,
            "layer": layer,
            "head": head,
            "recall": 0.9 - 0.2 * layer - 0.1 * head,
            "worst": 0.5 - 0.2 * layer - 0.1 * head,
            "density": 0.25 + 0.25 * head,
            "slashes": 3 + head,
            "columns": 10 * layer,
        }
        for layer in (0, 1)
        for head in (0, 1)
    ]


def test_a_layer_shows_the_mean_of_its_heads_and_its_worst_query():
    own = [*rows("p", 1), *rows("p", 5)]
    layers = sparsity_figure([("run", own)])
    shown = {view.labels[0]: list(view.data[0]["y"]) for view in layers.views}
    assert shown["recall, mean of heads"] == pytest.approx([0.85, 0.65])
    assert shown["recall of the worst sampled query"] == pytest.approx([0.4, 0.2])
    assert shown["density, mean of heads"] == pytest.approx([0.375, 0.375])
    assert [trace["name"] for trace in layers.views[0].data] == ["p, step 1", "p, step 5"]
