"""Find what a name or URL stands for, and return its local path."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.places import files, hub, named_set
from mtrain_extras.places.kinds import BASE, DATA, MODEL, TOKENIZER, is_url

_HUB = "hf://"
_FILES_OF_HUB = ("hf://datasets/", "hf://buckets/", "hf://spaces/", "hf://models/")


@functools.cache
def local(option: str, value: str, kind: str, known: object = None) -> str:
    """Return the local path, as `entry.local`. A process asks for each place only once."""
    subject = f"{option}{value}"
    if value.startswith("/"):
        return _again(option, value, kind)
    kind = MODEL if kind == BASE else kind
    if isinstance(known, str) and _came_from(known, value):
        return known
    is_named = not is_url(value) or (value.startswith(_HUB) and not value.startswith(_FILES_OF_HUB))
    if not is_url(value) and os.path.lexists(value):
        if Path(value).is_dir():
            files.say(f"{subject}: is a folder here, so it is not looked for on the Hub")
        return value
    if not is_url(value) and Path(value).parent.is_dir():
        return value  # a wrong path, which the caller reports
    if not is_named:
        return str(files.copy_here(option, value))
    name = value.removeprefix(_HUB).strip("/")
    if kind == DATA:
        return str(named_set.copy_here(subject, name))
    folder = hub.snapshot(subject, name, kind)
    if kind != TOKENIZER:
        return str(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{subject}: the repository has no tokenizer.json")
    return str(folder / "tokenizer.json")


def _came_from(known: str, value: str) -> bool:
    """Return whether a path of an earlier run came from a name or URL."""
    if (found := files.origin(known)) is not None:
        return found[0] == value or named_set.parts(found[0]) == named_set.parts(value)
    if (commit := hub.commit_of(known)) is not None:
        name, _, revision = value.removeprefix(_HUB).strip("/").partition("@")
        is_other = len(revision) == 40 and revision != commit[1]
        return name == commit[0] and not is_other
    return False


def _again(option: str, path: str, kind: str) -> str:
    """Return a path that an earlier run fetched, after fetching it again if it is missing.

    Raises ConfigError if the place now has other files.
    """
    commit = hub.commit_of(path)
    is_whole = kind != BASE or commit is None or not hub.lacking_weights(Path(path))
    if os.path.lexists(path) and is_whole:
        return path
    if commit is not None:
        # A run that resumes has its weights in the checkpoint, unless LoRA adapts them.
        if kind not in (TOKENIZER, BASE):
            return path
        name, kind = f"{commit[0]}@{commit[1]}", MODEL if kind == BASE else kind
        return str(hub.snapshot(f"{option}{path}", name, kind) / commit[2])
    found = files.origin(path)
    if found is None:
        return path
    url, version, rest = found
    again = local(option, url, kind)
    if (now := files.origin(again)) is None or now[1] != version:
        raise ConfigError(
            f"{option}{url}: has changed since the run began (now version {now and now[1]}, not "
            f"{version}); a run keeps its data"
        )
    files.say(f"{option}{url}: {rest} is here again")
    return again
