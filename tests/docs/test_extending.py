"""The worked examples of docs/extending.md run, and the exchange among them equals the oracle."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
import tomllib
import types

import gloo
import pytest
from commands.test_entry_points import install, mtrain_with
from docs.blocks import ROOT, blocks_of
from parallel import test_context_attention as oracle
from parallel.test_schedule import Play
from parallel.ways import Way

from mtrain_cli.attention import named_masks
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys, mask_settings, schema
from mtrain_cli.config.earlier_versions import LATER
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.schedule import KV, ScheduleOptions
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.dry_run import describe_sparsity
from mtrain_cli.training.planning import make_plan

EXAMPLES = [block for block in blocks_of("python") if block.page.name == "extending.md"]


def names_of(block) -> dict:
    names = {"__name__": "example"}
    exec(compile(block.text, str(block), "exec", dont_inherit=True), names)
    return names


def mirrored_ring():
    (block,) = [block for block in EXAMPLES if "def mirrored_ring" in block.text]
    return names_of(block)["mirrored_ring"]


def test_there_is_an_example_of_each_thing_to_add():
    text = "\n".join(block.text for block in EXAMPLES)
    for name in (
        *("RecentPattern", "mirrored_ring", "EinsumKernel", "lookahead", "LowestLoss"),
        "lowest_loss",
    ):
        assert name in text


@pytest.mark.parametrize(
    "block", [block for block in EXAMPLES if "def lowest_loss" not in block.text], ids=str
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


def test_the_pattern_needs_no_other_file(tmp_path, monkeypatch):
    (code,) = (block for block in EXAMPLES if "RecentPattern" in block.text)
    (defaults,) = (block for block in blocks_of("yaml") if "pattern: recent" in block.text)
    recent = types.SimpleNamespace(**names_of(code))
    monkeypatch.setitem(sys.modules, "mtrain_cli.sparsity.recent", recent)
    monkeypatch.setitem(PATTERNS, "recent", recent.RecentSettings)
    (tmp_path / "sparsity").mkdir()
    (tmp_path / "sparsity/recent.yaml").write_text(defaults.text)
    caches = (keys.all_keys, keys.sections)
    for cached in caches:
        cached.cache_clear()
    try:
        words = ["sparsity=recent", "sparsity.nearest=3", "topology.workers=2"]
        config = compose([*words, "topology.device=cpu"], config_dir=tmp_path)
        assert config.sparsity == recent.RecentSettings(block=128, nearest=3)
        assert isinstance(make_pattern(config.sparsity, config.seed), recent.RecentPattern)
        saved = tmp_path / "resolved.yaml"
        save(config, saved)
        assert load(saved) == config
        assert "the nearest 3 block diagonals" in describe_sparsity(make_plan(config))
        with pytest.raises(ConfigError, match=r"sparsity.nearest=99: at most 32 fit seq=4096"):
            compose(["sparsity=recent", "sparsity.nearest=99"], config_dir=tmp_path)
    finally:
        monkeypatch.undo()
        for cached in caches:
            cached.cache_clear()


def test_the_mask_needs_no_other_file(tmp_path, monkeypatch):
    """The steps of the page: a function, a key and two files of defaults."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    (field,) = re.findall(r"`ahead: int \| None = (option\(.*\))`", page)
    (entry,) = re.findall(r"add `(\"lookahead\": .*)` to `MASKS`", page)
    (line,) = re.findall(r"`conf/mask/causal.yaml`: add `(.*)`", page)
    (default,) = (block for block in blocks_of("yaml") if "kind: lookahead" in block.text)
    (code,) = (block for block in EXAMPLES if "def lookahead" in block.text)
    monkeypatch.setitem(named_masks._NAMED, "lookahead", names_of(code)["lookahead"])
    for name, own in ast.literal_eval(f"{{{entry}}}").items():
        monkeypatch.setitem(mask_settings.MASKS, name, own)
    option = eval(field, vars(mask_settings))
    kinds = mask_settings.option(tuple(mask_settings.MASKS))
    extended = dataclasses.make_dataclass(
        "MaskConfig",
        [("kind", str, kinds), ("ahead", int | None, option)],
        bases=(mask_settings.MaskConfig,),
        frozen=True,
        kw_only=True,
    )
    monkeypatch.setattr(schema, "MaskConfig", extended)
    monkeypatch.setitem(LATER, "mask.ahead", None)  # made from the fields of the class
    (tmp_path / "mask").mkdir()
    shipped = (ROOT / "conf/mask/causal.yaml").read_text(encoding="utf-8")
    (tmp_path / "mask/causal.yaml").write_text(f"{shipped}{line}\n")
    (tmp_path / "mask/lookahead.yaml").write_text(default.text)
    caches = (keys.all_keys, keys.sections, keys._hints)
    for cached in caches:
        cached.cache_clear()
    try:
        assert load(ROOT / "tests/config/resolved/dense.yaml").mask.kind == "causal"
        config = compose(["mask=lookahead", "mask.ahead=2"], config_dir=tmp_path)
        made = MaskRule.of(config)(None, 60, 64)
        assert made.pairs == 60 * 61 // 2 + 2 * 60 - 3
        assert not config.mask.keeps_causal_intervals
        assert keys.all_keys()["mask.ahead"].out_of_range(0) == "must be at least 1"
    finally:
        monkeypatch.undo()
        for cached in caches:
            cached.cache_clear()


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
    (code,) = (block for block in EXAMPLES if "def lowest_loss" in block.text)
    (about,) = (block for block in blocks_of("toml") if "lowest-loss" in block.text)
    (tmp_path / "lowest_loss.py").write_text(code.text)
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
