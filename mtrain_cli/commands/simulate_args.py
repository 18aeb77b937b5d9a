"""The request of `mtrain simulate`: turn settings and options into a training and its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.schema import Config, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.simulation.prediction import AttentionWorkload
    from mtrain_cli.simulation.scenario import PairSource, Scenario
    from mtrain_cli.simulation.timeline import Disturbances

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
    columns: per head.
    layers: number of layers with an index of their own.
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
        """Compose the training to predict.

        Args:
            extra, density, columns: values of a sweep's point, which replace the typed ones.

        Raises:
            ConfigError: a setting or an option is wrong.
        """
        from mtrain_cli.config.compose import compose
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.scenario import Scenario, pattern_words

        words = [*self.words, *extra]
        for word in words:
            _check_workers(word)
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
            config, problem, None if self.kernel == "auto" else self.kernel,
            load_user_calibration(self.calibration),
            self.disturbances(), (*words, *more),
        )  # fmt: skip

    def check(self, workers: int) -> None:
        """Check settings and slow ranks before anything heavy is imported.

        Raises:
            ConfigError: one of them is wrong.
        """
        from mtrain_cli.config.compose import compose

        for word in self.words:
            _check_workers(word)
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
        from mtrain_cli.simulation.families import FAMILIES
        from mtrain_cli.simulation.scenario import PairSource

        density = self.density if density is None else density
        columns = self.columns if columns is None else columns
        pattern = config.sparsity.pattern if _own_sparsity(words, config) else None
        if pattern is None and self.index is None and density is None and columns is None:
            pattern = DENSE  # a training's default
        layers = self._layers(config)
        if (
            self.index is not None
            and pattern is not None
            and (self.index == DENSE) != (pattern == DENSE)
        ):
            raise ConfigError(
                f"--index {self.index}: contradicts sparsity={pattern}; leave one of them out"
            )
        if self.index == FIXED and pattern != FIXED:
            raise ConfigError(
                "--index fixed: needs sparsity=fixed with its keys; give it, or leave --index out"
            )
        if self.index == DENSE or (self.index is None and pattern == DENSE):
            for option, value in (("--density", density), ("--columns", columns)):
                if value is not None:
                    raise ConfigError(
                        f"{option} {value:g}: has no effect on dense attention; leave it out"
                    )
            return PairSource(DENSE, layers=layers)
        if pattern in ("moba", "xattention"):
            raise ConfigError(
                f"sparsity={pattern}: there are no synthetic block lists; give --index FILE from "
                "a profile of such a training"
            )
        if pattern == FIXED and self.index in (None, FIXED):
            for option, value in (("--density", density), ("--columns", columns)):
                if value is not None:
                    raise ConfigError(
                        f"{option} {value:g}: sparsity=fixed has its own keys: sparsity.density, "
                        "sparsity.slashes and sparsity.columns"
                    )
            return PairSource(FIXED, layers=layers)
        if pattern == FIXED and self.index in FAMILIES:
            raise ConfigError(
                f"--index {self.index}: contradicts sparsity=fixed, which draws its own index; "
                "leave one of them out"
            )
        if columns is None:
            columns = COLUMNS
            if pattern == "vertical_slash":
                fewest, most = (
                    config.sparsity.min_columns or 0,
                    config.sparsity.max_columns or columns,
                )
                columns = min(max(columns, fewest), most)
        index, fewest, most = self.index or CLUSTERED, 1, 0
        if pattern == "vertical_slash":
            fewest, most = config.sparsity.min_slashes or 1, config.sparsity.max_slashes or 0
            typed = next(
                (
                    word
                    for word in words
                    if word.startswith(("sparsity.min_slashes=", "sparsity.max_slashes="))
                ),
                None,
            )
            if density is not None and typed:
                raise ConfigError(
                    f"--density {density:g}: contradicts {typed}; leave one of them out"
                )
        return PairSource(
            index, DENSITY if density is None else density, columns, layers, fewest, most
        )

    def describe_pairs(self, pairs: str, extra: Sequence[str] = ()) -> str:
        """Return a line that says which pairs the prediction assumes, and how to change that.

        Args:
            pairs: name of the pairs' pattern.
            extra: settings of a sweep's point.
        """
        from mtrain_cli.config.compose import compose

        if (file := self.recorded_file()) is not None:
            return f"recorded in {file} ({pairs})"
        if pairs == DENSE:
            default = self.index is None and not _sparsity([*self.words, *extra])
            why = (
                ", the default of mtrain train; use sparsity=, --density or --index for fewer"
                if default
                else ""
            )
            return f"dense: all causal pairs, each sequence one document{why}"
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
        from mtrain_cli.simulation.families import FAMILIES

        if self.index in FAMILIES:
            return None
        path = Path(self.index).expanduser()
        candidates = (path, path / "index.npz", path / "profile" / "index.npz")
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            allowed = ", ".join((DENSE, *FAMILIES, FIXED))
            raise ConfigError(
                f"--index {self.index}: is neither a file nor a folder with index.npz; "
                f"also allowed: {allowed}"
            )
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

        for option, value in (
            ("--density", density),
            ("--density", self.density),
            ("--columns", columns),
            ("--columns", self.columns),
        ):
            if value is not None:
                raise ConfigError(
                    f"{option} {value:g}: --index {file} has its own pairs; leave one of them out"
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
        given = next(
            (
                word.partition("=")[2]
                for word in self.words
                if word.startswith("topology.gpus_per_node=")
            ),
            "auto",
        )
        if given == "auto":
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


def _check_workers(word: str) -> None:
    if word.startswith("topology.workers=") and not word.endswith("=auto"):
        raise ConfigError(
            f"{word}: --workers, --nodes or --sweep workers= set the number of GPUs; leave it out"
        )


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
    from mtrain_cli.config.compose import compose

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
        unit = _UNITS.get(text[-1:].lower())
        parsed = (
            float(text[:-1]) * unit
            if unit
            else float(text)
            if "e" in text.lower()
            else float(parse_size(text))
        )
    except ValueError:
        parsed = float("nan")
    if not 1 <= parsed < 1e18:
        raise ConfigError(
            f"{option} {text}: expected a number of tokens such as 20b (b = 10^9, t = 10^12) or "
            "512m"
        )
    return parsed


def check_price(option: str, value: float | None) -> float | None:
    """Return a price in dollars per GPU and hour. Raise ConfigError if it is out of range."""
    if value is not None and not 0 <= value < 1e6:
        raise ConfigError(f"{option} {value:g}: expected dollars per GPU and hour, at least 0")
    return value
