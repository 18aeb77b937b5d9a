"""Which command goes on with a run that `mtrain study learning` trains.

The folder of a study has the file `STUDY`. Its runs are ``NAME/seed-N/run``.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from mtrain_cli.config import documents
from mtrain_cli.printable import printable

STUDY = "study.json"
RUN = "run"
COMMAND = "command"  # key of `STUDY`: the words of the study's command


def study_command(run: Path) -> str:
    """Return the command of the study to which a run belongs; "" for other runs."""
    folder = next(iter(run.absolute().parents[2:3]), None)
    if folder is None or run.name != RUN:
        return ""
    try:
        about = documents.read_json(folder / STUDY)
    except (OSError, ValueError):
        return ""
    words = about.get(COMMAND) if isinstance(about, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return ""
    return printable(shlex.join(words))
