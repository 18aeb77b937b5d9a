"""`mtrain simulate`: how long attention takes on clusters, layouts and exchanges that are not here."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.commands.options import names
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from mtrain_cli.config.schema import Config
    from mtrain_cli.simulation.cluster import Cluster
    from mtrain_cli.simulation.simulate import Prediction, Problem, Range
    from mtrain_cli.simulation.timeline import Conditions

_MOST_WORKERS = 4096
_WIDEST = 400  # characters
DENSE, FIXED = "dense", "fixed"


def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES", help="As in `mtrain train`: model=, seq= and so on.", autocompletion=complete_overrides, show_default=False
        ),
    ] = None,
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", help="A cluster of conf/cluster, or a YAML file of that form.")] = "h200_1x8",
    layout: Annotated[str, typer.Option(metavar="NAME,...", help="Layouts to compare.")] = "zigzag,striped",
    exchange: Annotated[str, typer.Option(metavar="NAME,...", help="Exchanges to compare.")] = "ring,hierarchical_ring,all_gather",
    index: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME",
            help="Pairs that are computed: index.npz of a profile (or its folder), dense, fixed (that of sparsity=fixed), or a family: "
            "local, clustered, uniform, drifting.",
        ),
    ] = "clustered",
    density: Annotated[float, typer.Option(metavar="X", help="Of a family: share of the causal blocks on its diagonals.")] = 0.05,
    columns: Annotated[int, typer.Option(metavar="N", help="Of a family: single columns a head.", min=0)] = 2048,
    layers: Annotated[int | None, typer.Option(metavar="N", help="How many layers; of a file all, of a family 1.", min=1)] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Workers that share a sequence; all GPUs of the cluster if not given.", show_default=False),
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes, instead of the cluster's own.", show_default=False)] = None,
    validate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN...", help="Predict the cases of these profiles instead, and compare with what was measured.", show_default=False
        ),
    ] = None,
    prediction: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="With --validate: what was written down before (--out DIR) instead of a new prediction.", show_default=False
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(metavar="NAME", help="Attention kernel; auto = by the GPU's name.")] = "auto",
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Times of kernels from `mtrain profile kernels --out FILE`; those that ship if not given."),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Also the forward pass that activation checkpointing repeats.")] = False,
    slow: Annotated[str, typer.Option(metavar="RANK=X,...", help="Ranks that compute X times as long.")] = "",
    jitter: Annotated[float, typer.Option(metavar="X", help="Spread of message times: standard deviation of their logarithm.")] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where files go; a new folder in measurements/.", show_default=False)
    ] = None,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Leave records that `mtrain report` reads.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Predict the time of attention on a cluster, for every layout and exchange, on this machine and without a GPU.

    Work is counted exactly. Times come from kernels that were measured and from constants of the cluster, each with its source; best and
    worst say how far these may be off. The time is that of the attention of a layer, messages and index included; the rest of a training
    step is not in it.

    [bold]Examples[/bold]

      [cyan]mtrain simulate model=qwen3b seq=512k --cluster a100_4x8[/cyan]
          two layouts under three exchanges on 32 GPUs
      [cyan]mtrain simulate --index measurements/imbalance-20260101-120000 --cluster h100_4x8[/cyan]
          the indices of a profile on a cluster that is not here
      [cyan]mtrain simulate model=qwen3b seq=4m --nodes 128 --cluster my.yaml --exchange hierarchical_ring --no-files[/cyan]
          1,024 GPUs of your own description
      [cyan]mtrain simulate --validate measurements/imbalance-20260101-120000 --cluster my.yaml --calibration mine.json[/cyan]
          how far to trust it: predicted against measured, every step and worker
    """
    from rich.console import Console

    from mtrain_cli.config.schema import EXCHANGES, KERNELS, LAYOUTS
    from mtrain_cli.simulation.calibration import load_calibration
    from mtrain_cli.simulation.cluster import load_cluster
    from mtrain_cli.simulation.simulate import predict
    from mtrain_cli.simulation.what_if import Setup, Unfit

    layouts, exchanges = names("--layout", layout, LAYOUTS), names("--exchange", exchange, EXCHANGES)
    if len(names("--kernel", kernel, KERNELS)) > 1:
        raise ConfigError(f"--kernel {kernel}: give one of {', '.join(KERNELS)}")
    found_cluster = load_cluster(cluster, nodes=nodes)
    count = found_cluster.gpus if workers is None else workers
    if not 1 <= count <= min(found_cluster.gpus, _MOST_WORKERS):
        most = min(found_cluster.gpus, _MOST_WORKERS)
        raise ConfigError(f"--workers {count}: {found_cluster.name} has {found_cluster.gpus} GPUs; allowed: 1 to {most}")
    own = load_calibration(calibration) if calibration is not None else None
    if validate:
        from mtrain_cli.commands.simulate_validate import validate as compare

        # RUN... after one option: what follows the first stands where overrides would.
        compare([*map(str, validate), *(overrides or [])], prediction or [], found_cluster, own, out, as_json=as_json)
        return
    if prediction:
        raise ConfigError(f"--prediction {prediction[0]}: is compared with what was measured; give --validate RUN, too")
    conditions = _conditions(slow, jitter, count)
    problem = _problem(overrides or [], index, density, columns, layers)
    per_node = _per_node(overrides or [], count) or min(found_cluster.gpus_per_node, count)
    predictions, clock = [], time.perf_counter()
    for number, (name, way) in enumerate(itertools.product(layouts, exchanges)):
        setup = Setup(name, way, count, per_node)
        try:
            predictions.append(
                predict(
                    found_cluster,
                    problem,
                    setup,
                    kernel=None if kernel == "auto" else kernel,
                    calibration=own,
                    recompute=recompute,
                    conditions=conditions,
                    number=number,
                    rows=files,
                )
            )
        except Unfit as error:
            about = {"per_node": "cluster", "workers": "workers"}.get(error.about, error.about)
            raise ConfigError(f"--{about} {error.value if about != 'cluster' else cluster}: {error}") from None
    seconds = time.perf_counter() - clock
    document = _document(found_cluster, problem, predictions)
    document["calibration"] = None if own is None else {"device": own.device, "files": list(own.files), "own": True}
    folder = _leave(out, document, predictions) if files else None
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    table = _table(found_cluster, problem, predictions)
    # A row is one line on any terminal.
    wide = Console(highlight=False, width=_WIDEST)
    wide.width = wide.measure(table).maximum
    wide.print(table)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_LEGEND)
    for remark in dict.fromkeys(remark for prediction in predictions for remark in prediction.remarks):
        console.print(f"note   {remark}", style="yellow")
    console.print(f"took   {seconds:.1f} s")
    if folder is not None:
        from mtrain_cli.simulation.validation import digest

        console.print(f"sha256 {digest(folder / 'summary.json')}  {folder}/summary.json")
        console.print(f"files  {folder}\ndraw   mtrain report {folder}")


