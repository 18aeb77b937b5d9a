"""What a run computes is what was recorded. Quick tests check a part, slow ones the rest."""

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
    "drifting on 2 x 4",
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
        pytest.skip("plans for GPUs that are not here; on a machine with GPUs they are for its own")
    names = [name for name in group.names if QUICK[group.name](name) is quick]
    different = {name: found for name, found in group.check(names) if found}
    assert not different, "\n".join(f"{name}: {found[:3]}" for name, found in different.items())


@by_group
def test_a_part_is_as_recorded(group: Group) -> None:
    check(group, quick=True)


@pytest.mark.slow
@by_group
def test_the_rest_is_as_recorded(group: Group) -> None:
    check(group, quick=False)


@by_group
def test_every_case_is_recorded_and_no_other(group: Group) -> None:
    assert list(group.recorded()) == list(group.names)


def test_a_resumed_training_is_the_unbroken_one() -> None:
    recorded = GROUPS[0].recorded()
    assert recorded["resumed"] == recorded["unbroken"]


def test_files_are_small() -> None:
    kept = [*RECORDED.iterdir(), *files.FOLDER.iterdir()]
    assert sum(path.stat().st_size for path in kept) < _MOST_BYTES


def test_names_are_chosen_by_group_and_by_part() -> None:
    assert [group.name for group, _ in chosen("memory")] == ["memory"]  # whatever others are called
    assert [group.name for group, _ in chosen("automatic memory")] == ["predictions"]
    assert [names for _, names in chosen("losses/uly")] == [
        ["ulysses 2", "ulysses 2 in a ring", "ulysses 2 in an all-gather"]
    ]
    assert list(chosen("no such case")) == []


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_every_number_that_changes_is_told(tolerance: float) -> None:
    """One number after the other is changed, in a case of each group."""
    for group in GROUPS:
        recorded = json.loads(group.path.read_text().splitlines()[0])["found"]
        allowed = {"": tolerance, "counts": 0.0}
        assert not list(differences(recorded, copy.deepcopy(recorded), allowed))
        for place in _places(recorded):
            found = copy.deepcopy(recorded)
            holder = found
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = _changed(holder[place[-1]])
            assert len(list(differences(recorded, found, allowed))) == 1, (group.name, place)


def test_rounding_is_allowed_where_it_is_and_nowhere_else() -> None:
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
