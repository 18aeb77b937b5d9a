"""The key of a .jsonl record, or the column of a .parquet file, from which a value is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from mtrain_cli.config.problem import as_typed
from mtrain_cli.config.schema import ConfigError


@dataclass(frozen=True)
class RecordKey:
    """A key of .jsonl records, or a column of a .parquet file.

    name: name of the key or column.
    option: configuration key or command-line option that sets the name, for messages.
    """

    name: str
    option: str

    def missing_error(self, location: str, present: Iterable[str]) -> ConfigError:
        """Return the error for a record or file at ``location`` whose keys are ``present``."""
        names = ", ".join(islice(present, 12)) or "none"
        return self.value_error(location, f"has no such key. Its keys: {names}")

    def value_error(self, location: str, problem: object) -> ConfigError:
        """Return the error for a value at ``location``. problem: text that continues the place."""
        return ConfigError(f"{as_typed(self.option, self.name)}: {location} {problem}")
