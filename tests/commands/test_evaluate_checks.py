"""What `mtrain eval` says before any work: lengths, held-out text and files without effect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from evaluation.evaluated_runs import small_run
from inference.small_models import source
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.evaluate_checks import (
    require_positions,
    require_room,
    require_short,
    unused_files,
)
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.results import read_results
from mtrain_cli.evaluation.sources import Sources


def warnings_of(*words: str) -> list[str]:
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, ["eval", *words], prog_name="mtrain")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    return [line for line in lines if line.startswith("mtrain: warning")]


def test_a_run_says_which_held_out_sequences_are_too_short_and_what_it_did_not_train(tmp_path):
    run = small_run(tmp_path, "topology.device=cpu", "data.eval_sequences=2")
    words = ("perplexity", str(run), "--length", "512,513")
    short, trained = sorted(warnings_of(*words), key=lambda line: "--length" in line)
    assert short == (
        "mtrain: warning: perplexity: 1 of 2 held-out sequences has 512 tokens; shorter ones, at "
        "the end of a corpus, do not count"
    )
    assert trained.startswith("mtrain: warning: --length 512,513: the run trained only on")
    (first, _) = read_results(run)
    assert (first.samples, first.note) == (1, short.removeprefix("mtrain: warning: perplexity: "))
    assert warnings_of("perplexity", str(run), "--length", "512", "--samples", "1") == []


def test_files_that_no_task_reads_get_a_warning():
    lines = unused_files(["niah_single_1", "cwe"], Sources(essays=Path("e"), words=Path("w")))
    assert lines == ["--essays e: has no effect, no task of --tasks niah_single_1,cwe reads it"]
    assert unused_files(["qa_1"], Sources(squad=Path("s"))) == []


def test_lengths_beyond_the_model_are_refused_unless_the_user_insists(tmp_path):
    found = source(small_run(tmp_path))
    require_positions(found, "4k", [4096], beyond=False)
    require_positions(found, "8k", [8192], beyond=True)
    with pytest.raises(ConfigError, match="--length 8k: the model has 4,096 positions"):
        require_positions(found, "8k", [8192], beyond=False)


def test_some_token_has_more_context_than_short():
    require_short(510, "512,1k")
    with pytest.raises(ConfigError, match="--short 511: no token of a sequence of 512 tokens"):
        require_short(511, "512,1k")


def test_several_special_tokens_need_room():
    model = SimpleNamespace(max_position=2048)
    for length, special in ((2048, 0), (2048, 1), (2047, 2)):
        require_room(model, length, special)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--length 2048: .* adds 2 tokens .* at most 2047"):
        require_room(model, 2048, 2)  # type: ignore[arg-type]
