"""`mtrain profile sparsity --checkpoints`: the same inputs through every checkpoint of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.dataset import Sample
from mtrain_cli.parallel.fsdp import reshard
from mtrain_cli.profiling.pattern_quality import (
    Analyzer,
    HeadRecord,
    Measurement,
    sampled_rows,
    worker_alone,
)
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.training.checkpointer import load_model_state
from mtrain_cli.training.trainer import Trainer


def profile_checkpoints(
    config: Config,
    checkpoints: Sequence[Path],
    patterns: Sequence[Pattern],
    samples: int,
    rows: int,
    progress: Callable[[int, float | None], None],
    analyzer: Analyzer | None = None,
) -> list[HeadRecord]:
    """Measure the attention of every checkpoint on the same sequences, on one worker.

    The sequences are the first held-out sequences of the run. If the run holds none out, they are
    the first sequences of its corpus, which training may have read.

    Args:
        checkpoints: folders ``step-N`` of the run, in ascending order.
        samples: number of sequences. Density and recall are measured on the first.
        rows: number of queries to sample per layer, the same for every checkpoint.
        progress: called with the step of the checkpoint and the mean loss after each checkpoint.
        analyzer: analyzes the same layers.

    Raises:
        ConfigError: there are too few sequences, a checkpoint is damaged, or what the analyzer
            keeps does not fit the memory of the host.
    """
    sampled_rows(patterns, config.seq, 0, rows)
    if analyzer is not None:
        analyzer.require_memory(config, len(checkpoints) * samples, rows)
    gradients = analyzer is not None and analyzer.needs_gradients
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=None))
    with worker_alone(config) as trainer:
        inputs = _inputs(trainer, samples)
        measurement = Measurement(trainer, patterns, rows, analyzer)
        trainer.callbacks.append(measurement)
        for folder in checkpoints:
            step, weights = load_model_state(folder)
            _load(trainer, step, weights)
            losses = []
            for number, sample in enumerate(inputs):
                measurement.start(step, number, seed=number)
                losses.append(_run(trainer, sample, gradients=gradients))
            known = [loss for loss in losses if loss is not None]
            progress(step, sum(known) / len(known) if known else None)
    return measurement.records


def _inputs(trainer: Trainer, samples: int) -> list[Sample]:
    held_out, data = trainer.held_out, trainer.dataset
    there = len(held_out) or len(data)
    if samples > there:
        whose = "holds out" if held_out else "has"
        raise ConfigError(f"--samples {samples}: the data of the run {whose} {there} sequences")
    return held_out[:samples] or [data[index] for index in range(samples)]


def _load(trainer: Trainer, step: int, weights: dict[str, Any]) -> None:
    options = state_dict.StateDictOptions(full_state_dict=True)
    try:
        state_dict.set_model_state_dict(trainer.states.masters, weights, options=options)
    except RuntimeError as error:
        line = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"step-{step}: the checkpoint is of another model ({line})") from None
    trainer.states.send()
    trainer.train_state.step = step  # decides whether the run's first steps are dense


def _run(trainer: Trainer, sample: Sample, *, gradients: bool) -> float | None:
    make = trainer.next_batch_maker()
    batch = make.to_device(make.on_host([sample]))
    attend = trainer.attention_of(batch)
    if gradients:
        loss = trainer.run_step.forward_backward([batch], [attend], batch.valid)
        trainer.states.drop_gradients()
        return float(loss) if batch.valid else None
    with torch.no_grad():
        losses = trainer.decoder.token_losses(batch.tokens, batch.positions, batch.labels, attend)
    reshard(trainer.decoder)
    return float(losses.double().sum()) / batch.valid if batch.valid else None
