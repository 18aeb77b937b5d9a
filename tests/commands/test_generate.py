"""`mtrain generate` as a user types it: texts, files, workers, and mistakes on one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import mtrain
from commands.typed_line import run
from inference.small_models import write_hf, write_run

from mtrain_cli.commands import completion


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a run of bytes, run, and a model without a tokenizer, hf."""
    folder = tmp_path_factory.mktemp("models")
    write_run(folder / "run", "sparsity=vertical_slash")
    write_hf(folder / "hf")
    (folder / "ids.jsonl").write_text('{"ids": [1, 2, 3]}\n\n{"ids": [5]}\n')
    (folder / "texts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (folder / "long.txt").write_text("x" * 300)
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    (folder / "wrong.jsonl").write_text('{"prompt": "one"}\n{"text": "two"}\n')
    (folder / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"ids": [1, 2, 3]}\r\n{"ids": [5]}\r\n')
    (folder / "outside.jsonl").write_text('{"ids": [1, 97]}\n')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "none.txt").touch()
    (folder / "row.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": ""}\n')
    (folder / "both.jsonl").write_text('{"prompt": "one", "ids": [1]}\n')
    (folder / "runs").mkdir()
    (folder / "runs/mine").mkdir()
    (folder / "runs/mine/resolved.yaml").touch()
    return folder


@pytest.fixture
def _here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


CPU = "topology.device=cpu"


@pytest.mark.usefixtures("_here")
def test_texts_go_to_stdout_and_the_rest_to_stderr():
    result = run("generate run --prompt abc --max-new 5", CPU)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.endswith("\n")
    assert "prompts: vertical_slash" in result.stderr
    assert "new tokens: dense over the whole cache" in result.stderr
    assert "1 of 1 ended at --max-new" in result.stderr
    several = run("generate run --prompt-file texts.jsonl --max-new 5", CPU)
    assert several.stdout.startswith("--- prompt 1 ---\n")
    twice = run("generate run --prompt one --prompt two --max-new 5", CPU)
    assert twice.stdout == several.stdout


def documents(*parts: str) -> list[dict]:
    result = run("generate", *parts, "--json", CPU)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("_here")
def test_samples_follow_the_options():
    model = "hf --prompt-file ids.jsonl --max-new 6"
    greedy = documents(model)
    assert [each["prompt_tokens"] for each in greedy] == [3, 1]
    assert [len(each["ids"]) for each in greedy] == [6, 6]
    marked = documents("hf --prompt-file marked.jsonl --max-new 6")
    assert [each["ids"] for each in marked] == [each["ids"] for each in greedy]

    def ids(options: str) -> list[list[int]]:
        return [each["ids"] for each in documents(model, options)]

    sampled = ids("--temperature 2 --seed 1")
    assert sampled == ids("--temperature 2 --seed 1")
    assert sampled != ids("--temperature 2 --seed 2")
    assert ids("--temperature 2 --top-k 1") == [each["ids"] for each in greedy]
    assert ids("--temperature 2 --top-p 1e-9") == [each["ids"] for each in greedy]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("typed", "warning"),
    [
        (
            "--prompt-file long.txt --max-new 213",
            "prompt and --max-new have up to 513 tokens; the run trained only on sequences of 512",
        ),
        ("--prompt-file long.txt --max-new 212 --temperature 1 --top-k 3", None),
        ("--prompt a topology.host_memory_gib=1", None),
    ],
)
def test_a_length_beyond_those_of_training_gets_a_warning(typed, warning):
    result = run(f"generate run --json {typed}", CPU)
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    if warning is None:
        assert warnings == []
    else:
        (line,) = warnings
        assert line.startswith(f"mtrain: warning: {warning}")


@pytest.mark.usefixtures("_here")
def test_a_prompt_comes_from_stdin(monkeypatch, folder):
    with (folder / "texts.jsonl").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        from mtrain_cli.commands.generate import _prompts

        (prompt,) = _prompts(None, "-").values()
    assert prompt == '{"prompt": "one"}\n{"prompt": "two"}\n'


