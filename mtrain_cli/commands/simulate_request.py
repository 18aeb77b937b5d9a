"""What `mtrain simulate` predicts: training runs, their query-key pairs, and what to compare."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mtrain_cli.commands.options import (
    MOST_TOKENS,
    MOST_WORKERS,
    parse_names,
    parse_whole_number,
    warn_of_unused_settings,
)
from mtrain_cli.config.cluster import Cluster, load_cluster, uneven_nodes
from mtrain_cli.config.exchanges import (
    COMPARED_EXCHANGES,
    GROUP_CASTS,
    HEAD_SHARING,
    exchange_names,
    flat_name,
)
from mtrain_cli.config.keys import all_keys, show
from mtrain_cli.config.mask_settings import FULL_LAYERS
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.schema import LAYOUTS, Config, ConfigError
from mtrain_cli.config.sizes import parse_share
from mtrain_cli.config.suggest import find_shipped, no_such, shipped_with

if TYPE_CHECKING:
    from mtrain_cli.commands.simulate import SimulateOptions
    from mtrain_cli.simulation.prediction import AttentionWorkload
    from mtrain_cli.simulation.scenario import PairSource, Scenario

DENSE, FIXED = "dense", "fixed"
DEFAULT_CLUSTER, DEFAULT_LAYOUTS = "h200_1x8", ("zigzag", "striped")
_SWEPT = 3  # exchanges that a sweep compares by default; each one more takes a third more time
# Settings that have an effect if a recording gives the shape of attention, and no model= the rest.
_OF_SHAPE = ("seq", "topology.gpus_per_node", "train.kernel")
# Settings that are the keys of `SimulateOptions` under another name.
_ALIASES = {f"topology.{name}": name for name in ("cluster", "workers", "layout", "exchange")}
_AXES = ("nodes", "workers", "density", "columns")  # keys that take several values in a sweep
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A training run and the pairs that its attention computes.

    words: settings, such as ``model=qwen3b``.
    slow: factor by which computation takes longer, by rank.
    cluster: name or file; "auto" for the one that the settings name.
    Other fields: see `SimulateOptions`.
    """

    words: tuple[str, ...]
    index: str | None = None
    density: float | None = None
    columns: int | None = None
    layers: int | None = None
    calibration: str | None = None
    slow: dict[int, float] = field(default_factory=dict)
    expert_loads: str | None = None
    cluster: str = "auto"

    def at(self, settings: Iterable[str], **pairs: Any) -> Request:
        return replace(self, words=(*self.words, *settings), **pairs)

    def scenario(self) -> Scenario:
        """Compose the training run to predict. ConfigError: keys contradict each other."""
        if self.recorded_file() is not None:
            return self._scenario(*self._recorded())
        config = self.compose()
        pairs = self.pair_source(config)
        more = [] if self._has_pattern(config) else pairs.sparsity()
        config = self.compose(more) if more else config
        return self._scenario(config, pairs.problem(config), more)

    def _scenario(
        self, config: Config, problem: AttentionWorkload, more: Sequence[str] = ()
    ) -> Scenario:
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.expert_cost import parse_loads
        from mtrain_cli.simulation.scenario import Scenario

        calibration = load_user_calibration(self.calibration)
        loads = parse_loads(self.expert_loads, config.model)
        return Scenario(config, problem, calibration, self.slow, (*self.words, *more), loads)

    def scenario_without_model(self) -> Scenario:
        """Return recorded attention, whose configuration has only topology and kernel."""
        for word in self.words:
            key = word.partition("=")[0]
            if key not in _OF_SHAPE and not key.startswith("model."):
                raise ConfigError(f"{word}: has no effect on a recorded index without model=")
        problem = self._load_recorded()
        if (full := problem.full) is not None:
            problem = problem.with_dense(full.layers, full.of)
        return self._scenario(self.compose(), problem)

    @property
    def without_a_model(self) -> bool:
        """Whether a recorded index gives the shape of attention, and no model the rest."""
        return self.recorded_file() is not None and not self.sets("model")

    def sets(self, key: str) -> bool:
        return any(word.startswith(f"{key}=") for word in self.words)

    def compose(self, more: Sequence[str] = ()) -> Config:
        """Compose the settings for the cluster, whose numbers of GPUs replace those of topology."""
        from mtrain_cli.composition.compose import compose

        on = [] if self.cluster == "auto" else [f"topology.cluster={self.cluster}"]
        free = ["topology.workers=auto", "topology.gpus_per_node=auto"]
        return compose([*free, *self.words, *more, *on])

    def _has_pattern(self, config: Config) -> bool:
        return self.sets("sparsity") or config.sparsity.pattern != DENSE

    def pair_source(self, config: Config) -> PairSource:
        """Return how to draw the pairs, by the sparsity settings."""
        from mtrain_cli.simulation.scenario import PairSource

        density, columns, settings = self.density, self.columns, config.sparsity
        pattern = settings.pattern if self._has_pattern(config) else None
        if pattern is density is columns is None:
            pattern = DENSE  # the default of mtrain train
        layers = self._layers(config)
        if pattern == DENSE:
            self._refuse("has no effect on dense attention; leave it out")
            return PairSource(DENSE, layers=layers)
        if pattern == FIXED:
            self._refuse("sparsity=fixed has its own keys: sparsity.density, slashes and columns")
        source = PairSource.of(config if pattern else None, layers, density, columns)
        if pattern in (None, FIXED):
            return source
        if limit := next((k for k in ("min", "max") if self.sets(f"sparsity.{k}_slashes")), None):
            self._refuse(f"contradicts sparsity.{limit}_slashes; give only one", "density")
        bound = None if source.groups else settings.column_bound
        if columns is not None and bound is not None and columns > bound:
            self._refuse(f"sparsity={pattern} allows at most {bound} per head", "columns")
        if (known := settings.known_density(config.seq)) is not None:
            self._refuse(f"sparsity={pattern} always computes {known:.3%} of the pairs", "density")
        if density is not None and density > (covered := source.most_covered(config)):
            self._refuse(f"sparsity={pattern} covers at most {covered:.3%} of the blocks")
        return source

    def _refuse(self, reason: str, *names: str) -> None:
        """Raise ConfigError if a key in ``names`` is given. Default: density and columns."""
        for name in names or ("density", "columns"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name}={value:g}: {reason}")

    def describe_pairs(self, pairs: str) -> str:
        """Describe in a line which pairs the prediction assumes, by the name of their pattern."""
        if (file := self.recorded_file()) is not None:
            return f"recorded in {file} ({pairs})"
        config = self.compose()
        one = "each sequence one document"
        if pairs == DENSE:
            line = f"dense: all {_allowed(config)}"
            if self.sets("sparsity") or config.data.mask_key:
                return line
            return f"{line}, the default of mtrain train; set sparsity, density or index for fewer"
        if pairs == FIXED:
            return f"as drawn by sparsity=fixed, {one}"
        pattern = config.sparsity.pattern
        purpose = f" for sparsity={pattern}" if pattern != DENSE else ""
        drawn = self.pair_source(config).describe(config)
        return f"synthetic ({pairs}){purpose}: {drawn}, {one}; set index for the pairs of a profile"

    def _layers(self, config: Config) -> int:
        for name in FULL_LAYERS:
            if self.layers is not None and (value := getattr(config.mask, name)):
                why = f"mask.{name}={value} needs all; leave it out"
                raise ConfigError(f"layers={self.layers}: {why}")
        most = len(config.pattern_layers)
        if (self.layers or 1) > most:
            why = f"{config.model.name} has {most} that are not in sparsity.dense_layers"
            raise ConfigError(f"layers={self.layers}: {why}; allowed: 1 to {most}")
        return self.layers or 1

    def recorded_file(self) -> Path | None:
        """Return the index.npz that ``index`` names, if it is given."""
        if self.index is None:
            return None
        path = find_shipped(Path(self.index))
        candidates = (path, path / "index.npz", path / "profile" / "index.npz")
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            names = shipped_with("*/index.npz")
            why = no_such("index", self.index, names, "a profile's folder or index.npz")
            raise ConfigError(f"index={self.index}: {why}")
        if not zipfile.is_zipfile(file):  # `load_indices` would refuse it after slow imports
            raise ConfigError(f"{file}: not an index file of mtrain, or damaged")
        return file

    def _load_recorded(self) -> AttentionWorkload:
        from mtrain_cli.records.index_file import load_indices
        from mtrain_cli.simulation.prediction import AttentionWorkload
        from mtrain_cli.simulation.what_if import index_of

        file = self.recorded_file()
        assert file is not None
        self._refuse(f"index={file} has its own pairs; give only one of the two")
        recorded = load_indices(file)
        setup = recorded.setup
        config = self.compose()
        model = config.model
        shapes = {
            "seq": (config.seq, setup.seq),
            "model.num_heads": (model.num_heads, setup.heads),
            "model.num_kv_heads": (model.num_kv_heads, setup.kv_heads),
            "model.head_dim": (model.head_dim, setup.head_dim),
        }
        wrong = [
            f"{key}={ours}: index={file} was recorded with {theirs}; leave it out"
            for key, (ours, theirs) in shapes.items()
            if ours != theirs and (self.sets(key) or (self.sets("model") and key != "seq"))
        ]
        if wrong:
            raise ConfigError(*wrong)
        pattern = recorded.patterns[0]
        available, dense = recorded.layers(pattern), None
        if recorded.full is not None and pattern != DENSE:
            dense = recorded.full
            available = tuple(layer for layer in available if layer not in dense.layers)
        count = len(available)
        if (self.layers or 1) > count:
            why = f"{file} holds {count} layers of {pattern}; allowed: 1 to {count}"
            raise ConfigError(f"layers={self.layers}: {why}")
        layers, columns = available[: self.layers or count], setup.columns.get(pattern, -1)
        index = partial(index_of, recorded, pattern)
        return AttentionWorkload(setup, recorded.masks, layers, index, pattern, columns, full=dense)

    def _recorded(self) -> tuple[Config, AttentionWorkload, list[str]]:
        """Return a training run with recorded indices, and the settings that follow from them."""
        from mtrain_cli.simulation.scenario import scores_of

        problem, file = self._load_recorded(), self.recorded_file()
        index, name = problem.index(problem.layers[0]), problem.pattern.partition(" ")[0]
        dense, of = (frozenset[int](), 0) if problem.full is None else problem.full[1:]
        is_last = dense == frozenset(range(of - len(dense), of))
        recorded = show(len(dense) if is_last else sorted(dense))
        follow: dict[str, Any] = {
            "seq": problem.made.seq,
            "topology.block_size": problem.made.block_size,
        }
        if name in PATTERNS and name != DENSE and index is not None and not self.sets("sparsity"):
            with_dense = {"sparsity.dense_layers": recorded} if dense else {}
            follow = {"sparsity": name, "sparsity.block": index.block, **with_dense, **follow}
        more = [f"{key}={value}" for key, value in follow.items() if not self.sets(key)]
        config = self.compose(more)
        count, given = config.model.num_layers, show(config.sparsity.dense_layers)
        numbers = config.sparsity.dense_of(count)
        batch, sequences = config.train.micro_batch, len(problem.masks)
        last, at = problem.layers[-1], f"index={file}"
        wrong = {
            f"train.micro_batch={batch}: {at} holds {sequences} sequences": sequences != batch,
            f"sparsity.dense_layers={given}: {at} was recorded with {recorded}": (
                len(numbers) < len(dense)
            ),
            f"sparsity.dense_layers={given}: {at} has an index of these layers only": (
                numbers.issuperset(problem.layers)
            ),
            f"model.num_layers={count}: {at} holds layer {last}, of another model": last >= count,
        }
        if problems := [line for line, is_wrong in wrong.items() if is_wrong]:
            raise ConfigError(problems[0])
        made = replace(problem.made, chunk=config.topology.chunk)
        problem = replace(problem, made=made, scores=scores_of(config))
        return config, problem.with_dense(numbers, count), more


