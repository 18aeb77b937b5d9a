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
