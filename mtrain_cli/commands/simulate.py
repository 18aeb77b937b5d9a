"""`mtrain simulate`: predict training steps on clusters, with any layout and exchange."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import (
    complete_clusters,
    complete_exchanges,
    complete_layouts,
    complete_overrides,
)
from mtrain_cli.commands.options import (
    MOST_TOKENS,
    MOST_WORKERS,
    parse_names,
    parse_share_option,
    warn_of_unused_settings,
)
from mtrain_cli.commands.simulate_args import (
    CLUSTERED,
    DENSE,
    SimulateRequest,
    check_price,
    parse_tokens,
)
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.console import Console
    from mtrain_cli.parallel.exchange_selection import ExchangeChoice
    from mtrain_cli.simulation.cluster import Cluster
    from mtrain_cli.simulation.scenario import PredictedScenario, Scenario
    from mtrain_cli.simulation.what_if import ReplaySetup

_MOST_WORKERS = 4096
_CLUSTER = "h200_1x8"
_LAYOUTS, _EXCHANGES = "zigzag,striped", "ring,hierarchical_ring,all_gather"


def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="As in `mtrain train`, such as model= and seq=.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A cluster of conf/cluster, or a YAML file like those; by default "
            f"{_CLUSTER}. cluster=NAME is the same.",
            autocompletion=complete_clusters,
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Layouts to compare; by default {_LAYOUTS.replace(',', ', ')}.",
            autocompletion=complete_layouts,
            show_default=False,
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Exchanges to compare; by default ring and all_gather, hierarchical_ring between "
            "nodes, and all with --recommend.",
            autocompletion=complete_exchanges,
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Also predict every combination of these: nodes, workers, density, columns, and "
            "any setting. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    recommend: Annotated[
        bool,
        typer.Option(
            "--recommend",
            help="Try layouts, exchanges, context groups, recomputation and train.keep_mlp; "
            "recommend a configuration and explain why.",
        ),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Tokens to train on, such as 20b, to predict days and dollars."
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Dollars per GPU and hour; by default the cluster's.",
            show_default=False,
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Pairs to compute: index.npz of a profile (or its folder), dense, or a synthetic "
            "family: local, clustered, uniform, drifting. By default as sparsity= says (dense), or "
            "clustered with --density or --columns.",
            show_default=False,
        ),
    ] = None,
    density: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Share of the causal blocks on a synthetic index's slashes, such as 0.05 or 5%. "
            "By default, with --columns or --index, 5% within sparsity.min_slashes and "
            "max_slashes.",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Columns per head of a synthetic index; 2048 by default.",
            min=0,
            max=MOST_TOKENS,
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of layers with an index of their own; by default 1, or all layers of a "
            "recorded file.",
            min=1,
            max=MOST_WORKERS,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of GPUs in total; by default all of the cluster.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_WORKERS,
            help="Number of nodes, instead of the cluster's own.",
            show_default=False,
        ),
    ] = None,
    validate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN...",
            help="Predict the cases of these profiles, and compare the predictions with the "
            "measurements.",
            show_default=False,
        ),
    ] = None,
    prediction: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="With --validate: use predictions that --out DIR saved before, instead of new "
            "ones.",
            show_default=False,
        ),
    ] = None,
    kernel: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Attention kernel; auto = train.kernel, or the GPU's usual kernel.",
        ),
    ] = "auto",
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE,...",
            help="Times of your GPU instead of the shipped ones, written by --out FILE of "
            "`mtrain profile kernels` and `mtrain profile non-attention`.",
            show_default=False,
        ),
    ] = None,
    attention_only: Annotated[
        bool,
        typer.Option(
            "--attention-only",
            help="Predict only the attention of one layer, which is all that a recorded index "
            "without model= allows.",
        ),
    ] = False,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="With --attention-only: add the forward pass that full recomputation repeats.",
        ),
    ] = False,
    slow: Annotated[
        str,
        typer.Option(
            metavar="RANK=X,...",
            help="Ranks, among all workers, that take X times as long to compute.",
        ),
    ] = "",
    jitter: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Spread of message times, as the standard deviation of their logarithm.",
        ),
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the files; by default a new one in measurements/. An interrupted "
            "sweep there is continued.",
            show_default=False,
        ),
    ] = None,
    files: Annotated[
        bool,
        typer.Option("--files/--no-files", help="Write records for `mtrain report`."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Predict training steps on a cluster for every layout and exchange, without a GPU.

    Counts work exactly and plans memory as `mtrain train --dry-run` does. Times come from measured
    kernels and from the cluster's constants, each with its source; best and worst show how far off
    they may be.

    [bold]Examples[/bold]

      [cyan]mtrain simulate model=qwen3b seq=512k --cluster a100_4x8[/cyan]
          Compare two layouts and three exchanges on 32 GPUs, dense
      [cyan]mtrain simulate model=qwen3b seq=512k --cluster a100_4x8 --density 5%[/cyan]
          Use a synthetic sparse index
      [cyan]mtrain simulate model=qwen3b --cluster h100_4x8 --recommend --tokens 20b[/cyan]
          Recommend a configuration, with reasons, training time and cost
      [cyan]mtrain simulate model=qwen3b --sweep "seq=512k,1m workers=2,4,8"[/cyan]
          Predict how it scales; `mtrain report` plots the result
      [cyan]mtrain simulate seq=256k train.global_batch=4 topology.context_parallel=8[/cyan]
          Train four sequences at a time, each on the eight GPUs of a node
      [cyan]mtrain simulate --index measurements/imbalance-x --cluster h100_4x8[/cyan]
          Predict the attention of a profile on another cluster
      [cyan]mtrain simulate model=qwen3b seq=4m --cluster my.yaml --nodes 128[/cyan]
          Use 128 nodes of a cluster that you describe in my.yaml
      [cyan]mtrain simulate --validate measurements/imbalance-x --cluster my.yaml[/cyan]
          Compare predictions with measurements, for every step and worker
    """
    from mtrain_cli.config.schema import EXCHANGES, KERNELS, LAYOUTS
    from mtrain_cli.simulation.cluster import load_cluster

    overrides, cluster = _split_cluster(overrides or [], cluster)
    layout = _compared("layout", layout, overrides)
    exchange = _compared("exchange", exchange, overrides)
    layouts = parse_names("--layout", _LAYOUTS if layout is None else layout, LAYOUTS)
    every = ",".join(name for name in EXCHANGES if name != "auto")
    exchanges = parse_names(
        "--exchange",
        (every if recommend else _EXCHANGES) if exchange is None else exchange,
        EXCHANGES,
    )
    if len(parse_names("--kernel", kernel, KERNELS)) > 1:
        raise ConfigError(f"--kernel {kernel}: give one of {', '.join(KERNELS)}")
    training, cost = parse_tokens("--tokens", tokens), check_price("--price", price)
    request = SimulateRequest(
        tuple(overrides or ()),
        index,
        parse_share_option("--density", density),
        columns,
        layers,
        kernel,
        calibration,
        slow,
        jitter,
    )
    target = load_cluster(cluster, nodes=nodes)
    if cost is None and target.dollars_per_gpu_hour is not None:
        cost = target.dollars_per_gpu_hour.value
    if validate:
        from mtrain_cli.commands.simulate_validate import validate as compare
        from mtrain_cli.simulation.calibration import load_user_calibration

        excluded = {
            "--sweep": sweep, "--recommend": recommend, "--attention-only": attention_only,
            "--tokens": tokens, "--price": price, "--layout": layout, "--exchange": exchange,
            "--index": index,
        }  # fmt: skip
        if ignored := [option for option, value in excluded.items() if value]:
            raise ConfigError(
                f"--validate {validate[0]} and {ignored[0]}: the measurement determines it; "
                f"leave {ignored[0]} out"
            )
        own = load_user_calibration(calibration)
        # RUN... after one option: the runs after the first arrive as overrides.
        compare(
            [*map(str, validate), *(overrides or [])],
            prediction or [],
            target,
            own,
            out,
            files=files,
            as_json=as_json,
        )
        return
    if prediction:
        raise ConfigError(
            f"--prediction {prediction[0]}: needs a measurement to compare with; add --validate RUN"
        )
    several = target.nodes > 1 or any(
        "nodes=" in word or "gpus_per_node=" in word
        for word in (*(overrides or ()), *(sweep or ()))
    )
    if exchange is None and not several:
        # Within a node, hierarchical exchanges equal the plain ones.
        exchanges = [name for name in exchanges if not name.startswith("hierarchical_")]
    worker_count = _workers(target, workers, request.words)
    if price and not (tokens or recommend or sweep):
        print(
            f"mtrain: warning: --price {price}: has no effect without --tokens",
            file=sys.stderr,
        )
    warn_of_unused_settings(request.words)
    if not sweep:  # a sweep may complete the settings
        request.check(worker_count)
    if recommend and attention_only:
        raise ConfigError(
            "--attention-only and --recommend: recommendations are about whole steps; leave one of "
            "them out"
        )
    job = _SimulateJob(
        target, request, layouts, exchanges, worker_count, out, files, as_json, training, cost
    )
    if sweep and (recommend or attention_only):
        raise ConfigError(
            f"--sweep and --{'recommend' if recommend else 'attention-only'}: give only one of them"
        )
    alone = attention_only or job.without_a_model
    if target.gpu.is_cpu and (sweep or recommend or not alone):
        raise ConfigError(
            f"--cluster {cluster}: {target.gpu.name} is a CPU, and steps are predicted for GPUs "
            "only; give --attention-only"
        )
    if recompute and (sweep or recommend or not alone):
        raise ConfigError(
            "--recompute: only with --attention-only; steps recompute as "
            "train.activation_checkpoint says"
        )
    if sweep:
        job.sweep(
            sweep,
            lambda number: load_cluster(cluster, nodes=nodes if number is None else number),
            workers,
        )
    elif recommend:
        job.recommend()
    elif alone:
        job.attention(recompute)
    else:
        job.steps()


