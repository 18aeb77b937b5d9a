"""The worked examples of docs/extending.md run, and the exchange among them equals the oracle."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import types

import gloo
import pytest
from docs.blocks import ROOT, blocks_of
from parallel import test_context_attention as oracle
from parallel.test_schedule import Play
from parallel.ways import Way

from mtrain_cli.attention import mask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys, schema
from mtrain_cli.config.earlier_versions import LATER
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.schedule import KV, ScheduleOptions
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.dry_run import describe_sparsity
from mtrain_cli.training.run_plan import make_plan

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
    for name in ("RecentPattern", "mirrored_ring", "EinsumKernel", "window_mask", "LowestLoss"):
        assert name in text


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
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


def test_the_key_of_the_mask_needs_no_other_file(tmp_path, monkeypatch):
    """The steps of the page: two fields, a line of LATER and a line of a file of defaults."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    (field,) = re.findall(r"`window: int = (option\(.*\))`", page)
    (later,) = (block for block in blocks_of("text") if block.text.startswith('"data.window"'))
    (default,) = (block for block in blocks_of("yaml") if block.text.startswith("window:"))
    (code,) = (block for block in EXAMPLES if "def window_mask" in block.text)
    window_mask = names_of(code)["window_mask"]

    class Windowed(mask.MaskRule):
        def __call__(self, documents, length, padded):
            found = super().__call__(documents, length, padded)
            return found.intersect(window_mask(self.window or padded, length, padded))

    def widened(cls, *default):
        return dataclasses.make_dataclass(
            cls.__name__, [("window", int, *default)], bases=(cls,), frozen=True, kw_only=True
        )

    option = eval(field, vars(schema))
    monkeypatch.setattr(schema, "DataConfig", widened(schema.DataConfig, option))
    monkeypatch.setattr(mask, "MaskRule", widened(Windowed))
    (tmp_path / "data").mkdir()
    shipped = (ROOT / "conf/data/stdlib.yaml").read_text(encoding="utf-8")
    (tmp_path / "data/stdlib.yaml").write_text(f"{shipped}{default.text}\n")
    earlier = ROOT / "tests/config/resolved/dense.yaml"
    caches = (keys.all_keys, keys.sections, keys._hints)
    for cached in caches:
        cached.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"data.window: missing; .* LATER in "):
            load(earlier)
        for name, value in ast.literal_eval(f"{{{later.text}}}").items():
            monkeypatch.setitem(LATER, name, value)
        assert load(earlier).data.window == 0
        config = compose(["data.window=8"], config_dir=tmp_path)
        text = ["data=text", f"data.path={ROOT / 'README.md'}"]
        assert compose(text, config_dir=tmp_path).data.window == 0, "inherits stdlib.yaml"
        masked, causal = (
            mask.MaskRule.of(each.data)(None, 60, 64) for each in (config, load(earlier))
        )
        assert masked.pairs == 8 * 60 - 8 * 7 // 2
        assert causal.pairs == 60 * 61 // 2
        assert keys.all_keys()["data.window"].out_of_range(-1) == "must be 0 or more"
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


def test_the_exchange_equals_the_oracle_on_real_processes():
    for differences in gloo.run(3, exchange_differences):
        assert len(differences) >= 18, "three layouts, three numbers of key heads, two indices"
        assert max(differences.values()) < 1e-13
