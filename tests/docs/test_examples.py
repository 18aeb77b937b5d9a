"""The scripts in examples/ run, small, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command import python_path
from docs.blocks import ROOT

EXAMPLES = ROOT / "examples"
# As SLURM starts tasks on one node; the last one to be started is rank 0.
SRUN = """#!/usr/bin/env bash
set -euo pipefail
export SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=localhost
export SLURM_NNODES=1 SLURM_NODEID=0
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"
wait $!
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """With some text, and programs that a machine of the example has."""
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(json.__file__, texts / "json.py")
    shutil.copy(json.decoder.__file__, texts / "decoder.py")
    shutil.copy(socket.__file__, texts / "socket.py")
    programs = tmp_path / "bin"
    programs.mkdir()
    write(programs / "mtrain", f'#!/bin/sh\nexec {sys.executable} -m mtrain_cli "$@"\n')
    write(
        programs / "torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    write(programs / "srun", SRUN)
    return tmp_path


def write(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


def run(
    folder: Path, name: str, *words: str, options: tuple[str, ...] = (), **variables: str
) -> str:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "MTRAIN_EXAMPLE_SMALL": "1",
        **variables,
    }
    environment.pop("TRITON_INTERPRET", None)
    program = (
        ["bash"] if not name.endswith(".py") else [sys.executable, "-m", "torch.distributed.run"]
    )
    result = subprocess.run(
        [*program, *options, EXAMPLES / name, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix != ".yaml")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_say_how_to_start_them(path):
    text = path.read_text()
    if path.suffix == ".py":
        compile(text, path.name, "exec")
    else:
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
        assert "set -euo pipefail" in text
    assert f"examples/{path.name}" in text
    assert len(text.splitlines()) <= (150 if path.suffix == ".py" else 45)
    assert max(map(len, text.splitlines())) <= 100


def test_every_script_has_a_test():
    here = Path(__file__).read_text()
    for path in SCRIPTS:
        assert f'"{path.name}"' in here


@pytest.mark.slow
def test_a_first_run_leaves_a_report(folder):
    run(folder, "first_run.sh", "topology.workers=1")
    assert len(losses(folder, "first")) == 2
    assert (folder / "runs/first/report.html").is_file()


@pytest.mark.slow
def test_simulating_a_cluster_leaves_a_sweep(folder):
    text = run(folder, "simulate_a_cluster.sh", "a100_4x8")
    assert "a100_4x8" in text
    assert (folder / "measurements/scaling/sweep.csv").is_file()


@pytest.mark.slow
def test_training_on_own_data_exports_a_model(folder):
    run(folder, "own_data.sh", "texts")
    assert len(losses(folder, "own")) == 2
    assert (folder / "own-hf/model.safetensors").is_file()
    assert (folder / "own-hf/tokenizer.json").is_file()


@pytest.mark.slow
def test_the_recipe_of_512k_trains_small(folder):
    subprocess.run(
        [folder / "bin/mtrain", "data", "prepare", "texts", "prepared"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path()},
        check=True,
    )
    run(folder, "qwen3b_512k.sh", "texts", "prepared")
    assert len(losses(folder, "qwen3b-512k")) == 2


@pytest.mark.slow
def test_a_job_of_slurm_trains_as_one_run(folder):
    run(
        folder,
        "slurm.sbatch",
        SLURM_JOB_ID="17",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
    )
    assert len(losses(folder, "slurm-17")) == 2


@pytest.mark.slow
def test_torchrun_trains_as_one_run(folder):
    run(
        folder,
        "torchrun_two_nodes.sh",
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
    )
    assert len(losses(folder, "two-nodes")) == 2


@pytest.mark.slow
def test_two_layouts_are_compared(folder):
    text = run(folder, "profile_and_compare.sh", "topology.workers=2")
    assert (folder / "compared/report.html").is_file()
    assert "striped" in text


@pytest.mark.slow
def test_a_loop_of_ones_own_gives_the_same_losses_on_any_number_of_processes(folder):
    pytest.importorskip("transformers")
    found = [
        run(
            folder, "own_loop.py", "texts/json.py", "--sparsity", sparsity,
            options=("--nproc-per-node", number, "--master-port", free_port()),
        )
        for number, sparsity in (("1", "dense"), ("2", "dense"), ("2", "vertical_slash"))
    ]  # fmt: skip
    assert [text.count("loss") for text in found] == [4, 4, 4]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_diffusion_transformer_trains_alike_on_any_number_of_processes(folder):
    found = [
        run(
            folder, "video_dit.py", "--layout", layout, "--exchange", exchange,
            options=("--nproc-per-node", number, "--master-port", free_port()),
        )
        for number, layout, exchange in (
            ("1", "auto", "auto"), ("2", "zigzag", "ring"), ("3", "balanced", "group_cast"),
        )
    ]  # fmt: skip
    assert [text.count("loss") for text in found] == [6, 6, 6]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_dense_attention_gives_the_loss_of_the_peer_beside_it(folder):
    pytest.importorskip("transformers")
    options = ("--nproc-per-node", "2", "--master-port", free_port())
    lines = run(folder, "compare_attention.py", options=options, CUDA_VISIBLE_DEVICES="")
    losses = dict(re.findall(r"^(.+): [\d.]+ s/step, .* loss ([\d.]+)$", lines, re.M))
    assert list(losses) == ["peer: Ulysses", "dense", "fixed, 15 %"]
    assert losses["dense"] == losses["peer: Ulysses"] != losses["fixed, 15 %"]


@pytest.mark.slow
def test_the_trainer_of_transformers_gives_the_same_losses_on_any_number_of_processes(folder):
    pytest.importorskip("datasets")
    found = [
        steps_of(
            run(
                folder, "hf_trainer.py", "texts/json.py", "--sparsity", sparsity,
                options=("--nproc-per-node", number, "--master-port", free_port()),
                CUDA_VISIBLE_DEVICES="",
            )
        )
        for number, sparsity in (("1", "dense"), ("2", "dense"), ("2", "vertical_slash"))
    ]  # fmt: skip
    assert [len(steps) for steps in found] == [4, 4, 4]
    assert found[0] == found[1]


@pytest.fixture
def chat(folder):
    """A small model with its tokenizer, and conversations."""
    for package in ("trl", "peft", "datasets", "accelerate"):
        pytest.importorskip(package)
    from integrations import loops

    text = loops.tokenizer()
    text.save_pretrained(folder / "model")
    loops.model_of("qwen2", True, len(text)).save_pretrained(folder / "model")
    loops.conversations().to_json(folder / "chat.jsonl")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_sft.py", "peft_lora.py"])
def test_conversations_give_the_same_losses_on_any_number_of_processes(chat, name):
    found = [
        steps_of(
            run(
                chat, name, "model", "chat.jsonl", "--seq", "1k",
                options=("--nproc-per-node", number, "--master-port", free_port()),
                CUDA_VISIBLE_DEVICES="",
            )
        )
        for number in ("1", "2")
    ]  # fmt: skip
    assert len(found[0]) == 4
    assert found[0] == found[1]
    saved = {"trl_sft.py": "trl-sft/model.safetensors", "peft_lora.py": "lora/adapter_config.json"}
    assert (chat / saved[name]).is_file()


@pytest.mark.slow
def test_preferences_give_the_losses_of_trl_on_any_number_of_processes(chat):
    from integrations import loops
    from transformers import AutoModelForCausalLM

    pairs = loops.preferences()
    plain = {"prompt": "a b", "chosen": " c d e", "rejected": " f" * 30}
    (chat / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (chat / "texts.jsonl").write_text(json.dumps(plain) + "\n" + json.dumps(plain) + "\n")
    options = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0}
    found = {}
    for file, number in (("pairs", "1"), ("pairs", "2"), ("texts", "2")):
        printed = run(
            chat, "dpo.py", "model", f"{file}.jsonl", "--seq", "256", "--lr", "1e-3",
            "--pairs-per-step", "2", "--output", f"dpo-{number}",
            options=("--nproc-per-node", number, "--master-port", free_port()),
            CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip
        steps = re.findall(r"^step \d+: loss ([\d.]+), gradient ([\d.]+)$", printed, re.M)
        found[file, number] = [tuple(map(float, step)) for step in steps]
    loops.start(0, 1)
    for (file, _), steps in found.items():
        model = AutoModelForCausalLM.from_pretrained(chat / "model")
        rows = pairs if file == "pairs" else [plain, plain]
        expected = loops.dpo_of_trl(
            chat / "trl", model, rows, precompute_ref_log_probs=True, **options
        )
        assert [loss for loss, _ in steps] == pytest.approx([n for n, _ in expected], abs=2e-5)
    trained = AutoModelForCausalLM.from_pretrained(chat / "dpo-2")
    assert trained.config.architectures == ["Qwen2ForCausalLM"]


def steps_of(printed: str) -> list[str]:
    """Return the loss and the norm of the gradient of each step that a Trainer printed."""
    return re.findall(r"'loss': '[0-9.]+', 'grad_norm': '[0-9.]+'", printed)


@pytest.mark.slow
def test_a_model_of_torchtitan_gives_the_same_losses_on_any_number_of_processes(folder):
    pytest.importorskip("torchtitan.models.llama3")
    found = [
        run(
            folder, "torchtitan_llama3.py", "texts/json.py",
            options=("--nproc-per-node", number, "--master-port", free_port()),
        )
        for number in ("1", "2")
    ]  # fmt: skip
    assert found[0].count("loss") == 4
    assert found[0] == found[1]