def _split_cluster(words: Sequence[str], option: str | None) -> tuple[list[str], str]:
    """Split ``cluster=NAME``, which is not a setting of a training, from the settings.

    Returns:
        The other settings, and the cluster.

    Raises:
        ConfigError: two different clusters are given.
    """
    named = [word.partition("=")[2] for word in words if word.startswith("cluster=")]
    if len({*named, *([] if option is None else [option])}) > 1:
        raise ConfigError(
            f"cluster={named[-1]}: {'--cluster ' + option if option else 'cluster=' + named[0]} "
            "names another; give one of them"
        )
    return [word for word in words if not word.startswith("cluster=")], option or (
        named[0] if named else _CLUSTER
    )


def _workers(cluster: Cluster, workers: int | None, words: Sequence[str]) -> int:
    """Return the number of workers.

    Raises:
        ConfigError: the cluster has fewer GPUs, or one of its nodes would be only partly used.
    """
    from mtrain_cli.simulation.cluster import uneven_nodes

    count = cluster.gpus if workers is None else workers
    most, each = min(cluster.gpus, _MOST_WORKERS), cluster.gpus_per_node
    if not 1 <= count <= most:
        more = (
            f", or more with --nodes {-(-count // each)}"
            if most < count <= _MOST_WORKERS and cluster.outer is not None
            else ""
        )
        single_node = (
            " on its one node; a100_4x8 and others have several"
            if most < count and cluster.outer is None
            else ""
        )
        raise ConfigError(
            f"--workers {count}: {cluster.name} has {cluster.gpus} GPUs; "
            f"allowed: 1 to {most}{more}{single_node}"
        )
    virtual = any(word.startswith("topology.gpus_per_node=") for word in words)
    if not virtual and (why := uneven_nodes(cluster, count)):
        raise ConfigError(f"--workers {count}: {why}")
    return count


