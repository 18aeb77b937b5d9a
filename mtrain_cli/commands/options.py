"""Options that name several things, such as ``--layout zigzag,striped``."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain_cli.config.schema import ConfigError


def names(option: str, text: str, allowed: Sequence[str] | None = None) -> list[str]:
    """The names in a list with commas, each once.

    allowed: None where others check them; nothing at all is then a list of none.

    Raises:
        ConfigError: there is none, or one that is not allowed.
    """
    from mtrain_cli.config.suggest import did_you_mean

    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found and (text or allowed is not None):
        raise ConfigError(f"{option} {text!r}: names nothing" + (f"; allowed: {', '.join(allowed)}" if allowed is not None else ""))
    for name in found:
        if allowed is not None and name not in allowed:
            raise ConfigError(f"{option} {name}: unknown{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}")
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
