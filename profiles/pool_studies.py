"""Pool two runs of one tier of `mtrain study learning`, each printed by `mtrain report DIR --json`.

    python profiles/pool_studies.py first.json again.json > both.json

Each pair of a cell and the dense cell that began with the same base counts once. So a mean is over
all trainings of both runs, and an interval is that of all their paired differences. It follows from
the number, the mean and the interval of each run. The spread is the larger one. Seconds and density
are those of the second run. So are all numbers of cells for equal time, since their steps depend on
the pace of a run. A prediction failed if it failed in one of the runs.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtrain_extras.studies.outcomes import FAILED, HELD, UNKNOWN, Compared, judged
from mtrain_extras.studies.t_interval import CONFIDENCE, Interval, t_quantile
from mtrain_extras.studies.tiers import TIERS, Variant

Document = dict[str, Any]


def pool(first: Document, again: Document) -> Document:
    """Return a document like those of the runs. ``again`` has the seeds and gates of the second.

    Raises:
        ValueError: the runs have other tiers, or other cells.
    """
    if first["tier"] != again["tier"]:
        raise ValueError(f"tiers {first['tier']} and {again['tier']} cannot be pooled")
    spread = {
        name: max(one["spread"].get(name, 0.0) for one in (first, again))
        for name in (*first["spread"], *again["spread"])
    }
    paces = {row["variant"]: row["step_seconds"] for row in again["compared"]}
    rows = {(row["variant"], row["attention"]): row for row in again["compared"]}
    keys = [(row["variant"], row["attention"]) for row in first["compared"]]
    if set(keys) != set(rows):
        raise ValueError(f"cells of one run only: {sorted(set(keys) ^ set(rows))}")
    tier = TIERS[first["tier"]]
    compared = [
        _compared(tier.variant(row["variant"]), row, rows[key])
        for key, row in zip(keys, first["compared"], strict=True)
    ]
    return {
        **{name: first[name] for name in ("tier", "toy", "gates", "seeds")},
        "again": {"gates": again["gates"]},
        "spread": spread,
        "compared": [
            {**asdict(one), "variant": one.variant.name, "step_seconds": paces[one.variant.name]}
            for one in judged(compared, spread)
        ],
        "predictions": _predictions(first["predictions"], again["predictions"]),
    }


def _compared(variant: Variant, first: Document, again: Document) -> Compared:
    runs = [again] if variant.time_of else [first, again]
    return Compared(
        variant,
        again["attention"],
        tuple(seed for run in runs for seed in run["seeds"]),
        _pooled([run["mean"] for run in runs]),
        _pooled([run["difference"] for run in runs]),
        {},
        again["seconds"],
        again["density"],
    )


def _pooled(runs: list[Document]) -> dict[str, Interval]:
    return {
        name: functools.reduce(pooled, [Interval(**run[name]) for run in runs]) for name in runs[0]
    }


def pooled(first: Interval, again: Interval) -> Interval:
    """Return the mean and t-interval of the values of both."""
    count = first.count + again.count
    mean = (first.count * first.mean + again.count * again.mean) / count
    squares = sum(_squares(each) + each.count * (each.mean - mean) ** 2 for each in (first, again))
    half = _quantile(count) * math.sqrt(squares / (count - 1) / count)
    return Interval(mean, mean - half, mean + half, count)


def _squares(over: Interval) -> float:
    """Return the sum of squared distances of the values from their mean."""
    if over.high is None:
        return 0.0
    error = (over.high - over.mean) / _quantile(over.count)
    return error**2 * over.count * (over.count - 1)


def _quantile(count: int) -> float:
    return t_quantile(0.5 + CONFIDENCE / 2, count - 1)


def _predictions(first: list[Document], again: list[Document]) -> list[Document]:
    others = {each["prediction"]["id"]: each for each in again}
    found = []
    for each in first:
        other = others[each["prediction"]["id"]]
        states = (each["state"], other["state"])
        state = next(word for word in (FAILED, HELD, UNKNOWN) if word in states)
        texts = [one["found"] for one in (each, other)]
        if len({*states} - {UNKNOWN}) == 2:
            texts = [f"{text} ({one})" for text, one in zip(texts, states, strict=True)]
        found.append({**each, "state": state, "found": "; again: ".join(texts)})
    return sorted(found, key=lambda each: (FAILED, HELD, UNKNOWN).index(each["state"]))


def main() -> None:
    """Print the pooled document."""
    first, again = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    print(json.dumps(pool(first, again), indent=1))


if __name__ == "__main__":
    main()
