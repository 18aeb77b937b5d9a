"""`mtrain profile sparsity`: records, tables and the keys of each pattern."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.profile_sparsity import _patterns
from mtrain_cli.records.record_files import HEAD_ROWS
from mtrain_cli.sparsity.block_topk import BlockTopkPattern
from mtrain_extras.studies.attention.files import read_attention_files

SHAPE = (
    "seq=256 topology.block_size=16 model.hidden_size=32 model.num_layers=2 model.head_dim=8 "
    "model.intermediate_size=48 sparsity.block=16"
)
SMALL = f"{SHAPE} sparsity.last_q=32 sparsity.chunk=32 sparsity.top_k=3"


def run(*words: str):
    return CliRunner().invoke(app, ["profile", *split(*words)])


def test_sparsity_measures_every_layer_and_head_of_the_given_steps(tmp_path):
    import pandas

    out = tmp_path / "found"
    words = "--pattern vertical_slash,moba --steps 3 --every 2 --rows 40"
    result = run("sparsity", SMALL, words, f"run.dir={out}")
    assert result.exit_code == 0, result.output
    assert "step 3/3  loss" in result.output
    assert "vertical_slash, step 3" in result.output
    assert "moba, step 3" in result.output
    assert "recall: over sampled queries that the pattern does not probe" in " ".join(
        result.output.split()
    )
    again = run("sparsity", SHAPE, "--pattern fixed --steps 1 --rows 4", f"run.dir={out}-again")
    assert "fixed (SYNTHETIC), step 1" in again.output
    found = pandas.read_parquet(out / HEAD_ROWS)
    assert len(found) == 3 * 2 * 2 * 4
    assert set(found.step) == {1, 2, 3}
    assert found.recall.between(0.3, 1.0).all()
    assert (found.worst <= found.recall + 1e-6).all()
    assert found.density.between(0.05, 1.0).all()
    assert (found.of_mask >= found.density - 1e-9).all()
    assert (found[found.pattern == "moba"].slashes == 0).all()
    assert (found[found.pattern == "vertical_slash"].slashes >= 1).all()


def test_sparsity_leaves_no_thread_running(tmp_path):
    """Triton 3.9 prints 30 lines of leak warnings if a loader thread still runs at exit."""
    before = set(threading.enumerate())
    words = "--pattern fixed --steps 1 --rows 4"
    result = run("sparsity", SHAPE, words, f"run.dir={tmp_path / 's'}")
    assert result.exit_code == 0, result.output
    assert set(threading.enumerate()) <= before
    assert gc.get_freeze_count() == 0


def test_a_key_goes_to_every_pattern_that_has_it():
    words = "sparsity=moba sparsity.chunk=512 sparsity.p_v=0.5 sparsity.block=64"
    config, (measured,) = _patterns(words.split(), "vertical_slash")
    assert (config.sparsity.pattern, config.sparsity.chunk, config.sparsity.block) == (
        "moba",
        512,
        64,
    )
    assert (measured.name, measured.p_v, measured.block) == ("vertical_slash", 0.5, 64)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--top-k 0", "--top-k 0: must be at least 1"),
        ("--top-k 257", "--top-k 257: must be at most seq=256"),
        ("--top-k many", "--top-k many: many is not a number; give items such as 64,1k"),
        ("--top-k 5%", "--top-k 5%: 5% is not a number; give items such as 64,1k"),
        ("--maps 2:0", "--maps 2:0: model=tiny has layers 0 to 1 and heads 0 to 3"),
        ("--maps 0:4", "--maps 0:4: model=tiny has layers 0 to 1 and heads 0 to 3"),
        ("--maps 0", "--maps 0: give LAYER:HEAD,..., such as 0:3,11:0"),
        ("--cells 64", "--cells 64: only with --maps LAYER:HEAD,..."),
        ("train.init_from=missing", "train.init_from=missing: no such folder;"),
        ("train.init_from=folder", "train.init_from=folder: has no config.json;"),
        ("data=text data.path=empty.txt", "empty.txt: holds no text"),
        ("data=tokens data.path=big.npy", "token 300000 does not fit model.vocab_size=264"),
        ("data=tokens data.path=short.npy", "short.npy holds only 100 tokens"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(words, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    np.save(tmp_path / "big.npy", np.full(4096, 300_000, np.int32))
    np.save(tmp_path / "short.npy", np.zeros(100, np.int32))
    result = run("sparsity", SHAPE, "sparsity.last_q=32", words)
    assert result.exit_code == 2
    assert line in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("mask=full", "mask.kind=full"),
        ("mask=block_causal mask.block=32", "mask.kind=block_causal"),
        ("mask=block_window mask.block=32", "mask.kind=block_window"),
        ("mask=dilated mask.block=16", "mask.kind=dilated"),
        ("mask=prefix_lm mask.prefix=64", "mask.kind=prefix_lm"),
        ("mask=sliding_window mask.window=64 mask.global_tokens=4", "mask.global_tokens=4"),
        ("mask=sliding_window mask.window=64 mask.full_every=2", "mask.full_every=2"),
    ],
)
def test_masks_without_causal_intervals_are_refused(words, given):
    result = run("sparsity", SHAPE, words)
    assert result.exit_code == 2
    assert result.output.startswith(f"mtrain: {given}: `mtrain profile sparsity` needs a mask")
    assert len(result.output.strip().splitlines()) == 1


def test_under_a_window_no_query_sees_beyond_it(tmp_path):
    """Queries see 32 keys at most, so no query sees more than 32, and distances end at 31."""
    words = "mask=sliding_window mask.window=32 data.document_mask=false sparsity.last_q=32"
    out = tmp_path / "measured"
    result = run("sparsity", SHAPE, words, f"--steps 1 --top-k 16,32 --rope run.dir={out}")
    assert result.exit_code == 0, result.output
    assert "attention analysis: about " in result.output
    found = read_attention_files(out)
    queries = {row.k: row.queries for row in found.top_keys}
    assert queries[16]
    assert not queries[32]
    assert all(row.uniform <= 16 / 17 for row in found.top_keys if row.k == 16)
    assert {row.distances[-1] for row in found.rope} == {31}


def test_learned_scores_need_a_sequence_that_no_step_reads(tmp_path):
    (tmp_path / "short.txt").write_text("some text " * 50)
    data = f"data=text data.path={tmp_path / 'short.txt'} data.tokenizer=bytes train.global_batch=2"
    words = f"--pattern block_topk --steps 1 {SHAPE} sparsity.rank=4 sparsity.density=0.6 {data}"
    result = run("sparsity", words)
    assert result.exit_code == 2, result.output
    line = "train.global_batch=2: 1 steps read all 2 sequences of the data, but learned"
    assert line in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_learned_scores_choose_for_sequences_that_they_have_not_learned_from(tmp_path, monkeypatch):
    import pandas

    from mtrain_cli.sparsity import index_maps

    monkeypatch.setattr(index_maps, "FIRST_UPDATES", 30)
    taught, chosen_for = [], []
    learn, estimate = index_maps.IndexMaps.learn, BlockTopkPattern.estimate

    def noting(maps, q, k, masked, b, seed):
        taught.append(k.flatten())
        return learn(maps, q, k, masked, b, seed)

    def estimating(pattern, q, k, masked, layer):
        before = [t for t in taught if t.shape == k.flatten().shape]
        chosen_for.append(any(torch.equal(t, k.flatten()) for t in before))
        return estimate(pattern, q, k, masked, layer)

    monkeypatch.setattr(index_maps.IndexMaps, "learn", noting)
    monkeypatch.setattr(BlockTopkPattern, "estimate", estimating)
    words = "--pattern block_topk --steps 3 sparsity.density=0.6 sparsity.row_cap=1 sparsity.rank=4"
    result = run("sparsity", SHAPE, words, "--rows 20", f"run.dir={tmp_path / 'learned'}")
    assert result.exit_code == 0, result.output
    assert not any(chosen_for)
    output = " ".join(result.output.split())
    learned = 30 + 2 * index_maps.EARLY_UPDATES
    line = f"learned scores: from {learned} or more updates with other sequences in this command"
    assert line in output
    assert "exceeded row_cap" in output
    rows = pandas.read_parquet(tmp_path / "learned" / HEAD_ROWS)
    assert rows.groupby("step").updates.first().to_dict() == {1: 30, 3: learned}
    assert rows.cut.between(0, 1, inclusive="neither").all()
