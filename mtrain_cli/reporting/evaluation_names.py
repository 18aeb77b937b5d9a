"""Names that tell apart results of one task, length and attention with other settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mtrain_cli.config.pattern_settings import PatternSettings, pattern_keys
from mtrain_cli.config.schema import PERPLEXITY
from mtrain_cli.evaluation.results import HELD_OUT_TEXT, Result
from mtrain_cli.grouping import grouped

# Settings that do not belong to an attention, by how they begin. If results of one attention differ
# in one, the names of all attentions have it.
_KINDS = (
    *("text", "short", "keys from", "haystack", "needles", "chains", "seed", "max-new"),
    *("tokenizer", "dtype"),
)
_WHOLE = {HELD_OUT_TEXT: "text", "sentences": "form", "python": "form"}
# All tasks of a suite have these settings, and those of their pattern.
_OF_MODEL = {"tokenizer", "dtype", *(field.name for field in fields(PatternSettings))}
_TEXT = "text"
_UNKNOWN = "settings not recorded"  # by earlier versions
_WEIGHTS = "weights "
# How details begin that do not depend on the length.
_ANY_LENGTH = ("in ", "haystack files ", "content ", "version ")
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
    """Return results of which no two have one heading, and no heading has two settings.

    Where results of a task and an attention differ in settings, such as the seed, the name of the
    attention gets these: ``dense, seed 2``. Lengths and checkpoints do not matter, so a column has
    one setting. Where texts differ, all names have the text. Where no settings tell results of one
    length apart, the name gets the beginning of the result's key, which does not change:
    ``dense (3f2a)``.
    """
    named: dict[int, str] = {}
    for table in _grouped(results, _table):
        own = [results[at] for at in table]
        names = _by_rows(_with_details, own, _with_settings(own))
        names = _by_rows(_with_keys, own, _with_weights(own, names))
        named.update(zip(table, names, strict=True))
    return [replace(result, attention=named[at]) for at, result in enumerate(results)]


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


def _grouped(
    results: Sequence[Result], key: Callable[[Result], Hashable]
) -> Iterable[Sequence[int]]:
    return grouped(range(len(results)), lambda at: key(results[at])).values()


def _by_rows(
    change: Callable[[Sequence[Result], Sequence[str]], list[str]],
    table: Sequence[Result],
    names: Sequence[str],
) -> list[str]:
    found = list(names)
    for row in _grouped(table, _row):
        changed = change([table[at] for at in row], [names[at] for at in row])
        for at, name in zip(row, changed, strict=True):
            found[at] = name
    return found


def _table(result: Result) -> str:
    suite, colon, _ = result.task.partition(":")
    return suite + colon


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


def _with_settings(table: Sequence[Result]) -> list[str]:
    different = [set[str]() for _ in table]
    for same in _grouped(table, lambda result: result.attention):
        found = _different([_of_model(table[at]) for at in same])
        for at in same:
            different[at] |= found
    for same in _grouped(table, lambda result: (_row(result), result.attention)):
        recorded = [table[at] for at in same if table[at].settings]
        found = _different([_settings(result) for result in recorded])
        for at in same:
            different[at] |= found if table[at].settings else {_UNKNOWN} if recorded else set()
    names = [result.attention for result in table]
    for row in _grouped(table, _row):
        kinds = {_kind(one) for at in row for one in different[at]} - {""}
        texts = {one for at in row for one in _settings(table[at]) if _kind(one) == _TEXT}
        kinds |= {_TEXT} if len(texts) > 1 else set()
        for at in row:
            own = _settings(table[at]) or (_UNKNOWN,)
            shown = [one for one in own if one in different[at] or _kind(one) in kinds]
            names[at] = ", ".join([names[at], *shown])
    return names


def _of_model(result: Result) -> list[str]:
    keys = {*_OF_MODEL, *pattern_keys(result.attention)}
    return [one for one in result.settings if one.partition(" ")[0] in keys]


def _different(every: Iterable[Iterable[str]]) -> set[str]:
    sets = [set(own) for own in every]
    common = sets[0].intersection(*sets) if sets else set()
    return {one for own in sets for one in own if one not in common}


def _with_weights(table: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return names with the weights where those of one step and name differ, if both are known."""
    found = list(names)
    weights = [
        next((one for one in result.details if one.startswith(_WEIGHTS)), "") for result in table
    ]
    for same in _same([(r.step, name) for r, name in zip(table, names, strict=True)]):
        known = {weights[at] for at in same if not weights[at].startswith(f"{_WEIGHTS}training")}
        if len(known - {""}) > 1:
            for at in same:
                found[at] += f", {weights[at]}" if weights[at] else ""
    return found


def _with_details(group: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return names of a row with the first details that tell apart results of one name."""
    found = list(names)
    most = max((len(result.details) for result in group), default=0)
    for number in range(most):
        details = [result.details[number : number + 1] for result in group]
        any_length = [bool(own) and own[0].startswith(_ANY_LENGTH) for own in details]
        alike = [one for one in _same(found) if all(any_length[at] for at in one)]
        for same in (*alike, *_alike(group, found)):
            own = [details[at] for at in same]
            if len({found[at] for at in same}) == 1 and all(own) and len(set(own)) > 1:
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
    return _same([(r.length, r.step, name) for r, name in zip(group, names, strict=True)])


def _same(keys: Sequence[Hashable]) -> list[list[int]]:
    return [same for same in grouped(range(len(keys)), keys.__getitem__).values() if len(same) > 1]


def _shortened(details: Sequence[str]) -> list[str]:
    if not all(one.startswith("in ") for one in details):
        return list(details)
    short = [f"in {Path(one.removeprefix('in ')).name}" for one in details]
    return short if len(set(short)) == len(set(details)) else list(details)
