"""`mtrain profile`: the group of commands, and the functions that these commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from mtrain_cli.config.pattern_settings import pattern_keys
from mtrain_cli.config.schema import ConfigError

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def profile() -> None:
    """Measure attention, messages and training steps on this machine.

    [bold]Examples[/bold]

      [cyan]mtrain profile imbalance model=qwen3b seq=512k sparsity=vertical_slash[/cyan]
          Measure how much each worker computes in each step
      [cyan]mtrain profile step model=qwen3b seq=128k[/cyan]
          Measure where the time of a training step goes
    """


def key_of(word: str) -> str:
    """Return ``chunk`` for ``sparsity.chunk=512``."""
    return word.partition("=")[0].removeprefix("sparsity.")


def require_known_keys(words: Sequence[str], patterns: Sequence[str], shown: Sequence[str]) -> None:
    """Raise ConfigError if no pattern has the key of a setting; name the patterns ``shown``."""
    for word in words:
        if not any(key_of(word) in pattern_keys(name) for name in patterns):
            raise ConfigError(f"{word}: none of the patterns {', '.join(shown)} has this key")


def keys_for(pattern: str, words: Sequence[str]) -> list[str]:
    """Return the settings ``sparsity.KEY=...`` whose key the pattern has."""
    return [word for word in words if key_of(word) in pattern_keys(pattern)]


def check_output(
    out: Path | None, is_own: Callable[[Path], bool], description: str, option: str = "--out"
) -> None:
    """Check before a measurement that ``out`` can be written, and create its folders.

    Raises ConfigError for anything but a new file, an empty one, or an earlier ``description``.
    is_own: whether a file is one.
    """
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"{option} {out}: is a folder; give a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(out)  # a link to a missing file is the user's
        with out.open("ab"):
            pass
        if is_new:
            out.unlink()
        is_foreign = not is_new and out.stat().st_size > 0 and not is_own(out)
    except OSError as error:
        raise ConfigError(
            f"{option} {out}: cannot be written: {error.strerror or error}"
        ) from error
    if is_foreign:
        raise ConfigError(
            f"{option} {out}: exists and is not a {description} of mtrain; give another name, or "
            "remove it"
        )
