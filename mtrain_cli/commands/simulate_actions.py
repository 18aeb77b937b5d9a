"""What the commands of `mtrain simulate` do: predict, write files, and print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mtrain_cli.commands import simulate_files as files
from mtrain_cli.commands import simulate_output as output
from mtrain_cli.commands.options import writing
from mtrain_cli.commands.simulate_args import SimulateJob
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.console import Console
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.records.record_files import SWEEP
from mtrain_cli.reporting import sweeps
from mtrain_cli.reporting.terminal_width import print_table
from mtrain_cli.simulation.calibration import load_user_calibration
from mtrain_cli.simulation.prediction import Prediction
from mtrain_cli.simulation.recommend import Recommendation, label
from mtrain_cli.simulation.recommend import recommend as search
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    evaluate,
    predict_attention_alone,
    predict_training,
)
from mtrain_cli.simulation.sweep import Sweep, points, row_of, shared_remarks, with_cost
from mtrain_cli.simulation.sweep_axes import NODES, OWN, WORKERS

_IDENTITY = ("point", "workers", "layout", "exchange")  # entries that tell rows of a sweep apart
_SHOWN = 8  # configurations in the table of a recommendation


def predict_steps(job: SimulateJob) -> None:
    """Predict a training step for every layout and exchange."""
    scenario = job.scenario()
    folder = files.folder_of(job)

    def predict(number: int, layout: str, exchange: str) -> PredictedScenario:
        return predict_training(
            job.cluster,
            scenario,
            job.workers,
            layout,
            exchange,
            number=number,
            rows=job.typed.files,
        )

    outcomes, automatic = job.each(predict, lambda outcome: outcome.plan.exchange.label)
    predictions = [outcome.attention for outcome in outcomes]
    rows = [with_cost(row_of(outcome), job.tokens, job.price) for outcome in outcomes]
    pipelines = [outcome.step.pipeline for outcome in outcomes]
    entries = files.prediction_entries(scenario.problem, predictions, rows, pipelines)
    content = files.document(job.cluster, scenario.calibration, **entries)

    def show(console: Console) -> None:
        kernels = (outcome.plan.kernel for outcome in outcomes)
        output.print_assumed(console, job, scenario.problem.pattern, kernels)
        table = output.step_table(job.cluster, scenario.problem, outcomes)
        print_table(console, table)
        if len(outcomes) > 1 or not outcomes[0].step.fits:
            output.print_lines(console, [output.best_line(outcomes)])
        main = output.main_outcome(outcomes)
        output.print_lines(console, output.step_lines(main, job.tokens, job.price))
        output.print_notes(console, output.automatic_remarks(automatic))
        output.print_notes(console, (remark for outcome in outcomes for remark in outcome.remarks))

    files.deliver(job, folder, content, predictions, show)


def predict_attention(job: SimulateJob, recompute: bool) -> None:
    """Predict a layer's attention for every layout and exchange."""
    request = job.request
    own = load_user_calibration(request.calibration)
    per_node = request.per_node(job.workers)
    if request.without_a_model:
        config, workload = None, request.load_without_model()
        conditions = request.disturbances(job.workers)
    else:
        scenario = job.scenario()
        config, workload, conditions = scenario.config, scenario.problem, scenario.conditions
    folder = files.folder_of(job)

    def predict(number: int, layout: str, exchange: str) -> Prediction:
        return predict_attention_alone(
            job.cluster,
            workload,
            config,
            layout,
            exchange,
            workers=job.workers,
            per_node=per_node,
            kernel=request.typed_kernel,
            conditions=conditions,
            calibration=own,
            recompute=Recompute.EVERYTHING if recompute else Recompute.NOTHING,
            number=number,
            rows=job.typed.files,
        )

    predictions, automatic = job.each(predict, lambda prediction: prediction.facts["exchange"])
    content = files.document(job.cluster, own, **files.prediction_entries(workload, predictions))

    def show(console: Console) -> None:
        kernels = (p.kernel for p in predictions)
        output.print_assumed(console, job, workload.pattern, kernels)
        print_table(console, output.attention_table(job.cluster, workload, predictions))
        output.print_notes(console, output.automatic_remarks(automatic))
        output.print_notes(console, (remark for p in predictions for remark in p.remarks))

    files.deliver(job, folder, content, predictions, show)


def recommend(job: SimulateJob) -> None:
    """Search for the fastest configuration that fits. The exit code is 1 if nothing fits."""
    scenario = job.scenario()
    if job.request.slow and job.request.context_parallel(scenario.config) is None:
        # The group of a rank depends on the size of groups, and several sizes are tried.
        raise ConfigError(
            f"--slow {job.request.slow}: this command tries context groups of several sizes; add "
            "topology.context_parallel=N, or leave --slow out"
        )
    folder = files.folder_of(job)
    # Settings that the user typed stay fixed.
    fixed = job.request.sets("train.activation_checkpoint")
    kinds = {"recomputations": (scenario.config.train.activation_checkpoint,)} if fixed else {}
    with job.errors_by_option(job.exchanges[0]), _progress() as progress:
        result = search(
            job.cluster,
            scenario,
            job.workers,
            job.layouts,
            job.exchanges,
            progress=progress,
            **kinds,
        )
    content = _recommendation(job, scenario, result)
    predictions: list[Prediction] = []
    if folder is not None and result.ranked:
        with_rows = evaluate(job.cluster, scenario, result.best.plan, rows=True, bounds=False)
        predictions = [with_rows.attention]

    def show(console: Console) -> None:
        kernels = (outcome.plan.kernel for outcome in result.ranked)
        output.print_assumed(console, job, scenario.problem.pattern, kernels)
        if result.ranked:
            by_time = sorted(result.ranked, key=lambda outcome: outcome.step.seconds.value)
            table = output.step_table(job.cluster, scenario.problem, by_time[:_SHOWN])
            print_table(console, table)
            if len(by_time) > _SHOWN:
                console.print(f"and {len(by_time) - _SHOWN} slower ones that fit")
        output.print_lines(console, content["recommended"]["lines"])
        if result.ranked:
            output.print_lines(console, output.step_lines(result.best, job.tokens, job.price))
            output.print_notes(console, result.best.remarks)

    files.deliver(job, folder if result.ranked else None, content, predictions, show)
    if not result.ranked:
        raise typer.Exit(1)


