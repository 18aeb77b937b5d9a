"""Sweeps: predict every combination of lengths, workers, nodes and settings, layouts and exchanges.

Rows are plain dictionaries; ``summary.json`` holds them under ``sweep``. Each row is written when
it is complete, so an interrupted sweep resumes when it is started again in the same folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli import __version__
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import parse_share
from mtrain_cli.config.suggest import did_you_mean
from mtrain_cli.simulation.cluster import Cluster
from mtrain_cli.simulation.prediction import BoundedTime
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    check_enough_blocks,
    evaluate,
    plan_on,
)
from mtrain_cli.simulation.what_if import InvalidSetup

NODES, WORKERS, DENSITY, COLUMNS = "nodes", "workers", "density", "columns"
OWN = (NODES, WORKERS, DENSITY, COLUMNS)  # axes that are not settings
MOST_POINTS = 5000
_LARGEST = {NODES: 2**14, WORKERS: 2**14, COLUMNS: 2**26}  # the limits of topology.workers and seq
_DIGITS = 18
_ROW_VERSION = 2  # of the rows in a journal; version 1 had no remarks
EXAMPLE = '--sweep "seq=128k,512k nodes=1,2,4"'


def axes(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse ``["seq=128k,512k nodes=1,2"]`` into values by name.

    Settings are checked later, when they are composed.

    Raises:
        ConfigError: a word is not a list of values, or names something that cannot be swept.
    """
    found: dict[str, list[str]] = {}
    for word in itertools.chain.from_iterable(text.split() for text in texts):
        name, equals, listed = word.partition("=")
        values = list(dict.fromkeys(value for value in listed.split(",") if value))
        if not equals or not values:
            raise ConfigError(f"--sweep {word}: expected NAME=VALUE,..., such as {EXAMPLE}")
        if name in ("layout", "exchange", "topology.layout", "topology.exchange"):
            option = name.rpartition(".")[2]
            raise ConfigError(f"--sweep {word}: use --{option} {listed} to compare these")
        if name in found:
            raise ConfigError(f"--sweep {word}: {name} is swept twice; give all its values at once")
        if name in (NODES, WORKERS, COLUMNS):
            least = 0 if name == COLUMNS else 1
            for value in values:
                if not (
                    value.isascii()
                    and value.isdecimal()
                    and len(value) <= _DIGITS
                    and least <= int(value) <= _LARGEST[name]
                ):
                    raise ConfigError(
                        f"--sweep {word}: {name}={value}: expected a whole number of at least "
                        f"{least} and at most {_LARGEST[name]:,}"
                    )
        elif name == DENSITY:
            for value in values:
                if not _is_share(value):
                    raise ConfigError(
                        f"--sweep {word}: {name}={value}: must be above 0 and at most 1, such as "
                        "0.05 or 5%"
                    )
        elif "." not in name and (hint := did_you_mean(name, OWN)):
            raise ConfigError(f"--sweep {word}: {name} cannot be swept{hint}")
        found[name] = values
    if not found:
        raise ConfigError(
            f"--sweep {' '.join(texts)!r}: empty; expected NAME=VALUE,..., such as {EXAMPLE}"
        )
    if NODES in found and WORKERS in found:
        raise ConfigError(
            "--sweep nodes and workers: both set the number of GPUs; give one of them"
        )
    return found


def _is_share(text: str) -> bool:
    try:
        return 0 < parse_share(text) <= 1
    except ValueError:
        return False


@dataclass(frozen=True)
class SweepPoint:
    """One configuration of a sweep. values: by axis, as typed."""

    values: dict[str, str]
    layout: str
    exchange: str

    def own(self, name: str, kind: Callable[[str], Any], otherwise: Any) -> Any:
        return kind(self.values[name]) if name in self.values else otherwise

    @property
    def settings(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.values.items() if name not in OWN]


