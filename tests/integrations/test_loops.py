"""Loops of other libraries train over two processes what they train in one."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

import gloo

for package in ("transformers", "trl", "peft", "accelerate", "datasets"):
    pytest.importorskip(package)

from integrations import loops  # noqa: E402

QUICK = {
    "Trainer": loops.hf_trainer,
    "Trainer fsdp": loops.fsdp,
    "Trainer resumed": loops.resumed,
    "SFTTrainer": loops.sft,
    "SFTTrainer LoRA sparse": loops.sparse_lora,
}


def run_all(rank, world, names, folder):
    made = {}
    for name in names:
        loops.start(rank, world)
        began = time.time()
        made[name] = QUICK[name](Path(folder, name), False)
        print(name, round(time.time()-began, 1), made[name], flush=True)
    return made


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return gloo.run(2, run_all, list(QUICK), str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_train_what_one_does(name, on_two, tmp_path):
    loops.start(0, 1)
    expected = QUICK[name](tmp_path, True)
    for found in on_two:
        assert len(found[name]) == len(expected)
        for own, other in zip(found[name], expected):
            assert own == pytest.approx(other, rel=3e-6), name
