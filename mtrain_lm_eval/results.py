"""Turn what lm-eval returns into results and rows of samples. This module imports neither."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtrain_cli.evaluation.results import PERCENT, Result, key_of, mean_and_error

PREFIX = "lm-eval:"
_SHARES = ("acc", "exact_match", "em", "contains")  # metrics from 0 to 1, by how they begin
_PLAIN = "none"  # lm-eval's name of no filter
_HASHES = ("doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True)
class Measured:
    """A result, and the rows of its samples without the names of the result."""

    result: Result
    rows: list[dict[str, Any]]


def measured(found: Mapping[str, Any], known: Result, origin: Mapping[str, Any]) -> list[Measured]:
    """Return a result for each task or group, and each of its metrics.

    Args:
        found: from `lm_eval.evaluator.evaluate`.
        known: what all results have in common.
        origin: what determines the samples, apart from the task.
    """
    results = []
    for task, values in found["results"].items():
        shots = found["n-shot"].get(task, 0)
        version = found["versions"].get(task)
        for name, value in values.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            label = metric if chosen == _PLAIN else f"{metric} ({chosen})"
            rows = _rows(found["samples"].get(task, ()), metric, chosen)
            about = {"task": task, "metric": label, "shots": shots, "version": str(version)}
            error = _error(value, rows, found, task, name)
            scale, unit = (100.0, PERCENT) if metric.startswith(_SHARES) else (1.0, "")
            result = replace(
                known,
                key=key_of({**origin, **about}),
                task=f"{PREFIX}{task}:{label}",
                samples=len(rows) or _count(values, name),
                score=scale * value if math.isfinite(value) else None,
                error=None if error is None else scale * error,
                unit=unit,
                details=(*([] if version is None else [f"version {version}"]), *known.details),
                note=f"{shots}-shot" if task in found["samples"] else "group",
            )
            results.append(Measured(result, rows))
    return results


def _count(values: Mapping[str, Any], name: str) -> int:
    """Return the number of samples of a group."""
    counts = values.get("sample_count", {})
    return int(counts.get(name, values.get("sample_len", 0)))


def _rows(samples: Any, metric: str, chosen: str) -> list[dict[str, Any]]:
    """Return the rows of a metric's samples, in the order of the documents."""
    return [
        {
            "index": int(sample["doc_id"]),
            "score": _plain(sample[metric]),
            "target": _plain(sample["target"]),
            "answers": _plain(sample["filtered_resps"]),
            **_hash(sample),
        }
        for sample in sorted(samples, key=lambda sample: sample["doc_id"])
        if sample["filter"] == chosen and metric in sample
    ]


def _hash(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of lm-eval's hashes: of the document, the prompt and the target."""
    own = {name: sample[name] for name in _HASHES if name in sample}
    return {"text": key_of(own)} if own else {}


def _error(
    score: float, rows: list[dict[str, Any]], found: Mapping[str, Any], task: str, name: str
) -> float | None:
    """Return the standard error of a mean over samples or over the samples of all subtasks."""
    scores = [row["score"] for row in rows]
    if scores and all(isinstance(one, int | float) for one in scores):
        mean, error = mean_and_error(scores)
        return error if mean is not None and math.isclose(mean, score, abs_tol=1e-9) else None
    parts = list(_parts(found, task, name))
    total = sum(count for _, _, count in parts)
    if not total or any(error is None for _, error, _ in parts):
        return None
    mean = sum(part * count for part, _, count in parts) / total
    if not math.isclose(mean, score, abs_tol=1e-9):
        return None
    return math.sqrt(sum(((error or 0.0) * count / total) ** 2 for _, error, count in parts))


def _parts(
    found: Mapping[str, Any], task: str, name: str
) -> Iterator[tuple[float, float | None, int]]:
    """Yield score, standard error and number of samples of each task of a group."""
    metric, _, chosen = name.partition(",")
    for child in found.get("group_subtasks", {}).get(task, ()):
        if child in found.get("group_subtasks", {}) and child not in found["samples"]:
            yield from _parts(found, child, name)
        elif name in found["results"].get(child, {}):
            scores = [row["score"] for row in _rows(found["samples"][child], metric, chosen)]
            if all(isinstance(one, int | float) for one in scores):
                mean, error = mean_and_error(scores)
                if mean is not None:
                    yield mean, error, len(scores)


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it. A number that is not finite becomes None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if hasattr(value, "item"):  # numpy
        return _plain(value.item())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return str(value)