_LEGEND = (
    "ms: attention of a layer, the slowest worker, mean over layers; best and worst by the bounds of the constants. worker, step: "
    "imbalance degrees of time, of work in brackets, largest over mean. late: waits for slower workers. exposed: transfer that nothing "
    "hid, by link."
)


def _problem(words: Sequence[str], index: str, density: float, columns: int, layers: int | None) -> Problem:
    from mtrain_cli.attention.mask import SequenceMask
    from mtrain_cli.config.compose import compose
    from mtrain_cli.profiling.index_file import RecordedSetup
    from mtrain_cli.simulation.families import FAMILIES, Family
    from mtrain_cli.simulation.simulate import Problem

    if index not in (*FAMILIES, DENSE, FIXED):
        return _recorded(words, index, layers)
    if index == FIXED:
        return _fixed(words, layers)
    if not 0 < density <= 1:
        raise ConfigError(f"--density {density:g}: must be above 0 and at most 1")
    config = compose(list(words))
    model, block = config.model, config.topology.block_size
    family = Family(index, density, min(columns, config.seq), block, config.seed) if index != DENSE else None
    setup = RecordedSetup(
        seq=config.seq, heads=model.num_heads, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype_bytes=_bytes(config),
        workers=1, per_node=1, layout=config.topology.layout, exchange=config.topology.exchange, block_size=block, needs_out=True,
    )  # fmt: skip
    kept: dict[int, Any] = {}

    def of(layer: int) -> Any:
        # The cases of one run share the indices of all layers, unless these are many.
        if family is None:
            return None
        if layer not in kept:
            if len(kept) > 4:
                kept.clear()
            kept[layer] = family.index(layer, config.seq, model.num_heads)
        return kept[layer]

    masks = (SequenceMask.causal(config.seq, config.seq),)
    return Problem(setup, masks, tuple(range(layers or 1)), of, DENSE if family is None else index, model=model.name)


