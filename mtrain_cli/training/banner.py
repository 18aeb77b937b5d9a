"""What the first worker prints before the first step: which model, kernel, layout and exchange really run, and why."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from mtrain_cli import __version__
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.config.unused_settings import unused_ring_keys
from mtrain_cli.sparsity.pattern_remarks import remarks
from mtrain_cli.training import dry_run
from mtrain_cli.training.optimizer import LearningRateSchedule
from mtrain_cli.training.run_plan import RunPlan, size


def banner(
    found: RunPlan, run_dir: Path, data: str, *, resumed: int | None = None
) -> RenderableType:
    """The facts of a run that starts now. data: one line on the corpus, from `PackedDataset.describe`. resumed: the step of the checkpoint
    that it goes on from.
    """
    config, environment = found.config, found.environment
    if found.capacity is None:
        memory = f"{size(found.memory.total)} of tensors in a worker at its peak, estimated"
    else:
        share = found.memory.total / found.capacity
        memory = f"{size(found.memory.total)} a worker at its peak, estimated: {share:.0%} of {size(found.capacity)}"
    if found.memory.host:
        memory += f"; {size(found.memory.host)} wait in host memory"
    chosen: list[tuple[str, str]] = []
    if found.search is not None:
        rejected = "; ".join(f"{way}: {reason}" for way, reason in found.search.rejected())
        chosen = [("", dry_run.describe_choice(found)), ("", f"rejected: {rejected}")]
    rows = [
        ("model", f"{dry_run.describe_model(found)}, {dry_run.describe_rope(found)}"),
        ("weights", _weights(config, resumed)),
        *dry_run.weights_rows(config)[1:],
        ("sequence", f"{format_size(config.seq)}; a step is {dry_run.describe_step(found)}"),
        ("workers", f"{dry_run.describe_workers(found)}, started by {environment.launcher}"),
        ("layout", dry_run.describe_layout(found)),
        ("exchange", f"{found.exchange.label}: {found.exchange.reason}"),
        ("sparsity", dry_run.describe_sparsity(found)),
        *(("", line) for line in remarks(config)),
        *dry_run.kernel_rows(found),
        (
            "dtype",
            f"{dry_run.describe_dtype(found)}; recomputation {dry_run.describe_activations(config)}",
        ),
        ("schedule", _schedule(config, resumed)),
        ("compile", dry_run.describe_compile(found)),
        ("memory", memory),
        *chosen,
        ("data", f"{data}; order by seed {config.seed}"),
        ("run", str(run_dir)),
        *(("warning", line) for line in _idle(found, run_dir)),
    ]
    return Group(Text(f"mtrain {__version__}", style="bold"), dry_run.facts(rows))


def _idle(found: RunPlan, run_dir: Path) -> list[str]:
    """Keys of the command line that are for rings, where topology.exchange=auto has chosen none."""
    try:
        words = (
            (run_dir / "overrides.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return []
    return unused_ring_keys(words, found.config, found.exchange.name)


def _weights(config: Config, resumed: int | None) -> str:
    """Where they come from."""
    origin = (
        f"{config.train.init_from} (train.init_from)"
        if config.train.init_from
        else f"random, seed {config.seed}"
    )
    return (
        origin
        if resumed is None
        else f"of the checkpoint of step {resumed}; the run began with {origin}"
    )


def _schedule(config: Config, resumed: int | None) -> str:
    schedule, steps = LearningRateSchedule.of(config), config.train.steps
    kept = resumed is not None and bool(schedule.decay) and config.optim.schedule_steps != "auto"
    return (
        schedule.describe(steps) + "; kept by the resume, optim.rewarm=true begins a new one" * kept
    )
