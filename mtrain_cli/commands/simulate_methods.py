"""`mtrain simulate methods`: compare methods of parallelism for a model and its GPUs."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import typer

from mtrain_cli.commands.simulate_args import SimulateJob
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.console import Console
from mtrain_cli.reporting.table import Column, Table, fixed
from mtrain_cli.reporting.terminal_width import print_table, say
from mtrain_cli.simulation.methods import (
    ImpossibleMethod,
    MethodCost,
    compare,
    sequences_of,
)
from mtrain_cli.simulation.scenario import plan_on
from mtrain_cli.training.memory import GIB

# Sizes, by their rank among the columns that a narrow terminal drops.
_SIZES = {"weights": 0, "gradients": 4, "optimizer": 5, "activations": 0, "received": 0}
_LABEL = len("not    ")
_LEGEND = (
    "GiB of one worker. weights: float32 shards, and what is whole in the compute dtype at the "
    "same time. activations: the most that layers keep for backward. received: weights, gradients, "
    "keys, values and hidden states, per step. idle: share of the time in which a stage idles. "
    "imbalance: attention work of the worker with the most, over the mean. Workers that a method "
    "leaves over share the sequences of a step (data). *: a formula, because mtrain does not have "
    "this method; the other rows are those of `mtrain train --dry-run`."
)


def show_methods(job: SimulateJob) -> None:
    """Print what each method costs a worker, as a table or as JSON."""
    config = job.request.compose(job.request.words)
    plan = partial(plan_on, job.cluster, workers=job.workers, kernel=job.request.typed_kernel)
    found = compare(config, job.workers, min(job.cluster.gpus_per_node, job.workers), plan)
    if job.typed.as_json:
        typer.echo(json_text(_document(job, config, found), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    costs = [each for each in found if isinstance(each, MethodCost)]
    title = (
        f"{job.cluster.name}, {job.workers} workers, {config.model.name}, "
        f"seq {format_size(config.seq)}, {sequences_of(config, job.workers)} sequences per step, "
        f"train.activation_checkpoint={config.train.activation_checkpoint}: each method alone"
    )
    two_digits = "{:,.2f}".format
    columns = (
        Column("method", lambda cost: cost.name + "*" * cost.formula, words=True),
        Column("workers", lambda cost: cost.workers, words=True),
        *(
            Column(name, lambda cost, name=name: getattr(cost, name) / GIB, two_digits, drop=rank)
            for name, rank in _SIZES.items()
        ),
        Column("idle", lambda cost: f"{cost.idle:.0%}" if cost.idle else "", drop=3),
        Column("imbalance", lambda cost: cost.imbalance, fixed(2), drop=1),
        Column("degree is limited by", lambda cost: cost.limit, drop=2),
    )
    print_table(console, Table(title, columns, costs, _LEGEND))
    for each in found:
        if isinstance(each, ImpossibleMethod):
            say(console, f"not    {each.name}: {each.why}", _LABEL)


def _document(
    job: SimulateJob, config: Config, found: list[MethodCost | ImpossibleMethod]
) -> dict[str, Any]:
    return {
        "kind": "methods",
        "cluster": job.cluster.name,
        "workers": job.workers,
        "model": config.model.name,
        "seq": config.seq,
        "global_batch": sequences_of(config, job.workers),
        "methods": [asdict(each) for each in found],
    }
