"""The start-up banner: the model, kernel, layout and exchange of a run, with reasons."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from mtrain_cli import __version__
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.console import grid
from mtrain_cli.training import dry_run
from mtrain_cli.training.memory import size
from mtrain_cli.training.optimizer import LearningRateSchedule
from mtrain_cli.training.progress import StepEstimate
from mtrain_cli.training.run_plan import RunPlan


def banner(
    plan: RunPlan,
    run_dir: Path,
    data: str,
    targets: str = "",
    *,
    resumed: int | None = None,
    estimate: StepEstimate | None = None,
) -> RenderableType:
    """Return the banner: the version, then a table with one row per topic.

    Args:
        data: one line that describes the corpus, from `PackedDataset.describe`.
        targets: one line from `batch.describe_targets`; "" leaves it out.
        resumed: step of the checkpoint that the run resumes from. None for a new run.
        estimate: of a step. None leaves the time out.
    """
    config = plan.config
    recomputation = f"recomputation: {dry_run.describe_activations(config)}"
    rows = [
        ("model", f"{dry_run.describe_model(plan)}, {dry_run.describe_rope(plan)}"),
        *dry_run.position_rows(config),
        ("weights", _weights(config, resumed)),
        *dry_run.weights_rows(config)[1:],
        ("sequence", f"{format_size(config.seq)}; a step is {dry_run.describe_step(plan)}"),
        *dry_run.time_rows(estimate),
        *dry_run.parallel_rows(plan, f", started by {plan.environment.launcher}"),
        *dry_run.mask_rows(config),
        *dry_run.sparsity_rows(plan),
        ("dtype", f"{dry_run.describe_dtype(plan)}; {recomputation}"),
        ("schedule", _schedule(config, resumed)),
        ("compile", dry_run.describe_compile(plan)),
        ("memory", _memory(plan)),
        *(("", line) for line in dry_run.describe_choice(plan)),
        ("data", f"{data}; order from seed {config.seed}"),
        *([("targets", targets)] if targets else []),
        ("run", str(run_dir)),
    ]
    return Group(Text(f"mtrain {__version__}", style="bold"), grid(rows))


def _memory(plan: RunPlan) -> str:
    total, capacity = plan.memory.total, plan.hardware.memory
    share = f", {total / capacity:.0%} of {size(capacity)}" if capacity else ""
    text = f"estimated peak {size(total)} {'' if capacity else 'of tensors '}per worker{share}"
    if plan.config.data.mask_key is not None:
        text += ", for causal documents"
    return f"{text}; plus {size(plan.memory.host)} of host memory" if plan.memory.host else text


def _weights(config: Config, resumed: int | None) -> str:
    """Describe where the weights come from."""
    origin = f"random, seed {config.seed}"
    if config.train.init_from:
        origin = f"{config.train.init_from} (train.init_from)"
    if resumed is None:
        return origin
    return f"from the checkpoint of step {resumed}; the run started from {origin}"


def _schedule(config: Config, resumed: int | None) -> str:
    schedule, steps = LearningRateSchedule.of(config), config.train.steps
    text = schedule.describe(steps)
    if resumed is not None and schedule.decay and config.optim.schedule_steps != "auto":
        text += "; resuming keeps this schedule, optim.rewarm=true starts a new one"
    return text