def _fixed(words: Sequence[str], layers: int | None) -> Problem:
    """The indices that ``sparsity=fixed`` draws, as `mtrain profile imbalance` with the same words measures them."""
    from mtrain_cli.attention.mask import SequenceMask
    from mtrain_cli.config.compose import compose
    from mtrain_cli.profiling.index_file import RecordedSetup
    from mtrain_cli.simulation.simulate import Problem
    from mtrain_cli.simulation.validation import fixed_of

    given = next((word for word in words if word.startswith("sparsity=")), None)
    if given not in (None, "sparsity=fixed"):
        raise ConfigError(f"{given}: --index fixed is that of sparsity=fixed; leave one of the two out")
    config = compose([*words, *([] if given else ["sparsity=fixed"])])
    model, batch = config.model, config.train.micro_batch
    setup = RecordedSetup(
        seq=config.seq, heads=model.num_heads, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype_bytes=_bytes(config),
        workers=1, per_node=1, layout=config.topology.layout, exchange=config.topology.exchange, block_size=config.topology.block_size,
        needs_out=True,
    )  # fmt: skip
    masks = (SequenceMask.causal(config.seq, config.seq),) * batch
    return Problem(
        setup, masks, tuple(range(layers or 1)), fixed_of(config), FIXED, int(config.sparsity.bars or 0), estimated=False, model=model.name
    )


def _bytes(config: Config) -> int:
    """Of a number, as `training.plan.compute_dtype` has it for the device that the words name."""
    name = config.train.dtype
    return 4 if name == "float32" or (name == "auto" and config.topology.device == "cpu") else 2


def _per_node(words: Sequence[str], workers: int) -> int | None:
    """Workers of a node, real or virtual, where the words say it."""
    given = next((word.partition("=")[2] for word in words if word.startswith("topology.gpus_per_node=")), "auto")
    if given == "auto":
        return None
    if not given.isdigit() or not int(given) or workers % int(given):
        divisors = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
        raise ConfigError(f"topology.gpus_per_node={given}: must divide the {workers} workers; possible are auto, {divisors}")
    return int(given)


def _recorded(words: Sequence[str], index: str, layers: int | None) -> Problem:
    from mtrain_cli.profiling.index_file import load_indices
    from mtrain_cli.simulation.families import FAMILIES
    from mtrain_cli.simulation.simulate import Problem
    from mtrain_cli.simulation.what_if import index_of

    path = Path(index).expanduser()
    candidates = (path, path / "index.npz", path / "profile" / "index.npz")
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        allowed = ", ".join((DENSE, *FAMILIES, FIXED))
        raise ConfigError(f"--index {index}: is neither a file nor a folder with index.npz; allowed besides: {allowed}")
    recorded = load_indices(file)
    made = recorded.setup
    if words:
        _compare(words, file, made)
    pattern = recorded.patterns[0]
    there = recorded.layers(pattern)
    if layers is not None and layers > len(there):
        raise ConfigError(f"--layers {layers}: {file} holds {len(there)} layers of {pattern}; allowed: 1 to {len(there)}")
    return Problem(
        made, recorded.masks, there[: layers or len(there)], lambda layer: index_of(recorded, pattern, layer), pattern,
        made.columns.get(pattern, -1),
    )  # fmt: skip


def _compare(words: Sequence[str], file: Path, made: Any) -> None:
    """Raises ConfigError where settings say another shape than the file was recorded with."""
    from mtrain_cli.config.compose import compose

    config = compose(list(words))
    said = {
        "seq": (config.seq, made.seq),
        "model.num_heads": (config.model.num_heads, made.heads),
        "model.num_kv_heads": (config.model.num_kv_heads, made.kv_heads),
        "model.head_dim": (config.model.head_dim, made.head_dim),
    }
    wrong = [f"{key}={mine}: --index {file} was recorded with {its}; leave it out" for key, (mine, its) in said.items() if mine != its]
    if wrong:
        raise ConfigError(*wrong)


