"""Options that name several things, such as ``--layout zigzag,striped``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config

# The largest numbers that options take. Larger ones overflow, or keep the command busy for longer than anybody waits.
MOST_STEPS = 10**9  # as train.steps
MOST_TOKENS = 2**26  # as seq
MOST_WORKERS = 2**14  # as topology.workers
MOST_SAMPLES = 10**6  # days of measuring
MOST_THREADS = 4096  # more than any machine has cores
MOST_HEADS = 65_535  # as model.num_heads
MOST_HEAD_DIM = 4096  # as model.head_dim
MOST_IDS = 2**31 - 1  # as model.vocab_size
MOST_DOCUMENTS = 2**40  # a token each would fill the largest disks
MOST_COMPARED = 2**16  # tokens: their logits in float32 take 40 GiB with 152k ids
LARGEST_DEGREE = MOST_WORKERS  # of imbalance: one worker does everything
LARGEST_TOLERANCE = 1e3  # of a logit: beyond it everything agrees
MOST_DIGITS = 18  # of a whole number in a list


def names(option: str, text: str, allowed: Sequence[str] | None = None) -> list[str]:
    """The names in a list with commas, each once.

    allowed: None where others check them; nothing at all is then a list of none.

    Raises:
        ConfigError: there is none, or one that is not allowed.
    """
    from mtrain_cli.config.suggest import did_you_mean

    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found and (text or allowed is not None):
        raise ConfigError(
            f"{option} {text!r}: names nothing"
            + (f"; allowed: {', '.join(allowed)}" if allowed is not None else "")
        )
    for name in found:
        if allowed is not None and name not in allowed:
            raise ConfigError(
                f"{option} {name}: unknown{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
            )
    return found


def share(option: str, text: str | None) -> float | None:
    """A share above 0 and at most 1; None where the option was not given.

    Raises:
        ConfigError: no number, or beyond.
    """
    from mtrain_cli.config.sizes import parse_share

    if text is None:
        return None
    try:
        found = parse_share(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise ConfigError(f"{option} {text}: must be above 0 and at most 1, such as 0.05 or 5%")
    return found


def parse_whole_number(text: str) -> int:
    """A whole number of at least 0 in digits. Raises ValueError for anything else; `int` alone takes signs, spaces and other digits."""
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ValueError(text)
    return int(text)


def warn_of_unused_settings(
    words: Sequence[str],
    config: Config | None = None,
    config_dir: Path | None = None,
    *,
    exchange: str = "",
    device: str = "",
) -> None:
    """One line on stderr for each typed setting that changes nothing. config: None where a command uses few keys by design."""
    from mtrain_cli.config.unused_settings import repeated_keys, unused_keys
    from mtrain_cli.launch.job import job_rank

    if job_rank():
        return
    found = repeated_keys(words, config_dir)
    if config is not None:
        found += unused_keys(words, config, config_dir, exchange=exchange, device=device)
    for line in found:
        print(f"mtrain: warning: {line}", file=sys.stderr)
