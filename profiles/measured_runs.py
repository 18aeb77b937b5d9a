"""Run `mtrain train` for a measurement, and predict its step. Used by scripts of this folder."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.init import initialize
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.metrics import read_metrics, steady_steps
from mtrain_cli.records.record_files import open_records

QUIET = ("train.checkpoint_every=0", "train.checkpoint_at_end=false", "run.restarts=0")
LIMIT_S = 590


@dataclass(frozen=True)
class Measured:
    """A run of `mtrain train`.

    losses: of each step.
    seconds: median of a step after the first steps.
    data_ms: median wait of these steps for the loader, in milliseconds.
    peak_gib: most memory of a GPU; 0 on a CPU.
    pipeline: times of the recorded passes of a step, as in a profile's results.
    """

    losses: list[float]
    seconds: float
    data_ms: float
    peak_gib: float
    pipeline: dict[str, Any] | None


def train(*words: str, record: bool = False, checkout: Path | None = None) -> Measured:
    """Run `mtrain train` with some settings.

    Args:
        record: whether to record the last step.
        checkout: folder of another revision of mtrain to run instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = [*QUIET, *words, f"run.dir={folder}/run"]
        if record:
            given.append(f"profile.every={compose(list(words)).train.steps}")
        _mtrain(["train", *given], checkout)
        run = Path(folder, "run")
        metrics = read_metrics(run / "metrics.jsonl")
        steady = steady_steps(metrics)
        times = analyse(open_records(run / "profile"))[0].pipeline if record else None
        return Measured(
            [step.loss for step in metrics],
            statistics.median(step.seconds for step in steady),
            1e3 * statistics.median(step.data_seconds or 0.0 for step in steady),
            max(step.peak_memory_gib or 0.0 for step in metrics),
            None if times is None else times.to_json(),
        )


def predicted(
    cluster: str, workers: int, layout: str, exchange: str, *words: str
) -> tuple[float, float, float]:
    """Return the seconds of a step that `mtrain simulate` predicts: best, value, worst."""
    options = ["--cluster", cluster, "--nodes", "1", "--workers", str(workers)]
    options += ["--layout", layout, "--exchange", exchange, "--json", "--no-files"]
    document = json.loads(_mtrain(["simulate", "run", *words, *options], None))
    (found,) = (entry["step"] for entry in document["predicted"])
    return tuple(found["seconds"][name] for name in ("low", "value", "high"))


def _mtrain(arguments: list[str], checkout: Path | None) -> str:
    path = {"PYTHONPATH": str(checkout)} if checkout else {}
    command = [sys.executable, "-m", "mtrain_cli", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"mtrain {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}"
        )
    return done.stdout


def write_ids(folder: Path, vocabulary: int, seq: int, documents: list[int]) -> Path:
    """Write random ids of one sequence, and where its documents begin.

    documents: the first token of each document, from 0.

    Returns:
        The file for ``data.path``.
    """
    ids = np.random.default_rng(0).integers(0, vocabulary, seq + 1).astype(np.int32)
    np.save(folder / "ids.npy", ids)
    np.save(folder / "ids.documents.npy", np.array([*documents, seq + 1]))
    return folder / "ids.npy"


def write_state(model: ModelConfig, seed: int, file: Path) -> None:
    """Write the initial weights of a run of mtrain with this seed."""
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    initialize(decoder, seed)
    torch.save({name: weight.detach() for name, weight in decoder.named_parameters()}, file)
