"""The numbers of studies.md are those of the file in profiles/."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest
from docs.blocks import ROOT
from reporting.test_learning_tables import summary

from mtrain_cli.reporting.learning_tables import document


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study_tables", ROOT / "docs/study_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_file(tables):
    page = tables.PAGE.read_text()
    assert tables.fill(page) == page, "python docs/study_tables.py"


def test_tables_have_the_mean_of_the_seeds_half_of_the_interval_and_the_verdict(tables):
    data = json.loads(json.dumps(document(summary([0.002, 0.003, 0.004]))))
    for row in data["compared"]:
        for part in ("mean", "difference", "verdict"):
            row[part]["long_loss"] = row[part].pop("loss", None)
            row[part] = {name: found for name, found in row[part].items() if found is not None}
    lines = tables.differences(data, own=True).splitlines()
    # 4.303 * 0.001 / sqrt(3)
    assert "| `vertical_slash-0.6` | +0.0030 ± 0.0025 | loses nothing | - | - |" in lines
    assert "| `dense-again` | +0.0033 ± 0.0287 | - | - | - |" in lines
    assert not any(line.startswith("| `dense` ") for line in lines)
    assert "`fixed`" not in tables.differences(data, own=False)
    dense = next(row for row in data["compared"] if row["variant"] == "dense")
    dense["seeds"] = [0, 1, 2, 3]
    assert "| `fixed` (3 seeds) | " in tables.differences(data, own=True)


def test_the_summary_counts_seeds_and_predictions(tables):
    outcomes = [{"state": state} for state in ("failed", "held", "held", "not measured")]
    one = {
        "gates": {"0": 99.4, "1": 99.0, "2": 98.0}, "seeds": [0, 1, 2], "predictions": outcomes,
        "compared": [{"variant": "dense", "seeds": [0]}],  # only bases of the others are trained
    }  # fmt: skip
    text = tables.summary(one)
    assert text.startswith("Of 3 seeds, 1 has run (0). Its base finds 99.4 % of")
    assert "Of 4 predictions: 1 failed, 2 held and 1 not judged yet." in text.replace("\n", " ")
    assert "One seed decides nothing" in text
    three = tables.summary({**one, "compared": [{"variant": "dense", "seeds": [0, 1, 2]}]})
    assert three.startswith("Of 3 seeds, 3 have run (0, 1 and 2). Their bases find 99.4 %, 99.0 %")
    assert "decides" not in three
