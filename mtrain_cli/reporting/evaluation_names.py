"""Names that tell apart results of one task, length and attention with other settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from mtrain_cli.evaluation.results import Result


def distinguished(results: Sequence[Result]) -> list[Result]:
    """Return results of which no two have one heading.

    Where results of a task and an attention differ in other settings, such as the seed, the name of
    the attention gets these: ``dense, seed 2``. Where the settings do not tell them apart, it gets
    a number: ``dense (2)``.
    """
    groups: dict[Hashable, list[Result]] = {}
    for result in results:
        groups.setdefault((_row(result), result.attention), []).append(result)
    named = {}
    for group in groups.values():
        for name, result in zip(_names(group), group, strict=True):
            named[id(result)] = replace(result, attention=name)
    return [named[id(result)] for result in results]


def _row(result: Result) -> tuple[str, str]:
    """Return what names the rows of a result. The note of lm-eval tells the shots."""
    return result.task, result.note if result.task.startswith("lm-eval:") else ""


def _names(group: Sequence[Result]) -> list[str]:
    """Return a name of the attention for each result of a task and an attention."""
    places = [(result.length, result.step) for result in group]
    names = [result.attention for result in group]
    if len(set(places)) == len(group):
        return names
    every = [result.settings for result in group]
    common = set.intersection(*(set(own) for own in every if own)) if any(every) else set()
    names = [
        ", ".join([name, *(one for one in own if one not in common)])
        for name, own in zip(names, every, strict=True)
    ]
    total = Counter(zip(places, names, strict=True))
    seen: Counter[Hashable] = Counter()
    numbered = []
    for place, name in zip(places, names, strict=True):
        seen[place, name] += 1
        several = total[place, name] > 1
        numbered.append(f"{name} ({seen[place, name]})" if several else name)
    return numbered
