"""Select the documents of a corpus that go into a token store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mtrain_cli.config.schema import ConfigError


@dataclass(frozen=True)
class Filters:
    """Conditions that a document must meet.

    domains: allowed domains; empty allows all.
    min_tokens, max_tokens: limits of the number of tokens, with the end token; 0 sets no limit.
    truncate: cut a longer document at ``max_tokens``, without an end token, instead of dropping it.
    min_chars: minimum number of characters in the document's text.
    """

    domains: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 0
    truncate: bool = False
    min_chars: int = 0

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_tokens", "min_chars"):
            if (value := getattr(self, name)) < 0:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {value}: must be 0 (no limit) or more")
        if 0 < self.max_tokens < self.min_tokens:
            raise ConfigError(
                f"--max-tokens {self.max_tokens}: is below --min-tokens {self.min_tokens}, so no "
                "document would be left"
            )
        if self.truncate and not self.max_tokens:
            raise ConfigError("--truncate: cuts documents at --max-tokens. Give --max-tokens too.")

    @property
    def recipe(self) -> dict[str, str]:
        """The entry for the filters in `StoreMeta.recipe`, or an empty dict without any filter."""
        return {} if self == Filters() else {"filters": repr(sorted(asdict(self).items()))}


EVERYTHING = Filters()
EMPTY = "empty or null"  # documents without text or tokens


def describe_left_out(counts: Mapping[str, int]) -> str:
    """Return ``left out: 1 .html (not a text format), 3 empty or null``; "" without counts."""
    shown = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    return f"left out: {shown}" if counts else ""
