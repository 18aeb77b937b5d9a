"""How a report reads and shows the results on attention: an entry point of `mtrain.records`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrain_cli.reporting.plots import Figure
from mtrain_extras.studies.attention.figures import attention_figures
from mtrain_extras.studies.attention.files import (
    TABLES,
    AttentionFiles,
    read_attention_files,
    without_lists,
)
from mtrain_extras.studies.attention.tables import tables
from mtrain_extras.studies.text_table import TextTable


class AttentionKind:
    """Largest keys, overlaps, maps and scores by distance."""

    def read(self, folder: Path) -> AttentionFiles:
        return read_attention_files(folder)

    def rows(self, records: AttentionFiles) -> dict[str, list[dict[str, Any]]]:
        return {name: [without_lists(row) for row in getattr(records, name)] for name in TABLES}

    def tables(self, records: AttentionFiles) -> list[TextTable]:
        return tables(records)

    def figures(self, named: Sequence[tuple[str, AttentionFiles]]) -> list[Figure]:
        return attention_figures(named)


ATTENTION = AttentionKind()
