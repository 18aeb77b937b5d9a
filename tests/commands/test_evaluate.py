"""`mtrain eval`: a run through all commands, and one line for each mistake."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from command import mtrain
from evaluation.evaluated_runs import small_run, text_file
from evaluation.small_tokenizer import write_small_tokenizer
from inference.small_models import write_hf, write_run
from typer.testing import CliRunner

from mtrain_cli import api
from mtrain_cli.commands.app import app
from mtrain_cli.commands.completion import complete_attentions
from mtrain_cli.evaluation.perplexity import text_hash
from mtrain_cli.evaluation.runner import STOPPED
from mtrain_cli.launch.manifest import Manifest, checksum

# Not Triton: its interpreter, in which tests run, takes minutes for what the other kernels do in
# seconds, and the kernel is not what these tests are about.
SPARSE = (
    "--attention", "dense,vertical_slash", "sparsity.block=16", "sparsity.last_q=16",
    "train.kernel=reference",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    text_file(folder)
    (folder / "none.md").touch()
    return small_run(folder, "topology.device=cpu")


@pytest.fixture(autouse=True)
def folder(run, monkeypatch) -> Path:
    monkeypatch.chdir(run.parent)
    return run.parent


def evaluate(*words: str, code: int = 0):
    arguments = ["eval", *words]
    result = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(
        app, arguments, prog_name="mtrain"
    )
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refused(*words: str) -> str:
    """Return the only line of output."""
    (line,) = evaluate(*words, code=2).stderr.splitlines()
    return line


def test_a_folder_of_books_gives_the_windows_of_each_length():
    """PG-19: one file per book; short books count only for the lengths that they fill."""
    books = {"10146": 700, "10321": 300, "10356": 1300}
    for name, characters in books.items():
        path = Path("pg19/test", f"{name}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} " * (characters // 6))
    words = ("--text", "pg19/test", "--length", "256,512,1k", "--samples", "3", "--json")
    done = evaluate("perplexity", "run", *words)
    results = {row["length"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {length: row["samples"] for length, row in results.items()} == {256: 3, 512: 3, 1024: 1}
    assert "shorter than 512 tokens" in results[512]["note"]
    assert results[1024]["parts"][-1]["end"] == 1024
    rows = map(json.loads, Path("run/evaluation/samples.jsonl").read_text().splitlines())
    at_256 = [row["text"] for row in rows if row["length"] == 256 and row["tokens"] == 255]
    starts = [[*f"{name} ".encode() * 43][:256] for name in books]
    assert at_256[-3:] == [text_hash(np.array(ids)) for ids in starts]  # each book's beginning
    assert "no document has 2,048 tokens; the longest has" in refused(
        "perplexity", "run", "--text", "pg19/test", "--length", "256,2k"
    )


def test_perplexity_and_needles_share_a_folder_that_report_shows():
    few = ("--samples", "2")
    texts = ("--text", "text.txt", "--length", "128,256")
    done = evaluate("perplexity", "run", *texts, *few, *SPARSE)
    assert "up to" in done.stderr
    assert "FLOP to compute" in done.stderr
    assert "perplexity 256 step 3, vertical_slash" in done.stderr
    needles = ("niah", "run", "--length", "512", "--needles", "3", *few)
    evaluate(*needles, *SPARSE)
    again = evaluate(*needles, "--json")
    (result,) = map(json.loads, again.stdout.splitlines())
    assert (result["task"], result["samples"], result["attention"]) == ("niah", 2, "dense")
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["report", "run", "--out", "page"])
    assert shown.exit_code == 0, shown.output
    assert "niah by depth" in shown.stdout
    page = Path("page/report.html").read_text()
    assert "Evaluations" in page
    assert "Needles by depth and length" in page
    assert "perplexity" in Path("page/tables/evaluations.csv").read_text()


@pytest.mark.slow
def test_a_finished_evaluation_with_a_short_context_has_nothing_to_compute():
    words = ("perplexity", "run", "--text", "text.txt", "--length", "256", "--short", "64")
    both = ("--samples", "1", "--attention", "dense,vertical_slash", "sparsity.block=16")
    assert "FLOP to compute" in evaluate(*words, *both).stderr
    assert "holds all samples; nothing to compute" in evaluate(*words, *both).stderr


def test_a_hugging_face_folder_gets_a_folder_of_measurements(tmp_path):
    write_hf(tmp_path / "hf", vocab_size=264)
    line = refused("perplexity", str(tmp_path / "hf"), "--length", "256")
    assert "no text: give --text FILE" in line
    assert "has no tokenizer" in refused("niah", str(tmp_path / "hf"), "--length", "1k")
    assert not Path("measurements").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("niah", "run", "--length", "64k"), "--length 64k: the model has 4,096 positions"),
        (("niah", "run", "--length", "300"), "--length 300: too few tokens for 10 needles"),
        (("niah", "run", "--length", "x"), "--length x: 'x' is not a number of tokens"),
        (("niah", "run", "--attention", "dens"), "no such attention (did you mean dense?)"),
        (("niah", "run", "--attention", "fixed"), "allowed: dense, vertical_slash"),
        (("niah", "run", "--attention", "moba", "sparsity=dense"), "leave one out"),
        (("niah", "run", "--attention", "dense", "sparsity.p=0.5"), "none of the patterns dense"),
        (("niah", "run", "--checkpoints", "7"), "has no checkpoint of step 7; it has 3"),
        (("niah", "run", "--form", "song"), "--form song: expected sentences or python"),
        (("niah", "run", "--chains", "0.5"), "only with --form python"),
        (
            ("niah", "run", "--tokenizer", "no"),
            "/no: no such folder; give a folder with tokenizer.json",
        ),
        (("niah", "run", "--haystack", "none.txt"), "--haystack none.txt: no such file"),
        (("perplexity", "run", "--length", "512"), "the run held out no text"),
        (("perplexity", "run", "--text", "none.txt"), "--text none.txt: no such file"),
        (("perplexity", "run", "--short", "1"), "--short 1: must be from 2"),
        (
            ("perplexity", "run", "--length", "1k,512", "--short", "512"),
            "--short 512: no token of a sequence of 512 tokens has more context than that",
        ),
        (
            ("niah", "run", "--form", "python", "--length", "300"),
            "--needles 10: 300 tokens of bytes have no room for them",
        ),
        (("niah", "run", "--haystack", "none.md"), "--haystack none.md: holds no text"),
        (
            ("perplexity", "run", "--text", "text.txt", "--short", "64", "--keys-from", "gone"),
            "--keys-from /",
        ),
        (("perplexity", "run", "--keys-from", "run"), "needs --short N"),
    ],
)
def test_mistakes_get_one_line(words, message):
    assert message in refused(*words)


def test_seeds_have_headings_of_their_own(tmp_path):
    words = ("niah", "run", "--length", "512", "--needles", "2", "--samples", "1")
    out = ("--out", str(tmp_path / "out"))
    for seed in ("1", "2"):
        done = evaluate(*words, "--seed", seed, *out)
    assert "dense, seed 1" in done.stdout
    assert "dense, seed 2" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("perplexity", "run", "--text", "text.txt", "--length", "128"),
        ("niah", "run", "--length", "512", "--needles", "2", "--haystack", "text.txt"),
        ("ruler", "run", "--length", "512", "--tasks", "niah_single_1"),
    ],
)
def test_the_tokenizer_of_another_model_is_refused(words, tmp_path):
    write_small_tokenizer(tmp_path)
    out = tmp_path / "out"
    line = refused(*words, "--tokenizer", str(tmp_path), "--out", str(out))
    assert f"--tokenizer {tmp_path}: this tokenizer gives the id " in line
    assert f"for {words[0]}" in line
    assert "but the model's 264 ids are 0 to 263" in line
    assert not out.exists()


def test_a_model_that_sees_later_tokens_has_no_losses(tmp_path):
    write_run(tmp_path / "run", "mask=prefix_lm", "mask.prefix=48")
    line = refused("niah", str(tmp_path / "run"), "--length", "400")
    assert "mask prefix_lm, prefix 48: this evaluation needs the loss of each token" in line


def test_sequences_beyond_those_of_training_get_a_warning(tmp_path):
    run = small_run(tmp_path, "topology.device=cpu", "data.eval_sequences=2")

    def warned(*words: str) -> list[str]:
        lines = evaluate(*words, "--out", str(tmp_path / "out")).stderr.splitlines()
        return [line for line in lines if line.startswith("mtrain: warning")]

    (line,) = warned("perplexity", str(run), "--length", "513")
    assert line.startswith("mtrain: warning: --length 513: the run trained only on sequences of")
    assert warned("perplexity", str(run), "--length", "512", "--samples", "1") == []


def test_results_of_another_model_are_refused(tmp_path, run):
    other = small_run(tmp_path)
    words = ("--length", "512", "--needles", "2", "--samples", "1")
    evaluate("niah", "run", *words)
    message = "holds results of another model"
    assert message in refused("niah", str(other), *words, "--out", str(run / "evaluation"))


@pytest.mark.slow
def test_two_workers_write_the_same_samples(folder):
    words = ("niah", "run", "--length", "512", "--needles", "2", "--samples", "2")
    words = (*words, "train.kernel=reference")
    evaluate(*words, "--out", "on-1")
    tensor = "topology.tensor_parallel=2"
    for name, more in {"on-2": (), "on-tensor": (tensor,)}.items():
        done = mtrain(folder, "eval", *words, "topology.workers=2", *more, "--out", name)
        assert done.returncode == 0, done.stderr
    hits = [
        [
            json.loads(line)["hits"]
            for line in Path(f"on-{n}/samples.jsonl").read_text().splitlines()
        ]
        for n in (1, 2, "tensor")
    ]
    assert hits[0] == hits[1] == hits[2]
    assert len(hits[0]) == 2


def test_several_checkpoints_have_a_line_per_attention_in_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    small_run(tmp_path, "topology.device=cpu", steps=(20, 40, 60))
    words = ("perplexity", "run", "--text", "text.txt", "--length", "128", "--samples", "2")
    Path("run/checkpoints/step-40/manifest.json").write_text("x")
    damage = refused(*words, "--checkpoints", "20,40,60")
    assert "step-40: manifest.json cannot be read" in damage
    done = evaluate(*words, "--checkpoints", "all", "--json", *SPARSE)
    line = done.stderr.splitlines()[0]
    assert line.startswith("mtrain: warning: ")
    assert "step-40: manifest.json cannot be read" in line
    assert line.endswith("; it is left out")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["step"], one["attention"]) for one in results] == [
        (step, name) for step in (20, 60) for name in ("dense", "vertical_slash")
    ]
    assert len({one["score"] for one in results}) == 4
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["report", "run", "--out", "page"])
    assert shown.exit_code == 0, shown.output
    page = Path("page/report.html").read_text()
    assert all(f"± standard error, step {step}" in page for step in (20, 60))


def test_a_stop_of_several_workers_says_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr("mtrain_cli.commands.generate.launch_workers", lambda *_: 130)
    words = ("niah", "run", "--length", "512", "--haystack", "text.txt", "--needles", "3")
    done = evaluate(*words, "--out", str(tmp_path / "o"), "topology.workers=2", code=130)
    assert done.stderr.splitlines()[-1] == STOPPED


def test_attentions_complete():
    assert complete_attentions("dense,ver") == ["dense,vertical_slash"]
    assert "fixed" not in complete_attentions("")


@pytest.fixture
def damaged(tmp_path, monkeypatch) -> Path:
    """Return a run whose newest checkpoint is truncated."""
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    run = small_run(tmp_path, "topology.device=cpu", steps=(20, 40))
    next((run / "checkpoints/step-40").glob("*.distcp")).write_bytes(b"")
    return run


SHORT = ("--text", "text.txt", "--length", "128", "--samples", "1")


@pytest.mark.usefixtures("damaged")
def test_a_truncated_newest_checkpoint_is_skipped_with_a_warning_as_in_generate():
    done = evaluate("perplexity", "run", *SHORT, "--json")
    assert json.loads(done.stdout)["step"] == 20
    (warning,) = (line for line in done.stderr.splitlines() if "warning" in line)
    assert "step-40: " in warning
    assert re.search(r"has 0 bytes instead of \d+; using the previous checkpoint instead$", warning)


def test_a_damaged_checkpoint_names_the_others_and_leaves_no_folder(damaged):
    newest = "run/checkpoints/step-40"
    line = refused("perplexity", newest, *SHORT)
    assert re.search(r"has 0 bytes instead of \d+$", line)
    generated = CliRunner().invoke(app, ["generate", newest, "--prompt", "a"])
    assert generated.exit_code == 2
    assert generated.stderr == f"{line}\n"
    altered = next((damaged / "checkpoints/step-20").glob("*.distcp"))
    altered.write_bytes(altered.read_bytes()[:-1] + b"x")
    for out in ((), ("--out", "new/folder")):
        result = evaluate("perplexity", "run/checkpoints/step-20", *SHORT, *out, code=2)
        assert "was altered" in result.stderr.splitlines()[-1]
        assert not (damaged / "evaluation").exists()
        assert not Path("new").exists()


def test_a_folder_below_a_file_is_refused_with_the_option():
    for out in ("text.txt/x", "/proc/x"):
        line = refused("perplexity", "run", *SHORT, "--out", out)
        assert line.startswith(f"mtrain: --out {out}: could not be written (No")


def _flip_a_bit(newest: Path) -> None:
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _put_code_into_the_metadata(newest: Path) -> None:
    (newest / ".metadata").write_bytes(pickle.dumps(print))
    known = Manifest.read(newest)
    files = {name: checksum(newest / name) for name in known.files}
    dataclasses.replace(known, files=files).write(newest)


DAMAGES = {
    "none": lambda _: None,
    "truncated": lambda newest: next(newest.glob("*.distcp")).write_bytes(b""),
    "a bit": _flip_a_bit,
    "a file less": lambda newest: next(newest.glob("*.distcp")).unlink(),
    "no metadata": lambda newest: (newest / ".metadata").unlink(),
    "no manifest": lambda newest: (newest / "manifest.json").unlink(),
    "a wrong manifest": lambda newest: (newest / "manifest.json").write_text("{"),
    "code": _put_code_into_the_metadata,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_eval_generate_and_api_use_the_same_checkpoint_and_say_the_same(
    damage, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    run = small_run(tmp_path, "topology.device=cpu", steps=(20, 40))
    DAMAGES[damage](run / "checkpoints/step-40")
    expected = 40 if damage == "none" else 20
    evaluated = evaluate("perplexity", "run", *SHORT, "--json")
    assert json.loads(evaluated.stdout)["step"] == expected
    words = ["generate", "run", "--prompt", "a", "--max-new", "2"]
    generated = CliRunner().invoke(app, words)
    assert generated.exit_code == 0, generated.stderr
    lines = [
        [line for line in result.stderr.splitlines() if "step-40" in line]
        for result in (evaluated, generated)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == (damage != "none")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api.load("run")
    told = [str(one.message) for one in caught if "step-40" in str(one.message)]
    assert [f"mtrain: warning: {line}" for line in told] == lines[0]