def _allowed(config: Config) -> str:
    from mtrain_cli.training.run_plan import first_masks

    read = first_masks(config)
    if read is not None and read.masks:
        return "pairs of a micro-batch of the data, with the median number of pairs"
    kind = config.mask.kind
    pairs = "causal pairs" if kind == "causal" else f"pairs of {config.mask.describe()}"
    return f"{pairs}, each sequence one document"


@dataclass(frozen=True)
class Job:
    """What to predict and compare, and where the results go.

    axes: values of each swept key or setting.
    """

    request: Request
    cluster: Cluster
    layouts: list[str]
    exchanges: list[str]
    given_workers: int | None
    axes: dict[str, list[str]]
    typed: SimulateOptions
    started: float = field(default_factory=time.perf_counter)

    @property
    def workers(self) -> int:
        return self.given_workers or self.cluster.gpus

    def require_gpus(self) -> None:
        if self.cluster.gpu.is_cpu:
            raise ConfigError(
                f"cluster={self.request.cluster}: {self.cluster.gpu.name} is a CPU, and steps are "
                "predicted for GPUs only; use `mtrain simulate run --attention-only`"
            )


def parse_job(typed: SimulateOptions, *, every_exchange: bool = False) -> Job:
    """Parse the keys of `mtrain simulate`, and load the cluster.

    every_exchange: compare all exchanges if none is given.
    """
    from mtrain_cli.simulation.calibration_files import calibration_files

    given, words = _split(typed)
    axes: dict[str, list[str]] = {}
    for word in words:
        for name, values in _axis(word).items():
            if not values or name in axes:
                why = "has no value" if not values else "give all values at once"
                raise ConfigError(f"{word}: {why}, as {name}=VALUE,VALUE")
            axes[name] = values
    words = [word for word in words if not _axis(word)]
    first = [f"{name}={values[0]}" for name, values in axes.items()]
    axes |= {name: given.pop(name).split(",") for name in _AXES if "," in given.get(name, "")}
    sizes = [
        name for name in ("nodes", "workers", "slow") if name in axes or name == "slow" in given
    ]
    if len(sizes) > 1:
        raise ConfigError(f"{sizes[1]}: cannot be combined with several values of {sizes[0]}")
    for name, value in ((n, v) for n, values in axes.items() if n in _AXES for v in values):
        _parse(name, value)
    keys = {name: _parse(name, value) for name, value in given.items()}
    layout, exchange = keys.pop("layout", None), keys.pop("exchange", None)
    workers, nodes, cluster = (keys.pop(name, None) for name in ("workers", "nodes", "cluster"))
    request = Request(tuple(words), cluster=cluster or "auto", **keys)
    # Check the files before anything slow is imported.
    request.recorded_file()
    if request.calibration is not None:
        calibration_files(request.calibration)
    config = None if request.without_a_model else request.compose(first)
    if config is not None and cluster is None:
        cluster = config.topology.cluster if config.topology.cluster != "auto" else None
    name = cluster or DEFAULT_CLUSTER
    machine = load_cluster(name, f"cluster={name}", nodes=nodes, typed_nodes=f"nodes={nodes}")
    for value in axes.get("nodes", ()):
        load_cluster(name, nodes=int(value), typed_nodes=f"nodes={value}")
    virtual = request.sets("topology.gpus_per_node")
    for count in map(int, axes.get("workers", [workers or machine.gpus])):
        _check_workers(machine, count, virtual)
    if (worst := max(request.slow, default=-1)) >= (workers or machine.gpus):
        allowed = f"there is no such rank; allowed: 0 to {(workers or machine.gpus) - 1}"
        raise ConfigError(f"slow={worst}={request.slow[worst]:g}: {allowed}")
    if machine.gpu.is_cpu and config is not None and not request.sets("topology.device"):
        # CPU workers compute in another dtype and with other kernels.
        request = request.at(["topology.device=cpu"])
    several = machine.nodes > 1 or "nodes" in axes or virtual
    layouts, exchanges = _compared(config, bool(axes), several, every_exchange)
    if config is not None and not axes:
        striped = {"layout": "striped"} if "striped" in (layout or layouts) else {}
        warn_of_unused_settings(words, config.changed(topology=striped))
    return Job(
        replace(request, cluster=name), machine, layout or layouts, exchange or exchanges, workers,
        axes, typed,
    )  # fmt: skip


