"""Data sets of the Hub by name, read with the package datasets and kept as JSON lines.

``org/set[@revision][?split=train&name=config]``. The path of the copy names the commit.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import date, time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.places import files, hub

_OPTIONS = ("split", "name")
_SAID = 100_000  # rows from one line of progress to the next


def copy_here(subject: str, name: str) -> Path:
    """Return a file of JSON lines with the rows of a split, written once per node and commit.

    Raises ConfigError if the set or split does not exist, cannot be read, or holds images or audio.
    """
    query = name.partition("?")[2]
    if "?" in name and (not query or dict(parse_qsl(query)).keys() - {*_OPTIONS}):
        raise ConfigError(f"{subject}: after ?, give split=NAME, name=CONFIGURATION or both, by &")
    repo, options = parts(name)
    revision, split = name.partition("?")[0].partition("@")[2], options["split"]
    with hub.explained(subject, repo, revision):
        from huggingface_hub import HfApi

        commit = str(HfApi().dataset_info(repo, revision=revision or None).sha)
    chosen = f"?split={split}" + (f"&name={options['name']}" if "name" in options else "")
    url = f"hf://{repo}@{commit}{chosen}"

    def fill(target: Path) -> None:
        files.say(f"{subject}: reading commit {commit}")
        with target.open("w", encoding="utf-8") as file:
            for number, row in enumerate(_rows(subject, repo, commit, split, options), start=1):
                file.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
                if number % _SAID == 0:
                    files.say(f"{subject}: {number:,} rows")

    try:
        return files.cached(subject, url, commit[:16], f"{repo.rpartition('/')[2]}.jsonl", fill)
    except TypeError as error:
        raise ConfigError(f"{subject}: {error}") from error


def parts(url: str) -> tuple[str, dict[str, str]]:
    """Return the repository of a data set and its options, without the revision."""
    name, _, query = url.removeprefix("hf://").partition("?")
    return name.partition("@")[0].strip("/"), {"split": "train", **dict(parse_qsl(query))}


def _rows(subject: str, repo: str, commit: str, split: str, options: dict[str, str]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{subject}: needs datasets; {install_command('hub')}") from error
    if Path(repo).exists():  # datasets would read it in place of the Hub's set
        raise ConfigError(
            f"{subject}: the folder {repo} here hides the data set of the Hub from the package "
            f"datasets; give {repo} to read the folder, or work in another folder"
        )
    with ExitStack() as stack:
        stack.enter_context(hub.explained(subject, f"datasets/{repo}"))
        try:
            yield from datasets.load_dataset(
                repo, options.get("name"), split=split, revision=commit, streaming=True
            )
        except (datasets.exceptions.DatasetsError, ValueError) as error:
            raise ConfigError(f"{subject}: cannot be read ({files.why(error)})") from error


def _plain(value: object) -> str:
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"a column holds {type(value).__name__} values; only text and numbers are read")
