"""`mtrain profile sparsity`: measure how much of dense attention the patterns keep."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mtrain_cli.commands.options import (
    MOST_STEPS,
    MOST_TOKENS,
    Overrides,
    bounded,
    name_list,
    parse_names,
    with_measurement_folder,
    with_options,
    writing,
)
from mtrain_cli.commands.profile import app, key_of, keys_for, require_known_keys
from mtrain_cli.config import plugins
from mtrain_cli.config.pattern_settings import PATTERNS, VerticalSlashSettings
from mtrain_cli.config.schema import Config, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.profiling.pattern_quality import HeadRecord
    from mtrain_cli.sparsity.pattern import Pattern


def _one_only(_: str, __: Any, others: Mapping[str, Any]) -> None:
    if others:
        raise ValueError("another package analyzes attention, and mtrain uses one")


# The analysis of another package, whose options this command takes: a module or object with
# `Options`, `parse` and `open_analyzer`, such as `mtrain_extras.studies.attention.profile`.
_STUDY: Any = next(iter(plugins.load_by_name("mtrain.analyzers", check=_one_only).values()), None)


@dataclass(frozen=True)
class _NoOptions:
    """No options."""


@app.command("sparsity")
@with_options(_NoOptions if _STUDY is None else _STUDY.Options)
def sparsity(
    options: Any,
    overrides: Overrides = None,
    pattern: Annotated[str, name_list()] = VerticalSlashSettings.name,
    steps: Annotated[int, bounded(1, MOST_STEPS)] = 2,
    every: Annotated[int, bounded(0, MOST_STEPS)] = 0,
    rows: Annotated[int, bounded(1, MOST_TOKENS)] = 256,
) -> None:
    """Measure how much of dense attention the patterns keep on real training steps, per layer.

    This share, the recall, is measured only on queries that no pattern used to estimate its index.
    Further options show what attention itself looks like.

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
    """
    from mtrain_cli.console import Console

    words = list(overrides or ())
    request = None if _STUDY is None else _STUDY.parse(options)
    degrees = ("workers", "context_parallel", "tensor_parallel", "pipeline_parallel")
    for word in words:
        key, _, value = word.partition("=")
        if key.removeprefix("topology.") in degrees and value not in ("1", "auto"):
            raise ConfigError(f"{word}: `mtrain profile sparsity` uses one worker; leave it out")
    config, patterns = _patterns(words, pattern)
    config.model.require_own()
    if request is not None:
        request.require_fit(config)
    console = Console(highlight=False, soft_wrap=True)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.profiling import pattern_quality
    from mtrain_cli.reporting.sparsity import sparsity_tables
    from mtrain_cli.reporting.terminal import print_table
    from mtrain_cli.sparsity.pattern import display_name

    analyzer: Any = None
    if request is not None:
        analyzer, cost = _STUDY.open_analyzer(request, config, rows)
        if cost:
            console.print(cost)
    measured = sorted({1, steps, *(range(every, steps + 1, every) if every else ())})

    def progress(step: int, loss: float | None) -> None:
        console.print(f"step {step}/{steps}  loss {'n.a.' if loss is None else f'{loss:.4f}'}")

    records = pattern_quality.profile_sparsity(config, patterns, measured, rows, progress, analyzer)
    if analyzer is not None:
        analyzer.finish()
    names = {p.name: display_name(p) for p in patterns}
    shown = [dataclasses.asdict(r) | {"pattern": names[r.pattern]} for r in records]
    for table in sparsity_tables(shown):
        print_table(console, table)
    about = {"patterns": list(names), "steps": measured, "rows": rows, "samples": 1}
    folder = _save_measurement(config, words, records, about, analyzer)
    if analyzer is not None:
        analyzer.show(console)
    console.print(f"files  {folder}\ndraw   mtrain report {shlex.quote(str(folder))}")


def _save_measurement(
    config: Config,
    words: list[str],
    records: list[HeadRecord],
    about: dict[str, Any],
    analyzer: Any,
) -> Path:
    """Save the results as a folder in measurements/ and return it."""
    import pandas

    from mtrain_cli.launch import run_dir
    from mtrain_cli.records.record_files import HEAD_ROWS, SPARSITY, write_summary

    run = run_dir.create(with_measurement_folder(config, SPARSITY), words)
    facts = json.loads(run.environment.read_text()) if run.environment.exists() else {}
    header = {"kind": SPARSITY, "complete": True, "command": facts.get("command", [])}
    header |= {"environment": facts, "workers": 1}
    try:
        with writing(run.path / HEAD_ROWS):
            rows = pandas.DataFrame([dataclasses.asdict(r) for r in records])
            rows.to_parquet(run.path / HEAD_ROWS)
            if analyzer is not None:
                analyzer.write(run.path)
            write_summary(run.path, {**header, **about})
    finally:
        run.release()
    return run.path


def _patterns(overrides: list[str], names: str) -> tuple[Config, list[Pattern]]:
    """Return the configuration to train with, and the patterns to measure."""
    from mtrain_cli.composition.compose import compose

    wanted = parse_names("--pattern", names, [name for name in PATTERNS if name != "dense"])
    given = [w.removeprefix("sparsity=") for w in overrides if w.startswith("sparsity=")]
    trained = given[0] if given else "dense"
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
    configs = (
        compose([*rest, f"sparsity={name}", "topology.workers=1", *keys_for(name, keys)])
        for name in (trained, *wanted)
    )
    config = next(configs)
    _require_causal_intervals(config)  # before a pattern refuses its mask
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.sparsity.pattern import make_pattern

    patterns = [make_pattern(each.sparsity, each.seed) for each in configs]
    return config, [pattern for pattern in patterns if pattern is not None]


def _require_causal_intervals(config: Config) -> None:
    """Raise ConfigError for a mask under which no pattern can be measured."""
    mask, key = config.mask, config.data.mask_key
    given = f"data.mask_key={key}" if key is not None else mask.for_dense_only()
    if mask.full_every and key is None:
        given = f"mask.full_every={mask.full_every}"
    if given is None:
        return
    raise ConfigError(
        f"{given}: `mtrain profile sparsity` needs a mask in which each query sees one interval of "
        "keys up to itself, the same in every layer; allowed: mask=causal, mask=chunked, and "
        "mask=sliding_window without global tokens and full layers, each with or without "
        "data.document_mask"
    )
