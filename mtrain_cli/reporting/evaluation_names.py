"""Names that tell apart results of one task, length and attention with other settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtrain_cli.config.schema import PERPLEXITY
from mtrain_cli.evaluation.results import HELD_OUT_TEXT, Result

# Settings that do not belong to an attention, by how they begin. If results of one attention differ
# in one, the names of all attentions have it.
_KINDS = (
    *("text", "short", "keys from", "haystack", "needles", "chains", "seed", "max-new"),
    *("tokenizer", "dtype"),
)
_WHOLE = {HELD_OUT_TEXT: "text", "sentences": "form", "python": "form"}
_TEXT = "text"
_KEY_DIGITS = 4  # of the key of a result in its name


@dataclass(frozen=True)
class NamedSettings:
    """What a name of a table stands for.

    name: the attention, with the settings in which results differ.
    task: as in `Result`.
    settings: all settings of the results with this name.
    """

    name: str
    task: str
    settings: tuple[str, ...]


def distinguished(results: Sequence[Result]) -> list[Result]:
    """Return results of which no two have one heading.

    Where results of a task and an attention differ in other settings, such as the seed, the name of
    the attention gets these: ``dense, seed 2``. Where texts differ, all names have the text. Where
    no settings tell results apart, the name gets the beginning of the result's key, which does not
    change: ``dense (3f2a)``.
    """
    groups: dict[Hashable, list[Result]] = {}
    for result in results:
        groups.setdefault(_row(result), []).append(result)
    named = {}
    for group in groups.values():
        for name, result in zip(_names(group), group, strict=True):
            named[id(result)] = replace(result, attention=name)
    return [named[id(result)] for result in results]


def named_settings(results: Sequence[Result]) -> list[NamedSettings]:
    """Return what the names of `distinguished` stand for, if they have more than the attention."""
    groups: dict[tuple[str, str], list[Result]] = {}
    plain: dict[str, bool] = {}
    for given, result in zip(results, distinguished(results), strict=True):
        task = result.task.partition(":")[0]
        groups.setdefault((task, result.attention), []).append(given)
        plain[task] = plain.get(task, True) and given.attention == result.attention
    found = []
    for (task, name), group in groups.items():
        if not plain[task]:
            keys = sorted({result.key for result in group if name.endswith(_short_key(result))})
            every = [(*_settings(one), *filter(None, one.details)) for one in group]
            common = [one for one in every[0] if all(one in other for other in every)]
            settings = (*common, *(f"key {key}" for key in keys))
            found.append(NamedSettings(name, task, settings or ("not recorded",)))
    return found


def _row(result: Result) -> tuple[str, str]:
    """Return what names the rows of a result. The note of lm-eval tells the shots."""
    return result.task, result.note if result.task.startswith("lm-eval:") else ""


def _settings(result: Result) -> tuple[str, ...]:
    """Return the settings. Earlier versions did not name the text that a run held out."""
    own = result.settings
    if result.task == PERPLEXITY and own and not any(_kind(one) == _TEXT for one in own):
        return HELD_OUT_TEXT, *own
    return own


def _kind(setting: str) -> str:
    """Return the kind of a setting that does not belong to an attention; "" for others."""
    begins = (kind for kind in _KINDS if setting.startswith(f"{kind} "))
    return _WHOLE.get(setting) or next(begins, "")


def _names(group: Sequence[Result]) -> list[str]:
    """Return a name of the attention for each result of a task."""
    by_attention: dict[str, list[Result]] = {}
    for result in group:
        by_attention.setdefault(result.attention, []).append(result)
    different = {name: _different(own) for name, own in by_attention.items()}
    kinds = {_kind(one) for own in different.values() for one in own} - {""}
    texts = {one for result in group for one in _settings(result) if _kind(one) == _TEXT}
    if len(texts) > 1:
        kinds.add(_TEXT)
    names = []
    for result in group:
        own = different[result.attention]
        shown = [one for one in _settings(result) if one in own or _kind(one) in kinds]
        names.append(", ".join([result.attention, *shown]))
    return _with_keys(group, _with_details(group, names))


def _different(group: Sequence[Result]) -> set[str]:
    """Return the settings in which results of an attention differ; none if no two are of a place.

    A place is a length and a step.
    """
    if len({(result.length, result.step) for result in group}) == len(group):
        return set()
    every = [set(_settings(result)) for result in group if result.settings]
    common: set[str] = set.intersection(*every) if every else set()
    return {one for own in every for one in own} - common


def _with_details(group: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return names with the first details that tell apart results of one name and place."""
    found = list(names)
    most = max((len(result.details) for result in group), default=0)
    for number in range(most):
        for same in _alike(group, found):
            own = [group[at].details[number : number + 1] for at in same]
            if all(own) and len(set(own)) > 1:
                shown = _shortened([one for (one,) in own])
                for at, detail in zip(same, shown, strict=True):
                    found[at] += f", {detail}"
    return found


def _with_keys(group: Sequence[Result], names: Sequence[str]) -> list[str]:
    found = list(names)
    for same in _alike(group, names):
        for at in same:
            found[at] += _short_key(group[at])
    return found


def _short_key(result: Result) -> str:
    return f" ({result.key[:_KEY_DIGITS]})"


def _alike(group: Sequence[Result], names: Sequence[str]) -> Iterable[Collection[int]]:
    """Return the numbers of the results that share a name and a place with others."""
    places = [(r.length, r.step, name) for r, name in zip(group, names, strict=True)]
    several = {place for place, count in Counter(places).items() if count > 1}
    return [
        [at for at, own in enumerate(places) if own == place]
        for place in sorted(several, key=places.index)
    ]


def _shortened(details: Sequence[str]) -> list[str]:
    """Return ``in FOLDER`` with the last name of each folder, if these differ."""
    if not all(one.startswith("in ") for one in details):
        return list(details)
    short = [f"in {Path(one.removeprefix('in ')).name}" for one in details]
    return short if len(set(short)) == len(set(details)) else list(details)
