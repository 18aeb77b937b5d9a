"""Runs compute the recorded results. Quick tests check a part, slow ones the rest."""

from __future__ import annotations

import copy
import json

import pytest

from golden import files, losses, reach
from golden.compare import differences
from golden.groups import GROUPS, RECORDED, Group, chosen

_MOST_BYTES = 1_500_000  # of all committed files
# Each exchange, kind of index and kind of cluster once.
_PREDICTED = (
    "clustered on 8",
    "clustered on 2 x 4",
    "dense ulysses",
    "dense on 2 x 8",
    "hierarchical queries",
    "slow rank",
    "recompute",
    "two sequences",
    "sparse step on a100_4x8",
    "step, data x context",
    "recorded where it was",
    "sweep of workers and density",
)
_PROFILED = "4 workers"
_READ = (
    "checkpoint resumed",
    "report of a profile",
    "what-if of a profile",
    "validation of a profile",
    "validation against 4 H200",
    "profile of documents on H100s",
)
QUICK = {
    "losses": lambda name: name in losses.QUICK,
    "memory": lambda name: GROUPS[1].names.index(name) % 5 == 0,
    "predictions": lambda name: name.partition(":")[0] in _PREDICTED,
    "profiles": lambda name: name.startswith(_PROFILED),
    "files": lambda name: name in _READ,
}
by_group = pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)


def check(group: Group, quick: bool) -> None:
    if group.name == "memory" and reach.has_gpu():
        pytest.skip("plans for absent GPUs; on a machine with GPUs, plans are for its own")
    names = [name for name in group.names if QUICK[group.name](name) is quick]
    different = {name: computed for name, computed in group.check(names) if computed}
    assert not different, "\n".join(
        f"{name}: {computed[:3]}" for name, computed in different.items()
    )


@pytest.mark.parametrize(
    "group",
    [
        # Trainings of other tests show what these do.
        pytest.param(group, marks=pytest.mark.slow)
        if group.name in ("losses", "profiles")
        else group
        for group in GROUPS
    ],
    ids=lambda group: group.name,
)
def test_a_part_equals_the_recorded_results(group: Group) -> None:
    check(group, quick=True)


@pytest.mark.slow
@by_group
def test_the_rest_equals_the_recorded_results(group: Group) -> None:
    check(group, quick=False)


@by_group
def test_exactly_the_existing_cases_are_recorded(group: Group) -> None:
    assert list(group.recorded()) == list(group.names)


def test_a_resumed_training_equals_the_uninterrupted_one() -> None:
    recorded = GROUPS[0].recorded()
    assert recorded["resumed"] == recorded["unbroken"]


def test_recorded_files_are_small() -> None:
    kept = [*RECORDED.iterdir(), *files.FOLDER.iterdir()]
    assert sum(path.stat().st_size for path in kept) < _MOST_BYTES


def test_cases_are_selected_by_group_and_by_part_of_a_name() -> None:
    assert [group.name for group, _ in chosen("memory")] == ["memory"]  # and no case with that word
    assert [group.name for group, _ in chosen("automatic memory")] == ["predictions"]
    assert [names for _, names in chosen("losses/uly")] == [
        ["ulysses 2", "ulysses 2 in a ring", "ulysses 2 in an all-gather"]
    ]
    assert list(chosen("no such case")) == []


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_every_changed_number_is_reported(tolerance: float) -> None:
    """Change one number after the other, in one case of each group."""
    for group in GROUPS:
        recorded = json.loads(group.path.read_text().splitlines()[0])["found"]
        allowed = {"": tolerance, "counts": 0.0}
        assert not list(differences(recorded, copy.deepcopy(recorded), allowed))
        for place in _places(recorded):
            computed = copy.deepcopy(recorded)
            holder = computed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = _changed(holder[place[-1]])
            assert len(list(differences(recorded, computed, allowed))) == 1, (group.name, place)


def test_rounding_is_tolerated_only_where_allowed() -> None:
    recorded = {"seconds": [1.0, 2.0], "counts": {"flop": 1.0, "pairs": 7}}
    near = {"seconds": [1.0001, 2.0], "counts": {"flop": 1.0001, "pairs": 7}}
    assert list(differences(recorded, near, {"": 1e-3, "counts": 0.0})) == [
        "counts.flop: 1.0001, recorded 1.0"
    ]
    assert len(list(differences(recorded, near, {"": 0.0}))) == 2
    lines = {"seconds: 1 entries, recorded 2", "counts: missing"}
    assert set(differences(recorded, {"seconds": [1.0]}, {"": 1e-3})) == lines


def _places(tree, before=()):
    if isinstance(tree, dict | list):
        for key, below in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places(below, (*before, key))
    else:
        yield before


def _changed(value):
    if isinstance(value, bool):
        return not value
    return (
        value * 1.01 + 0.01
        if isinstance(value, float)
        else value + 1
        if isinstance(value, int)
        else f"{value}."
    )
