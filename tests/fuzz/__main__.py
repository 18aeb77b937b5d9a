"""``python -m fuzz words|damage|kills``; see the package's docstring."""

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

from fuzz.damage import copy_to, damage
from fuzz.kills import check
from fuzz.material import commands_for, make
from fuzz.runner import Outcome, run, run_watched, say, stub_heavy_work, table
from fuzz.words import Words


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("what", choices=("words", "damage", "kills"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument(
        "--limit", type=float, default=120.0, help="time limit of a command in seconds"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--material",
        type=Path,
        help="folder of an earlier call with a run and so on; created by default",
    )
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="mtrain-fuzz-") as scratch:
        if arguments.what == "kills":
            started = time.monotonic()
            bad = list(check(arguments.seed, arguments.count, Path(scratch)))
            print(f"kills, seed {arguments.seed}, {time.monotonic() - started:.0f} s")
            print("\n".join([f"{len(bad)} of {arguments.count} differ", *bad]))
            return int(bool(bad))
        material = (
            arguments.material.resolve() if arguments.material else make(Path(scratch, "material"))
        )
        _import_everything()
        started = time.monotonic()
        names, run_one = (_words if arguments.what == "words" else _damage)(
            arguments.seed, arguments.count, material, Path(scratch)
        )
        outcomes: dict[int, Outcome] = {}

        def prepare() -> None:
            os.chdir(Path(scratch))
            stub_heavy_work()

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # show the results so far
            for number, outcome in run_watched(
                arguments.count, prepare, run_one, arguments.limit, arguments.workers
            ):
                outcomes[number] = outcome
                if len(outcomes) % 500 == 0:
                    bad = sum(o.kind != "fine" for o in outcomes.values())
                    seconds = time.monotonic() - started
                    say(f"{len(outcomes)} of {arguments.count}, {seconds:.0f} s, {bad} bad")
        ordered = list(outcomes.values())
        print(f"{arguments.what}, seed {arguments.seed}, {time.monotonic() - started:.0f} s")
        print(
            table(ordered, [names(number) for number in outcomes]).encode(errors="replace").decode()
        )
        return int(any(outcome.kind != "fine" for outcome in ordered))


def _import_everything() -> None:
    """Import the heavy modules before processes fork."""
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

    def run_one(number: int) -> Outcome:
        return run(lines[number].words, lines[number].typos)

    return (lambda number: " ".join(lines[number].words)), run_one


def _damage(seed: int, _: int, material: Path, scratch: Path):
    sources = list(commands_for(material))

    def plan(number: int):
        draw = random.Random(f"{seed}-{number}")
        source, files, commands = draw.choice(sources)
        return draw, source, draw.choice(files), draw.choice(commands)

    def run_one(number: int) -> Outcome:
        draw, source, file, command = plan(number)
        copy = copy_to(source, scratch / f"damaged-{os.getpid()}")
        target = copy / file if source.is_dir() else copy
        change = damage(draw, target)
        outcome = run(
            [
                word.replace("THIS", str(copy)).replace(
                    "OUT", str(scratch / f"out-{os.getpid()}-{number}")
                )
                for word in command
            ]
        )
        return Outcome(
            outcome.kind,
            outcome.code,
            f"{outcome.about} [{change}]" if outcome.kind != "fine" else outcome.about,
            outcome.seconds,
        )

    def name(number: int) -> str:
        _, source, file, command = plan(number)
        return f"{source.name}/{file}: {' '.join(command)}"

    return name, run_one


if __name__ == "__main__":
    sys.exit(main())
