"""What `mtrain simulate` was asked for: settings and options -> which training computes which pairs."""

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
    """Options as they were typed; None where one was not."""

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
        """extra, density, columns: of a point of a sweep, instead of those that were typed.

        Raises:
            ConfigError: a setting or an option is wrong.
        """
        from mtrain_cli.config.compose import compose
        from mtrain_cli.simulation.calibration import load_user_calibration
        from mtrain_cli.simulation.scenario import Scenario, pattern_words

        words = [*self.words, *extra]
        for word in words:
            _check_workers(word)
        if recorded := self.file(words):
            problem = self.recorded(recorded, words, density, columns)
            more = _as_recorded(problem, words, pattern_words(problem.pattern))
            config = compose([*words, *more])
            if len(problem.masks) != config.train.micro_batch:
                raise ConfigError(
                    f"train.micro_batch={config.train.micro_batch}: --index {recorded} holds {len(problem.masks)} sequences"
                )
            if problem.layers[-1] >= config.model.num_layers:
                raise ConfigError(
                    f"model.num_layers={config.model.num_layers}: --index {recorded} holds layer {problem.layers[-1]}; is of another model"
                )
        else:
            config = compose(words)
            pairs = self.pairs(words, config, density, columns)
            more = [] if _own_sparsity(words, config) else pairs.sparsity()
            config = compose([*words, *more]) if more else config
            problem = pairs.problem(config)
        return Scenario(
            config, problem, None if self.kernel == "auto" else self.kernel,
            load_user_calibration(self.calibration),
            self.conditions(), (*words, *more),
        )  # fmt: skip

    def check(self, workers: int) -> None:
        """Raises ConfigError where settings or slow ranks are wrong in themselves: at once, before anything heavy is imported."""
        from mtrain_cli.config.compose import compose

        for word in self.words:
            _check_workers(word)
        compose(list(self.words))
        self.slow_ranks(workers)

    def context(self, config: Config) -> int | None:
        given = config.topology.context_parallel
        return given if isinstance(given, int) else None

    def pairs(
        self,
        words: Sequence[str],
        config: Config,
        density: float | None = None,
        columns: int | None = None,
    ) -> PairSource:
        """Of a name, or of the sparsity that the settings ask for, which is dense by default; --density and --columns ask for a family."""
        from mtrain_cli.simulation.families import FAMILIES
        from mtrain_cli.simulation.scenario import PairSource

        density = self.density if density is None else density
        columns = self.columns if columns is None else columns
        pattern = config.sparsity.pattern if _own_sparsity(words, config) else None
        if pattern is None and self.index is None and density is None and columns is None:
            pattern = DENSE  # the default of a training
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
                "--index fixed: is that of sparsity=fixed; give it, with its keys, or leave --index out"
            )
        if self.index == DENSE or (self.index is None and pattern == DENSE):
            for option, value in (("--density", density), ("--columns", columns)):
                if value is not None:
                    raise ConfigError(
                        f"{option} {value:g}: dense attention leaves no pair out; leave it out"
                    )
            return PairSource(DENSE, layers=layers)
        if pattern in ("moba", "xattention"):
            raise ConfigError(
                f"sparsity={pattern}: there are no synthetic lists of blocks; give --index FILE of a profile of such a training"
            )
        if pattern == FIXED and self.index in (None, FIXED):
            for option, value in (("--density", density), ("--columns", columns)):
                if value is not None:
                    raise ConfigError(
                        f"{option} {value:g}: sparsity=fixed says it itself, as sparsity.density, sparsity.slashes and sparsity.columns"
                    )
            return PairSource(FIXED, layers=layers)
        if pattern == FIXED and self.index in FAMILIES:
            raise ConfigError(
                f"--index {self.index}: contradicts sparsity=fixed, which draws its own lines; leave one of them out"
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

    def assumed(self, pairs: str, extra: Sequence[str] = ()) -> str:
        """One line: which pairs a prediction takes to be computed, and what would change that. pairs: what they are called. extra: settings
        of a point of a sweep.
        """
        from mtrain_cli.config.compose import compose

        if (recorded := self.file(self.words)) is not None:
            return f"recorded in {recorded} ({pairs})"
        if pairs == DENSE:
            default = self.index is None and not _sparsity([*self.words, *extra])
            why = (
                ", the default of mtrain train; sparsity=, --density or --index ask for fewer"
                if default
                else ""
            )
            return f"dense: all causal pairs, each sequence one document{why}"
        if pairs == FIXED:
            return "as sparsity=fixed draws them, each sequence one document"
        asked = compose([*self.words, *extra]).sparsity.pattern
        of = f" for sparsity={asked}" if asked != DENSE else ""
        return (
            f"synthetic ({pairs}){of}, each sequence one document; --index takes those of a profile"
        )

    def _layers(self, config: Config) -> int:
        most = config.model.num_layers
        if self.layers is not None and self.layers > most:
            raise ConfigError(
                f"--layers {self.layers}: {config.model.name} has {most}; allowed: 1 to {most}"
            )
        return self.layers or 1

    def file(self, words: Sequence[str]) -> Path | None:  # noqa: ARG002
        """index.npz, where that is what --index names."""
        if self.index is None or self.index in (DENSE, FIXED):
            return None
        from mtrain_cli.simulation.families import FAMILIES

        if self.index in FAMILIES:
            return None
        path = Path(self.index).expanduser()
        candidates = (path, path / "index.npz", path / "profile" / "index.npz")
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        if found is None:
            allowed = ", ".join((DENSE, *FAMILIES, FIXED))
            raise ConfigError(
                f"--index {self.index}: is neither a file nor a folder with index.npz; allowed besides: {allowed}"
            )
        return found

    def shape_alone(self) -> AttentionWorkload:
        """The indices of a profile, where no model was named.

        Raises:
            ConfigError: a setting says what the shape of attention does not, and would be ignored.
        """
        for word in self.words:
            key = word.partition("=")[0]
            if key not in _OF_SHAPE and not key.startswith("model."):
                raise ConfigError(
                    f"{word}: --index {self.index} without model= says the shape of attention alone; give model=, too"
                )
        file = self.file(self.words)
        assert file is not None
        return self.recorded(file, self.words)

    def recorded(
        self,
        file: Path,
        words: Sequence[str],
        density: float | None = None,
        columns: int | None = None,
    ) -> AttentionWorkload:
        """The indices of a profile. density, columns: of a point of a sweep, which such indices have not."""
        from mtrain_cli.profiling.index_file import load_indices
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
                    f"{option} {value:g}: --index {file} has pairs of its own; leave one of them out"
                )
        recorded = load_indices(file)
        made = recorded.setup
        if words:
            _compare(words, file, made)
        pattern = recorded.patterns[0]
        there = recorded.layers(pattern)
        if self.layers is not None and self.layers > len(there):
            raise ConfigError(
                f"--layers {self.layers}: {file} holds {len(there)} layers of {pattern}; allowed: 1 to {len(there)}"
            )
        return AttentionWorkload(
            made, recorded.masks, there[: self.layers or len(there)], lambda layer: index_of(recorded, pattern, layer), pattern,
            made.columns.get(pattern, -1),
        )  # fmt: skip

    def per_node(self, workers: int) -> int | None:
        """Workers of a node, real or virtual, where the settings say it."""
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
                f"topology.gpus_per_node={given}: must divide the {workers} workers; possible are auto, {divisors}"
            )
        return int(given)

    def conditions(self, workers: int | None = None) -> Disturbances:
        """workers: in all; None where that is not known yet."""
        from mtrain_cli.simulation.timeline import Disturbances

        return Disturbances(slow=self.slow_ranks(workers), jitter=self.jitter)

    def slow_ranks(self, workers: int | None) -> dict[int, float]:
        """As `conditions`: how many times as long each computes. Raises ConfigError where these cannot be."""
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
                raise ConfigError(f"--slow {word}: a rank may take 0.1 to 100 times as long")
        return ranks


