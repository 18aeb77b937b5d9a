"""Turn what lm-eval returns into results and rows of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtrain_cli.config.documents import finite
from mtrain_cli.evaluation.results import PERCENT, Result, key_of, mean_and_error

PREFIX = "lm-eval:"
_SHARES = ("acc", "exact_match", "em", "contains")  # metrics from 0 to 1, by how they begin
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
Found = Mapping[str, Any]  # from `lm_eval.evaluator.evaluate`


def measured(
    found: Found, known: Result, origin: Mapping[str, Any]
) -> list[tuple[Result, list[dict[str, Any]]]]:
    """Return a result for each task or group and each of its metrics, with the rows of its samples.

    known: what all results have in common. origin: what determines the samples, but the task.
    """
    results = []
    for task, values in found["results"].items():
        shots, version = found["n-shot"].get(task, 0), found["versions"].get(task)
        for name, value in values.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            label = metric if chosen == "none" else f"{metric} ({chosen})"
            rows = _rows(found["samples"].get(task, ()), metric, chosen)
            about = {"task": task, "metric": label, "shots": shots, "version": str(version)}
            error = _error(value, rows, found, task, name)
            scale, unit = (100.0, PERCENT) if metric.startswith(_SHARES) else (1.0, "")
            of_group = values.get("sample_count", {}).get(name, values.get("sample_len", 0))
            result = replace(
                known,
                key=key_of({**origin, **about}),
                task=f"{PREFIX}{task}:{label}",
                samples=len(rows) or int(of_group),
                score=scale * value if math.isfinite(value) else None,
                error=None if error is None else scale * error,
                unit=unit,
                details=(*([] if version is None else [f"version {version}"]), *known.details),
                note=f"{shots}-shot" if task in found["samples"] else "group",
            )
            results.append((result, rows))
    return results


def _rows(samples: Any, metric: str, chosen: str) -> list[dict[str, Any]]:
    """Return the rows of a metric's samples, in the order of the documents."""
    rows = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        if sample["filter"] == chosen and metric in sample:
            row = {
                "index": int(sample["doc_id"]),
                "score": _plain(sample[metric]),
                "target": _plain(sample["target"]),
                "answers": _plain(sample["filtered_resps"]),
            }
            if hashes := {name: sample[name] for name in _HASHES if name in sample}:
                row["text"] = key_of(hashes)
            rows.append(row)
    return rows


def _error(
    score: float, rows: list[dict[str, Any]], found: Found, task: str, name: str
) -> float | None:
    """Return the standard error of a mean over samples or over the samples of all subtasks."""
    parts = [_mean(rows)] if rows else list(_parts(found, task, name))
    means = [part for part in parts if part is not None]
    total = sum(count for _, _, count in means)
    if not total or any(error is None for _, error, _ in means):
        return None
    mean = sum(own * count for own, _, count in means) / total
    if not math.isclose(mean, score, abs_tol=1e-9):
        return None
    return math.sqrt(sum(((error or 0.0) * count / total) ** 2 for _, error, count in means))


def _mean(rows: list[dict[str, Any]]) -> tuple[float, float | None, int] | None:
    """Return mean, standard error and number of samples; None if a score is no number."""
    scores = [row["score"] for row in rows]
    if not all(isinstance(score, int | float) for score in scores):
        return None
    mean, error = mean_and_error(scores)
    return None if mean is None else (mean, error, len(scores))


def _parts(found: Found, task: str, name: str) -> Iterator[tuple[float, float | None, int] | None]:
    """Yield `_mean` of each task of a group."""
    metric, _, chosen = name.partition(",")
    groups = found.get("group_subtasks", {})
    for child in groups.get(task, ()):
        if child in groups and child not in found["samples"]:
            yield from _parts(found, child, name)
        elif name in found["results"].get(child, {}):
            yield _mean(_rows(found["samples"][child], metric, chosen))


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it. A number that is not finite becomes None."""
    if hasattr(value, "item"):  # numpy
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    plain = isinstance(value, bool | int | float | str) or value is None
    return finite(value) if plain else str(value)
