"""Shell completion of keys, groups, options and values. Imports neither Hydra nor torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mtrain_cli.config import keys
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.exchanges import exchange_names
from mtrain_cli.config.groups import Groups, open_groups, summary
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.plugins import callback_names
from mtrain_cli.config.schema import LAYOUTS

Candidate = tuple[str, str]  # text to insert, and its help


def complete_overrides(incomplete: str) -> list[Candidate]:
    """Complete a setting, even if the shell has split it at the ``=``."""
    groups, split = open_groups(), _split_by_bash()
    if split is None:
        return candidates(incomplete, groups)
    key, value = split
    if key in keys.PATHS:
        # Without candidates, bash completes file names itself and adds no space after a folder.
        return [word for word in _path_words(key) if value and word[0].startswith(value)]
    return [(name, help) for name, help in _values(key, groups) if name.startswith(value)]


def candidates(incomplete: str, groups: Groups) -> list[Candidate]:
    """Complete a whole word such as ``mo``, ``optim.w`` or ``model=qw``.

    If only one name matches, return that name with each of its values. The shell inserts the
    common part, such as ``model=``, without a space.
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        is_path = key in keys.PATHS
        values = [*_path_words(key), *_files(value)] if is_path else _values(key, groups)
        return [(f"{key}={name}", help) for name, help in values if name.startswith(value)]
    names = _names(groups, everything=bool(incomplete))
    matches = [(name, help) for name, help in names if name.startswith(incomplete)]
    if len(matches) == 1:
        name, help = matches[0]
        values = _values(name, groups) or [("...", help)]
        values = values if len(values) > 1 else [("", help), *values]
        return [(f"{name}={value}", help) for value, help in values]
    return [(f"{name}=", help) for name, help in matches]


def complete_runs(incomplete: str) -> list[str]:
    """Complete names of runs under runs/."""
    names = (file.parent.name for file in Path("runs").glob("*/resolved.yaml"))
    return sorted(name for name in names if name.startswith(incomplete))


def complete_measured(incomplete: str) -> list[str]:
    """Complete names of runs and measurements."""
    folders = (folder for root in ("runs", "measurements") for folder in Path(root).glob("*/"))
    return sorted({folder.name for folder in folders if folder.name.startswith(incomplete)})


def complete_models(incomplete: str) -> list[Candidate]:
    """Complete a run as runs/NAME, or the path of a folder."""
    return _or_files([(f"runs/{name}", "") for name in complete_runs("")], incomplete)


def complete_options(incomplete: str) -> list[Candidate]:
    """Complete GROUP/NAME for every option of every group."""
    return [
        (f"{group}/{option}", summary(file))
        for group, options in open_groups().options.items()
        for option, file in options.items()
        if f"{group}/{option}".startswith(incomplete)
    ]


def complete_layouts(incomplete: str) -> list[str]:
    return in_list(LAYOUTS, incomplete)


def complete_exchanges(incomplete: str) -> list[str]:
    return in_list(exchange_names(), incomplete)


def complete_attentions(incomplete: str) -> list[str]:
    """Complete a comma-separated list of patterns that read their input."""
    return in_list([name for name, kind in PATTERNS.items() if not kind.synthetic], incomplete)


def complete_clusters(incomplete: str) -> list[Candidate]:
    """Complete the name of a shipped cluster, or the path of a file."""
    return _or_files([(name, summary(file)) for name, file in shipped().items()], incomplete)


def complete_tokenizers(incomplete: str) -> list[Candidate]:
    """Complete bytes, bpe or the path of a tokenizer file."""
    return _or_files([("bytes", ""), ("bpe", "a byte-level BPE trained on SOURCE")], incomplete)


def in_list(allowed: Sequence[str], incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list, without names that are in the list."""
    before, comma, start = incomplete.rpartition(",")
    others = [name for name in allowed if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in others if name.startswith(start)]


def _or_files(words: Iterable[Candidate], incomplete: str) -> list[Candidate]:
    matches = [(word, help) for word, help in words if word.startswith(incomplete)]
    # Without candidates, bash completes file names itself and adds no space after a folder.
    return matches or ([] if _in_bash() else _files(incomplete))


def _names(groups: Groups, everything: bool) -> Iterable[Candidate]:
    for group, options in groups.options.items():
        yield group, f"one of {', '.join(options)}"
    for key in keys.all_keys().values():
        if everything or "." not in key.name:
            yield key.name, key.help


def _values(name: str, groups: Groups) -> list[Candidate]:
    """Return the options of a group, or the allowed words or examples of a key."""
    if name in groups.options:
        return [(option, summary(file)) for option, file in groups.options[name].items()]
    key = keys.all_keys().get(name)
    if key is None:
        return []
    words = [*key.choices, *_words_of(key)]
    words += ["true", "false"] if bool in key.types else []
    if name == "train.callbacks":
        words = [f"[{callback}]" for callback in callback_names()]
    if name == "seq":
        words = ["4k", "32k", "128k", "512k", "1m"]
    return [(word, key.help) for word in words]


def _path_words(name: str) -> list[Candidate]:
    """Return the words that a key takes instead of a path."""
    return [(word, keys.all_keys()[name].help) for word in keys.PATHS[name]]


def _words_of(key: keys.ConfigKey) -> tuple[str, ...]:
    takes_auto = key.name in keys.DERIVED or (str in key.types and not key.is_text)
    return ("auto",) if takes_auto else keys.PATHS.get(key.name, ())


def _files(prefix: str) -> list[Candidate]:
    folder, _, start = prefix.rpartition("/")
    base = Path(f"{folder}/" if folder or prefix.startswith("/") else ".").expanduser()
    lead = prefix[: len(prefix) - len(start)]
    try:
        entries = sorted(base.iterdir())
    except OSError:
        return []
    return [
        (f"{lead}{entry.name}{'/' if entry.is_dir() else ''}", "")
        for entry in entries
        if entry.name.startswith(start) and (start or entry.name[0] != ".")
    ]


def _split_by_bash() -> tuple[str, str] | None:
    """Return the key and the partial value if bash has split ``key=value`` at the ``=``.

    Return None for an unsplit word. Bash splits a word at the ``=``, which is in COMP_WORDBREAKS,
    and replaces only the text after the ``=``. Candidates must therefore not repeat the key.
    """
    if not _in_bash():
        return None
    line = os.environ.get("COMP_WORDS", "")
    words = line.split("\n") if "\n" in line else line.split()
    at = int(os.environ.get("COMP_CWORD", "0"))
    words += [""] * (at + 1 - len(words))
    if words[at] == "=" and at >= 1:
        return words[at - 1], ""
    if at >= 2 and words[at - 1] == "=":
        return words[at - 2], words[at]
    return None


def _in_bash() -> bool:
    return os.environ.get("_MTRAIN_COMPLETE") == "complete_bash"
