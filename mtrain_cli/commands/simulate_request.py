"""What `mtrain simulate` predicts: a training run and the pairs that it computes."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.mask_settings import FULL_LAYERS, mask_problems
from mtrain_cli.config.pattern_settings import PatternSettings
from mtrain_cli.config.schema import Config, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.simulation.scenario import PairSource, Scenario
    from mtrain_cli.simulation.timeline import Disturbances
    from mtrain_cli.simulation.workload import AttentionWorkload

DENSE, FIXED = "dense", "fixed"
_OF_SHAPE = ("seq", "topology.gpus_per_node")  # settings that need no model


@dataclass(frozen=True)
class SimulateRequest:
    """The settings and options as typed. None: the option was not given.

    words: settings, such as model=qwen3b.
    slow: RANK=X,..., the factors by which computation on these ranks takes longer.
    expert_loads: zipf:X, or a run whose loads to take.
    swept: which of density and columns come from a sweep instead of an option.
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
    cluster: str = ""
    swept: tuple[str, ...] = ()
    expert_loads: str | None = None

    def scenario(
        self, extra: Sequence[str] = (), density: float | None = None, columns: int | None = None
    ) -> Scenario:
        """Compose the training run to predict.

        Args:
            extra: settings of one point of a sweep, added to the typed settings.
            density, columns: values of one point of a sweep, which replace the typed values.

        Raises:
            ConfigError: a setting or an option is wrong.
        """
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.router_loads import parse_loads
        from mtrain_cli.simulation.scenario import Scenario, pattern_words

        point = {"density": density, "columns": columns}
        given: dict[str, Any] = {name: value for name, value in point.items() if value is not None}
        if given:
            return replace(self, **given, swept=tuple(given)).scenario(extra)
        words = [*self.words, *extra]
        if file := self.recorded_file():
            problem = self.load_recorded(file, words)
            more = _recorded_settings(problem, words, pattern_words(problem.pattern))
            config = self.compose([*words, *more])
            if len(problem.masks) != config.train.micro_batch:
                raise ConfigError(
                    f"train.micro_batch={config.train.micro_batch}: --index {file} holds "
                    f"{len(problem.masks)} sequences"
                )
            made = replace(problem.made, chunk=config.topology.chunk)
            problem = _with_dense_layers(replace(problem, made=made), config, file)
            if problem.layers[-1] >= config.model.num_layers:
                raise ConfigError(
                    f"model.num_layers={config.model.num_layers}: --index {file} holds layer "
                    f"{problem.layers[-1]}, so it is from another model"
                )
        else:
            config = self.compose(words)
            pairs = self.pair_source(words, config)
            more = [] if _own_sparsity(words, config) else pairs.sparsity()
            config = self.compose([*words, *more]) if more else config
            problem = pairs.problem(config)
        return Scenario(
            config,
            problem,
            self.typed_kernel,
            load_user_calibration(self.calibration),
            self.disturbances(),
            (*words, *more),
            parse_loads(self.expert_loads, config.model),
        )

    @property
    def typed_kernel(self) -> str | None:
        return None if self.kernel == "auto" else self.kernel

    @property
    def without_a_model(self) -> bool:
        """Whether the user gave a recorded index but no model.

        The index gives the shape of the attention, and nothing about the rest of a layer.
        """
        return self.recorded_file() is not None and not self.sets("model")

    def sets(self, key: str) -> bool:
        """Return whether the user typed a setting for this key."""
        return setting_of(self.words, key) is not None

    def check(self, workers: int) -> None:
        """Check settings and slow ranks, before slow imports.

        Raises:
            ConfigError: a setting or a slow rank is wrong.
        """
        self._check_mask(self.compose(self.words))
        self.slow_ranks(workers)

    def compose(self, words: Sequence[str]) -> Config:
        """Compose settings. The cluster replaces the numbers of GPUs that ``topology=`` sets.

        ``topology.cluster`` of the result names the cluster, so that choices of layout, exchange
        and stages compare times on the cluster of the prediction.

        Raises:
            ConfigError: a setting is wrong, or describes another cluster.
        """
        from mtrain_cli.composition.compose import compose

        for word in words:
            key, _, value = word.partition("=")
            if key == "topology.workers" and value != "auto":
                raise ConfigError(
                    f"{word}: give --workers {value} instead, or several numbers with `mtrain "
                    "simulate sweep workers=2,4,8`"
                )
        config = compose(["topology.workers=auto", "topology.gpus_per_node=auto", *words])
        named = config.topology.cluster  # a file has its absolute path
        if named not in ("auto", self.cluster, str(Path(self.cluster).expanduser().absolute())):
            raise ConfigError(
                f"topology.cluster={named}: this command predicts for {self.cluster}; start a "
                "command for each cluster"
            )
        return config.changed(topology={"cluster": self.cluster}) if self.cluster else config

    def context_parallel(self, config: Config) -> int | None:
        """Return ``topology.context_parallel``, or None for auto."""
        given = config.topology.context_parallel
        return given if isinstance(given, int) else None

    def pair_source(self, words: Sequence[str], config: Config) -> PairSource:
        """Return how to draw the pairs: by the family of --index, else by the sparsity settings.

        With neither, --density or --columns choose the default family.


        Raises:
            ConfigError: options and settings contradict each other.
        """
        from mtrain_cli.simulation.scenario import PairSource

        self._check_mask(config)
        index, density, columns = self.index, self.density, self.columns
        pattern = config.sparsity.pattern if _own_sparsity(words, config) else None
        if pattern is None and index is None and density is None and columns is None:
            pattern = DENSE  # the default of mtrain train
        layers = self._layers(config)
        _check_index(index, pattern)
        if DENSE in (index, pattern):
            self._refuse("has no effect on dense attention; leave it out")
            return PairSource(DENSE, layers=layers)
        if pattern == FIXED:
            self._refuse(
                "sparsity=fixed has its own keys: sparsity.density, sparsity.slashes and "
                "sparsity.columns"
            )
        source = PairSource.of(
            config if pattern is not None else None, layers, index, density, columns
        )
        if pattern not in (None, FIXED):
            self._check_pairs(config, words, source)
        return source

    def _check_pairs(self, config: Config, words: Sequence[str], source: PairSource) -> None:
        """Raise ConfigError if an option is beyond the bounds of the pattern."""
        settings, density = config.sparsity, self.density
        limits = ("sparsity.min_slashes=", "sparsity.max_slashes=")
        if limit := next((word for word in words if word.startswith(limits)), None):
            self._refuse(f"contradicts {limit}; give only one of the two", "density")
        self._check_columns(settings)
        if (known := settings.known_density(config.seq)) is not None:
            self._refuse(
                f"sparsity={settings.pattern} always computes {known * 100:.3g}% of the pairs; "
                "leave it out",
                "density",
            )
        if density is not None and density > (covered := source.most_covered(config)):
            self._refuse(
                f"sparsity={settings.pattern} chooses at most {source.most} slashes per head, "
                f"which cover at most {covered * 100:.3g}% of the blocks; give at most that",
                "density",
            )

    def _check_columns(self, settings: PatternSettings) -> None:
        bound = settings.column_bound
        if self.columns is None or bound is None or self.columns <= bound:
            return
        if "max_columns" in settings.own_keys():
            raise ConfigError(
                f"{self._typed('columns')}: sparsity.max_columns={bound} allows at most {bound}; "
                f"give fewer, or set sparsity.max_columns={self.columns}"
            )
        raise ConfigError(
            f"{self._typed('columns')}: sparsity={settings.pattern} allows at most {bound} per "
            "head; give fewer"
        )

    def _check_mask(self, config: Config) -> None:
        mixed = next((name for name in FULL_LAYERS if getattr(config.mask, name)), None)
        if self.layers is not None and mixed is not None:
            raise ConfigError(
                f"--layers {self.layers}: with mask.{mixed}={getattr(config.mask, mixed)}, all "
                f"{config.model.num_layers} layers are predicted; leave --layers out"
            )
        given = {
            "index": None if self.index == DENSE else self.index,
            "density": self.density,
            "columns": self.columns,
        }
        name = next((name for name, value in given.items() if value is not None), None)
        if name is None or config.sparsity.pattern != DENSE:
            return
        typed = f"--index {self.index}" if name == "index" else self._typed(name)
        lines = [
            line.replace("sparsity.pattern=index", typed).replace(
                "sparsity=dense", f"leave {typed.partition('=')[0].partition(' ')[0]} out"
            )
            for line in mask_problems(config.mask, config.seq, "index")
        ]
        if lines:
            raise ConfigError(*lines)

    def describe_pairs(self, pairs: str, swept: Sequence[str] | None = None) -> str:
        """Describe in a line which pairs the prediction assumes, and how to change them.

        Args:
            pairs: name of the pattern of the pairs.
            swept: settings of one point of a sweep. The line leaves out the density, which the
                table of the sweep shows. None without a sweep.
        """
        if (file := self.recorded_file()) is not None:
            return f"recorded in {file} ({pairs})"
        words = [*self.words, *(swept or ())]
        if pairs == DENSE:
            config = self.compose(words)
            line = f"dense: all {_allowed(config)}"
            if config.data.mask_key is not None:
                return line  # sparse patterns refuse such data
            if self.index is not None or _sparsity(words):
                return line
            return (
                f"{line}, the default of mtrain train; use sparsity=, --density or --index for "
                "fewer"
            )
        if pairs == FIXED:
            return "as drawn by sparsity=fixed, each sequence one document"
        config = self.compose(words)
        purpose, parts = "", ""
        if config.sparsity.pattern != DENSE:
            purpose = f" for sparsity={config.sparsity.pattern}"
        if swept is None:
            parts = f": {self.pair_source(words, config).describe(config)}"
        return (
            f"synthetic ({pairs}){purpose}{parts}, each sequence one document; use --index for "
            "the pairs of a profile"
        )

    def _layers(self, config: Config) -> int:
        dense = config.sparsity.dense_layers or 0
        most = config.model.num_layers - dense
        if self.layers is not None and self.layers > most:
            kind = f" sparse ones with sparsity.dense_layers={dense}" if dense else ""
            raise ConfigError(
                f"--layers {self.layers}: {config.model.name} has {most}{kind}; "
                f"allowed: 1 to {most}"
            )
        return self.layers or 1

    def recorded_file(self) -> Path | None:
        """Return the index.npz that --index gives, or None for dense or a synthetic index."""
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
        if not zipfile.is_zipfile(file):  # `load_indices` would refuse it after slow imports
            raise ConfigError(f"{file}: not an index file of mtrain, or damaged")
        return file

    def load_without_model(self) -> AttentionWorkload:
        """Load the recorded indices, without a model.

        Raises:
            ConfigError: a setting has no effect, since only the shape of attention is known.
        """
        for word in self.words:
            key = word.partition("=")[0]
            if key not in _OF_SHAPE and not key.startswith("model."):
                raise ConfigError(
                    f"{word}: has no effect without model=, because --index {self.index} gives "
                    "only the shape of attention; add model=NAME"
                )
        file = self.recorded_file()
        assert file is not None
        problem = self.load_recorded(file, self.words)
        full = problem.full
        return problem if full is None else problem.with_dense(full.layers, full.of)

    def load_recorded(self, file: Path, words: Sequence[str]) -> AttentionWorkload:
        """Load recorded indices.

        Args:
            file: an index.npz.
            words: settings to compare with the shape in the file.

        Raises:
            ConfigError: the shape or the layers of the file contradict the settings and options.
        """
        from mtrain_cli.records.index_file import load_indices
        from mtrain_cli.simulation.what_if import index_of
        from mtrain_cli.simulation.workload import AttentionWorkload

        self._refuse(f"--index {file} has its own pairs; give only one of the two")
        recorded = load_indices(file)
        setup = recorded.setup
        if words:
            _compare(self.compose(words), file, setup)
        pattern = recorded.patterns[0]
        available, dense = recorded.layers(pattern), None
        if recorded.full is not None and pattern != DENSE:
            dense = recorded.full
            available = tuple(layer for layer in available if layer not in dense.layers)
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
            full=dense,
        )

    def _typed(self, name: str) -> str:
        value = getattr(self, name)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{name}={text}" if name in self.swept else f"--{name} {text}"

    def _refuse(self, reason: str, *names: str) -> None:
        """Raise ConfigError if an option in ``names`` is given. Default: density and columns."""
        for name in names or ("density", "columns"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{self._typed(name)}: {reason}")

    def per_node(self, workers: int) -> int | None:
        """Return ``topology.gpus_per_node``, or None for auto.

        Raises:
            ConfigError: the number does not divide the workers.
        """
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
        """Return the slow ranks and the jitter. workers: number of workers, None if unknown."""
        from mtrain_cli.simulation.timeline import Disturbances

        return Disturbances(slow=self.slow_ranks(workers), jitter=self.jitter)

    def slow_ranks(self, workers: int | None) -> dict[int, float]:
        """Return the factor of each slow rank.

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


def _allowed(config: Config) -> str:
    from mtrain_cli.training.first_masks import first_masks

    read = first_masks(config)
    if read is not None and read.masks:
        return "pairs of a micro-batch of the data, with the median number of pairs"
    kind = config.mask.kind
    pairs = "causal pairs" if kind == "causal" else f"pairs of {config.mask.describe()}"
    return f"{pairs}, each sequence one document"


def _check_index(index: str | None, pattern: str | None) -> None:
    """Raise ConfigError if a synthetic index contradicts the settings' pattern."""
    if index is None:
        return
    if pattern is not None and (index == DENSE) != (pattern == DENSE):
        raise ConfigError(
            f"--index {index}: contradicts sparsity={pattern}; give only one of the two"
        )
    if index == FIXED and pattern != FIXED:
        raise ConfigError(
            "--index fixed: only with sparsity=fixed; add sparsity=fixed, or leave --index out"
        )
    if pattern == FIXED != index:
        raise ConfigError(
            f"--index {index}: contradicts sparsity=fixed, which draws its own index; give only "
            "one of the two"
        )


def _sparsity(words: Sequence[str]) -> bool:
    return any(word.startswith("sparsity=") for word in words)


def _own_sparsity(words: Sequence[str], config: Config) -> bool:
    return _sparsity(words) or config.sparsity.pattern != DENSE


def _recorded_settings(
    problem: AttentionWorkload, words: Sequence[str], pattern: Sequence[str]
) -> list[str]:
    """Return the settings that follow from a recording, except settings that the user typed."""
    index = problem.index(problem.layers[0])
    typed = {word.partition("=")[0] for word in words}
    settings = [] if "sparsity" in typed else list(pattern)
    if settings and index is not None:
        settings.append(f"sparsity.block={index.block}")
        if problem.full is not None:
            settings.append(f"sparsity.dense_layers={len(problem.full.layers)}")
    settings.append(f"topology.block_size={problem.made.block_size}")
    return [word for word in settings if word.partition("=")[0] not in typed]


def _with_dense_layers(problem: AttentionWorkload, config: Config, file: Path) -> AttentionWorkload:
    """Return recorded attention with the dense layers of the settings."""
    given = config.sparsity.dense_layers or 0
    recorded = 0 if problem.full is None else len(problem.full.layers)
    if given < recorded:
        raise ConfigError(
            f"sparsity.dense_layers={given}: --index {file} was recorded with {recorded} dense "
            f"layers; give at least {recorded}"
        )
    dense = config.sparsity.dense_of(config.model.num_layers)
    if dense.issuperset(problem.layers):
        raise ConfigError(
            f"sparsity.dense_layers={given}: --index {file} has an index of these layers only; "
            "give fewer"
        )
    return problem.with_dense(dense, config.model.num_layers)


def _compare(config: Config, file: Path, setup: Any) -> None:
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


def setting_of(words: Sequence[str], key: str) -> str | None:
    """Return the value of the first ``key=value`` among the words, or None."""
    return next((w.partition("=")[2] for w in words if w.startswith(f"{key}=")), None)
