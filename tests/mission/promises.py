"""Compare the rows of the suite with a table of promises, so that none leaves with its test.

    python tests/mission/promises.py MISSION.md

Prints a line with the missing and the unknown rows, and exits with 1, unless both have the same.
"""

import re
import sys
from pathlib import Path

from mission_rows import ROWS


def promised(text: str) -> list[str]:
    """Return the ids in the first column of the tables, such as C1a."""
    return re.findall(r"^\| *([A-Z]\d+[a-z]?) *\|", text, re.MULTILINE)


def difference(promises: list[str], rows: list[str]) -> str:
    """Return what differs, in one line; "" if nothing does."""
    found = {
        "without a test": [name for name in promises if name not in rows],
        "without a promise": [name for name in rows if name not in promises],
        "twice": sorted({name for of in (promises, rows) for name in of if of.count(name) > 1}),
    }
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)


if __name__ == "__main__":
    table = promised(Path(sys.argv[1]).read_text(encoding="utf-8"))
    problem = difference(table, [row.id for row in ROWS]) if table else "no row in the table"
    print(f"{sys.argv[1]}: {problem or f'all {len(table)} promises have a test'}")
    sys.exit(bool(problem))
