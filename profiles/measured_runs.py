"""Train for a measurement, and predict the time of a step. Used by scripts of this folder."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import worker_pool

from mtrain_cli.commands import train
from mtrain_cli.commands.train import checked_environment
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.parallelize import initialize
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.metrics import read_metrics, steady_steps
from mtrain_cli.records.record_files import open_records

QUIET = ("train.checkpoint_every=0", "train.checkpoint_at_end=false", "run.restarts=0")
LIMIT_S = 590
RunFailed = worker_pool.RunFailed


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


class Pool(worker_pool.Pool):
    """Processes that stay, and train runs of mtrain one after another."""

    def train(
        self,
        *words: str,
        record: bool = False,
        workers: int | None = None,
        limit_s: float = worker_pool.LIMIT_S,
    ) -> Measured:
        """Train as `mtrain train` does with these settings.

        Args:
            record: whether to record the last step.
            workers: number of workers; None takes that of the settings.
            limit_s: longest time of the run, in seconds.

        Raises:
            RunFailed: a setting is wrong, or training failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            count = () if workers is None else (f"topology.workers={workers}",)
            try:
                config = compose(run_words(*words, *count, folder=folder, record=record))
                environment = checked_environment(config)
                run = run_dir.create(config, [])
            except ConfigError as error:
                raise RunFailed(str(error)) from error
            dims = environment.dims
            splits = dims.pp * dims.tp > 1  # a mesh of several dimensions
            try:
                self.call(train_run, run.path, workers=dims.workers, limit_s=limit_s, splits=splits)
            finally:
                run.release()
            return read_run(run.path, record=record)


def train_run(_rank: int, _workers: int, path: Path) -> None:
    """Train a run as a worker of a `Pool`."""
    config = resolved_file.load(path / "resolved.yaml")
    environment = replace(resolve_environment(config), launcher="mtrain")
    train.run_worker(config, run_dir.RunDir(path), environment, False)


def train_elsewhere(checkout: Path, *words: str) -> Measured:
    """Train with the mtrain of another folder, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        _mtrain(["train", *run_words(*words, folder=folder)], checkout)
        return read_run(Path(folder, "run"))


def run_words(*words: str, folder: str, record: bool = False) -> list[str]:
    """Return the settings of a measured run."""
    given = [*QUIET, *words, f"run.dir={folder}/run"]
    if record:
        given.append(f"profile.every={compose(list(words)).train.steps}")
    return given


def read_run(run: Path, *, record: bool = False) -> Measured:
    """Return what a run measured."""
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


class Prediction:
    """The time of a step that `mtrain simulate` predicts, computed while a measurement runs."""

    _executor = ThreadPoolExecutor(1)

    def __init__(self, cluster: str, workers: int, layout: str, exchange: str, *words: str) -> None:
        given = (cluster, workers, layout, exchange, *words)
        self._future = self._executor.submit(predicted, *given)

    def __str__(self) -> str:
        try:
            low, value, high = self._future.result()
        except RunFailed as error:
            return f"none: {error}"
        return f"{value:.3g} ({low:.3g} - {high:.3g})"


def predicted(
    cluster: str, workers: int, layout: str, exchange: str, *words: str
) -> tuple[float, float, float]:
    """Return the seconds of a step that `mtrain simulate` predicts: best, value, worst.

    Raises:
        RunFailed: the simulator refuses the settings.
    """
    options = ["--cluster", cluster, "--nodes", "1", "--workers", str(workers)]
    options += ["--layout", layout, "--exchange", exchange, "--json", "--no-files"]
    document = json.loads(_mtrain(["simulate", "run", *words, *options], None))
    (found,) = (entry["step"] for entry in document["predicted"])
    return tuple(found["seconds"][name] for name in ("low", "value", "high"))


def _mtrain(arguments: list[str], checkout: Path | None) -> str:
    path = {}
    if checkout:
        others = os.environ.get("PYTHONPATH")  # packages that are installed in another folder
        path["PYTHONPATH"] = os.pathsep.join([str(checkout), *([others] if others else [])])
    command = [sys.executable, "-m", "mtrain_cli", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **path},
        cwd=checkout,  # python -m looks there first
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunFailed(f"mtrain {' '.join(arguments)}: exit code {done.returncode}: {last[0]}")
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


def write_state(model: ModelConfig, seed: int, device: str, file: Path) -> None:
    """Write the initial weights of a run of mtrain with this seed on this type of device."""
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device=device)
    initialize(decoder, seed)
    state = {name: weight.detach().cpu() for name, weight in decoder.named_parameters()}
    torch.save(state, file)
