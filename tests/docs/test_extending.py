"""docs/extending.md shows the package in tests/plugin, whose exchange equals the oracle."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tomllib

import gloo
import pytest
from commands.test_entry_points import install, mtrain_with
from docs.blocks import ROOT, blocks_of
from parallel import test_context_attention as oracle
from parallel.test_schedule import Play
from parallel.ways import Way

from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.schedule import KV, ScheduleOptions

EXAMPLES = [block for block in blocks_of("python") if block.page.name == "extending.md"]


PLUGIN = ROOT / "tests/plugin"


@pytest.fixture(autouse=True)
def _with_the_package(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def names_of(block) -> dict:
    names = {"__name__": "example"}
    exec(compile(block.text, str(block), "exec", dont_inherit=True), names)
    return names


def mirrored_ring():
    sys.path.insert(0, str(PLUGIN))  # in the processes of a test, too
    return importlib.import_module("mtrain_a_shape.exchange").mirrored_ring


def test_the_page_shows_every_file_of_the_package():
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    files = [file for file in PLUGIN.rglob("*") if file.suffix in (".py", ".toml", ".yaml")]
    shown = [file for file in files if file.name != "__init__.py"]
    assert len(shown) >= 9
    for file in shown:
        name = file.relative_to(PLUGIN).as_posix()
        begin = f"# {name}\n" if file.suffix == ".py" else ""
        assert f"\n{begin}{file.read_text(encoding='utf-8')}```\n" in page, name


@pytest.mark.parametrize(
    "block",
    [block for block in EXAMPLES if "# mtrain_a_shape/" not in block.text],
    ids=str,
)
def test_examples_hold_what_they_assert(block):
    assert "assert" in block.text
    names_of(block)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_exchange_ends_with_every_pair_computed_once(workers):
    schedule = mirrored_ring()(ScheduleOptions(workers, workers))
    pairs = sorted((rank, shard) for rank in range(workers) for shard in range(workers))
    for steps, held in (
        (schedule.forward, [{rank} for rank in range(workers)]),
        (schedule.backward, [{rank, *schedule.keeps[rank]} for rank in range(workers)]),
    ):
        play = Play(schedule, tuple(steps), held, KV)
        computed = [(s.queries[0], s.keys[0]) for rank in steps for s in rank if s.keys]
        assert sorted(computed) == pairs
        assert len(play.computed) == len(pairs)


def exchange_differences(rank: int, world: int) -> dict[str, float]:
    """The largest difference from the oracle on this process, for layouts, heads and indices."""
    make = mirrored_ring()
    oracle.WAYS = (Way("mirrored_ring"),)
    oracle.make_exchange = lambda _, layout, group, **options: Exchange(
        layout, group, make(ScheduleOptions(world, world)), shared_columns=options["shared_columns"]
    )
    return oracle.cells(rank, world, "reference", "float64", ("dense", "vertical_slash"), False)


@pytest.mark.slow
def test_the_exchange_equals_the_oracle_on_real_processes():
    for differences in gloo.run(3, exchange_differences):
        assert len(differences) >= 18, "three layouts, three numbers of key heads, two indices"
        assert max(differences.values()) < 1e-13


def test_the_command_comes_from_another_package(tmp_path):
    (about,) = (block for block in blocks_of("toml") if "lowest-loss" in block.text)
    shutil.copytree(PLUGIN / "mtrain_a_shape", tmp_path / "mtrain_a_shape")
    install(tmp_path, **tomllib.loads(about.text)["project"])
    listed = mtrain_with(tmp_path, "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    names = re.findall(r"^│ ([\w-]+) ", listed.stdout.partition("Commands")[2], re.MULTILINE)
    assert names[-2:] == ["doctor", "lowest-loss"]
    rows = ({"step": step, "loss": loss} for step, loss in enumerate([5.0, None, 4.0, 4.5], 1))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = mtrain_with(tmp_path, "lowest-loss", str(tmp_path))
    assert (found.stdout, found.stderr) == ("step 3 has the lowest loss: 4.0000\n", "")
    wrong = mtrain_with(tmp_path, "lowest-loss", "nope")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert wrong.stderr.startswith("mtrain: nope: ")
