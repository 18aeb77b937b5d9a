"""Runs and requests for tests of evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from inference.small_models import source, write_run

from mtrain_cli.config.schema import Config
from mtrain_cli.evaluation.request import EvaluationRequest, NeedleOptions, Weights
from mtrain_cli.evaluation.runner import Runner
from mtrain_cli.launch.environment import Environment, resolve_environment

SPARSE = ("sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16")


def text_file(folder: Path, characters: int = 6000) -> Path:
    """Write a text of letters, numbers and sentences to a file."""
    words = (f"Line {n} says {n * n % 97}.\n" for n in range(characters // 8))
    path = folder / "text.txt"
    path.write_text("".join(words)[:characters])
    return path


def small_run(folder: Path, *overrides: str, steps: tuple[int, ...] = (3,)) -> Path:
    """Write a run with random weights whose tokens are bytes. steps: of its checkpoints."""
    write_run(folder / "run", *overrides, steps=steps)
    return folder / "run"


def request_of(run: Path, kind: str, **changes) -> EvaluationRequest:
    """Return a request for the checkpoint of a run, at 512 tokens and dense."""
    checkpoint = next((run / "checkpoints").glob("step-*"))
    request = EvaluationRequest(
        kind=kind,
        out=str(run / "evaluation"),
        model="..",
        weights=(Weights.of_checkpoint(checkpoint),),
        attentions=("dense",),
        lengths=(512,),
        samples=3,
        niah=NeedleOptions(needles=3),
    )
    return dataclasses.replace(request, **changes)


def configs_of(run: Path, attentions: tuple[str, ...] = ("dense",)) -> tuple[Config, ...]:
    """Return the configuration of each attention."""
    return tuple(source(run, *(SPARSE if name != "dense" else ())).config for name in attentions)


def runner_of(
    run: Path, request: EvaluationRequest, environment: Environment | None = None, **options
) -> Runner:
    """Return a runner on this process alone, unless there is an environment."""
    configs = configs_of(run, request.attentions)
    return Runner(request, configs, environment or resolve_environment(configs[0]), **options)
