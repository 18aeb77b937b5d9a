"""`mtrain mask show` counts what a mask allows, and draws it."""

from __future__ import annotations

import pytest
from attention.mask_definitions import cells
from masked_documents import masked_store
from typer.testing import CliRunner

from mtrain_cli.attention.mask import KeySlice
from mtrain_cli.commands.app import app
from mtrain_cli.commands.train import require_labels
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.training.layout_choice import make_balancer
from mtrain_extras.masks.page import views

NAMES = ("contiguous", "zigzag", "striped", "balanced")


def run(*words: str):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["mask", *words], prog_name="mtrain")


def test_it_counts_pairs_labels_and_the_work_of_layouts(tmp_path):
    words = ["mask=prefix_lm", "mask.prefix=100", "seq=1000", "topology.block_size=16"]
    file = tmp_path / "mask.html"
    found = run("show", *words, "topology.workers=4", "--plot", str(file))
    assert found.exit_code == 0, found.output
    text = " ".join(found.stdout.split())
    pairs = 1000 * 1001 // 2 + 100 * 99 // 2
    assert f"pairs {pairs:,}, 1.01 of causal" in text
    assert "901 of 1,000 count" in text
    assert "4 workers" in text
    assert "dense attention only" in text
    assert "Cost: the pairs of a rank plus the cost of the rows that it receives" in text
    assert all(f"{name} " in text for name in NAMES)
    page = file.read_text()
    assert page.startswith("<!doctype html>")
    assert "<h1>prefix_lm, prefix 100, seq 1,000</h1>" in page
    assert all(f"<td class=words>{name}</td>" in page for name in NAMES)


def test_workers_and_nodes_come_from_the_topology(tmp_path):
    file = tmp_path / "mask.html"
    words = ["seq=8k", "model=qwen3b", "--plot", str(file)]
    one = run("show", *words, "topology.workers=6")
    assert "6 workers" in one.stdout
    two = run("show", *words, "topology.workers=6", "topology.gpus_per_node=3")
    assert one.stdout != two.stdout
    # 16 query heads and 2 KV heads
    assert "On H200s, a row of this model costs as much as 253 pairs, and 1,511" in file.read_text()
    other = run("show", *words, "topology.cluster=a100_4x8")
    assert "On a100_4x8, a row of this model costs as much as" in " ".join(other.stdout.split())
    assert "On a100_4x8, a row of this model costs as much as" in file.read_text()


def test_it_shows_both_kinds_of_layers(tmp_path):
    file = tmp_path / "mask.html"
    words = ["mask=sliding_window", "mask.window=100", "mask.full_every=3", "seq=1000"]
    found = run("show", *words, "topology.block_size=16", "--plot", str(file))
    assert found.exit_code == 0, found.output
    text = " ".join(found.stdout.split())
    window, full = text.split("mask causal, 1 of 4 layers; seq 1,000")
    assert "mask sliding_window, window 100, " in window
    assert ", 3 of 4 layers; seq 1,000" in window
    assert f"pairs {1000 * 100 - 100 * 99 // 2:,}, " in window
    assert f"pairs {1000 * 1001 // 2:,}, 1 of causal" in full
    assert all(text.count(f"{name} ") == 2 for name in NAMES)
    assert "dense attention only" in window
    page = file.read_text()
    assert "<h2>Layouts: sliding_window, window 100, " in page
    assert "<h2>Layouts: causal, 1 of 4 layers</h2>" in page


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["mask=prefix_lm", "mask.prefix=5k", "seq=4k"], "mask.prefix=5120: must be at most"),
        (["seq=1k", "--plot", "folder"], "--plot folder: is a folder; give a file"),
        (["seq=1k", "--plot", "notes.html"], "--plot notes.html: exists and is not a picture"),
        (["seq=1k", "--plot", "new.png"], "--plot new.png: give a file that ends in .html"),
        (["seq=1k", "--plot", "notes.html/x.html"], "x.html: cannot be written: "),
    ],
)
def test_mistakes_are_one_line_before_the_work(tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.html").write_text("mine")
    found = run("show", *words)
    assert (found.exit_code, line in found.stderr, found.stdout) == (2, True, "")
    assert len(found.stderr.strip().splitlines()) == 1
    assert (tmp_path / "notes.html").read_text() == "mine"


def test_training_needs_a_label_that_the_mask_hides(tmp_path):
    words = ["seq=64", "train.steps=1", f"run.dir={tmp_path / 'run'}"]
    refused = ["mask=full"], ["mask=full", "--dry-run"], ["mask=prefix_lm", "mask.prefix=64"]
    for mask in refused:
        found = CliRunner().invoke(app, ["train", *words, *mask], prog_name="mtrain")
        assert found.exit_code == 2
        assert f"{mask[0].replace('=', '.kind=')}: shows every query its next token" in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
    require_labels(compose(["seq=64"]))


@pytest.mark.parametrize(
    ("mask", "key"), [("prefix_lm", "prefix"), ("block_causal", "block"), ("block_window", "block")]
)
def test_a_size_that_leaves_no_label_is_named(mask, key):
    with pytest.raises(ConfigError, match=rf"\. mask\.{key}=64 must be below seq=64; "):
        require_labels(compose(["seq=64", f"mask={mask}", f"mask.{key}=64"]))
    require_labels(compose(["seq=64", f"mask={mask}", f"mask.{key}=63"]))


def test_the_masks_of_the_data_are_shown(tmp_path):
    store, file = masked_store(tmp_path), tmp_path / "mask.html"
    words = ["data=tokens", f"data.path={store}", "data.mask_key=mask", "seq=150"]
    found = run("show", *words, "topology.workers=2", "topology.block_size=16", "--plot", str(file))
    assert found.exit_code == 0, found.output
    sample = open_dataset(compose(words))[0]
    allowed = cells([KeySlice(*row) for row in sample.slices.tolist()], 150, 150) > 0
    assert allowed.sum() < 150 * 151 // 4
    text = " ".join(found.stdout.split())
    assert "mask first sequence of the data; seq 150" in text
    assert f"pairs {int(allowed.sum()):,}, " in text
    assert f"labels {int((sample.labels >= 0).sum())} of 150 count" in text
    assert "intervals 2 per query at most; dense attention only" in text
    assert all(f"{name} " in text for name in NAMES)
    assert "<h1>first sequence of the data, seq 150</h1>" in file.read_text()
    config = compose([*words, "topology.block_size=16"])
    (view,) = views(config, 2, sample=sample)
    shares, made = view.shares, make_balancer(config, 2, 2).layout([[view.mask]])
    assert shares[NAMES.index("balanced")].layout == made
    assert {int(share.traffic.pairs.sum()) for share in shares} == {int(allowed.sum())}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "data.mask_key=mask: the masks are in the data, but data.path is not set; give data."),
        (["data.path=nosuch"], "data.path=nosuch: no such file or folder"),
    ],
)
def test_masks_of_missing_data_are_refused(words, line):
    found = run("show", "recipe=shared_question", *words)
    assert (found.exit_code, found.stdout, line in found.stderr) == (2, "", True)
    assert len(found.stderr.strip().splitlines()) == 1
