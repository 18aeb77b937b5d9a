"""Random input with a fixed seed. `python -m fuzz` tries more of it, over all commands."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fuzz.damage import copy_to, damage
from fuzz.material import commands_for, complete
from fuzz.runner import PYTHON, run, stub_heavy_work
from fuzz.words import Words
from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import run_status
from mtrain_cli.launch.run_dir import RunDir

SEED, LINES, DAMAGES, COMMANDS = 20, 250, 120, 30


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    stub_heavy_work(monkeypatch)
    return tmp_path


def test_any_override_composes_or_is_refused_in_lines(quick: Path) -> None:
    """Command lines raise only ConfigError, without Python terms, and no typo is accepted."""
    words = Words(SEED, [str(quick), "nowhere", "a.yaml"])
    # Composing a group is slow, so draw few of them; keys are cheap.
    draw, groups = (
        random.Random(SEED),
        ([], [], [], ["model=qwen3b"], ["sparsity=vertical_slash"], ["data=text"]),
    )
    refused = 0
    for _ in range(LINES):
        drawn = [words.override() for _ in range(draw.choice((1, 1, 2, 3)))]
        drawn = [
            (word, typo)
            for word, typo in drawn
            if word.partition("=")[0] not in words.groups or typo
        ]
        line = [*draw.choice(groups), *(word for word, _ in drawn)]
        problems = _problems(line)
        refused += bool(problems)
        assert not any(
            PYTHON.search(problem)
            for problem in problems
            if not any(word in problem for word in line)
        ), line
        assert problems or not any(typo for _, typo in drawn), line
    assert 0.3 * LINES < refused < LINES


def _problems(line: list[str]) -> tuple[str, ...]:
    try:
        compose.compose(line)
    except ConfigError as error:
        return error.problems
    return ()


def test_any_command_line_ends_without_a_traceback(quick: Path) -> None:
    words = Words(SEED, ["nowhere", str(quick)])
    lines = [words.line() for _ in range(COMMANDS)]
    # Plans and simulations take seconds; `python -m fuzz` runs them.
    lines = [
        line
        for line in lines
        if line.words[0] not in ("simulate", "doctor") and "--dry-run" not in line.words
    ]
    for line in lines:
        assert run(line.words, line.typos).kind == "fine", line


def test_a_stubbed_measurement_shows_its_rows(quick: Path) -> None:
    assert run(["profile", "sparsity", "sparsity=moba", "run.name=one"]).kind == "fine"
    assert (quick / "measurements" / "one" / "summary.json").is_file()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `fuzz.material.make`, but written at once without running commands."""
    folder = tmp_path_factory.mktemp("material")
    run_dir = folder / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    resolved_file.save(compose.compose(["seq=256"]), run_dir / "resolved.yaml")
    step = {
        "step": 1, "loss": 5.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 256,
        "tokens_per_second_per_gpu": 9.0, "mfu_model": None, "mfu_executed": None, "density": 1.0,
        "peak_memory_gib": None, "seconds": 0.5, "epoch": 0.1, "consumed": 1,
    }  # fmt: skip
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps({**step, "step": n}) + "\n" for n in range(1, 4))
    )
    run_status.write_state(
        RunDir(run_dir),
        run_status.RunState(
            phase="finished", time=1.7e9, began=1.7e9, step=3, steps=3, warnings=((1.7e9, "slow"),)
        ),
    )
    (run_dir / "environment.json").write_text(
        '{"host": "here", "gpus": [], "cpu_cores": 2, "versions": {"torch": "2.12"}}'
    )
    bucket = '{"begin": 0, "end": 128, "tokens": 5, "loss": 5.0}'
    (run_dir / "evaluations.jsonl").write_text(
        '{"step": 1, "loss": 5.0, "tokens": 5, "sequences": 1, "seconds": 1.0, '
        f'"attention": "dense", "buckets": [{bucket}]}}\n'
    )
    (run_dir / "overrides.txt").write_text("seq=256\n")
    (folder / "hf").mkdir()
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    shape = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "vocab_size": 300, "intermediate_size": 128, "rope_scaling": scaling,
    }  # fmt: skip
    (folder / "hf/config.json").write_text(json.dumps(shape))
    case = {
        "seq": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "block": 16,
        "density": None,
        "columns": 0,
    }
    times = [
        {
            "kernel": "sdpa",
            "pairs": 9000 * n,
            "forward_ms": 0.1 * n,
            "backward_ms": 0.2 * n,
            "case": case,
        }
        for n in (1, 2, 3)
    ]
    (folder / "kernels.json").write_text(
        json.dumps({"kind": "kernels", "schema": 1, "device": "CPU", "times": times})
    )
    return complete(folder)


def test_damaged_files_end_in_one_line(quick: Path, material: Path) -> None:
    sources = [entry for entry in commands_for(material) if entry[0].exists() and entry[1]]
    sources = [
        (source, files, kept)
        for source, files, commands in sources
        if (kept := [c for c in commands if _is_quick(c)])
    ]
    assert {source.name for source, _, _ in sources} == {
        "run",
        "cluster.yaml",
        "kernels.json",
        "hf",
        "mds",
        "weights.yaml",
    }
    for number in range(DAMAGES):
        draw = random.Random(number)
        source, files, commands = draw.choice(sources)
        name, command = draw.choice(files), draw.choice(commands)
        copy = copy_to(source, quick / "damaged")
        change = damage(draw, copy / name if source.is_dir() else copy)
        outcome = run(
            [
                word.replace("THIS", str(copy)).replace("OUT", str(quick / f"out{number}"))
                for word in command
            ]
        )
        assert outcome.kind == "fine", (name, change, command, outcome)


def _is_quick(command: list[str]) -> bool:
    return command[:2] != ["checkpoint", "export"] and "--dry-run" not in command
