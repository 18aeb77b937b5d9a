"""The simulator's replay of a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import mtrain


def replayed(folder: Path) -> dict[str, Any]:
    """Replay a profile, check that all counted work is equal, and return the comparison."""
    words = ["simulate", "validate", str(folder), "--json", "--no-files"]
    result = mtrain(folder.parents[1], *words)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    agreement = document["agreement"]
    assert agreement["work_cells_equal"] == agreement["work_cells"] > 0
    return document
