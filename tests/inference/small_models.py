"""Small models on disk for tests of generation: Hugging Face folders and runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from model.tiny_models import export, make_decoder, tiny_model

from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import Config
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.model_source import ModelSource, open_source
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.training.checkpointer import Checkpointer

POSITIONS = 2048  # of the models


def write_hf(folder: Path, family: str = "qwen2", **changes) -> Path:
    """Write a random model of 97 ids to a Hugging Face folder."""
    model = tiny_model(family, **changes)
    rope = dataclasses.replace(model.rope, original_max_position=POSITIONS)
    export(folder, dataclasses.replace(model, rope=rope))
    return folder


def write_run(folder: Path, *overrides: str, steps: tuple[int, ...] = (3,)) -> Config:
    """Write a run with checkpoints of random weights. Its text is encoded as bytes.

    steps: steps of the checkpoints. Each has other weights.
    """
    config = compose.compose(
        ["seq=512", "model.num_layers=2", "model.hidden_size=32", "model.head_dim=16",
         "model.intermediate_size=48", "model.num_heads=4", "model.num_kv_heads=2", *overrides]
    )  # fmt: skip
    folder.mkdir(parents=True)
    resolved_file.save(config, folder / "resolved.yaml")
    decoder = make_decoder(dataclasses.replace(config.model, init_std=0.2))
    saved = decoder.state_dict()
    weights = {
        name: one
        for name, one in (*decoder.named_parameters(), *decoder.named_buffers())
        if name in saved
    }
    checkpointer = Checkpointer(folder / "checkpoints", keep=len(steps))
    for number, step in enumerate(steps):
        state = {
            "model": {name: one.detach() * (1 + number / 4) for name, one in weights.items()},
            # A checkpoint without this is an import, whose tokenizer is unknown.
            "trainer": {"step": step},
        }
        checkpointer.save(step, state, asynchronous=False)
    return config


def tokens(count: int, seed: int = 0, vocabulary: int = 97) -> list[int]:
    """Return random ids."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def source(path: Path, *overrides: str) -> ModelSource:
    return open_source(path, ["topology.device=cpu", "train.kernel=sdpa", *overrides])


def engine(path: Path, *overrides: str, environment: Environment | None = None) -> Engine:
    """Load a model on the CPU, by default on this process alone."""
    found = source(path, *overrides)
    return Engine(found, environment or resolve_environment(found.config))
