"""The command lowest-loss of mtrain."""

from pathlib import Path

import typer

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records.metrics import metrics_file, read_metrics


def lowest_loss(run: Path) -> None:
    """Print the step of a run with the lowest loss."""
    steps = [step for step in read_metrics(metrics_file(run)) if step.loss is not None]
    if not steps:
        raise ConfigError(f"{run}: no step has a loss")
    best = min(steps, key=lambda step: step.loss)
    typer.echo(f"step {best.step} has the lowest loss: {best.loss:.4f}")