def _compared(key: str, option: str | None, overrides: Sequence[str]) -> str | None:
    """Return what to compare: an option's value, or the equivalent setting of a training.

    Raises:
        ConfigError: both are given.
    """
    setting = next(
        (word.partition("=")[2] for word in overrides if word.startswith(f"topology.{key}=")), None
    )
    if setting in (None, "auto"):
        return option
    if option is not None:
        raise ConfigError(
            f"topology.{key}={setting}: --{key} {option} compares it already; leave one of them out"
        )
    return setting


class _SimulateJob:
    """One call of the command: a request and the cluster to predict it for."""

    def __init__(
        self,
        cluster: Cluster,
        request: SimulateRequest,
        layouts: Sequence[str],
        exchanges: Sequence[str],
        workers: int,
        out: Path | None,
        files: bool,
        as_json: bool,
        tokens: float | None,
        price: float | None,
    ) -> None:
        self.cluster = cluster
        self.request = request
        self.layouts = layouts
        self.exchanges = exchanges
        self.workers = workers
        self.out = out
        self.files = files
        self.as_json = as_json
        self.tokens = tokens
        self.price = price
        self.started = time.perf_counter()
        # CPU workers compute in another dtype and with other kernels.
        if (
            cluster.gpu.is_cpu
            and not self.without_a_model
            and not any(word.startswith("topology.device=") for word in request.words)
        ):
            self.request = replace(request, words=(*request.words, "topology.device=cpu"))

    @property
    def without_a_model(self) -> bool:
        """Whether only a recorded index is given, which has only the shape of attention."""
        return self.request.recorded_file() is not None and not any(
            word.startswith("model=") for word in self.request.words
        )

    def steps(self) -> None:
        from mtrain_cli.commands import simulate_output as output
        from mtrain_cli.reporting.terminal_width import print_table, say
        from mtrain_cli.simulation.scenario import check_enough_blocks, evaluate, plan_on
        from mtrain_cli.simulation.sweep import row_of

        scenario = self._scenario()
        folder = output.new_folder(self.out) if self.files else None
        context = self.request.context_parallel(scenario.config) or self.workers
        outcomes: list[PredictedScenario] = []
        for number, (layout, exchange) in enumerate(
            itertools.product(self.layouts, self.exchanges)
        ):
            with self._errors_by_option(exchange):
                check_enough_blocks(scenario.config, layout, self.workers, context)
                plan = plan_on(
                    self.cluster,
                    scenario.config,
                    workers=self.workers,
                    kernel=scenario.kernel,
                    layout=layout,
                    exchange=exchange,
                )
                outcomes.append(
                    evaluate(self.cluster, scenario, plan, number=number, rows=self.files)
                )
        predictions = [outcome.attention for outcome in outcomes]
        rows = [self._with_cost(row) for row in map(row_of, outcomes)]
        content = output.document(
            self.cluster,
            scenario.calibration,
            **output.prediction_entries(scenario.problem, predictions, rows),
        )
        if folder is not None:
            output.write_files(folder, content, predictions)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
            return
        console = self._console()
        pairs = self.request.describe_pairs(scenario.problem.pattern)
        output.print_lines(console, [f"pairs  {pairs}"])
        print_table(
            console,
            output.step_table(self.cluster, scenario.problem, outcomes),
            output.SPARE_OF_STEPS,
        )
        say(console, output.step_legend())
        if len(outcomes) > 1 or not outcomes[0].step.fits:
            output.print_lines(console, [output.best_line(outcomes)])
        main = output.main_outcome(outcomes)
        output.print_lines(console, output.step_lines(main, self.tokens, self.price))
        output.print_notes(console, (remark for outcome in outcomes for remark in outcome.remarks))
        self._print_end(console, folder)

    def attention(self, recompute: bool) -> None:
        from mtrain_cli.commands import simulate_output as output
        from mtrain_cli.reporting.terminal_width import print_table, say
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.prediction import predict
        from mtrain_cli.simulation.scenario import slowest_group

        request = self.request
        own = load_user_calibration(request.calibration)
        request.per_node(self.workers)
        scenario = None if self.without_a_model else self._scenario()
        if scenario is None:
            problem = request.load_without_model()
            conditions = request.disturbances(self.workers)
        else:
            problem, conditions = scenario.problem, scenario.conditions
        folder = output.new_folder(self.out) if self.files else None
        predictions = []
        for number, (layout, exchange) in enumerate(
            itertools.product(self.layouts, self.exchanges)
        ):
            with self._errors_by_option(exchange):
                setup, kernel, choice = self._group(scenario, layout, exchange)
                predict_group = partial(
                    predict,
                    self.cluster,
                    problem,
                    setup,
                    kernel=kernel,
                    calibration=own,
                    recompute=recompute,
                    number=number,
                    rows=self.files,
                    choice=choice,
                )
                predictions.append(slowest_group(conditions, setup.workers, predict_group))
        content = output.document(
            self.cluster, own, **output.prediction_entries(problem, predictions)
        )
        if folder is not None:
            output.write_files(folder, content, predictions)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
            return
        console = self._console()
        output.print_lines(console, [f"pairs  {request.describe_pairs(problem.pattern)}"])
        print_table(
            console,
            output.attention_table(self.cluster, problem, predictions),
            output.SPARE_OF_ATTENTION,
        )
        say(console, output.LEGEND)
        output.print_notes(
            console, (remark for prediction in predictions for remark in prediction.remarks)
        )
        self._print_end(console, folder)

    def _group(
        self, scenario: Scenario | None, layout: str, exchange: str
    ) -> tuple[ReplaySetup, str | None, ExchangeChoice | None]:
        """Return a context group's setup and kernel, and its exchange in a training step."""
        from mtrain_cli.simulation.scenario import check_enough_blocks, plan_on, setup_of
        from mtrain_cli.simulation.what_if import ReplaySetup

        per_node = self.request.per_node(self.workers) or min(
            self.cluster.gpus_per_node, self.workers
        )
        kernel = None if self.request.kernel == "auto" else self.request.kernel
        if scenario is None:
            return ReplaySetup(layout, exchange, self.workers, per_node), kernel, None
        config = scenario.config
        context = self.request.context_parallel(config) or self.workers
        check_enough_blocks(config, layout, self.workers, context)
        if config.topology.device == "cpu":
            # Steps of CPU processes are not predicted. Attention follows the cluster's links and
            # kernels.
            if self.workers % context:
                raise ConfigError(
                    f"topology.context_parallel={context}: must divide the {self.workers} workers"
                )
            typed = None if config.train.kernel == "auto" else config.train.kernel
            return (
                ReplaySetup(layout, exchange, context, min(per_node, context), config.topology),
                kernel or typed,
                None,
            )
        plan = plan_on(
            self.cluster,
            config,
            workers=self.workers,
            kernel=kernel,
            layout=layout,
            exchange=exchange,
        )
        return setup_of(plan), plan.kernel, plan.exchange

    def recommend(self) -> None:
        from mtrain_cli.commands import simulate_output as output
        from mtrain_cli.reporting.terminal_width import print_table
        from mtrain_cli.simulation.recommend import label, recommend
        from mtrain_cli.simulation.sweep import row_of

        scenario = self._scenario()
        if self.request.slow and self.request.context_parallel(scenario.config) is None:
            # A rank belongs to a group, and groups of different sizes are tried.
            raise ConfigError(
                f"--slow {self.request.slow}: --recommend tries groups of any size; add "
                "topology.context_parallel=N, or leave --slow out"
            )
        folder = output.new_folder(self.out) if self.files else None
        # Settings that the user typed stay fixed.
        given = [
            word for word in self.request.words if word.startswith("train.activation_checkpoint=")
        ]
        kinds = {"recomputations": (scenario.config.train.activation_checkpoint,)} if given else {}
        with (
            self._errors_by_option(self.exchanges[0]),
            self._progress("configurations") as progress,
        ):
            result = recommend(
                self.cluster,
                scenario,
                self.workers,
                self.layouts,
                self.exchanges,
                progress=progress,
                **kinds,
            )
        ranked = [{"configuration": label(o.plan), **row_of(o)} for o in result.ranked]
        content = output.document(
            self.cluster,
            scenario.calibration,
            **(
                output.prediction_entries(
                    scenario.problem, [result.best.attention], [row_of(result.best)]
                )
                if result.ranked
                else {"workers": self.workers}
            ),
            recommended={
                "ranked": [self._with_cost(row) for row in ranked],
                "rejected": [{"what": r.what, "why": r.why} for r in result.rejected],
                "needed": list(result.needed),
                "lines": list(output.recommendation_lines(self.cluster, result, scenario.words)),
            },
        )
        if folder is not None and result.ranked:
            self._write_best(folder, content, result.best, scenario)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
        else:
            console = self._console()
            pairs = self.request.describe_pairs(scenario.problem.pattern)
            output.print_lines(console, [f"pairs  {pairs}"])
            if result.ranked:
                by_time = sorted(result.ranked, key=lambda outcome: outcome.step.seconds.value)
                print_table(
                    console,
                    output.step_table(self.cluster, scenario.problem, by_time[:8]),
                    output.SPARE_OF_STEPS,
                )
                if len(result.ranked) > 8:
                    console.print(f"and {len(result.ranked) - 8} slower ones that fit")
            output.print_lines(console, content["recommended"]["lines"])
            if result.ranked:
                output.print_lines(console, output.step_lines(result.best, self.tokens, self.price))
                output.print_notes(console, result.best.remarks)
            self._print_end(console, folder if result.ranked else None)
        if not result.ranked:
            raise typer.Exit(1)

    def _write_best(
        self, folder: Path, content: dict[str, Any], best: PredictedScenario, scenario: Scenario
    ) -> None:
        from mtrain_cli.commands import simulate_output as output
        from mtrain_cli.simulation.scenario import evaluate

        with_rows = evaluate(self.cluster, scenario, best.plan, rows=True, bounds=False)
        output.write_files(folder, content, [with_rows.attention])

    def sweep(
        self, texts: Sequence[str], cluster_of: Callable[[int | None], Cluster], workers: int | None
    ) -> None:
        from mtrain_cli.commands import simulate_output as output
        from mtrain_cli.launch.failures import RunError
        from mtrain_cli.records.record_files import SWEEP
        from mtrain_cli.reporting.sweeps import LEGEND, SPARE, sheet, sweep_table, why_not
        from mtrain_cli.reporting.terminal_width import print_table, say
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.sweep import (
            COLUMNS,
            DENSITY,
            NODES,
            WORKERS,
            Sweep,
            axes,
            points,
            shared_remarks,
        )

        if self.request.slow:
            raise ConfigError(
                f"--slow {self.request.slow}: a rank means something else at each point of a "
                "--sweep; leave it out"
            )
        swept = axes(texts)
        if WORKERS in swept and workers is not None:
            raise ConfigError(
                f"--workers {workers}: --sweep sets workers too; leave one of them out"
            )
        for value in swept.get(NODES, ()):
            cluster_of(int(value))
        for value in swept.get(WORKERS, ()):
            if int(value) > self.cluster.gpus:
                raise ConfigError(
                    f"--sweep workers={value}: {self.cluster.name} has {self.cluster.gpus} GPUs; "
                    f"allowed: 1 to {self.cluster.gpus}"
                )
        todo = points(swept, self.layouts, self.exchanges)
        folder = output.new_folder(self.out) if self.files else None
        own = load_user_calibration(self.request.calibration)
        # Identifies the sweep by content: a calibration file that was measured again differs.
        about = json.dumps([repr(own), repr(self.request), repr(self.cluster), workers])
        job = Sweep(todo, cluster_of, self.request.scenario, workers, about)
        # Check all settings before anything is written.
        drawn = bool({DENSITY, COLUMNS} & swept.keys())
        pair_lines: dict[str, None] = {}
        for settings in dict.fromkeys(tuple(point.settings) for point in todo):
            pairs = self.request.scenario(settings).problem.pattern
            shown_pairs = CLUSTERED if drawn and pairs == DENSE else pairs
            pair_lines[self.request.describe_pairs(shown_pairs, settings)] = None
        try:
            with self._progress("configurations") as progress:
                rows = list(
                    job.rows(
                        None if folder is None else folder / SWEEP,
                        lambda done: progress(done, len(todo)),
                    )
                )
        except OSError as error:
            raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error
        if all("cannot" in row for row in rows):
            raise ConfigError(f"--sweep {' '.join(texts)}: {rows[0]['cannot']}")
        rows = [row if "cannot" in row else self._with_cost(row) for row in rows]
        remarks, rows = shared_remarks(rows)
        most = max(row["workers"] for row in rows)
        content = output.document(
            self.cluster, own, workers=most, cases=[], remarks=remarks, sweep=rows
        )
        if folder is not None:
            sheet([(folder.name, rows)]).write(folder)
            output.write_files(folder, content)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
            return
        console = self._console()
        output.print_lines(console, (f"pairs  {line}" for line in pair_lines))
        print_table(console, sweep_table(rows), SPARE)
        say(console, LEGEND)
        output.print_lines(console, (f"not    {why}" for why in why_not(rows)))
        own_remarks = len({remark for row in rows for remark in row.get("remarks", ())})
        more = [f"{own_remarks} more remarks on single rows: see --json"] if own_remarks else []
        output.print_notes(console, [*remarks, *more])
        self._print_end(console, folder)

    def _scenario(self) -> Scenario:
        scenario = self.request.scenario()
        self.request.disturbances(self.workers)
        return scenario

    def _with_cost(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with days and dollars, if --tokens is given."""
        if self.tokens is None:
            return row
        seconds = {
            name: self.tokens / (rate * row["workers"])
            for name, rate in row["tokens_per_second_per_gpu"].items()
        }
        days = {
            name: seconds[other] / 86400
            for name, other in (("low", "high"), ("value", "value"), ("high", "low"))
        }
        cost = (
            None
            if self.price is None
            else {name: value * 24 * row["workers"] * self.price for name, value in days.items()}
        )
        return {
            **row,
            "tokens": self.tokens,
            "days": days,
            "dollars_per_gpu_hour": self.price,
            "dollars": cost,
        }

    @contextmanager
    def _errors_by_option(self, exchange: str) -> Iterator[None]:
        """Report impossible configurations under the option that asked for them."""
        from mtrain_cli.simulation.what_if import InvalidSetup

        try:
            yield
        except InvalidSetup as error:
            about = {"per_node": "cluster", "workers": "workers"}.get(error.about, error.about)
            raise ConfigError(
                f"--{about} {error.value if about != 'cluster' else self.cluster.name}: {error}"
            ) from None
        except ConfigError as error:
            key = f"topology.exchange={exchange}:"
            raise ConfigError(
                *(line.replace(key, f"--exchange {exchange}:") for line in error.problems)
            ) from None

    @contextmanager
    def _progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show a progress bar if stderr is a terminal."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        from mtrain_cli.console import Console

        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(
            *columns, console=console, transient=True, disable=not sys.stderr.isatty()
        ) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @staticmethod
    def _console() -> Console:
        from mtrain_cli.console import Console

        return Console(highlight=False, soft_wrap=True)

    def _print_end(self, console: Console, folder: Path | None) -> None:
        console.print(f"took   {time.perf_counter() - self.started:.1f} s")
        if folder is not None:
            from mtrain_cli.simulation.validation import digest

            console.print(f"sha256 {digest(folder / 'summary.json')}  {folder}/summary.json")
            console.print(f"files  {folder}\ndraw   mtrain report {folder}")
