"""RULER's metrics: does a prediction contain the expected answers? (arXiv:2404.06654, section 4)"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")

Metric = Callable[[str, Sequence[str]], float]


def clean_prediction(text: str) -> str:
    """Replace control characters by line breaks and strip the ends, as RULER does."""
    return _CONTROL.sub("\n", text.strip()).strip()


def string_match_all(prediction: str, outputs: Sequence[str]) -> float:
    """Return the share of answers that the cleaned prediction contains, whatever their case."""
    return sum(_contained(prediction, outputs)) / len(outputs)


def string_match_part(prediction: str, outputs: Sequence[str]) -> float:
    """Return 1 if the cleaned prediction contains one of the answers, whatever its case, else 0."""
    return max(_contained(prediction, outputs))


def percentage(grades: Sequence[float]) -> float:
    """Return the mean of the grades in percent, rounded to two digits as in RULER's tables."""
    return round(sum(grades) / len(grades) * 100, 2)


def _contained(prediction: str, outputs: Sequence[str]) -> list[float]:
    lowered = prediction.lower()
    return [1.0 if output.lower() in lowered else 0.0 for output in outputs]