def _compared(
    config: Config | None, sweeps: bool, several: bool, every_exchange: bool
) -> tuple[list[str], list[str]]:
    """Return the layouts and exchanges to compare if none are given, with those of a recipe."""
    layouts, exchanges = [*DEFAULT_LAYOUTS], [*COMPARED_EXCHANGES[: _SWEPT if sweeps else None]]
    casts = config is not None and config.mask.kind != "causal"
    if casts and not sweeps:
        layouts.append("balanced")
    exchanges += GROUP_CASTS if casts else ()
    if every_exchange:
        names = (*COMPARED_EXCHANGES, *(GROUP_CASTS if casts else ()), *HEAD_SHARING)
        exchanges = [name for name in exchange_names() if name in names]
    if not several:  # within a node, hierarchical exchanges equal the plain ones
        exchanges = [name for name in exchanges if flat_name(name) == name]
    if config is not None and not sweeps:
        chosen = config.topology.exchange
        exchanges.append(chosen if several else flat_name(chosen))
        layouts.append(config.topology.layout)
    layouts, exchanges = (list(dict.fromkeys(names)) for names in (layouts, exchanges))
    return [n for n in layouts if n != "auto"], [n for n in exchanges if n != "auto"]


def _split(typed: SimulateOptions) -> tuple[dict[str, str], list[str]]:
    own = [option.name for option in fields(typed)]
    names = own[own.index("overrides") + 1 : own.index("out")]
    given = {name: value for name in names if (value := getattr(typed, name)) is not None}
    words = []
    for word in typed.overrides or ():
        setting, equals, value = word.partition("=")
        name = _ALIASES.get(setting, setting)
        if name not in names or not equals:
            words.append(word)
        elif not value or given.setdefault(name, value) != value:
            why = f"{name}={given[name]} is given, too; give one" if value else "the value is empty"
            raise ConfigError(f"{word}: {why}")
    return given, words


