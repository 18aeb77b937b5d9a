"""Another distribution adds a pattern, a mask, an exchange, a callback and a command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands.test_entry_points import install, mtrain_with

from mtrain_cli.config import plugins
from mtrain_cli.config.plugins import Plugins

SOURCE = Path(__file__).parents[1] / "plugin"
RUN = (
    *("seq=256", "model=tiny", "topology.workers=2", "topology.device=cpu", "train.steps=2"),
    *("sparsity=a_shape", "sparsity.block=32", "sparsity.nearest=2", "mask=pages", "mask.page=64"),
    *("topology.exchange=mirrored_ring", "train.callbacks=[lowest_loss]"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Install the distribution in tests/plugin into a folder, with pip."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    words = [*pip, "--no-index", "--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return folder / "site"


@pytest.fixture(scope="module")
def run(site, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = mtrain_with(site, "train", *RUN, f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_uses_what_it_adds(site, run):
    log = (run / "log.txt").read_text()
    assert "a_shape: 4 sink tokens and the nearest 2 block diagonals" in " ".join(log.split())
    assert re.search(r"step 1 has the lowest loss so far: \d", log)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Two block diagonals and four columns, of which each query sees those of two pages.
    seen = sum(
        k <= q and k // 64 >= q // 64 - 1 and (q // 32 - k // 32 < 2 or k < 4)
        for q in range(256)
        for k in range(256)
    )
    assert steps[0]["density"] == pytest.approx(seen / (256 * 257 / 2), abs=0.02)
    shown = mtrain_with(site, "lowest-loss", str(run))
    assert re.fullmatch(r"step \d has the lowest loss: \d\.\d{4}\n", shown.stdout), shown.stderr


def test_its_names_are_listed_completed_and_checked_without_torch(site):
    listed = mtrain_with(site, "config", "list", first=NO_TORCH)
    assert re.search(r"sparsity=a_shape +A few sink tokens", listed.stdout), listed.stderr
    assert re.search(r"mask=pages +Each token sees", listed.stdout)
    code = "from mtrain_cli.config.keys import all_keys; print(all_keys()['sparsity.sinks'].help)"
    help = python_with(site, f"{NO_TORCH}\n{code}").stdout
    assert help == "a_shape: number of tokens at the start of the sequence that all queries see\n"
    for word, problem in (
        ("sparsity=a_shap", "sparsity=a_shap: no such sparsity (did you mean a_shape?)"),
        ("mask=page", "mask=page: no such mask (did you mean pages?)"),
        ("topology.exchange=mirrored", "hierarchical_ring, mirrored_ring, ulysses"),
        ("train.callbacks=[x]", "train.callbacks=[x]: x: no such callback; allowed: lowest_loss"),
        ("train.callbacks=x", "train.callbacks=x: expected a list of callbacks: lowest_loss"),
    ):
        refused = mtrain_with(site, "train", word, "--dry-run", first=NO_TORCH)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert problem in refused.stderr
    assert "lowest-loss" in mtrain_with(site, "--help", first=NO_TORCH).stdout
    completed = {
        "mask=pa": "mask=pages",
        "sparsity=a_": "sparsity=a_shape",
        "topology.exchange=mi": "topology.exchange=mirrored_ring",
        "train.callbacks=": "train.callbacks=[lowest_loss]",
        "sparsity.sin": "sparsity.sinks=",
    }
    code = (
        f"{NO_TORCH}\nfrom mtrain_cli.commands.completion import complete_overrides\n"
        f"for begun in {[*completed]}: print([word for word, _ in complete_overrides(begun)])"
    )
    found = python_with(site, code)
    lines = found.stdout.splitlines()
    assert len(lines) == len(completed), found.stderr
    for wanted, line in zip(completed.values(), lines, strict=True):
        assert wanted in line


def test_a_run_without_its_package_says_so_in_one_line(run, tmp_path):
    for words in (["train", "--resume", str(run)], ["generate", str(run), "--prompt", "a"]):
        refused = mtrain_with(tmp_path, *words)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "mask.kind=pages: no installed package has mask=pages; install the" in refused.stderr
    shown = mtrain_with(tmp_path, "report", str(run), "--json")
    assert shown.returncode == 0 or shown.stderr.count("\n") == 1, shown.stderr


def test_a_file_of_a_run_with_the_package_opens_without_it(site, tmp_path):
    saved = tmp_path / "resolved.yaml"
    save = (
        "from mtrain_cli.composition.compose import compose\n"
        "from mtrain_cli.config.resolved_file import save\n"
        f"save(compose(['seq=512']), {str(saved)!r})"
    )
    assert python_with(site, save).returncode == 0
    assert "sinks: null" in saved.read_text()
    code = (
        "from mtrain_cli.config.resolved_file import load\n"
        f"from pathlib import Path; print(load(Path({str(saved)!r})).seq)"
    )
    assert python_with(tmp_path, code).stdout == "512\n"


def test_what_cannot_be_loaded_costs_a_line_and_nothing_else(site, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "sound.py").write_text(SOUND)
    patterns = {
        "bad": "broken:Bad",
        "number": "sound:number",
        "other": "sound:Named",
        "clash": "sound:Clash",
        "moba": "sound:Named",
    }
    entries = {"mtrain.patterns": patterns, "mtrain.callbacks": {"bad_callback": "broken:callback"}}
    install(tmp_path, "others", "2.0", **{"entry-points": entries})
    both = Path(f"{site}{os.pathsep}{tmp_path}")
    listed = mtrain_with(both, "train", "sparsity=a_shape", "--dry-run", "topology.device=cpu")
    assert listed.returncode == 0, listed.stderr
    begin, lines = "mtrain: warning: mtrain.patterns: ", listed.stderr.splitlines()
    told = {line.removeprefix(begin).split()[0]: line for line in lines if line.startswith(begin)}
    assert sorted(told) == sorted(patterns)
    assert " of others 2.0 cannot be loaded, so it is left out (" in told.pop("bad")
    assert all(" of others 2.0 cannot be used, so it is left out (" in told[n] for n in told)
    assert "it must be a subclass of PatternSettings" in told["number"]
    assert "its name must be other, like its entry point" in told["other"]
    assert "its key block has another type or range than in mtrain" in told["clash"]
    assert "this name is taken" in told["moba"]
    refused = mtrain_with(both, "train", "train.callbacks=[bad_callback]", "topology.device=cpu")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        "mtrain: train.callbacks=[bad_callback]: mtrain.callbacks: bad_callback = broken:callback "
        "of others 2.0 cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')"
    )


def test_a_checkout_without_metadata_has_what_mtrain_has_itself(monkeypatch):
    monkeypatch.setattr(plugins, "installed", lambda _: [])
    for group, own, name in (
        ("mtrain.masks", "mtrain_cli.attention.named_masks:NAMED", "causal"),
        ("mtrain.patterns", "mtrain_cli.config.pattern_settings:OWN", "dense"),
        ("mtrain.exchanges", "mtrain_cli.config.exchanges:OWN", "ring"),
    ):
        assert name in Plugins(group, own, lambda *_: None)


NO_TORCH = "import sys; sys.modules['torch'] = None"
SOUND = """
from dataclasses import dataclass
from typing import ClassVar
from mtrain_cli.config.option import option
from mtrain_cli.config.pattern_settings import PatternSettings

number = 1

@dataclass(frozen=True)
class Named(PatternSettings):
    name: ClassVar[str] = "named"

@dataclass(frozen=True)
class Clash(PatternSettings):
    name: ClassVar[str] = "clash"
    block: float = option(default=0.5)
"""


def python_with(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
