"""One failure of many kinds: a run resumes with the losses of an undisturbed one, and is clean."""

from __future__ import annotations

import dataclasses

import pytest

from nodes.failure_campaign import Campaign, Outcome, table, unmet
from nodes.failure_kinds import KINDS

# The kinds whose failures take long or need more packages are left to the whole campaign.
SHORT = [
    "kill -9 of a rank",
    "kill -9 of a rank in a save",
    "kill -9 of a node's processes",
    "a link is cut for 2 to 3 s",
    "a link is slow for 1 to 3 s",
    "SIGTERM in a save",
    "SIGUSR1 in a save",
    "launcher: kill -9 of it",
    "launcher: Ctrl-C",
    "torchrun: kill -9 of an agent",
    "a rank cannot write for 1.5 s",
    "the disk is full",
    "the store refuses the writes of one node",
    "the store fails at the n-th write",
    "kill -9 of all in an upload",
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(".")  # the campaign adds a folder
        yield Campaign(tmp_path_factory.mktemp("campaign"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SHORT)
def test_a_failure_leaves_nothing_behind_and_loses_nothing_committed(kind, campaign):
    outcomes = (campaign.break_one(kind, seed) for seed in range(700, 710))
    outcome = next(outcome for outcome in outcomes if outcome is not None)
    assert outcome.unmet == [], outcome


GOOD = Outcome(
    "kill -9 of a rank", 1, 2, 2, "0.1 s after step 3", "rank 1 on 10.77.0.2", 3, 4, 3, 1, [1, -9],
    "error: rank 1 on 10.77.0.2 is gone", 0.1, 0.2, equal=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"orphans": 1}, "1 orphans"),
        ({"leftovers": ["tmp/a"]}, "leftovers: tmp/a"),
        ({"equal": False}, "other losses than those of the undisturbed run"),
        ({"traceback": True}, "a traceback"),
        ({"said": "error: rank 0 is gone"}, "the line does not name rank 1 on 10.77.0.2"),
        ({"said_s": 11.0}, "said after 11.0 s, later than 10 s"),
        ({"gone_s": 21.0}, "processes for 21.0 s, longer than 20 s"),
        ({"codes": [0, -9]}, "exit codes [0, -9]"),
    ],
)
def test_what_does_not_hold_is_named(change, problem):
    outcome = dataclasses.replace(GOOD, **change)
    assert list(unmet(outcome, KINDS[outcome.kind])) == [problem] * bool(problem)


def test_the_table_has_a_row_for_each_kind():
    rows = [dataclasses.asdict(dataclasses.replace(GOOD, said_s=said)) for said in (0.1, 0.3, 2.0)]
    assert table(rows)[2:] == ["| kill -9 of a rank | 3 | 0.3 (2.0) | 0.2 (0.2) | 1 | 0 |"]


def test_a_campaign_breaks_more_than_a_hundred_runs():
    assert sum(kind.count for kind in KINDS.values()) >= 100
