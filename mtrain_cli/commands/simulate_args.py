"""Turn settings and options of `mtrain simulate` into a training run, pairs and a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.commands.options import parse_names, parse_share_option, warn_of_unused_settings
from mtrain_cli.config.exchanges import flat_name
from mtrain_cli.config.pattern_settings import VerticalSlashSettings
from mtrain_cli.config.schema import EXCHANGES, KERNELS, LAYOUTS, Config, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.commands.simulate import SimulateOptions
    from mtrain_cli.simulation.cluster import Cluster
    from mtrain_cli.simulation.prediction import AttentionWorkload
    from mtrain_cli.simulation.scenario import PairSource, Scenario
    from mtrain_cli.simulation.timeline import Disturbances

DEFAULT_CLUSTER = "h200_1x8"
DEFAULT_LAYOUTS = "zigzag,striped"
_EXCHANGES = "ring,hierarchical_ring,all_gather"
_MOST_WORKERS = 4096
DENSE, CLUSTERED, FIXED = "dense", "clustered", "fixed"
DENSITY, COLUMNS = 0.05, 2048
_OF_SHAPE = ("seq", "topology.gpus_per_node")  # settings that need no model
_UNITS = {"b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class SimulateRequest:
    """The settings and options as typed; None for an option that was not given.

    words: settings, such as model=qwen3b.
    index: a file, a folder, or the name of a family of synthetic indices.
    density: share of the causal blocks that slashes fill.
    columns: number of columns per head.
    layers: number of layers that have their own index.
    slow: RANK=X,..., the factors by which ranks are slower.
    jitter: standard deviation of the logarithm of message times.
    """

    words: tuple[str, ...]
    index: str | None
    density: float | None
    columns: int | None
    layers: int | None
    kernel: str
    calibration: str | None
    slow: str
    jitter: float

    def scenario(
        self, extra: Sequence[str] = (), density: float | None = None, columns: int | None = None
    ) -> Scenario:
        """Compose the training run to predict.

        Args:
            extra, density, columns: values of a sweep's point, which replace the typed ones.

        Raises:
            ConfigError: a setting or an option is wrong.
        """
        from mtrain_cli.composition.compose import compose
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.scenario import Scenario, pattern_words

        words = [*self.words, *extra]
        _check_workers(words)
        if file := self.recorded_file():
            problem = self.load_recorded(file, words, density, columns)
            more = _recorded_settings(problem, words, pattern_words(problem.pattern))
            config = compose([*words, *more])
            if len(problem.masks) != config.train.micro_batch:
                raise ConfigError(
                    f"train.micro_batch={config.train.micro_batch}: --index {file} holds "
                    f"{len(problem.masks)} sequences"
                )
            if problem.layers[-1] >= config.model.num_layers:
                raise ConfigError(
                    f"model.num_layers={config.model.num_layers}: --index {file} holds layer "
                    f"{problem.layers[-1]}, so it is from another model"
                )
        else:
            config = compose(words)
            pairs = self.pair_source(words, config, density, columns)
            more = [] if _own_sparsity(words, config) else pairs.sparsity()
            config = compose([*words, *more]) if more else config
            problem = pairs.problem(config)
        return Scenario(
            config,
            problem,
            self.typed_kernel,
            load_user_calibration(self.calibration),
            self.disturbances(),
            (*words, *more),
        )

    @property
    def typed_kernel(self) -> str | None:
        return None if self.kernel == "auto" else self.kernel

    @property
    def without_a_model(self) -> bool:
        """Whether the input is a recorded index alone.

        It has the shape of the attention, but nothing of the rest of the model.
        """
        return self.recorded_file() is not None and not self.sets("model")

    def sets(self, key: str) -> bool:
        """Return whether the user typed a setting of this key."""
        return setting_of(self.words, key) is not None

    def check(self, workers: int) -> None:
        """Check settings and slow ranks before anything heavy is imported.

        Raises:
            ConfigError: one of them is wrong.
        """
        from mtrain_cli.composition.compose import compose

        _check_workers(self.words)
        compose(list(self.words))
        self.slow_ranks(workers)

    def context_parallel(self, config: Config) -> int | None:
        """Return ``topology.context_parallel``, or None for auto."""
        given = config.topology.context_parallel
        return given if isinstance(given, int) else None

    def pair_source(
        self,
        words: Sequence[str],
        config: Config,
        density: float | None = None,
        columns: int | None = None,
    ) -> PairSource:
        """Return the source of the pairs: the index's name, else the settings' sparsity.

        --density and --columns ask for a synthetic family.

        Raises:
            ConfigError: options and settings contradict each other.
        """
        from mtrain_cli.simulation.scenario import PairSource

        index = self.index
        density = self.density if density is None else density
        typed_columns = f"--columns {self.columns}" if columns is None else f"columns={columns}"
        columns = self.columns if columns is None else columns
        pattern = config.sparsity.pattern if _own_sparsity(words, config) else None
        if pattern is None and index is None and density is None and columns is None:
            pattern = DENSE  # the default of mtrain train
        layers = self._layers(config)
        _check_index(index, pattern)
        settings = config.sparsity if pattern is not None else None
        if DENSE in (index, pattern):
            _refuse("has no effect on dense attention; leave it out", density, columns)
            return PairSource(DENSE, layers=layers)
        if settings is not None and settings.bitmap:
            raise ConfigError(
                f"sparsity={pattern}: there are no synthetic block lists; give --index FILE from "
                "a profile of such a run"
            )
        if pattern == FIXED:
            _refuse(
                "sparsity=fixed has its own keys: sparsity.density, sparsity.slashes and "
                "sparsity.columns",
                density,
                columns,
            )
            return PairSource(FIXED, layers=layers)
        fewest, most = 1, 0
        if isinstance(settings, VerticalSlashSettings):
            _refuse_slashes(words, density)
            fewest, most = settings.min_slashes, settings.max_slashes
            if columns is None:
                columns = max(COLUMNS, settings.min_columns)
                columns = min(columns, settings.max_columns or COLUMNS)
            elif settings.column_bound is not None and columns > settings.column_bound:
                raise ConfigError(
                    f"{typed_columns}: sparsity.max_columns={settings.column_bound} allows at most "
                    f"{settings.column_bound}; give fewer, or set sparsity.max_columns={columns}"
                )
        return PairSource(
            index or CLUSTERED,
            DENSITY if density is None else density,
            COLUMNS if columns is None else columns,
            layers,
            fewest,
            most,
        )

    def describe_pairs(self, pairs: str, extra: Sequence[str] = ()) -> str:
        """Return a line that says which pairs the prediction assumes, and how to change that.

        Args:
            pairs: name of the pairs' pattern.
            extra: settings of a sweep's point.
        """
        from mtrain_cli.composition.compose import compose

        if (file := self.recorded_file()) is not None:
            return f"recorded in {file} ({pairs})"
        if pairs == DENSE:
            line = "dense: all causal pairs, each sequence one document"
            if self.index is not None or _sparsity([*self.words, *extra]):
                return line
            return (
                f"{line}, the default of mtrain train; use sparsity=, --density or --index for "
                "fewer"
            )
        if pairs == FIXED:
            return "as drawn by sparsity=fixed, each sequence one document"
        trained = compose([*self.words, *extra]).sparsity.pattern
        purpose = f" for sparsity={trained}" if trained != DENSE else ""
        return (
            f"synthetic ({pairs}){purpose}, each sequence one document; use --index for those of "
            "a profile"
        )

    def _layers(self, config: Config) -> int:
        most = config.model.num_layers
        if self.layers is not None and self.layers > most:
            raise ConfigError(
                f"--layers {self.layers}: {config.model.name} has {most}; allowed: 1 to {most}"
            )
        return self.layers or 1

    def recorded_file(self) -> Path | None:
        """Return the index.npz that --index names, or None if it names no file."""
        if self.index is None or self.index in (DENSE, FIXED):
            return None
        from mtrain_cli.config.suggest import no_such
        from mtrain_cli.records.shipped_profiles import find_shipped, shipped_with
        from mtrain_cli.simulation.families import FAMILIES

        if self.index in FAMILIES:
            return None
        path = find_shipped(Path(self.index))
        candidates = (path, path / "index.npz", path / "profile" / "index.npz")
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            names = [DENSE, *FAMILIES, FIXED, *shipped_with("*/index.npz")]
            why = no_such("index", self.index, names, "a profile's folder or index.npz")
            raise ConfigError(f"--index {self.index}: {why}")
        return file

    def load_without_model(self) -> AttentionWorkload:
        """Load a profile's indices if no model is named.

        Raises:
            ConfigError: a setting would have no effect, since only the shape of attention is known.
        """
        for word in self.words:
            key = word.partition("=")[0]
            if key not in _OF_SHAPE and not key.startswith("model."):
                raise ConfigError(
                    f"{word}: --index {self.index} without model= gives only the shape of "
                    "attention; add model="
                )
        file = self.recorded_file()
        assert file is not None
        return self.load_recorded(file, self.words)

    def load_recorded(
        self,
        file: Path,
        words: Sequence[str],
        density: float | None = None,
        columns: int | None = None,
    ) -> AttentionWorkload:
        """Load a profile's indices.

        Args:
            density, columns: values of a sweep's point, which a recorded index does not allow.

        Raises:
            ConfigError: the file's shape or layers do not match the settings and options.
        """
        from mtrain_cli.records.index_file import load_indices
        from mtrain_cli.simulation.prediction import AttentionWorkload
        from mtrain_cli.simulation.what_if import index_of

        _refuse(
            f"--index {file} has its own pairs; give only one of the two",
            self.density if density is None else density,
            self.columns if columns is None else columns,
        )
        recorded = load_indices(file)
        setup = recorded.setup
        if words:
            _compare(words, file, setup)
        pattern = recorded.patterns[0]
        available = recorded.layers(pattern)
        if self.layers is not None and self.layers > len(available):
            raise ConfigError(
                f"--layers {self.layers}: {file} holds {len(available)} layers of {pattern}; "
                f"allowed: 1 to {len(available)}"
            )
        return AttentionWorkload(
            setup,
            recorded.masks,
            available[: self.layers or len(available)],
            lambda layer: index_of(recorded, pattern, layer),
            pattern,
            setup.columns.get(pattern, -1),
        )

    def per_node(self, workers: int) -> int | None:
        """Return the workers per real or virtual node if the settings give them, else None."""
        given = setting_of(self.words, "topology.gpus_per_node")
        if given in (None, "auto"):
            return None
        if not given.isdigit() or not int(given) or workers % int(given):
            divisors = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
            raise ConfigError(
                f"topology.gpus_per_node={given}: must divide the {workers} workers; "
                f"allowed: auto, {divisors}"
            )
        return int(given)

    def disturbances(self, workers: int | None = None) -> Disturbances:
        """Return slow ranks and jitter. workers: number of workers; None if unknown so far."""
        from mtrain_cli.simulation.timeline import Disturbances

        return Disturbances(slow=self.slow_ranks(workers), jitter=self.jitter)

    def slow_ranks(self, workers: int | None) -> dict[int, float]:
        """Return each slow rank's factor.

        Raises:
            ConfigError: a rank or a factor is out of range.
        """
        if not 0 <= self.jitter <= 2:
            raise ConfigError(f"--jitter {self.jitter:g}: must be between 0 and 2")
        ranks: dict[int, float] = {}
        for word in filter(None, (w.strip() for w in self.slow.split(","))):
            rank, _, factor = word.partition("=")
            try:
                ranks[int(rank)] = float(factor)
            except ValueError:
                raise ConfigError(f"--slow {word}: expected RANK=X, such as 3=1.5") from None
            if int(rank) < 0 or (workers is not None and int(rank) >= workers):
                allowed = f"0 to {workers - 1}" if workers is not None else "0 and above"
                raise ConfigError(f"--slow {word}: there is no rank {rank}; allowed: {allowed}")
            if not 0.1 <= ranks[int(rank)] <= 100:
                raise ConfigError(f"--slow {word}: the factor must be between 0.1 and 100")
        return ranks


def _refuse_axes(words: Sequence[str]) -> None:
    """Raise ConfigError for a word such as nodes=2, which only a sweep takes."""
    from mtrain_cli.simulation.sweep_axes import OWN

    for word in words:
        name, equals, values = word.partition("=")
        if equals and name in OWN:
            value = values.partition(",")[0] or "..."
            raise ConfigError(
                f"{word}: give --{name} {value}, or use `mtrain simulate sweep` for several values"
            )


def _check_workers(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("topology.workers=") and not word.endswith("=auto"):
            raise ConfigError(
                f"{word}: --workers, --nodes or workers= of a sweep set the number of GPUs; leave "
                "it out"
            )


def _check_index(index: str | None, pattern: str | None) -> None:
    """Raise ConfigError if a synthetic index contradicts the settings' pattern.

    pattern: None if the settings choose none.
    """
    if index is None:
        return
    if pattern is not None and (index == DENSE) != (pattern == DENSE):
        raise ConfigError(
            f"--index {index}: contradicts sparsity={pattern}; give only one of the two"
        )
    if index == FIXED and pattern != FIXED:
        raise ConfigError(
            "--index fixed: needs sparsity=fixed with its keys; give it, or leave --index out"
        )
    if pattern == FIXED != index:
        raise ConfigError(
            f"--index {index}: contradicts sparsity=fixed, which draws its own index; give only "
            "one of the two"
        )


def _refuse(reason: str, density: float | None, columns: int | None) -> None:
    """Raise ConfigError if a density or a number of columns is given."""
    for option, value in (("--density", density), ("--columns", columns)):
        if value is not None:
            raise ConfigError(f"{option} {value:g}: {reason}")


def _refuse_slashes(words: Sequence[str], density: float | None) -> None:
    keys = ("sparsity.min_slashes=", "sparsity.max_slashes=")
    typed = next((word for word in words if word.startswith(keys)), None)
    if density is not None and typed:
        raise ConfigError(f"--density {density:g}: contradicts {typed}; give only one of the two")


def _sparsity(words: Sequence[str]) -> bool:
    return any(word.startswith("sparsity=") for word in words)


def _own_sparsity(words: Sequence[str], config: Config) -> bool:
    """Return whether the settings, or a recipe among them, choose a pattern."""
    return _sparsity(words) or config.sparsity.pattern != DENSE


def _recorded_settings(
    problem: AttentionWorkload, words: Sequence[str], pattern: Sequence[str]
) -> list[str]:
    """Return the settings that a recording implies and the user did not type."""
    index = problem.index(problem.layers[0])
    typed = {word.partition("=")[0] for word in words}
    settings = [] if "sparsity" in typed else list(pattern)
    if settings and index is not None:
        settings.append(f"sparsity.block={index.block}")
    settings.append(f"topology.block_size={problem.made.block_size}")
    return [word for word in settings if word.partition("=")[0] not in typed]


def _compare(words: Sequence[str], file: Path, setup: Any) -> None:
    """Compare the settings with the shape that the file was recorded with.

    Raises:
        ConfigError: they differ.
    """
    from mtrain_cli.composition.compose import compose

    config = compose(list(words))
    shapes = {
        "seq": (config.seq, setup.seq),
        "model.num_heads": (config.model.num_heads, setup.heads),
        "model.num_kv_heads": (config.model.num_kv_heads, setup.kv_heads),
        "model.head_dim": (config.model.head_dim, setup.head_dim),
    }
    wrong = [
        f"{key}={ours}: --index {file} was recorded with {theirs}; leave it out"
        for key, (ours, theirs) in shapes.items()
        if ours != theirs
    ]
    if wrong:
        raise ConfigError(*wrong)


def parse_tokens(option: str, text: str | None) -> float | None:
    """Parse tokens to train on: 500m, 20b (10^9) or 1t (10^12); k = 1024 and m = 1024^2.

    Raises:
        ConfigError: not such a number.
    """
    from mtrain_cli.config.sizes import parse_size

    if text is None:
        return None
    try:
        if unit := _UNITS.get(text[-1:].lower()):
            parsed = float(text[:-1]) * unit
        else:
            parsed = float(text) if "e" in text.lower() else float(parse_size(text))
    except ValueError:
        parsed = float("nan")
    if not 1 <= parsed < 1e18:
        raise ConfigError(
            f"{option} {text}: expected a number of tokens such as 20b (b = 10^9, t = 10^12) or "
            "512m"
        )
    return parsed


def _parse_price(price: float | None, cluster: Cluster) -> float | None:
    """Return dollars per GPU and hour, by default those of the cluster; None if unknown."""
    if price is None:
        known = cluster.dollars_per_gpu_hour
        return None if known is None else known.value
    if not 0 <= price < 1e6:
        raise ConfigError(f"--price {price:g}: expected dollars per GPU and hour, at least 0")
    return price


@dataclass(frozen=True)
class SimulateJob:
    """What to predict, and where the results go.

    cluster_name, nodes: as typed; `cluster_with` makes the cluster with another number of nodes.
    workers: number of GPUs in total.
    tokens: tokens to train on, for days and dollars; None if not asked for.
    price: dollars per GPU and hour; None if unknown.
    out: folder for the files; None for a new one in measurements/.
    """

    request: SimulateRequest
    cluster: Cluster
    cluster_name: str
    nodes: int | None
    layouts: list[str]
    exchanges: list[str]
    workers: int
    tokens: float | None
    price: float | None
    out: Path | None
    files: bool
    as_json: bool
    started: float = field(default_factory=time.perf_counter)

    def cluster_with(self, nodes: int | None) -> Cluster:
        from mtrain_cli.simulation.cluster import load_cluster

        return load_cluster(self.cluster_name, nodes=self.nodes if nodes is None else nodes)

    def scenario(self) -> Scenario:
        scenario = self.request.scenario()
        self.request.disturbances(self.workers)
        return scenario

    def require_gpus(self, attention_only: bool, remedy: str) -> None:
        """Raise ConfigError if whole steps are to be predicted for CPUs."""
        gpu = self.cluster.gpu
        if gpu.is_cpu and not attention_only:
            raise ConfigError(
                f"--cluster {self.cluster_name}: {gpu.name} is a CPU, and steps are predicted for "
                f"GPUs only; {remedy}"
            )

    @contextmanager
    def errors_by_option(self, exchange: str) -> Iterator[None]:
        """Report impossible configurations under the option that asked for them."""
        from mtrain_cli.simulation.what_if import InvalidSetup

        try:
            yield
        except InvalidSetup as error:
            if error.about == "per_node":
                raise ConfigError(f"--cluster {self.cluster.name}: {error}") from None
            raise ConfigError(f"--{error.about} {error.value}: {error}") from None
        except ConfigError as error:
            key = f"topology.exchange={exchange}:"
            raise ConfigError(
                *(line.replace(key, f"--exchange {exchange}:") for line in error.problems)
            ) from None


def parse_job(
    typed: SimulateOptions, swept: Sequence[str] = (), *, every_exchange: bool = False
) -> SimulateJob:
    """Parse options, and load the cluster.

    Args:
        typed: options and settings.
        swept: words of a sweep, such as nodes=1,2.
        every_exchange: whether to compare all exchanges by default.

    Raises:
        ConfigError: an option is wrong.
    """
    from mtrain_cli.simulation.cluster import load_cluster

    words, name = _split_cluster(typed.overrides or [], typed.cluster)
    _refuse_axes(words)
    layout = _compared("layout", typed.layout, words)
    exchange = _compared("exchange", typed.exchange, words)
    usual = [e for e in EXCHANGES if e != "auto"] if every_exchange else _EXCHANGES.split(",")
    layouts = parse_names("--layout", DEFAULT_LAYOUTS if layout is None else layout, LAYOUTS)
    exchanges = usual if exchange is None else parse_names("--exchange", exchange, EXCHANGES)
    if len(parse_names("--kernel", typed.kernel, KERNELS)) > 1:
        raise ConfigError(f"--kernel {typed.kernel}: give one of {', '.join(KERNELS)}")
    tokens = parse_tokens("--tokens", typed.tokens)
    request = SimulateRequest(
        tuple(words),
        typed.index,
        parse_share_option("--density", typed.density),
        typed.columns,
        typed.layers,
        typed.kernel,
        typed.calibration,
        typed.slow,
        typed.jitter,
    )
    cluster = load_cluster(name, nodes=typed.nodes)
    price = _parse_price(typed.price, cluster)
    several = cluster.nodes > 1 or any(
        "nodes=" in word or "gpus_per_node=" in word for word in (*words, *swept)
    )
    if exchange is None and not several:
        # Within a node, hierarchical exchanges equal the plain ones.
        exchanges = [name for name in exchanges if flat_name(name) == name]
    workers = _parse_workers(cluster, typed.workers, request)
    warn_of_unused_settings(words)
    if cluster.gpu.is_cpu and not request.without_a_model and not request.sets("topology.device"):
        # CPU workers compute in another dtype and with other kernels.
        request = replace(request, words=(*words, "topology.device=cpu"))
    return SimulateJob(
        request,
        cluster,
        name,
        typed.nodes,
        layouts,
        exchanges,
        workers,
        tokens,
        price,
        typed.out,
        typed.files,
        typed.as_json,
    )


def _split_cluster(words: Sequence[str], option: str | None) -> tuple[list[str], str]:
    """Split ``cluster=NAME``, which mtrain train does not take, from the settings.

    Raises:
        ConfigError: two different clusters are given.
    """
    named = [word.partition("=")[2] for word in words if word.startswith("cluster=")]
    if len({*named, *([] if option is None else [option])}) > 1:
        raise ConfigError(
            f"cluster={named[-1]}: {'--cluster ' + option if option else 'cluster=' + named[0]} "
            "names another; give one of them"
        )
    settings = [word for word in words if not word.startswith("cluster=")]
    return settings, option or (named[0] if named else DEFAULT_CLUSTER)


def _compared(key: str, option: str | None, overrides: Sequence[str]) -> str | None:
    """Return what to compare: an option's value, or the equivalent setting.

    Raises:
        ConfigError: both are given.
    """
    setting = setting_of(overrides, f"topology.{key}")
    if setting in (None, "auto"):
        return option
    if option is not None:
        raise ConfigError(
            f"topology.{key}={setting}: --{key} {option} compares it already; give only one of "
            "the two"
        )
    return setting


def _parse_workers(cluster: Cluster, workers: int | None, request: SimulateRequest) -> int:
    """Return the number of workers.

    Raises:
        ConfigError: the cluster has fewer GPUs, or one of its nodes would be only partly used.
    """
    from mtrain_cli.simulation.cluster import uneven_nodes

    count = cluster.gpus if workers is None else workers
    most = min(cluster.gpus, _MOST_WORKERS)
    if not 1 <= count <= most:
        more = ""
        if count > most and cluster.outer is None:
            more = " on its one node; a100_4x8 and others have several"
        elif most < count <= _MOST_WORKERS:
            more = f", or more with --nodes {-(-count // cluster.gpus_per_node)}"
        raise ConfigError(
            f"--workers {count}: {cluster.name} has {cluster.gpus} GPUs; allowed: 1 to {most}{more}"
        )
    virtual = request.sets("topology.gpus_per_node")
    if not virtual and (why := uneven_nodes(cluster, count)):
        raise ConfigError(f"--workers {count}: {why}")
    return count


def setting_of(words: Sequence[str], key: str) -> str | None:
    """Return the value of the first ``key=value`` among the words, or None."""
    return next((w.partition("=")[2] for w in words if w.startswith(f"{key}=")), None)
