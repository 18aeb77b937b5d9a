"""Turn the typed options of `mtrain simulate` into a job: what to predict, on which cluster."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from mtrain_cli.commands.options import parse_names, parse_share_option
from mtrain_cli.commands.simulate_request import SimulateRequest, setting_of
from mtrain_cli.config.exchanges import (
    COMPARED_EXCHANGES,
    GROUP_CASTS,
    HEAD_SHARING,
    exchange_names,
    flat_name,
)
from mtrain_cli.config.schema import KERNELS, LAYOUTS, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.commands.simulate import SimulateOptions
    from mtrain_cli.config.cluster import Cluster
    from mtrain_cli.config.schema import Config
    from mtrain_cli.simulation.scenario import Scenario

DEFAULT_CLUSTER = "h200_1x8"
DEFAULT_LAYOUTS = "zigzag,striped"
_SWEPT = 3  # exchanges that a sweep compares by default; each one more takes a third more time
_MOST_WORKERS = 4096
# Options that a user may type as a setting. Those that a sweep takes as settings are not listed.
_OPTIONS = (
    "layout",
    "exchange",
    "index",
    "layers",
    "kernel",
    "calibration",
    "slow",
    "jitter",
    "tokens",
    "price",
    "out",
)
_USE_SWEEP = "one value per prediction; `mtrain simulate sweep` takes several"
_UNITS = {"b": 10**9, "t": 10**12}
T = TypeVar("T")


@dataclass(frozen=True)
class SimulateJob:
    """What to predict, and where the results go.

    cluster_name: name or file of the cluster.
    cluster_typed: the word that names the cluster, such as ``topology=a100_4x8``.
    tokens: tokens to train on, to predict days and dollars; None to predict neither.
    price: dollars per GPU-hour; None if unknown.
    """

    request: SimulateRequest
    cluster: Cluster
    cluster_name: str
    cluster_typed: str
    layouts: list[str]
    exchanges: list[str]
    workers: int
    tokens: float | None
    price: float | None
    typed: SimulateOptions
    started: float = field(default_factory=time.perf_counter)

    def cluster_with(self, nodes: int | None) -> Cluster:
        """Return the cluster with ``nodes`` nodes. With None, keep the number of nodes."""
        from mtrain_cli.config.cluster import load_cluster

        if nodes is None:
            return self.cluster
        name, typed = self.cluster_name, self.cluster_typed
        return load_cluster(name, typed, nodes=nodes, typed_nodes=f"nodes={nodes}")

    def scenario(self) -> Scenario:
        """Compose the training run to predict, and check the slow ranks.

        Raises:
            ConfigError: a setting, an option or a slow rank is wrong.
        """
        scenario = self.request.scenario()
        self.request.disturbances(self.workers)
        return scenario

    def require_gpus(self, attention_only: bool, remedy: str) -> None:
        """Raise ConfigError if the prediction would cover whole steps on CPUs.

        remedy: what the user can do, for the message.
        """
        gpu = self.cluster.gpu
        if gpu.is_cpu and not attention_only:
            raise ConfigError(
                f"{self.cluster_typed}: {gpu.name} is a CPU, and steps are predicted for "
                f"GPUs only; {remedy}"
            )

    def each(
        self, predict: Callable[[int, str, str], T], label: Callable[[T], str]
    ) -> tuple[list[T], list[str]]:
        """Call ``predict(number, layout, exchange)`` for every layout and exchange to compare.

        Keep one of the predictions that are equal because ``auto`` chose the exchange of another.

        Args:
            label: returns the label of the exchange that a prediction is for.

        Returns:
            The predictions, and the labels of the exchanges that ``auto`` chose.
        """
        predicted: dict[tuple[str, str], T] = {}
        automatic = []
        for layout, exchange in itertools.product(self.layouts, self.exchanges):
            with self.errors_by_option(exchange):
                found = predict(len(predicted), layout, exchange)
            predicted.setdefault((layout, label(found)), found)
            if exchange == "auto":
                automatic.append(label(found))
        return list(predicted.values()), automatic

    @contextmanager
    def errors_by_option(self, exchange: str) -> Iterator[None]:
        """In errors about impossible configurations, name what the user typed."""
        from mtrain_cli.simulation.what_if import InvalidSetup

        try:
            yield
        except InvalidSetup as error:
            raise ConfigError(f"{self._typed_as(error.about, error.value)}: {error}") from None
        except ConfigError as error:
            typed = self._typed_as("exchange", exchange)
            raise ConfigError(
                *(
                    re.sub(rf"\btopology\.exchange={exchange}\b", typed, line)
                    for line in error.problems
                )
            ) from None

    def _typed_as(self, name: str, value: object) -> str:
        """Return the words with which the user chose the value of a field of `ReplaySetup`."""
        if name == "per_node":
            return self.cluster_typed
        if name == "workers":
            all_gpus = f"{self.cluster_typed}, {value} workers"
            return all_gpus if self.typed.workers is None else f"--workers {value}"
        if getattr(self.typed, name) is not None:
            return f"--{name} {value}"
        if self.request.sets(f"topology.{name}"):
            return f"topology.{name}={value}"
        return f"{name} {value} (compared by default)"


def parse_job(
    typed: SimulateOptions, swept: Sequence[str] = (), *, every_exchange: bool = False
) -> SimulateJob:
    """Parse options, and load the cluster.

    Args:
        swept: axes of a sweep, such as nodes=1,2.
        every_exchange: compare all exchanges if none is typed.

    Raises:
        ConfigError: an option is wrong.
    """
    from mtrain_cli.config.cluster import load_cluster
    from mtrain_cli.simulation.calibration_files import calibration_files

    words, name, cluster_typed = _split_cluster(typed.overrides or [], typed.cluster)
    _refuse_options(words)
    layout = _compared("layout", typed.layout, words)
    exchange = _compared("exchange", typed.exchange, words)
    layouts = DEFAULT_LAYOUTS.split(",") if layout is None else parse_names(*layout, LAYOUTS)
    exchanges = [] if exchange is None else parse_names(*exchange, exchange_names())
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
        name,
        expert_loads=typed.expert_loads,
    )
    cluster = load_cluster(name, cluster_typed, nodes=typed.nodes)
    # Check the files before anything slow is imported.
    request.recorded_file()
    if typed.calibration is not None:
        calibration_files(typed.calibration)
    price = _parse_price(typed.price, cluster)
    several = cluster.nodes > 1 or any(
        "nodes=" in word or "gpus_per_node=" in word for word in (*words, *swept)
    )
    config = _composed(request)
    other_mask = config is not None and config.mask.kind != "causal"
    if layout is None and other_mask and not swept:
        layouts = [*layouts, "balanced"]
    if exchange is None:
        casts = GROUP_CASTS if other_mask else ()
        exchanges = _usual_exchanges(casts, bool(swept), every_exchange)
        # Within a node, hierarchical exchanges equal the plain ones.
        exchanges = [name for name in exchanges if several or flat_name(name) == name]
    if config is not None and not swept:  # what a recipe or a group sets is compared, too
        chosen = config.topology.exchange if several else flat_name(config.topology.exchange)
        layouts = layouts if layout else _with_choice(layouts, config.topology.layout)
        exchanges = exchanges if exchange else _with_choice(exchanges, chosen)
    workers = _parse_workers(cluster, typed, cluster_typed, request)
    if cluster.gpu.is_cpu and not request.without_a_model and not request.sets("topology.device"):
        # CPU workers compute in another dtype and with other kernels.
        request = replace(request, words=(*words, "topology.device=cpu"))
    return SimulateJob(
        request, cluster, name, cluster_typed, layouts, exchanges, workers, tokens, price, typed
    )


def _composed(request: SimulateRequest) -> Config | None:
    """Return the configuration of the settings; None if they name no model or are wrong."""
    # Without its axes, a sweep may be wrong. A command checks its settings later.
    with suppress(ConfigError):
        return None if request.without_a_model else request.compose(request.words)
    return None


def _with_choice(compared: list[str], chosen: str) -> list[str]:
    return compared if chosen in (*compared, "auto") else [*compared, chosen]


def _usual_exchanges(casts: Sequence[str], sweeps: bool, every_exchange: bool) -> list[str]:
    """Return the exchanges to compare if none is typed."""
    if every_exchange:
        compared = (*COMPARED_EXCHANGES, *casts, *HEAD_SHARING)
        return [name for name in exchange_names() if name in compared]
    return [*COMPARED_EXCHANGES[: _SWEPT if sweeps else None], *casts]


def _split_cluster(words: Sequence[str], option: str | None) -> tuple[list[str], str, str]:
    """Return settings without ``cluster=NAME``, the cluster's name, and the word that names it."""
    from mtrain_cli.composition.compose import composed_values
    from mtrain_cli.config.groups import open_groups
    from mtrain_cli.config.overrides import ONE_VALUE, parse

    settings = [word for word in words if not word.startswith("cluster=")]
    parsed = parse(settings, open_groups())
    several = [
        f"{problem.key}={problem.value}: {_USE_SWEEP}"
        for problem in parsed.problems
        if problem.allowed == ONE_VALUE
    ]
    if several:
        raise ConfigError(*several)
    values = composed_values(parsed.groups) | parsed.values
    names = {} if option is None else {f"--cluster {option}": option}
    names |= {word: word.partition("=")[2] for word in words if word.startswith("cluster=")}
    if (name := values.get("topology.cluster")) not in (None, "auto"):
        group = None if "topology.cluster" in parsed.values else parsed.groups.get("topology")
        names[f"topology={group}" if group else f"topology.cluster={name}"] = name
    if len(set(names.values())) > 1:
        first, *_, last = names
        raise ConfigError(f"{last}: {first} names another cluster; give only one of the two")
    usual = f"cluster {DEFAULT_CLUSTER} (the default)", DEFAULT_CLUSTER
    typed, name = next(iter(names.items()), usual)
    return settings, name, typed


