"""The tables of the experiment in studies.md and sparse-attention.md are those of profiles/."""

from __future__ import annotations

import json
import re
import tarfile
from types import ModuleType

import pytest
from docs.blocks import ROOT, script
from nodes import failure_campaign
from studies.test_learning_tables import summary

from mtrain_extras.studies.cells import Study
from mtrain_extras.studies.learning_tables import document
from mtrain_extras.studies.outcomes import FAILED, HELD, UNKNOWN, summarize
from mtrain_extras.studies.t_interval import interval

RESULTS = ROOT / "profiles/learning"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("docs/study_tables.py")


@pytest.fixture(scope="module")
def pools() -> ModuleType:
    return script("profiles/pool_studies.py")


def of_file(name: str) -> dict:
    return json.loads((RESULTS / f"tier-{name}.json").read_text())


@pytest.mark.parametrize("tier", ["a", "b"])
def test_the_second_run_is_that_of_its_archive(tier, tmp_path):
    with tarfile.open(RESULTS / f"tier-{tier}-again.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    study = Study.open(tmp_path / f"learning-{tier}")
    assert study is not None
    found = json.loads(json.dumps(document(summarize(study))))
    expected = of_file(f"{tier}-again")
    # Tier a had fewer cells and more remarks.
    remarks, recorded = (
        {re.sub(r"of \d+ cells", "of n cells", remark) for remark in each["remarks"]}
        for each in (found, expected)
    )
    assert remarks <= recorded
    assert found["cells"] == expected["cells"]
    for row, other in zip(found["compared"], expected["compared"], strict=True):
        assert row["verdict"] == other["verdict"]
        for name, over in row["mean"].items():
            assert over == pytest.approx(other["mean"][name])


def test_the_pooled_file_is_that_of_both_runs(pools):
    found = json.loads(json.dumps(pools.pool(of_file("a-first"), of_file("a-again"))))
    assert found == of_file("a")


@pytest.mark.parametrize(("first", "again"), [([1.0, 2.0, 4.0], [3.0, 7.0]), ([1.0], [2.0])])
def test_a_pooled_interval_is_that_of_all_values(pools, first, again):
    found, expected = pools.pooled(interval(first), interval(again)), interval(first + again)
    assert (found.mean, found.low, found.high) == pytest.approx(
        (expected.mean, expected.low, expected.high)
    )
    assert found.count == len(first) + len(again)


@pytest.mark.parametrize(
    ("states", "state", "text"),
    [
        ((HELD, HELD), HELD, "x; again: y"),
        ((HELD, FAILED), FAILED, "x (held); again: y (failed)"),
        ((FAILED, HELD), FAILED, "x (failed); again: y (held)"),
        ((UNKNOWN, HELD), HELD, "x; again: y"),
        ((UNKNOWN, UNKNOWN), UNKNOWN, "x; again: y"),
    ],
)
def test_a_prediction_that_failed_in_one_run_failed(pools, states, state, text):
    runs = [
        {"tier": "a", "toy": False, "gates": {}, "seeds": [], "spread": {}, "compared": [],
         "predictions": [{"prediction": {"id": "p"}, "state": word, "found": found}]}
        for word, found in zip(states, "xy", strict=True)
    ]  # fmt: skip
    (one,) = pools.pool(*runs)["predictions"]
    assert (one["state"], one["found"]) == (state, text)


def test_runs_of_other_tiers_or_cells_are_not_pooled(pools):
    one = of_file("a-first")
    with pytest.raises(ValueError, match="tiers a and b cannot be pooled"):
        pools.pool(one, of_file("b"))
    fewer = {**one, "compared": one["compared"][1:]}
    for pair in ((one, fewer), (fewer, one)):
        with pytest.raises(ValueError, match="'dense', 'dense'"):
            pools.pool(*pair)


def test_cells_for_equal_time_are_not_pooled(pools):
    runs = [of_file(name) for name in ("a-first", "a-again")]
    found = json.loads(json.dumps(pools.pool(*runs)))
    for row, again in zip(found["compared"], runs[1]["compared"], strict=True):
        apart = row["variant"] == "equal-time"
        assert (row["mean"] == again["mean"]) == apart, row["variant"]
        assert (row["seeds"] == again["seeds"]) == apart


def test_the_spread_is_the_larger_one_also_of_a_measure_of_one_run(pools):
    empty = {"tier": "a", "toy": False, "gates": {}, "seeds": [], "compared": [], "predictions": []}
    spreads = ({"loss": 1.0, "needles": 2.0}, {"loss": 3.0, "tail": 4.0})
    found = pools.pool(*({**empty, "spread": spread} for spread in spreads))
    assert found["spread"] == {"loss": 3.0, "needles": 2.0, "tail": 4.0}


@pytest.mark.parametrize("name", ["studies", "sparse-attention"])
def test_the_page_has_the_tables_of_the_file(tables, name):
    page = ROOT / f"docs/{name}.md"
    assert tables.fill(page) == page.read_text(), "python docs/study_tables.py"


def test_both_uses_of_a_sparse_model_are_in_the_tables(tables):
    """The numbers of the archive agree with those of the summary, which another program wrote."""
    again = of_file("a-again")["compared"]
    for row in again:
        if row["variant"] in tables.LEARNED:
            shares = [
                tables._share(hit for _, hit in found)
                for seed in tables.AGAIN_SEEDS
                for attention, found in tables.asked(row["variant"], seed).items()
                if (attention == "dense") == (row["attention"] == "dense")
            ]
            assert sum(shares) / 2 == pytest.approx(row["mean"]["needles"]["mean"])
    lines = tables.learned({}).splitlines()
    assert "| `vertical_slash-0.6` | 56.1 | 89.8 | 12.6 | 22.4 |" in lines
    uses = [line.split(" | ")[1] for line in tables.distances({}).splitlines()[2:]]
    assert uses == ["dense", *["own", "dense"] * 4]


def test_tables_have_the_mean_of_the_seeds_half_of_the_interval_and_the_verdict(tables):
    data = json.loads(json.dumps(document(summary([0.002, 0.003, 0.004]))))
    for row in data["compared"]:
        for part in ("mean", "difference", "verdict"):
            row[part]["long_loss"] = row[part].pop("loss", None)
            row[part] = {name: found for name, found in row[part].items() if found is not None}
    lines = tables.differences(data).splitlines()
    # 4.303 * 0.001 / sqrt(3)
    assert "| `vertical_slash-0.6` | +0.0030 ± 0.0025 | loses nothing | - | - |" in lines
    assert "| `dense-again` | +0.0033 ± 0.0287 | - | - | - |" in lines
    assert not any(line.startswith("| `dense` ") for line in lines)
    dense = next(row for row in data["compared"] if row["variant"] == "dense")
    dense["seeds"] = [0, 1, 2, 3]
    assert "| `fixed` (n = 3) | " in tables.differences(data)


def test_the_summary_counts_seeds_and_predictions(tables):
    outcomes = [{"state": state} for state in ("failed", "held", "held", "not measured")]
    one = {
        "gates": {"0": 99.4, "1": 99.0, "2": 98.0}, "seeds": [0, 1, 2], "predictions": outcomes,
        "compared": [{"variant": "dense", "seeds": [0]}],  # only bases of the others are trained
    }  # fmt: skip
    text = tables.summary(one)
    assert text.startswith("1 of 3 seeds (0) is complete. Its base finds 99.4 % of")
    assert "Of 4 predictions, 1 failed, 2 held and 1 not judged yet." in text.replace("\n", " ")
    assert "One seed decides nothing" in text
    three = tables.summary(three_seeds(one))
    assert three.startswith(
        "All 3 seeds (0, 1 and 2) are complete. Their bases find 99.4 %, 99.0 %"
    )
    assert "decides" not in three
    again = {"gates": {"0": 98.3, "1": 99.9}}
    two = {**three_seeds(one), "again": again}
    assert "Seeds 0 and 1 ran a second time, with new bases, which find 98.3 % and 99.9 %." in (
        tables.summary(two).replace("\n", " ")
    )


def three_seeds(one: dict) -> dict:
    return {**one, "compared": [{"variant": "dense", "seeds": [0, 1, 2, 0, 1]}]}


def test_the_table_of_failures_is_that_of_the_campaign():
    document = json.loads((ROOT / "profiles/failures-cpu.json").read_text())
    rows = failure_campaign.table(document["failures"])
    assert "\n".join(rows) in (ROOT / "docs/long-runs.md").read_text()
    assert len(document["failures"]) >= 100
    assert not [row for row in document["failures"] if row["unmet"]]