def _conditions(slow: str, jitter: float, workers: int) -> Conditions:
    from mtrain_cli.simulation.timeline import Conditions

    if not 0 <= jitter <= 2:
        raise ConfigError(f"--jitter {jitter:g}: must be between 0 and 2")
    ranks: dict[int, float] = {}
    for word in filter(None, (w.strip() for w in slow.split(","))):
        rank, _, factor = word.partition("=")
        try:
            ranks[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow {word}: expected RANK=X, such as 3=1.5") from None
        if not 0 <= int(rank) < workers:
            raise ConfigError(f"--slow {word}: there is no rank {rank}; allowed: 0 to {workers - 1}")
        if not 0.1 <= ranks[int(rank)] <= 100:
            raise ConfigError(f"--slow {word}: a rank may take 0.1 to 100 times as long")
    return Conditions(slow=ranks, jitter=jitter)


def _table(cluster: Cluster, problem: Problem, predictions: Sequence[Prediction]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    made, nodes = problem.made, f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    layers = f"{len(problem.layers)} layer{'s' * (len(problem.layers) > 1)}"
    shown = f"{problem.pattern}, density {predictions[0].facts['density']:.1%}" if problem.pattern != DENSE else DENSE
    title = f"{cluster.name} ({nodes}), {predictions[0].setup.workers} workers, seq {made.seq:,}, {shown}, {layers}: predicted"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("layout", "exchange", "kernel"):
        table.add_column(name)
    for name in (*predictions[0].passes, "all, ms a layer", "best - worst", "worker", "step", "computed", "late ms"):
        table.add_column(name, justify="right")
    table.add_column("exposed ms")
    fastest = min(predictions, key=lambda p: p.duration.value)
    for p in predictions:
        links: dict[str, float] = {}
        for of_pass in p.passes.values():
            for link, ms in of_pass.exposed.items():
                links[link] = links.get(link, 0.0) + ms
        both = [p.passes[name] for name in ("forward", "backward")]
        degrees = [
            f"{sum(getattr(b.time, name) for b in both) / 2:.2f} ({sum(getattr(b.work, name) for b in both) / 2:.2f})"
            for name in ("worker", "step")
        ]
        table.add_row(
            p.setup.layout,
            p.exchange,
            p.kernel,
            *(f"{of_pass.duration.value:.2f}" for of_pass in p.passes.values()),
            f"{p.duration.value:.2f}",
            f"{p.duration.low:.1f} - {p.duration.high:.1f}",
            *degrees,
            f"{sum(b.computed * b.duration.value for b in both) / sum(b.duration.value for b in both):.2f}",
            f"{sum(of_pass.late for of_pass in p.passes.values()):.2f}",
            ", ".join(f"{link} {ms:.2f}" for link, ms in links.items() if ms >= 0.005) or "none",
            style="bold" if p is fastest and len(predictions) > 1 else None,
        )
    return table


def _range(found: Range) -> dict[str, float]:
    return {"low": round(found.low, 5), "value": round(found.value, 5), "high": round(found.high, 5)}


def _document(cluster: Cluster, problem: Problem, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """summary.json, without the analysis of its rows."""
    import dataclasses
    import sys

    from mtrain_cli import __version__

    predicted = [
        {
            "label": p.facts["label"],
            "ms": _range(p.duration),
            "remarks": list(p.remarks),
            "passes": {
                name: {
                    "ms": _range(of_pass.duration),
                    "time": dataclasses.asdict(of_pass.time),
                    "work": dataclasses.asdict(of_pass.work),
                    "computed": of_pass.computed,
                    "late_ms": of_pass.late,
                    "exposed_ms": of_pass.exposed,
                }
                for name, of_pass in p.passes.items()
            },
        }
        for p in predictions
    ]
    return {
        "kind": "simulation",
        "mode": "attention",
        "complete": True,
        "workers": predictions[0].setup.workers,
        "samples_wanted": 1,
        "samples": 1,
        "command": ["mtrain", *sys.argv[1:]],
        "environment": {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": {"mtrain": __version__}, "gpus": []},
        "clock": {"uncertainty_us": 0.0},
        "overhead": None,
        "cluster": {
            "name": cluster.name, "nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node, "gpu": cluster.gpu.name,
            "constants": {key: dataclasses.asdict(constant) for key, constant in cluster.constants().items()},
        },
        "layers": list(problem.layers),
        "cases": [p.facts for p in predictions],
        "predicted": predicted,
        "results": [],
    }  # fmt: skip


def _leave(out: Path | None, document: dict[str, Any], predictions: Sequence[Prediction]) -> Path | None:
    """The files of a profile."""
    from mtrain_cli.launch.failures import RunError
    from mtrain_cli.profiling import records
    from mtrain_cli.profiling.analysis import analyse
    from mtrain_cli.simulation.validation import digest

    with_rows = [p for p in predictions if p.rows is not None]
    folder = out or Path("measurements", f"simulation-{time.strftime('%Y%m%d-%H%M%S')}")
    if (folder / records.SUMMARY).exists():
        raise ConfigError(f"--out {folder}: holds a profile or simulation already; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, prediction in enumerate(with_rows):
            assert prediction.rows is not None
            records.write_part(prediction.rows, folder, number)
        records.join_parts(folder)
        records.write_summary(folder, document)
        if with_rows:
            # The digest of the summary is one of everything that was predicted.
            document["records_sha256"] = digest(folder / records.RECORDS)
            records.write_summary(folder, document)
            document["results"] = [found.to_json() for found in analyse(records.open_records(folder))]
            records.write_summary(folder, document)
    except OSError as error:
        raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error
    return folder