def _refuse_options(words: Sequence[str]) -> None:
    from mtrain_cli.simulation.sweep_axes import OWN

    for word in words:
        name, equals, values = word.partition("=")
        if equals and name in OWN:
            value = values.partition(",")[0] or "..."
            raise ConfigError(
                f"{word}: give --{name} {value}, or use `mtrain simulate sweep` for several values"
            )
        if equals and name in _OPTIONS:
            raise ConfigError(f"{word}: is an option, not a setting; give --{name} {values}")


def _compared(key: str, option: str | None, overrides: Sequence[str]) -> tuple[str, str] | None:
    """Return the option --KEY or the setting topology.KEY, and its value: the names to compare."""
    setting = setting_of(overrides, f"topology.{key}")
    if setting is None or setting == "auto":
        return None if option is None else (f"--{key}", option)
    if option is not None:
        raise ConfigError(
            f"topology.{key}={setting}: --{key} {option} already compares this setting; give only "
            "one of the two"
        )
    return f"topology.{key}=", setting


def _parse_workers(
    cluster: Cluster, typed: SimulateOptions, cluster_typed: str, request: SimulateRequest
) -> int:
    """Return the number of workers."""
    from mtrain_cli.config.cluster import uneven_nodes

    count = cluster.gpus if typed.workers is None else typed.workers
    given = f"--workers {count}"
    if typed.workers is None:
        given = cluster_typed if typed.nodes is None else f"--nodes {typed.nodes}"
    most = min(cluster.gpus, _MOST_WORKERS)
    if not 1 <= count <= most:
        more = ""
        if count > most and cluster.outer is None:
            more = " on its one node; a100_4x8 and others have several"
        elif most < count <= _MOST_WORKERS:
            more = f", or more with --nodes {-(-count // cluster.gpus_per_node)}"
        allowed = f"1 to {most}{more}" if typed.workers is not None else f"--workers 1 to {most}"
        raise ConfigError(f"{given}: {cluster.name} has {cluster.gpus} GPUs; allowed: {allowed}")
    virtual = request.sets("topology.gpus_per_node")
    if not virtual and (why := uneven_nodes(cluster, count)):
        raise ConfigError(f"{given}: {why}")
    return count


def parse_tokens(option: str, text: str | None) -> float | None:
    """Parse tokens to train on: 500m, 20b (10^9) or 1t (10^12); k = 1024 and m = 1024^2.

    Raises:
        ConfigError: the text is not such a number.
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
    """Return dollars per GPU-hour, by default the price of the cluster; None if unknown."""
    if price is None:
        known = cluster.dollars_per_gpu_hour
        return None if known is None else known.value
    if not 0 <= price < 1e6:
        raise ConfigError(f"--price {price:g}: expected dollars per GPU-hour, at least 0")
    return price
