"""Which command goes on with a run that `mtrain study learning` trains.

The folder of a study has the file `STUDY`. Its runs are ``NAME/seed-N/run``.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from mtrain_cli.config import documents

STUDY = "study.json"
RUN = "run"
COMMAND = "command"  # key of `STUDY`: the words of the study's command
_FIRST_WORDS = ["mtrain", "study", "learning"]
# Instead of a command that others may have written into the file.
_UNKNOWN = "mtrain study learning, with the options it was started with"


def study_command(run: Path) -> str:
    """Return the command of the study to which a run belongs; "" for other runs.

    The file of the study is not trusted. Words that are not a command of a study, or that are not
    one printable line, are replaced by a sentence without them.
    """
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
    return shlex.join(words) if _is_command(words) else _UNKNOWN


def _is_command(words: list[str]) -> bool:
    return words[:3] == _FIRST_WORDS and all(map(str.isprintable, words))
