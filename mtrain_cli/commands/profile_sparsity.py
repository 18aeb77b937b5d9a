"""`mtrain profile sparsity`: measure how much of dense attention the patterns cover."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mtrain_cli.commands.options import (
    MOST_STEPS,
    MOST_TOKENS,
    Overrides,
    bounded,
    name_list,
    option,
    parse_names,
    warn_of_unused_settings,
    with_measurement_folder,
    writing,
)
from mtrain_cli.commands.profile import app, check_output, key_of, keys_for, require_known_keys
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.pattern_quality import HeadRecord
    from mtrain_cli.sparsity.pattern import Pattern


@app.command("sparsity")
def sparsity(
    overrides: Overrides = None,
    pattern: Annotated[str, name_list()] = "vertical_slash",
    steps: Annotated[int, bounded(1, MOST_STEPS)] = 2,
    every: Annotated[int, bounded(0, MOST_STEPS)] = 0,
    rows: Annotated[int, bounded(1, MOST_TOKENS)] = 256,
    out: Annotated[Path | None, option("FILE")] = None,
) -> None:
    """Measure how much of dense attention the patterns cover on real training steps, per layer.

    Coverage is measured only on queries that no pattern used to estimate its index.

    [bold]Examples[/bold]

      [cyan]mtrain profile sparsity[/cyan]
          Measure the tiny model at its first and second step
      [cyan]mtrain profile sparsity --pattern moba,fixed --steps 99 sparsity.top_k=3[/cyan]
          Compare two patterns as a model learns; each key applies to the pattern that has it

    Args:
        overrides: As in `mtrain train`; the run uses one worker.
        pattern: Patterns to measure, all on the same queries and keys. sparsity= sets the pattern
            of the training run, dense by default.
        steps: Number of training steps; the first and the last are measured.
        every: Also measure every N steps; 0 = only the first and the last step.
        rows: Number of queries to sample per layer, without the queries that a pattern uses to
            estimate its index.
        out: Parquet file with one row per step, pattern, layer and head; by default a folder in
            measurements/, which `mtrain report` can show.
    """
    from mtrain_cli.console import Console

    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: give a file that ends in .parquet")
    words = list(overrides or ())
    config, patterns = _patterns(words, pattern)
    warn_of_unused_settings(words)
    replaced = check_output(out, _is_sparsity_file, "sparsity profile")
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.profiling.pattern_quality import profile_sparsity
    from mtrain_cli.sparsity.pattern import display_name

    measured = sorted({1, steps, *range(every, steps + 1, every)} if every else {1, steps})
    console = Console(highlight=False, soft_wrap=True)

    def progress(step: int, loss: float | None) -> None:
        console.print(f"step {step}/{steps}  loss {'n.a.' if loss is None else f'{loss:.4f}'}")

    records = profile_sparsity(config, patterns, measured, rows, progress)
    names = {p.name: display_name(p) for p in patterns}
    _print_tables(console, records, names, measured)
    if out is None:
        about = {"patterns": list(names), "steps": measured, "rows": rows}
        folder = _save_measurement(config, words, records, about)
        console.print(f"files  {folder}\ndraw   mtrain report {shlex.quote(str(folder))}")
        return
    with writing(out):
        _write_parquet(records, out)
    console.print(f"{len(records)} rows in {out}{replaced}")


def _print_tables(
    console: Console, records: list[HeadRecord], names: dict[str, str], steps: list[int]
) -> None:
    """Print a table for each pattern at the first and at the last measured step."""
    from mtrain_cli.reporting.tables import sparsity_table

    measured = dict.fromkeys(r.pattern for r in records)
    for name, step in itertools.product(measured, dict.fromkeys((steps[0], steps[-1]))):
        rows = [dataclasses.asdict(r) for r in records if (r.pattern, r.step) == (name, step)]
        console.print(sparsity_table(rows, f"{names[name]}, step {step}"))


def _save_measurement(
    config: Config, words: list[str], records: list[HeadRecord], about: dict[str, Any]
) -> Path:
    """Save the records as a folder in measurements/ and return it."""
    from mtrain_cli.launch import run_dir
    from mtrain_cli.records.record_files import HEAD_ROWS, SPARSITY, write_summary

    run = run_dir.create(with_measurement_folder(config, SPARSITY), words)
    facts = json.loads(run.environment.read_text()) if run.environment.exists() else {}
    header = {
        "kind": SPARSITY,
        "complete": True,
        "command": facts.get("command", []),
        "environment": facts,
        "workers": 1,
    }
    try:
        with writing(run.path / HEAD_ROWS):
            _write_parquet(records, run.path / HEAD_ROWS)
            write_summary(run.path, {**header, **about})
    finally:
        run.release()
    return run.path


def _patterns(overrides: list[str], names: str) -> tuple[Config, list[Pattern]]:
    """Return the configuration to train with, and the patterns to measure.

    A setting such as sparsity.chunk=512 applies to each pattern that has this key.

    Raises:
        ConfigError: a pattern does not exist, or no pattern has a key.
    """
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.config.pattern_settings import PATTERNS

    wanted = parse_names("--pattern", names, [name for name in PATTERNS if name != "dense"])
    trained = next(
        (w.removeprefix("sparsity=") for w in overrides if w.startswith("sparsity=")), "dense"
    )
    keys = [word for word in overrides if word.startswith("sparsity.")]
    others = ("sparsity.", "topology.workers=", "sparsity=")
    rest = [word for word in overrides if not word.startswith(others)]
    for word in keys:
        if key_of(word) == "pattern":
            raise ConfigError(
                f"{word}: give the patterns to measure as --pattern NAME,... and the one to train "
                "with as sparsity=NAME"
            )
    require_known_keys(keys, [*wanted, trained], wanted)

    def compose_with(name: str) -> Config:
        return compose([*rest, f"sparsity={name}", "topology.workers=1", *keys_for(name, keys)])

    configs = [compose_with(name) for name in wanted]
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.sparsity.pattern_registry import make_pattern

    patterns = []
    for config in configs:
        built = make_pattern(config.sparsity, config.seed)
        assert built is not None
        patterns.append(built)
    return compose_with(trained), patterns


def _is_sparsity_file(out: Path) -> bool:
    import pyarrow
    import pyarrow.parquet

    from mtrain_cli.profiling.pattern_quality import HeadRecord

    try:
        names = set(pyarrow.parquet.read_schema(out).names)
    except (pyarrow.ArrowException, OSError):
        return False
    return names >= {field.name for field in dataclasses.fields(HeadRecord)}


def _write_parquet(records: list[HeadRecord], out: Path) -> None:
    import pandas

    pandas.DataFrame([dataclasses.asdict(r) for r in records]).to_parquet(out)
