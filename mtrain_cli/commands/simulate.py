"""`mtrain simulate`: steps of training on clusters, layouts and exchanges that are not here."""

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
from mtrain_cli.commands.options import MOST_TOKENS, MOST_WORKERS, names, share, warn_of_idle
from mtrain_cli.commands.simulate_args import CLUSTERED, DENSE, SimulateRequest, count, dollars
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
            help="As in `mtrain train`: model=, seq= and so on.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"A cluster of conf/cluster, or a YAML file of that form; {_CLUSTER} if not given. cluster=NAME says the same.",
            autocompletion=complete_clusters,
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Layouts to compare; {_LAYOUTS} if not given.",
            autocompletion=complete_layouts,
            show_default=False,
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Exchanges to compare; {_EXCHANGES} (the second between nodes), or with --recommend all.",
            autocompletion=complete_exchanges,
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Also every combination of these: nodes, workers, density, columns, and any setting. May be repeated.",
            show_default=False,
        ),
    ] = None,
    recommend: Annotated[
        bool,
        typer.Option(
            "--recommend",
            help="Try layouts, exchanges, context groups, recomputation and train.keep_mlp; say which to take, and why.",
        ),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens of a training, such as 20b: days and dollars."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Dollars of a GPU and hour; of the cluster if not given.",
            show_default=False,
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Pairs that are computed: index.npz of a profile (or its folder), dense, or a family: local, clustered, uniform, "
            "drifting. Otherwise what sparsity= says: dense by default, clustered with --density or --columns.",
            show_default=False,
        ),
    ] = None,
    density: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Sparse attention of a family: share of the causal blocks on its diagonals, such as 0.05 or 5%. With --columns or --index "
            "alone 5%, or as many diagonals as sparsity.min_slashes and max_slashes leave.",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of a family: single columns a head; 2048.",
            min=0,
            max=MOST_TOKENS,
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Layers that get an index of their own; by default 1, or all layers of a recorded file.",
            min=1,
            max=MOST_WORKERS,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="GPUs in all; those of the cluster if not given.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_WORKERS,
            help="Nodes, instead of the cluster's own.",
            show_default=False,
        ),
    ] = None,
    validate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN...",
            help="Predict the cases of these profiles instead, and compare with what was measured.",
            show_default=False,
        ),
    ] = None,
    prediction: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="With --validate: what was written down before (--out DIR) instead of a new prediction.",
            show_default=False,
        ),
    ] = None,
    kernel: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Attention kernel; auto = train.kernel, by the GPU's name."
        ),
    ] = "auto",
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE,...",
            help="Times of your GPU in place of those that ship, from --out FILE of `mtrain profile kernels` and "
            "`mtrain profile non-attention`.",
            show_default=False,
        ),
    ] = None,
    attention_only: Annotated[
        bool,
        typer.Option(
            "--attention-only",
            help="Of the attention of a layer alone; so it is of a recorded index without model=.",
        ),
    ] = False,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="With --attention-only: also the forward pass that full recomputation repeats.",
        ),
    ] = False,
    slow: Annotated[
        str,
        typer.Option(
            metavar="RANK=X,...", help="Ranks, of all workers, that compute X times as long."
        ),
    ] = "",
    jitter: Annotated[
        float,
        typer.Option(
            metavar="X", help="Spread of message times: standard deviation of their logarithm."
        ),
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where files go; a new folder in measurements/. A sweep that was ended there goes on.",
            show_default=False,
        ),
    ] = None,
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Leave records that `mtrain report` reads.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Predict the steps of a training on a cluster, for every layout and exchange, on this machine and without a GPU.

    Work is counted exactly, memory is that of `mtrain train --dry-run`. Times come from kernels that were measured and from constants of
    the cluster, each with its source; best and worst say how far these may be off.

    [bold]Examples[/bold]

      [cyan]mtrain simulate model=qwen3b seq=512k --cluster a100_4x8[/cyan]
          dense attention, two layouts under three exchanges on 32 GPUs
      [cyan]mtrain simulate model=qwen3b seq=512k --cluster a100_4x8 --density 5%[/cyan]
          the same under a synthetic sparse index
      [cyan]mtrain simulate model=qwen3b seq=1m --cluster h100_4x8 --recommend --tokens 20b --price 2.5[/cyan]
          which configuration to take, why, how long it trains and for how much
      [cyan]mtrain simulate model=qwen3b --cluster a100_4x8 --layout striped --sweep "seq=512k,1m nodes=1,2,4,8,16"[/cyan]
          how it scales; `mtrain report` draws it
      [cyan]mtrain simulate model=llama8b seq=256k train.global_batch=4 topology.context_parallel=8 --cluster h100_4x8[/cyan]
          four sequences at once, each on the eight GPUs of a node
      [cyan]mtrain simulate --index measurements/imbalance-20260101-120000 --cluster h100_4x8[/cyan]
          the attention of a profile on a cluster that is not here
      [cyan]mtrain simulate model=qwen3b seq=4m --nodes 128 --cluster my.yaml --exchange hierarchical_ring --no-files[/cyan]
          1,024 GPUs of your own description
      [cyan]mtrain simulate --validate measurements/imbalance-20260101-120000 --cluster my.yaml --calibration mine.json[/cyan]
          how far to trust it: predicted against measured, every step and worker
    """
    from mtrain_cli.config.schema import EXCHANGES, KERNELS, LAYOUTS
    from mtrain_cli.simulation.cluster import load_cluster

    overrides, cluster = _cluster_named(overrides or [], cluster)
    layout, exchange = _typed("layout", layout, overrides), _typed("exchange", exchange, overrides)
    layouts = names("--layout", _LAYOUTS if layout is None else layout, LAYOUTS)
    every = ",".join(name for name in EXCHANGES if name != "auto")
    exchanges = names(
        "--exchange",
        (every if recommend else _EXCHANGES) if exchange is None else exchange,
        EXCHANGES,
    )
    if len(names("--kernel", kernel, KERNELS)) > 1:
        raise ConfigError(f"--kernel {kernel}: give one of {', '.join(KERNELS)}")
    training, cost = count("--tokens", tokens), dollars("--price", price)
    asked = SimulateRequest(
        tuple(overrides or ()),
        index,
        share("--density", density),
        columns,
        layers,
        kernel,
        calibration,
        slow,
        jitter,
    )
    found = load_cluster(cluster, nodes=nodes)
    if cost is None and found.dollars_per_gpu_hour is not None:
        cost = found.dollars_per_gpu_hour.value
    if validate:
        from mtrain_cli.commands.simulate_validate import validate as compare
        from mtrain_cli.simulation.calibration import load_user_calibration

        beside = {"--sweep": sweep, "--recommend": recommend, "--attention-only": attention_only, "--tokens": tokens, "--price": price,
                  "--layout": layout, "--exchange": exchange, "--index": index}  # fmt: skip
        if ignored := [option for option, value in beside.items() if value]:
            raise ConfigError(
                f"--validate {validate[0]} and {ignored[0]}: what was measured says that itself; leave {ignored[0]} out"
            )
        own = load_user_calibration(calibration)
        # RUN... after one option: what follows the first stands where overrides would.
        compare(
            [*map(str, validate), *(overrides or [])],
            prediction or [],
            found,
            own,
            out,
            files=files,
            as_json=as_json,
        )
        return
    if prediction:
        raise ConfigError(
            f"--prediction {prediction[0]}: is compared with what was measured; give --validate RUN, too"
        )
    several = found.nodes > 1 or any(
        "nodes=" in word or "gpus_per_node=" in word
        for word in (*(overrides or ()), *(sweep or ()))
    )
    if exchange is None and not several:
        # Inside a node they are the plain ones.
        exchanges = [name for name in exchanges if not name.startswith("hierarchical_")]
    count_of = _workers(found, workers, asked.words)
    if price and not (tokens or recommend or sweep):
        print(
            f"mtrain: warning: --price {price}: has no effect without --tokens, which says how much to train",
            file=sys.stderr,
        )
    warn_of_idle(asked.words)
    if not sweep:  # which may say what the words lack
        asked.check(count_of)
    if recommend and attention_only:
        raise ConfigError(
            "--attention-only and --recommend: what is recommended are whole steps; leave one of them out"
        )
    job = _SimulateJob(
        found, asked, layouts, exchanges, count_of, out, files, as_json, training, cost
    )
    if sweep and (recommend or attention_only):
        raise ConfigError(
            f"--sweep and --{'recommend' if recommend else 'attention-only'}: ask for one of them"
        )
    alone = attention_only or job.without_a_model
    if found.gpu.is_cpu and (sweep or recommend or not alone):
        raise ConfigError(
            f"--cluster {cluster}: {found.gpu.name} is a CPU, and steps are predicted of GPUs alone; give --attention-only"
        )
    if recompute and (sweep or recommend or not alone):
        raise ConfigError(
            "--recompute: is for --attention-only; steps recompute what train.activation_checkpoint says"
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


def _cluster_named(words: Sequence[str], option: str | None) -> tuple[list[str], str]:
    """-> settings, and the cluster: ``cluster=NAME`` says it like a group of settings, which it is not in a training.

    Raises:
        ConfigError: it is said twice.
    """
    named = [word.partition("=")[2] for word in words if word.startswith("cluster=")]
    if len({*named, *([] if option is None else [option])}) > 1:
        raise ConfigError(
            f"cluster={named[-1]}: {'--cluster ' + option if option else 'cluster=' + named[0]} says another; give one of them"
        )
    return [word for word in words if not word.startswith("cluster=")], option or (
        named[0] if named else _CLUSTER
    )


def _workers(cluster: Cluster, workers: int | None, words: Sequence[str]) -> int:
    """Raises ConfigError where the cluster has not so many, or they would leave one of its nodes half empty."""
    from mtrain_cli.simulation.cluster import uneven_nodes

    found = cluster.gpus if workers is None else workers
    most, each = min(cluster.gpus, _MOST_WORKERS), cluster.gpus_per_node
    if not 1 <= found <= most:
        more = (
            f", or more with --nodes {-(-found // each)}"
            if most < found <= _MOST_WORKERS and cluster.outer is not None
            else ""
        )
        alone = (
            " on its one node; a100_4x8 and others have several"
            if most < found and cluster.outer is None
            else ""
        )
        raise ConfigError(
            f"--workers {found}: {cluster.name} has {cluster.gpus} GPUs; allowed: 1 to {most}{more}{alone}"
        )
    virtual = any(word.startswith("topology.gpus_per_node=") for word in words)
    if not virtual and (why := uneven_nodes(cluster, found)):
        raise ConfigError(f"--workers {found}: {why}")
    return found


def _typed(key: str, option: str | None, overrides: Sequence[str]) -> str | None:
    """What is compared: an option, or the same setting of a training.

    Raises:
        ConfigError: both were given.
    """
    found = next(
        (word.partition("=")[2] for word in overrides if word.startswith(f"topology.{key}=")), None
    )
    if found in (None, "auto"):
        return option
    if option is not None:
        raise ConfigError(
            f"topology.{key}={found}: is compared by --{key} {option} already; leave one of them out"
        )
    return found


class _SimulateJob:
    """One command: what it was asked for, on which cluster."""

    def __init__(
        self,
        cluster: Cluster,
        asked: SimulateRequest,
        layouts: Sequence[str],
        exchanges: Sequence[str],
        workers: int,
        out: Path | None,
        files: bool,
        as_json: bool,
        tokens: float | None,
        price: float | None,
    ) -> None:
        self.cluster, self.asked, self.layouts, self.exchanges, self.workers = (
            cluster,
            asked,
            layouts,
            exchanges,
            workers,
        )
        self.out, self.files, self.as_json, self.tokens, self.price = (
            out,
            files,
            as_json,
            tokens,
            price,
        )
        self.began = time.perf_counter()
        # Workers on a CPU compute in another dtype and with other kernels.
        if (
            cluster.gpu.is_cpu
            and not self.without_a_model
            and not any(word.startswith("topology.device=") for word in asked.words)
        ):
            self.asked = replace(asked, words=(*asked.words, "topology.device=cpu"))

    @property
    def without_a_model(self) -> bool:
        """A recorded index says the shape of attention, and nothing of the rest."""
        return self.asked.file(self.asked.words) is not None and not any(
            word.startswith("model=") for word in self.asked.words
        )

    def steps(self) -> None:
        from mtrain_cli.commands import simulate_output as shown
        from mtrain_cli.reporting.terminal_width import print_table, say
        from mtrain_cli.simulation.scenario import check_enough_blocks, evaluate, plan_on
        from mtrain_cli.simulation.sweep import row_of

        scenario = self._scenario()
        folder = shown.new_folder(self.out) if self.files else None
        context = self.asked.context(scenario.config) or self.workers
        outcomes: list[PredictedScenario] = []
        for number, (layout, exchange) in enumerate(
            itertools.product(self.layouts, self.exchanges)
        ):
            with self._unfit(exchange):
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
        content = shown.document(
            self.cluster,
            scenario.calibration,
            **shown.of_predictions(
                scenario.problem, predictions, [self._with_cost(o) for o in map(row_of, outcomes)]
            ),
        )
        if folder is not None:
            shown.leave(folder, content, predictions)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
            return
        console = self._console()
        shown.print_lines(console, [f"pairs  {self.asked.assumed(scenario.problem.pattern)}"])
        print_table(
            console,
            shown.step_table(self.cluster, scenario.problem, outcomes),
            shown.SPARE_OF_STEPS,
        )
        say(console, shown.step_legend())
        if len(outcomes) > 1 or not outcomes[0].step.fits:
            shown.print_lines(console, [shown.best_line(outcomes)])
        shown.print_lines(
            console, shown.step_lines(shown.told_of(outcomes), self.tokens, self.price)
        )
        shown.print_notes(console, (remark for outcome in outcomes for remark in outcome.remarks))
        self._ended(console, folder)

    def attention(self, recompute: bool) -> None:
        from mtrain_cli.commands import simulate_output as shown
        from mtrain_cli.reporting.terminal_width import print_table, say
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.prediction import predict
        from mtrain_cli.simulation.scenario import slowest_group

        asked = self.asked
        own = load_user_calibration(asked.calibration)
        asked.per_node(self.workers)
        scenario = None if self.without_a_model else self._scenario()
        if scenario is None:
            problem, conditions = asked.shape_alone(), asked.conditions(self.workers)
        else:
            problem, conditions = scenario.problem, scenario.conditions
        folder = shown.new_folder(self.out) if self.files else None
        predictions = []
        for number, (layout, exchange) in enumerate(
            itertools.product(self.layouts, self.exchanges)
        ):
            with self._unfit(exchange):
                setup, kernel, choice = self._group(scenario, layout, exchange)
                played = partial(
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
                predictions.append(slowest_group(conditions, setup.workers, played))
        content = shown.document(self.cluster, own, **shown.of_predictions(problem, predictions))
        if folder is not None:
            shown.leave(folder, content, predictions)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
            return
        console = self._console()
        shown.print_lines(console, [f"pairs  {asked.assumed(problem.pattern)}"])
        print_table(
            console,
            shown.attention_table(self.cluster, problem, predictions),
            shown.SPARE_OF_ATTENTION,
        )
        say(console, shown.LEGEND)
        shown.print_notes(
            console, (remark for prediction in predictions for remark in prediction.remarks)
        )
        self._ended(console, folder)

    def _group(
        self, scenario: Scenario | None, layout: str, exchange: str
    ) -> tuple[ReplaySetup, str | None, ExchangeChoice | None]:
        """-> what a context group does, with which kernel; with the exchange where it is that of a training step."""
        from mtrain_cli.simulation.scenario import check_enough_blocks, plan_on, setup_of
        from mtrain_cli.simulation.what_if import ReplaySetup

        per_node = self.asked.per_node(self.workers) or min(
            self.cluster.gpus_per_node, self.workers
        )
        kernel = None if self.asked.kernel == "auto" else self.asked.kernel
        if scenario is None:
            return ReplaySetup(layout, exchange, self.workers, per_node), kernel, None
        config = scenario.config
        context = self.asked.context(config) or self.workers
        check_enough_blocks(config, layout, self.workers, context)
        if config.topology.device == "cpu":
            # There are no steps of processes on a CPU, and attention is what links and kernels of its cluster say.
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
        from mtrain_cli.commands import simulate_output as shown
        from mtrain_cli.reporting.terminal_width import print_table
        from mtrain_cli.simulation.recommend import label, recommend
        from mtrain_cli.simulation.sweep import row_of

        scenario = self._scenario()
        if self.asked.slow and self.asked.context(scenario.config) is None:
            # A rank is one of a group, and groups of different sizes are tried.
            raise ConfigError(
                f"--slow {self.asked.slow}: --recommend tries groups of any size; give topology.context_parallel=N, too, or leave it out"
            )
        folder = shown.new_folder(self.out) if self.files else None
        # A setting that was typed is not searched.
        given = [
            word for word in self.asked.words if word.startswith("train.activation_checkpoint=")
        ]
        kinds = {"recomputations": (scenario.config.train.activation_checkpoint,)} if given else {}
        with self._unfit(self.exchanges[0]), self._progress("configurations") as told:
            found = recommend(
                self.cluster,
                scenario,
                self.workers,
                self.layouts,
                self.exchanges,
                progress=told,
                **kinds,
            )
        ranked = [{"configuration": label(o.plan), **row_of(o)} for o in found.ranked]
        content = shown.document(
            self.cluster,
            scenario.calibration,
            **(
                shown.of_predictions(scenario.problem, [found.best.attention], [row_of(found.best)])
                if found.ranked
                else {"workers": self.workers}
            ),
            recommended={
                "ranked": [self._with_cost(row) for row in ranked],
                "rejected": [{"what": r.what, "why": r.why} for r in found.rejected],
                "needed": list(found.needed),
                "lines": list(shown.recommendation_lines(self.cluster, found, scenario.words)),
            },
        )
        if folder is not None and found.ranked:
            self._leave_best(folder, content, found.best, scenario)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
        else:
            console = self._console()
            shown.print_lines(console, [f"pairs  {self.asked.assumed(scenario.problem.pattern)}"])
            if found.ranked:
                fastest = sorted(found.ranked, key=lambda outcome: outcome.step.seconds.value)[:8]
                print_table(
                    console,
                    shown.step_table(self.cluster, scenario.problem, fastest),
                    shown.SPARE_OF_STEPS,
                )
                if len(found.ranked) > 8:
                    console.print(f"and {len(found.ranked) - 8} slower ones that fit")
            shown.print_lines(console, content["recommended"]["lines"])
            if found.ranked:
                shown.print_lines(console, shown.step_lines(found.best, self.tokens, self.price))
                shown.print_notes(console, found.best.remarks)
            self._ended(console, folder if found.ranked else None)
        if not found.ranked:
            raise typer.Exit(1)

    def _leave_best(
        self, folder: Path, content: dict[str, Any], best: PredictedScenario, scenario: Scenario
    ) -> None:
        from mtrain_cli.commands import simulate_output as shown
        from mtrain_cli.simulation.scenario import evaluate

        again = evaluate(self.cluster, scenario, best.plan, rows=True, bounds=False)
        shown.leave(folder, content, [again.attention])

    def sweep(
        self, texts: Sequence[str], cluster_of: Callable[[int | None], Cluster], workers: int | None
    ) -> None:
        from mtrain_cli.commands import simulate_output as shown
        from mtrain_cli.launch.failures import RunError
        from mtrain_cli.profiling.records import SWEEP
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

        if self.asked.slow:
            raise ConfigError(
                f"--slow {self.asked.slow}: which rank that is changes with the points of a --sweep; leave it out"
            )
        swept = axes(texts)
        if WORKERS in swept and workers is not None:
            raise ConfigError(
                f"--workers {workers}: --sweep gives workers too; leave one of them out"
            )
        for value in swept.get(NODES, ()):
            cluster_of(int(value))
        for value in swept.get(WORKERS, ()):
            if int(value) > self.cluster.gpus:
                raise ConfigError(
                    f"--sweep workers={value}: {self.cluster.name} has {self.cluster.gpus} GPUs; allowed: 1 to {self.cluster.gpus}"
                )
        todo = points(swept, self.layouts, self.exchanges)
        folder = shown.new_folder(self.out) if self.files else None
        own = load_user_calibration(self.asked.calibration)
        # A file that was measured again is another one, whatever its name.
        about = json.dumps([repr(own), repr(self.asked), repr(self.cluster), workers])
        job = Sweep(todo, cluster_of, self.asked.scenario, workers, about)
        # Settings are wrong before anything is written.
        drawn = bool({DENSITY, COLUMNS} & swept.keys())
        assumed: dict[str, None] = {}
        for settings in dict.fromkeys(tuple(point.settings) for point in todo):
            pairs = self.asked.scenario(settings).problem.pattern
            assumed[
                self.asked.assumed(CLUSTERED if drawn and pairs == DENSE else pairs, settings)
            ] = None
        try:
            with self._progress("configurations") as told:
                rows = list(
                    job.rows(
                        None if folder is None else folder / SWEEP,
                        lambda done: told(done, len(todo)),
                    )
                )
        except OSError as error:
            raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error
        if all("cannot" in row for row in rows):
            raise ConfigError(f"--sweep {' '.join(texts)}: {rows[0]['cannot']}")
        rows = [row if "cannot" in row else self._with_cost(row) for row in rows]
        remarks, rows = shared_remarks(rows)
        most = max(row["workers"] for row in rows)
        content = shown.document(
            self.cluster, own, workers=most, cases=[], remarks=remarks, sweep=rows
        )
        if folder is not None:
            sheet([(folder.name, rows)]).write(folder)
            shown.leave(folder, content)
        if self.as_json:
            typer.echo(json.dumps(content, indent=1))
            return
        console = self._console()
        shown.print_lines(console, (f"pairs  {line}" for line in assumed))
        print_table(console, sweep_table(rows), SPARE)
        say(console, LEGEND)
        shown.print_lines(console, (f"not    {why}" for why in why_not(rows)))
        own_remarks = len({remark for row in rows for remark in row.get("remarks", ())})
        more = (
            [f"{own_remarks} more of some of these alone: remarks of --json"] if own_remarks else []
        )
        shown.print_notes(console, [*remarks, *more])
        self._ended(console, folder)

    def _scenario(self) -> Scenario:
        found = self.asked.scenario()
        self.asked.conditions(self.workers)
        return found

    def _with_cost(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with days and dollars, where they were asked for."""
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
    def _unfit(self, exchange: str) -> Iterator[None]:
        """Configurations that cannot be are told by their options."""
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
        """A bar on stderr, where somebody may look at it."""
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
            yield lambda done, of: bar.update(task, completed=done, total=of)

    @staticmethod
    def _console() -> Console:
        from mtrain_cli.console import Console

        return Console(highlight=False, soft_wrap=True)

    def _ended(self, console: Console, folder: Path | None) -> None:
        console.print(f"took   {time.perf_counter() - self.began:.1f} s")
        if folder is not None:
            from mtrain_cli.simulation.validation import digest

            console.print(f"sha256 {digest(folder / 'summary.json')}  {folder}/summary.json")
            console.print(f"files  {folder}\ndraw   mtrain report {folder}")