def _axis(word: str) -> dict[str, list[str]]:
    """Return the values of a setting with several, such as ``seq=128k,512k``, by its name."""
    name, _, listed = word.partition("=")
    key = all_keys().get(name)
    is_text = key is not None and (key.is_mapping or (key.is_text and not key.choices))
    if "," not in listed or listed[0] in "[{(" or is_text:
        return {}
    if name == "topology":
        raise ConfigError(f"{word}: a command predicts for one cluster; start one for each")
    return {name: list(dict.fromkeys(filter(None, listed.split(","))))}


def _parse(name: str, text: str) -> Any:
    if name in ("layout", "exchange"):
        allowed = ("auto", *LAYOUTS) if name == "layout" else exchange_names()
        return parse_names(f"topology.{name}=", text, allowed)
    parser, expected = _PARSERS.get(name, (str, ""))
    with suppress(ValueError):
        return parser(text)
    raise ConfigError(f"{name}={text}: expected {expected}")


def _within(value: T, least: float, most: float) -> T:
    if not least <= value <= most:  # type: ignore[operator]
        raise ValueError
    return value


def _whole(least: int, most: int) -> tuple[Callable[[str], int], str]:
    expected = f"a whole number of at least {least} and at most {most:,}"
    return lambda text: _within(parse_whole_number(text), least, most), expected


