"""``python -m fuzz words|damage``: see the package."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from fuzz.damage import copied, damage
from fuzz.material import commands_for, make
from fuzz.runner import Outcome, run, say, table, watched, without_work
from fuzz.words import Words


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("what", choices=("words", "damage"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that a command may take"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--material",
        type=Path,
        help="a folder made before, of a run and so on; made anew if not given",
    )
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="mtrain-fuzz-") as scratch:
        material = asked.material.resolve() if asked.material else make(Path(scratch, "material"))
        _import_everything()
        began = time.monotonic()
        names, one = (_words if asked.what == "words" else _damage)(
            asked.seed, asked.count, material, Path(scratch)
        )
        found: dict[int, Outcome] = {}

        def prepare() -> None:
            os.chdir(Path(scratch))
            without_work()

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # what was found until then is shown
            for number, outcome in watched(asked.count, prepare, one, asked.limit, asked.workers):
                found[number] = outcome
                if len(found) % 500 == 0:
                    bad = sum(o.kind != "fine" for o in found.values())
                    say(
                        f"{len(found)} of {asked.count}, {time.monotonic() - began:.0f} s, {bad} bad"
                    )
        ordered = list(found.values())
        print(f"{asked.what}, seed {asked.seed}, {time.monotonic() - began:.0f} s")
        print(table(ordered, [names(number) for number in found]).encode(errors="replace").decode())
        return int(any(outcome.kind != "fine" for outcome in ordered))


def _import_everything() -> None:
    """Before processes fork."""
    import pandas
    import pyarrow.parquet
    import torch

    import mtrain_cli.reporting.html
    import mtrain_cli.simulation.recommend
    import mtrain_cli.training.conversion
    import mtrain_cli.training.dry_run

    torch.set_num_threads(1)
    del pandas, pyarrow, mtrain_cli


def _words(seed: int, count: int, material: Path, _: Path):
    from fuzz.material import names

    generator = Words(seed, [str(material / name) for name in names()])
    lines = [generator.line() for _ in range(count)]

    def one(number: int) -> Outcome:
        return run(lines[number].words, lines[number].typos)

    return (lambda number: " ".join(lines[number].words)), one


def _damage(seed: int, _: int, material: Path, scratch: Path):
    wanted = list(commands_for(material))

    def plan(number: int):
        draw = random.Random(f"{seed}-{number}")
        source, files, commands = draw.choice(wanted)
        return draw, source, draw.choice(files), draw.choice(commands)

    def one(number: int) -> Outcome:
        draw, source, file, command = plan(number)
        there = copied(source, scratch / f"damaged-{os.getpid()}")
        target = there / file if source.is_dir() else there
        said = damage(draw, target)
        outcome = run(
            [
                word.replace("THIS", str(there)).replace(
                    "OUT", str(scratch / f"out-{os.getpid()}-{number}")
                )
                for word in command
            ]
        )
        return Outcome(
            outcome.kind,
            outcome.code,
            f"{outcome.about} [{said}]" if outcome.kind != "fine" else outcome.about,
            outcome.seconds,
        )

    def name(number: int) -> str:
        _, source, file, command = plan(number)
        return f"{source.name}/{file}: {' '.join(command)}"

    return name, one


if __name__ == "__main__":
    sys.exit(main())