def _check_workers(word: str) -> None:
    if word.startswith("topology.workers=") and not word.endswith("=auto"):
        raise ConfigError(
            f"{word}: how many GPUs there are is what --workers, --nodes or --sweep workers= say; leave it out"
        )


def _sparsity(words: Sequence[str]) -> bool:
    return any(word.startswith("sparsity=") for word in words)


def _own_sparsity(words: Sequence[str], config: Config) -> bool:
    """Whether the settings, such as a recipe, say which pairs are computed."""
    return _sparsity(words) or config.sparsity.pattern != DENSE


def _as_recorded(
    problem: AttentionWorkload, words: Sequence[str], pattern: Sequence[str]
) -> list[str]:
    """Settings that a recording says, where nothing else was typed. pattern: of its name."""
    index = problem.index(problem.layers[0])
    typed = {word.partition("=")[0] for word in words}
    found = [] if "sparsity" in typed else list(pattern)
    if found and index is not None:
        found.append(f"sparsity.block={index.block}")
    found.append(f"topology.block_size={problem.made.block_size}")
    return [word for word in found if word.partition("=")[0] not in typed]


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
    wrong = [
        f"{key}={mine}: --index {file} was recorded with {its}; leave it out"
        for key, (mine, its) in said.items()
        if mine != its
    ]
    if wrong:
        raise ConfigError(*wrong)


def count(option: str, text: str | None) -> float | None:
    """Tokens of a training: 500m, 20b (10^9) or 1t (10^12); k and m as everywhere, 1024 and 1024^2.

    Raises:
        ConfigError: it is no such number.
    """
    from mtrain_cli.config.sizes import parse_size

    if text is None:
        return None
    try:
        unit = _UNITS.get(text[-1:].lower())
        found = (
            float(text[:-1]) * unit
            if unit
            else float(text)
            if "e" in text.lower()
            else float(parse_size(text))
        )
    except ValueError:
        found = float("nan")
    if not 1 <= found < 1e18:
        raise ConfigError(
            f"{option} {text}: expected a number of tokens such as 20b (b = 10^9, t = 10^12) or 512m"
        )
    return found


def dollars(option: str, value: float | None) -> float | None:
    """Raises ConfigError where it is no price."""
    if value is not None and not 0 <= value < 1e6:
        raise ConfigError(f"{option} {value:g}: expected dollars of a GPU and hour, at least 0")
    return value