def _slow(text: str) -> dict[int, float]:
    pairs = (word.partition("=") for word in filter(None, text.split(",")))
    return {
        parse_whole_number(rank.strip()): _within(float(factor), 0.1, 100)
        for rank, _, factor in pairs
    }


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "nodes": _whole(1, MOST_WORKERS),
    "workers": _whole(1, MOST_WORKERS),
    "layers": _whole(1, MOST_WORKERS),
    "columns": _whole(0, MOST_TOKENS),
    "density": (
        lambda text: _within(parse_share(text), 1e-9, 1),
        "a share above 0 and at most 1, such as 0.05 or 5%",
    ),
    "slow": (_slow, "RANK=X,..., such as 3=1.5, with factors from 0.1 to 100"),
}


def _check_workers(cluster: Cluster, count: int, virtual: bool) -> None:
    most = min(cluster.gpus, MOST_WORKERS)
    if count > most:
        more = f"; for more, set nodes={-(-count // cluster.gpus_per_node)}"
        more = more if cluster.outer is not None and count <= MOST_WORKERS else ""
        raise ConfigError(
            f"workers={count}: {cluster.name} has {cluster.gpus} GPUs; allowed: 1 to {most}{more}"
        )
    if not virtual and (why := uneven_nodes(cluster, count)):
        raise ConfigError(f"workers={count}: {why}")
