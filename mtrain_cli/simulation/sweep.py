"""Many trainings, one after the other: every combination of lengths, workers, nodes and settings under every layout and exchange.

Rows are plain dictionaries, as they stand in ``summary.json`` under ``sweep``. Each is written when it is there, so that a sweep that was
ended goes on from where it was when it is started again into the same folder.
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
    check_dealt,
    evaluate,
    plan_on,
)
from mtrain_cli.simulation.what_if import InvalidSetup

NODES, WORKERS, DENSITY, COLUMNS = "nodes", "workers", "density", "columns"
OWN = (NODES, WORKERS, DENSITY, COLUMNS)  # axes that are no settings
MOST_POINTS = 5000
_LARGEST = {NODES: 2**14, WORKERS: 2**14, COLUMNS: 2**26}  # as topology.workers and seq
_DIGITS = 18
_ROW = 2  # of what a row holds: earlier versions wrote none of its remarks
EXAMPLE = '--sweep "seq=128k,512k nodes=1,2,4"'


def axes(texts: Sequence[str]) -> dict[str, list[str]]:
    """``["seq=128k,512k nodes=1,2"]`` -> values by name. Settings are checked when they are composed.

    Raises:
        ConfigError: a word is no list of values, or names what cannot be swept.
    """
    found: dict[str, list[str]] = {}
    for word in itertools.chain.from_iterable(text.split() for text in texts):
        name, equals, listed = word.partition("=")
        values = list(dict.fromkeys(value for value in listed.split(",") if value))
        if not equals or not values:
            raise ConfigError(f"--sweep {word}: expected NAME=VALUE,..., such as {EXAMPLE}")
        if name in ("layout", "exchange", "topology.layout", "topology.exchange"):
            option = name.rpartition(".")[2]
            raise ConfigError(f"--sweep {word}: is compared by --{option} {listed}")
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
            f"--sweep {' '.join(texts)!r}: names nothing; expected NAME=VALUE,..., such as "
            f"{EXAMPLE}"
        )
    if NODES in found and WORKERS in found:
        raise ConfigError(
            "--sweep nodes and workers: each says how many GPUs there are; give one of them"
        )
    return found


def _is_share(text: str) -> bool:
    try:
        return 0 < parse_share(text) <= 1
    except ValueError:
        return False


@dataclass(frozen=True)
class SweepPoint:
    """values: by axis, as typed."""

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
    """Settings outermost, so that points which share them come one after the other and indices are drawn once."""
    names = sorted(swept, key=lambda name: name in (NODES, WORKERS))
    found = [
        SweepPoint(dict(zip(names, values, strict=True)), layout, exchange)
        for values in itertools.product(*(swept[name] for name in names))
        for layout in layouts
        for exchange in exchanges
    ]
    if len(found) > MOST_POINTS:
        raise ConfigError(
            f"--sweep: makes {len(found)} configurations; allowed: at most {MOST_POINTS}"
        )
    return found


@dataclass(frozen=True)
class Sweep:
    """cluster_of: with so many nodes. scenario_of: of settings, a density and a number of columns. about: everything else that a row
    depends on.
    """

    points: list[SweepPoint]
    cluster_of: Callable[[int | None], Cluster]
    scenario_of: Callable[[tuple[str, ...], float | None, int | None], Scenario]
    workers: int | None
    about: str
    _scenarios: dict[tuple, Scenario] = field(default_factory=dict)

    def rows(self, journal: Path | None, told: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """journal: rows of an earlier attempt, and of this one. told: how many are there.

        Raises:
            ConfigError: settings that are wrong whatever the other axes are.
        """
        there, waiting = _read(journal), ""
        for number, point in enumerate(self.points):
            told(number)
            key = hashlib.sha256(
                json.dumps([__version__, _ROW, self.about, dataclasses.asdict(point)]).encode()
            ).hexdigest()[:16]
            if key not in there:
                row = there[key] = self._row(point)
                waiting += json.dumps({"key": key, **row}) + "\n"
                # A sweep in which nothing can be leaves nothing.
                if journal is not None and "cannot" not in row:
                    journal.parent.mkdir(parents=True, exist_ok=True)
                    with journal.open("a", encoding="utf-8") as file:
                        file.write(waiting)
                    waiting = ""
            yield there[key]
        told(len(self.points))

    def _row(self, point: SweepPoint) -> dict[str, Any]:
        cluster = self.cluster_of(point.own(NODES, int, None))
        scenario = self._scenario(point)
        count = point.own(WORKERS, int, self.workers or cluster.gpus)
        said: dict[str, Any] = {
            "point": point.values,
            "workers": count,
            "layout": point.layout,
            "exchange": point.exchange,
        }
        try:
            context = scenario.config.topology.context_parallel
            check_dealt(
                scenario.config, point.layout, count, count if isinstance(context, str) else context
            )
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
            return {**said, "cannot": str(error).splitlines()[0]}
        return {**said, **row_of(outcome), "remarks": list(outcome.remarks)}

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
    """-> what was said of every row that can be, once; and the rows, with what is left to say of each under ``remarks``."""
    said = [row["remarks"] for row in rows if "cannot" not in row]
    common = [
        remark
        for remark in dict.fromkeys(said[0] if said else ())
        if all(remark in of for of in said)
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
                continue  # the line at which an earlier attempt was ended
    return found


def of_range(found: BoundedTime, digits: int = 6) -> dict[str, float]:
    return {name: float(f"{getattr(found, name):.{digits}g}") for name in ("low", "value", "high")}


def row_of(outcome: PredictedScenario) -> dict[str, Any]:
    """The figures of one training, as files have them. mfu: None where pairs are left out; mfu_as_dense counts them, and may be above 1."""
    step, plan = outcome.step, outcome.plan
    passes = outcome.attention.passes
    degrees = {
        f"{name}_{of}": sum(getattr(getattr(passes[d], of), name) for d in ("forward", "backward"))
        / 2
        for of in ("time", "work")
        for name in ("worker", "step")
    }
    return {
        "layout": outcome.layout, "exchange": plan.exchange.label, "kernel": plan.kernel, "seq": plan.config.seq,
        "nodes": -(-plan.environment.workers // max(1, plan.environment.workers_per_node)),
        "workers": plan.environment.workers, "cp": outcome.context, "dp": plan.environment.dp,
        "activation_checkpoint": plan.config.train.activation_checkpoint, "density": outcome.attention.facts["density"],
        "seconds": of_range(step.seconds), "tokens_per_second_per_gpu": of_range(step.tokens_per_second_per_gpu),
        "mfu": step.mfu if outcome.dense else None, "mfu_as_dense": step.mfu, "hfu": step.hfu,
        "memory_bytes": plan.memory.total, "memory_parts": plan.memory.peak.parts,
        "memory_reserve_bytes": plan.memory.reserve, "capacity_bytes": plan.capacity, "fits": step.fits,
        "parts_s": {name: float(f"{value:.6g}") for name, value in step.parts.items()}, "hidden_weights_s": step.hidden,
        "degrees": degrees,
    }  # fmt: skip