def _recommendation(job: SimulateJob, scenario: Scenario, result: Recommendation) -> dict[str, Any]:
    rows = [row_of(outcome) for outcome in result.ranked]
    entries: dict[str, Any] = {"workers": job.workers}
    if rows:
        best = result.best
        entries = files.prediction_entries(
            scenario.problem, [best.attention], rows[:1], [best.step.pipeline]
        )
    ranked = [
        with_cost({"configuration": label(outcome.plan), **row}, job.tokens, job.price)
        for outcome, row in zip(result.ranked, rows, strict=True)
    ]
    recommended = {
        "ranked": ranked,
        "rejected": [{"what": r.what, "why": r.why} for r in result.rejected],
        "needed": list(result.needed),
        "lines": list(output.recommendation_lines(job.cluster, result, scenario.words)),
    }
    return files.document(job.cluster, scenario.calibration, **entries, recommended=recommended)


def predict_sweep(
    job: SimulateJob, swept: Mapping[str, Sequence[str]], workers: int | None
) -> None:
    """Predict every combination of the axes, layouts and exchanges.

    Args:
        swept: values by axis.
        workers: value of --workers; None if it was not typed.
    """
    _check_axes(job, swept)
    todo = points(swept, job.layouts, job.exchanges)
    folder = files.folder_of(job)
    own = load_user_calibration(job.request.calibration)
    # Identify the sweep by the contents of files: a calibration may be measured again.
    about = json.dumps([repr(own), repr(job.request), repr(job.cluster), workers])
    # Check all settings before anything is written.
    pair_lines: dict[str, None] = {}
    for inputs in dict.fromkeys(point.inputs for point in todo):
        pairs = job.request.scenario(*inputs).problem.pattern
        pair_lines[job.request.describe_pairs(pairs, inputs[0])] = None
    journal = None if folder is None else folder / SWEEP
    sweep = Sweep(todo, job.cluster_with, job.request.scenario, workers, about)
    with writing(folder), _progress() as progress:
        rows = list(sweep.rows(journal, lambda done: progress(done, len(todo))))
    automatic = [
        row["exchange"]
        for point, row in zip(todo, rows, strict=True)
        if point.exchange == "auto" and "cannot" not in row
    ]
    rows = list({str([row[k] for k in _IDENTITY]): row for row in reversed(rows)}.values())[::-1]
    if all("cannot" in row for row in rows):
        typed = " ".join(f"{name}={','.join(values)}" for name, values in swept.items())
        raise ConfigError(f"{typed}: {rows[0]['cannot']}")
    rows = [row if "cannot" in row else with_cost(row, job.tokens, job.price) for row in rows]
    remarks, rows = shared_remarks(rows)
    most = max(row["workers"] for row in rows)
    content = files.document(job.cluster, own, workers=most, cases=[], remarks=remarks, sweep=rows)
    if folder is not None:
        sweeps.sweep_table([(folder.name, rows)]).write(folder)

    def show(console: Console) -> None:
        output.print_lines(console, (f"pairs  {line}" for line in pair_lines))
        output.print_lines(console, output.kernel_lines(row.get("kernel") for row in rows))
        print_table(console, sweeps.sweep_table([("", rows)]))
        output.print_lines(console, (f"not    {why}" for why in sweeps.why_not(rows)))
        of_rows = len({remark for row in rows for remark in row.get("remarks", ())})
        more = [f"{of_rows} more remarks on single rows: see --json"] if of_rows else []
        output.print_notes(console, [*output.automatic_remarks(automatic), *remarks, *more])

    files.deliver(job, folder, content, [], show)


def _check_axes(job: SimulateJob, swept: Mapping[str, Sequence[str]]) -> None:
    options = {name: getattr(job.typed, name) for name in OWN}
    # --workers would give every number of nodes the same GPUs.
    for axis, name in (*zip(OWN, OWN, strict=True), (NODES, WORKERS)):
        if axis in swept and options[name] is not None:
            raise ConfigError(
                f"--{name} {options[name]}: {axis}={','.join(swept[axis])} already sweeps this "
                "number; give only one of the two"
            )
    for value in swept.get(NODES, ()):
        job.cluster_with(int(value))
    for value in swept.get(WORKERS, ()):
        if int(value) > job.cluster.gpus:
            raise ConfigError(
                f"workers={value}: {job.cluster.name} has {job.cluster.gpus} GPUs; "
                f"allowed: 1 to {job.cluster.gpus}"
            )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("configurations"), BarColumn(), MofNCompleteColumn())
    hidden, console = not sys.stderr.isatty(), Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
