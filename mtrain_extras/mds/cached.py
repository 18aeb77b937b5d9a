"""Keep arrays in the cache folder of tokens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import numpy as np

from mtrain_cli.data.token_cache import locked_entry


def cached_array(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array that ``key`` identifies from the cache folder, or else make and cache it."""
    try:
        with locked_entry(f"{key}.npy") as (entry, _):
            try:
                return np.load(entry, allow_pickle=False)
            except (FileNotFoundError, ValueError, EOFError):
                array = make()
                with tempfile.NamedTemporaryFile(
                    dir=entry.parent, prefix=f"{key}.tmp", delete=False
                ) as file:
                    np.save(file, array)
                os.replace(file.name, entry)
                return array
    except OSError:
        return make()
