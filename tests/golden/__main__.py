"""`python -m golden record|check`; see the package."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib import metadata

from golden import files
from golden.groups import RECORDED, chosen

_SHOWN = 8  # differences printed per case
_PACKAGES = ("torch", "numpy", "pandas", "pyarrow")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m golden", description="Record or check what mtrain computes."
    )
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("--only", help='a group, the start of "GROUP/NAME", or part of a name')
    parser.add_argument("--exact", action="store_true", help="check every bit")
    parser.add_argument(
        "--files",
        action="store_true",
        help="with record: recreate the old checkpoint and profile, too",
    )
    arguments = parser.parse_args()
    if not list(chosen(arguments.only)):
        parser.error(f"--only {arguments.only}: no such case")
    if arguments.what == "check" and arguments.exact and (changed := _changed()):
        print(f"recorded with other versions: {changed}", file=sys.stderr)
    return (
        _record(arguments.only, arguments.files)
        if arguments.what == "record"
        else _check(arguments.only, arguments.exact)
    )


def _record(only: str | None, with_files: bool) -> int:
    if with_files:
        files.make()
    for group, names in chosen(only):
        began = time.monotonic()
        group.record(names)
        print(
            f"{group.name}: {len(names)} recorded in {time.monotonic() - began:.0f} s, "
            f"{group.path.stat().st_size:,} bytes"
        )
    (RECORDED / "versions.json").write_text(json.dumps(_versions(), indent=1) + "\n")
    return 0


def _check(only: str | None, exact: bool) -> int:
    failed = 0
    for group, names in chosen(only):
        began, bad = time.monotonic(), 0
        for name, differences in group.check(names, exact):
            if differences:
                bad += 1
                more = (
                    [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
                )
                print(
                    f"{group.name}/{name}\n  " + "\n  ".join([*differences[:_SHOWN], *more]),
                    flush=True,
                )
        print(
            f"{group.name}: {len(names) - bad} of {len(names)} as recorded, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        failed += bad
    return 1 if failed else 0


def _versions() -> dict[str, str]:
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def _changed() -> str:
    path, now = RECORDED / "versions.json", _versions()
    then = json.loads(path.read_text()) if path.exists() else {}
    return ", ".join(
        f"{name} {then.get(name)}, now {value}"
        for name, value in now.items()
        if then.get(name) != value
    )


if __name__ == "__main__":
    sys.exit(main())