def test_two_workers_print_what_one_prints(folder):
    words = ("generate", "run", "--prompt", "abcdef", "--max-new", "7", "--temperature", "1", CPU)
    one = mtrain(folder, *words)
    assert one.returncode == 0, one.stderr
    two = mtrain(folder, *words, "topology.workers=2", "topology.layout=striped")
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    assert "2 workers (striped" in two.stderr
    shared = mtrain(folder, *words, "topology.workers=2", "topology.tensor_parallel=2")
    assert (shared.returncode, shared.stdout) == (0, one.stdout), shared.stderr
    assert {path.name for path in folder.iterdir()} == {
        "run", "hf", "runs", "ids.jsonl", "texts.jsonl", "long.txt", "latin1.txt", "wrong.jsonl",
        "outside.jsonl", "empty.jsonl", "marked.jsonl", "both.jsonl", "none.txt", "row.jsonl",
    }  # fmt: skip


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("run", "no prompt: give --prompt TEXT, --prompt-file FILE"),
        ("run --prompt ''", "--prompt '': is empty; give TEXT"),
        ("run --prompt a --prompt-file texts.jsonl", "--prompt-file texts.jsonl: --prompt already"),
        ("run --prompt-file nope.txt", "--prompt-file nope.txt: no such file"),
        ("run --prompt-file runs", "--prompt-file runs: cannot be read (Is a directory)"),
        ("run --prompt-file latin1.txt", "--prompt-file latin1.txt: is not UTF-8 text (byte 3)"),
        ("run --prompt-file wrong.jsonl", "--prompt-file wrong.jsonl: line 2 is not a JSON object"),
        ("run --prompt-file both.jsonl", "--prompt-file both.jsonl: line 1 is not a JSON object"),
        ("run --prompt-file empty.jsonl", "--prompt-file empty.jsonl: has no prompt"),
        ("run --prompt a --max-new 5000", "the prompt has 1 token; with --max-new 5000 it"),
        (
            "hf --prompt-file outside.jsonl",
            "--prompt-file outside.jsonl: line 1 has the id 97 at token 2",
        ),
        ("hf --prompt a", "hf: has no tokenizer. Give --tokenizer FOLDER"),
        ("run --prompt a --tokenizer runs", "--tokenizer runs: has no tokenizer files"),
        ("run --prompt-file none.txt", "--prompt-file none.txt is empty; give at least"),
        ("run --prompt-file row.jsonl", "--prompt-file row.jsonl: line 3 is empty; give at"),
        ("run --prompt a --prompt ''", "--prompt '': is empty"),
        ("run/checkpoints/step-9 --prompt a", "run/checkpoints/step-9: no such checkpoint; the"),
        ("run --prompt a --temperature -1", "--temperature -1: must be 0"),
        ("run --prompt a --max-new 0", "--max-new 0: must be at least 1"),
        ("run --prompt a sparsity=fixed", "sparsity=fixed: chooses keys without regard"),
        ("runs --prompt a", "runs: no model here. Give a Hugging Face folder"),
        ("run --prompt-file long.txt topology.host_memory_gib=0.001", "a prompt of 300 tokens"),
    ],
)
def test_mistakes_are_one_line(typed, problem):
    result = run(f"generate {typed}", CPU)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith(f"mtrain: {problem}")
    assert result.stderr.count("\n") == 1
    assert "fixed" not in result.stderr.partition("allowed:")[2]


@pytest.mark.usefixtures("_here")
def test_runs_and_folders_complete():
    assert completion.complete_models("runs/m") == [("runs/mine", "")]
    assert ("hf/", "") in completion.complete_models("h")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_checkpoint_of_a_pipeline_generates_as_a_whole_model(tmp_path, tied):
    """Generation from the run equals that from its exported Hugging Face folder."""
    shape = f"seq=512 model.num_layers=2 model.tie_word_embeddings={str(tied).lower()}"
    trained = mtrain(
        tmp_path, "train", *shape.split(), "topology.device=cpu", "topology.workers=2",
        "topology.pipeline_parallel=2", "train.steps=2", "train.global_batch=2", "run.name=one",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    exported = mtrain(tmp_path, "checkpoint", "export", "runs/one", "out", "--dtype", "float32")
    assert exported.returncode == 0, exported.stderr
    words = ["--prompt", "The quick brown", "--max-new", "8", "--json", CPU, "train.dtype=float32"]
    found = [mtrain(tmp_path, "generate", model, *words) for model in ("runs/one", "out")]
    assert [result.returncode for result in found] == [0, 0], found[0].stderr + found[1].stderr
    texts = [json.loads(result.stdout.splitlines()[0])["text"] for result in found]
    assert texts[0] == texts[1]
