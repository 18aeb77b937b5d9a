"""Which documents of a corpus get into a token store."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mtrain_cli.config.schema import ConfigError


@dataclass(frozen=True)
class Filters:
    """domains: none means all. Tokens are those of the store, the end token included; 0: any number. truncate: a document that is longer
    than max_tokens is cut there, and then has no end token, instead of being left out. min_chars: characters of the text.
    """

    domains: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 0
    truncate: bool = False
    min_chars: int = 0

    def __post_init__(self) -> None:
        for option, value in (
            ("--min-tokens", self.min_tokens),
            ("--max-tokens", self.max_tokens),
            ("--min-chars", self.min_chars),
        ):
            if value < 0:
                raise ConfigError(f"{option} {value}: must be 0 (any number) or more")
        if 0 < self.max_tokens < self.min_tokens:
            raise ConfigError(
                f"--max-tokens {self.max_tokens}: is below --min-tokens {self.min_tokens}; no document would be left"
            )
        if self.truncate and not self.max_tokens:
            raise ConfigError(
                "--truncate: cuts documents at --max-tokens, which has to be given too"
            )

    @property
    def recipe(self) -> dict[str, str]:
        """What tells stores apart; empty for no filters, as stores of earlier versions say."""
        return {} if self == Filters() else {"filters": repr(sorted(asdict(self).items()))}


EVERYTHING = Filters()
