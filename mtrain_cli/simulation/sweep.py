"""Predict every combination of lengths, workers, nodes, settings, layouts and exchanges.

The result of a combination is a row: a plain dictionary. ``summary.json`` lists the rows under
``sweep``. The sweep writes each row as soon as the row is complete. If you start an interrupted
sweep again in the same folder, it resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtrain_cli import __version__
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import parse_share
from mtrain_cli.simulation.expert_exchange import dealt_over
from mtrain_cli.simulation.predicted_step import training_days, training_dollars
from mtrain_cli.simulation.prediction import BoundedTime
from mtrain_cli.simulation.scenario import PredictedScenario, Scenario, predict_training
from mtrain_cli.simulation.sweep_axes import COLUMNS, DENSITY, NODES, OWN, WORKERS
from mtrain_cli.simulation.what_if import InvalidSetup

MOST_POINTS = 5000
# Version of the rows in a journal. Rows of version 1 had no remarks; in version 2, choices of
# layout, exchange and stages took rates of H200s on every cluster; in version 3, chunks of experts
# had no price.
_ROW_VERSION = 4


@dataclass(frozen=True)
class SweepPoint:
    """One configuration of a sweep. values: the value of each axis, as the user typed it."""

    values: dict[str, str]
    layout: str
    exchange: str

    def own(self, name: str, kind: Callable[[str], Any], otherwise: Any) -> Any:
        return kind(self.values[name]) if name in self.values else otherwise

    @property
    def inputs(self) -> tuple[tuple[str, ...], float | None, int | None]:
        """The arguments of `Sweep.scenario_of`: settings, density and number of columns."""
        settings = (f"{name}={value}" for name, value in self.values.items() if name not in OWN)
        return (tuple(settings), self.own(DENSITY, parse_share, None), self.own(COLUMNS, int, None))


def points(
    swept: Mapping[str, Sequence[str]], layouts: Sequence[str], exchanges: Sequence[str]
) -> list[SweepPoint]:
    """Make all points. Settings vary slowest, so points that use the same indices are adjacent."""
    names = sorted(swept, key=lambda name: name in (NODES, WORKERS))
    combinations = [
        SweepPoint(dict(zip(names, values, strict=True)), layout, exchange)
        for *values, layout, exchange in itertools.product(
            *(swept[name] for name in names), layouts, exchanges
        )
    ]
    if len(combinations) > MOST_POINTS:
        raise ConfigError(
            f"{len(combinations)} configurations to sweep; allowed: at most {MOST_POINTS}"
        )
    return combinations


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep, and the inputs that they share.

    cluster_of: function that makes the cluster from a number of nodes. None stands for the number
        in the cluster file.
    scenario_of: function that makes the scenario from settings, a density and a number of columns.
    workers: number of workers if no axis sets this number; None for all GPUs of the cluster.
    about: text that identifies all inputs of a row except its point.
    """

    points: list[SweepPoint]
    cluster_of: Callable[[int | None], Cluster]
    scenario_of: Callable[[tuple[str, ...], float | None, int | None], Scenario]
    workers: int | None
    about: str

    def rows(
        self, journal: Path | None, report_count: Callable[[int], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield the row of each point.

        Args:
            journal: file with the rows of an earlier attempt, to which new rows are appended; None
                to write no file.

        Raises:
            ConfigError: settings are wrong for every point.
        """
        done, waiting = _read(journal), ""
        scenario_of = lru_cache(1)(self.scenario_of)  # adjacent points share scenarios
        for number, point in enumerate(self.points):
            report_count(number)
            identity = [__version__, _ROW_VERSION, self.about, dataclasses.asdict(point)]
            key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
            if key not in done:
                row = done[key] = self._row(point, scenario_of(*point.inputs))
                waiting += json.dumps({"key": key, **row}) + "\n"
                # If every point is impossible, write no file.
                if journal is not None and "cannot" not in row:
                    journal.parent.mkdir(parents=True, exist_ok=True)
                    with journal.open("a", encoding="utf-8") as file:
                        file.write(waiting)
                    waiting = ""
            yield done[key]
        report_count(len(self.points))

    def _row(self, point: SweepPoint, scenario: Scenario) -> dict[str, Any]:
        cluster = self.cluster_of(point.own(NODES, int, None))
        count = point.own(WORKERS, int, self.workers or cluster.gpus)
        identity: dict[str, Any] = {
            "point": point.values,
            "workers": count,
            "layout": point.layout,
            "exchange": point.exchange,
        }
        try:
            outcome = predict_training(cluster, scenario, count, point.layout, point.exchange)
        except (InvalidSetup, ConfigError) as error:
            return {**identity, "cannot": str(error).splitlines()[0]}
        return {**identity, **row_of(outcome), "remarks": list(outcome.remarks)}


def shared_remarks(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the remarks that all rows share, and the rows without these remarks.

    Rows of impossible points have no remarks, so they are ignored.
    """
    remarks = [row["remarks"] for row in rows if "cannot" not in row]
    common = [
        remark
        for remark in dict.fromkeys(remarks[0] if remarks else ())
        if all(remark in of_row for of_row in remarks)
    ]
    left = []
    for row in rows:
        own = [remark for remark in row.get("remarks", ()) if remark not in common]
        plain = {key: value for key, value in row.items() if key != "remarks"}
        left.append(plain | ({"remarks": own} if own else {}))
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


def with_cost(row: dict[str, Any], tokens: float | None, price: float | None) -> dict[str, Any]:
    """Return a row with the time and the cost of training, in days and dollars.

    tokens: number of tokens to train on; None leaves the row as it is.
    price: dollars per GPU hour; None if unknown.
    """
    if tokens is None:
        return row
    workers = row["workers"]
    days = training_days(BoundedTime(**row["tokens_per_second_per_gpu"]), workers, tokens)
    dollars = None if price is None else vars(training_dollars(days, workers, price))
    more = {"tokens": tokens, "days": vars(days), "dollars_per_gpu_hour": price, "dollars": dollars}
    return {**row, **more}


def row_of(outcome: PredictedScenario) -> dict[str, Any]:
    """Return the predicted numbers of one training run as a row.

    ``mfu`` is None for sparse attention. ``mfu_as_dense`` also counts the pairs that sparse
    attention skips, so it may exceed 1.
    """
    step, plan = outcome.step, outcome.plan
    passes = [outcome.attention.passes[name] for name in ("forward", "backward")]
    degrees = {
        f"{name}_{of}": sum(getattr(getattr(one, of), name) for one in passes) / 2
        for of in ("time", "work")
        for name in ("worker", "step")
    }
    return {
        "layout": outcome.layout,
        "exchange": plan.exchange.label,
        "kernel": plan.kernel,
        "seq": plan.config.seq,
        "nodes": -(-plan.dims.workers // max(1, plan.environment.workers_per_node)),
        "workers": plan.dims.workers,
        "cp": outcome.context,
        "dp": plan.dims.dp,
        "tp": plan.dims.tp,
        "ep": dealt_over(plan),
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
        "capacity_bytes": plan.hardware.memory,
        "fits": step.fits,
        "parts_s": {name: float(f"{value:.6g}") for name, value in step.parts.items()},
        "hidden_weights_s": step.hidden,
        "hidden_state_bytes": step.hidden_states,
        "expert_rows": None if step.experts is None else dataclasses.asdict(step.experts),
        "degrees": degrees,
    }