def points(
    swept: Mapping[str, Sequence[str]], layouts: Sequence[str], exchanges: Sequence[str]
) -> list[SweepPoint]:
    """Make all points. Settings vary slowest, so points that share indices follow each other."""
    names = sorted(swept, key=lambda name: name in (NODES, WORKERS))
    combinations = [
        SweepPoint(dict(zip(names, values, strict=True)), layout, exchange)
        for values in itertools.product(*(swept[name] for name in names))
        for layout in layouts
        for exchange in exchanges
    ]
    if len(combinations) > MOST_POINTS:
        raise ConfigError(
            f"--sweep: makes {len(combinations)} configurations; allowed: at most {MOST_POINTS}"
        )
    return combinations


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep and what they share.

    cluster_of: makes the cluster with this many nodes (None: as it is).
    scenario_of: makes the scenario of settings, a density and a number of columns.
    workers: if no axis sets them; None for all GPUs.
    about: identifies everything else that a row depends on.
    """

    points: list[SweepPoint]
    cluster_of: Callable[[int | None], Cluster]
    scenario_of: Callable[[tuple[str, ...], float | None, int | None], Scenario]
    workers: int | None
    about: str
    _scenarios: dict[tuple, Scenario] = field(default_factory=dict)

    def rows(
        self, journal: Path | None, report_count: Callable[[int], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield the row of each point.

        Args:
            journal: file with the rows of an earlier attempt; new rows are added.
            report_count: called with the number of complete rows.

        Raises:
            ConfigError: settings are wrong for every point.
        """
        done, waiting = _read(journal), ""
        for number, point in enumerate(self.points):
            report_count(number)
            key = hashlib.sha256(
                json.dumps(
                    [__version__, _ROW_VERSION, self.about, dataclasses.asdict(point)]
                ).encode()
            ).hexdigest()[:16]
            if key not in done:
                row = done[key] = self._row(point)
                waiting += json.dumps({"key": key, **row}) + "\n"
                # A sweep without a single possible point writes no file.
                if journal is not None and "cannot" not in row:
                    journal.parent.mkdir(parents=True, exist_ok=True)
                    with journal.open("a", encoding="utf-8") as file:
                        file.write(waiting)
                    waiting = ""
            yield done[key]
        report_count(len(self.points))

    def _row(self, point: SweepPoint) -> dict[str, Any]:
        cluster = self.cluster_of(point.own(NODES, int, None))
        scenario = self._scenario(point)
        count = point.own(WORKERS, int, self.workers or cluster.gpus)
        identity: dict[str, Any] = {
            "point": point.values,
            "workers": count,
            "layout": point.layout,
            "exchange": point.exchange,
        }
        try:
            context = scenario.config.topology.context_parallel
            shared_by = count if isinstance(context, str) else context
            check_enough_blocks(scenario.config, point.layout, count, shared_by)
            plan = plan_on(
                cluster,
                scenario.config,
                workers=count,
                kernel=scenario.kernel,
                layout=point.layout,
                exchange=point.exchange,
            )
            outcome = evaluate(cluster, scenario, plan)
        except (InvalidSetup, ConfigError) as error:
            return {**identity, "cannot": str(error).splitlines()[0]}
        return {**identity, **row_of(outcome), "remarks": list(outcome.remarks)}

    def _scenario(self, point: SweepPoint) -> Scenario:
        key = (
            tuple(point.settings),
            point.own(DENSITY, parse_share, None),
            point.own(COLUMNS, int, None),
        )
        if key not in self._scenarios:
            self._scenarios.clear()
            self._scenarios[key] = self.scenario_of(*key)
        return self._scenarios[key]


def shared_remarks(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the remarks that all possible rows share, and the rows with only their own."""
    remarks = [row["remarks"] for row in rows if "cannot" not in row]
    common = [
        remark
        for remark in dict.fromkeys(remarks[0] if remarks else ())
        if all(remark in of_row for of_row in remarks)
    ]
    left: list[dict[str, Any]] = []
    for row in rows:
        own = [remark for remark in row.get("remarks", ()) if remark not in common]
        left.append(
            {
                **{key: value for key, value in row.items() if key != "remarks"},
                **({"remarks": own} if own else {}),
            }
        )
    return common, left


def _read(journal: Path | None) -> dict[str, dict[str, Any]]:
    found = {}
    if journal is not None and journal.is_file():
        text = journal.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            with journal.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                row = json.loads(line)
                found[row.pop("key")] = row
            except (ValueError, KeyError, AttributeError):
                continue  # the incomplete line of an interrupted attempt
    return found


def range_as_dict(time: BoundedTime, digits: int = 6) -> dict[str, float]:
    return {name: float(f"{getattr(time, name):.{digits}g}") for name in ("low", "value", "high")}


def row_of(outcome: PredictedScenario) -> dict[str, Any]:
    """Return the figures of one training, as files hold them.

    mfu: None for sparse attention. mfu_as_dense counts skipped pairs as if computed, so it may
    exceed 1.
    """
    step, plan = outcome.step, outcome.plan
    passes = outcome.attention.passes
    degrees = {
        f"{name}_{of}": sum(getattr(getattr(passes[d], of), name) for d in ("forward", "backward"))
        / 2
        for of in ("time", "work")
        for name in ("worker", "step")
    }
    return {
        "layout": outcome.layout,
        "exchange": plan.exchange.label,
        "kernel": plan.kernel,
        "seq": plan.config.seq,
        "nodes": -(-plan.environment.workers // max(1, plan.environment.workers_per_node)),
        "workers": plan.environment.workers,
        "cp": outcome.context,
        "dp": plan.environment.dp,
        "activation_checkpoint": plan.config.train.activation_checkpoint,
        "density": outcome.attention.facts["density"],
        "seconds": range_as_dict(step.seconds),
        "tokens_per_second_per_gpu": range_as_dict(step.tokens_per_second_per_gpu),
        "mfu": step.mfu if outcome.dense else None,
        "mfu_as_dense": step.mfu,
        "hfu": step.hfu,
        "memory_bytes": plan.memory.total,
        "memory_parts": plan.memory.peak.parts,
        "memory_reserve_bytes": plan.memory.reserve,
        "capacity_bytes": plan.capacity,
        "fits": step.fits,
        "parts_s": {name: float(f"{value:.6g}") for name, value in step.parts.items()},
        "hidden_weights_s": step.hidden,
        "degrees": degrees,
    }
