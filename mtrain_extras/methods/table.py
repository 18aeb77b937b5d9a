"""What methods of parallelism cost a worker, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import typer

from mtrain_cli.commands.simulate_output import print_lines
from mtrain_cli.commands.simulate_request import Job
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.console import Console
from mtrain_cli.reporting.table import Column, Table, fixed
from mtrain_cli.reporting.terminal import print_table
from mtrain_cli.simulation.scenario import plan_on
from mtrain_cli.training.memory import GIB
from mtrain_extras.methods.methods import ImpossibleMethod, MethodCost, compare, sequences_of

LEGEND = (
    "GiB of one worker. weights: float32 shards, and what is whole in the compute dtype at the "
    "same time. activations: the most that layers keep for backward. received: weights, gradients, "
    "keys, values and hidden states, per step. idle: share of the time in which a stage idles. "
    "imbalance: attention work of the worker with the most, over the mean. Workers that a method "
    "leaves over share the sequences of a step (data). *: a formula, as mtrain lacks this method."
)
# Sizes of a method, by their rank among the columns that a narrow terminal drops.
_SIZES = {"weights": 0, "gradients": 4, "optimizer": 5, "activations": 0, "received": 0}


def show(job: Job) -> None:
    """Print what each method of parallelism costs a worker, as a table or as JSON."""
    config, workers = job.request.compose(), job.workers
    plan = partial(plan_on, job.cluster, workers=workers)
    methods = compare(config, workers, min(job.cluster.gpus_per_node, workers), plan)
    if job.typed.as_json:
        about = {
            "kind": "methods",
            "cluster": job.cluster.name,
            "workers": workers,
            "model": config.model.name,
            "seq": config.seq,
            "global_batch": sequences_of(config, workers),
            "methods": [asdict(method) for method in methods],
        }
        typer.echo(json_text(about, indent=1))
        return
    _print(Console(highlight=False, soft_wrap=True), job, config, methods)


def _print(
    console: Console, job: Job, config: Config, methods: Sequence[MethodCost | ImpossibleMethod]
) -> None:
    """Print a table of what methods of parallelism cost, and why others are impossible."""
    heading = (
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
    costs = [method for method in methods if isinstance(method, MethodCost)]
    print_table(console, Table(heading, columns, costs, LEGEND))
    impossible = [method for method in methods if isinstance(method, ImpossibleMethod)]
    print_lines(console, (f"not    {method.name}: {method.why}" for method in impossible))
