"""`mtrain profile sparsity`: measure how much of dense attention the patterns keep."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mtrain_cli.commands.completion import complete_runs
from mtrain_cli.commands.options import (
    MOST_SAMPLES,
    MOST_STEPS,
    MOST_TOKENS,
    Overrides,
    bounded,
    name_list,
    option,
    parse_names,
    with_measurement_folder,
    with_options,
    writing,
)
from mtrain_cli.commands.profile import app, key_of, keys_for, require_known_keys
from mtrain_cli.config import plugins
from mtrain_cli.config.pattern_settings import VerticalSlashSettings
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.pattern_quality import HeadRecord
    from mtrain_cli.sparsity.pattern import Pattern


def _one_only(_: str, __: Any, others: Mapping[str, Any]) -> None:
    if others:
        raise ValueError("another package analyzes attention, and mtrain uses one")


# The analysis of another package, whose options this command takes: a module or object with
# `Options`, `parse` and `open_analyzer`, such as `mtrain_studies.attention.profile`.
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
    steps: Annotated[int | None, bounded(1, MOST_STEPS)] = None,
    every: Annotated[int | None, bounded(0, MOST_STEPS)] = None,
    rows: Annotated[int, bounded(1, MOST_TOKENS)] = 256,
    checkpoints: Annotated[Path | None, option("RUN", complete=complete_runs)] = None,
    samples: Annotated[int | None, bounded(1, MOST_SAMPLES)] = None,
) -> None:
    """Measure how much of dense attention the patterns keep on real training steps, per layer.

    This share, the recall, is measured only on queries that no pattern used to estimate its index.
    Further options show what attention itself looks like.

    [bold]Examples[/bold]

      [cyan]mtrain profile sparsity[/cyan]
          Measure the tiny model at its first and second step
      [cyan]mtrain profile sparsity --pattern moba,fixed --steps 99 sparsity.top_k=3[/cyan]
          Compare two patterns as a model learns; each key applies to the pattern that has it
      [cyan]mtrain profile sparsity --checkpoints my-run --top-k 64,1k --maps 0:0,3:2 --rope[/cyan]
          Show the attention of every checkpoint of a run, and what stays the same between them

    Args:
        overrides: As in `mtrain train`; the run uses one worker. With --checkpoints, the settings
            to change in the run's own settings.
        pattern: Patterns to measure, all on the same queries and keys. sparsity= sets the pattern
            of the training run, dense by default.
        steps: Number of training steps, 2 by default; the first and the last are measured.
        every: Also measure every N steps; 0 = only the first and the last step.
        rows: Number of queries to sample per layer, without the queries that a pattern uses to
            estimate its index.
        checkpoints: Measure the checkpoints of a run instead of training, all on the same
            sequences, and compare their largest keys, slashes and columns. Takes a folder, or a
            name under runs/.
        samples: Number of sequences to run through each checkpoint, 1 by default: held-out
            sequences, or the first of the corpus if the run holds none out.
    """
    from mtrain_cli.console import Console

    words = list(overrides or ())
    request = None if _STUDY is None else _STUDY.parse(options)
    degrees = ("workers", "context_parallel", "tensor_parallel", "pipeline_parallel")
    for word in words:
        key, _, value = word.partition("=")
        if key.removeprefix("topology.") in degrees and value not in ("1", "auto"):
            raise ConfigError(f"{word}: `mtrain profile sparsity` uses one worker; leave it out")
    if checkpoints is None:
        if samples is not None:
            raise ConfigError(f"--samples {samples}: only with --checkpoints RUN")
        source, (config, patterns) = None, _patterns(words, pattern)
    else:
        for name, number in (("--steps", steps), ("--every", every)):
            if number is not None:
                raise ConfigError(f"{name} {number}: trains; leave it out with --checkpoints")
        source, config, patterns = _of_checkpoints(checkpoints, words, pattern)
        if request is not None:
            request = request.with_counts(config.seq)
    if request is not None:
        request.require_fit(config)
    console = Console(highlight=False, soft_wrap=True)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.profiling import pattern_quality
    from mtrain_cli.reporting.sparsity import sparsity_tables
    from mtrain_cli.reporting.terminal_width import print_table
    from mtrain_cli.sparsity.pattern import display_name

    analyzer: Any = None
    if request is not None:
        analyzer, cost = _STUDY.open_analyzer(request, config, rows)
        if cost:
            console.print(cost)
    if source is None:
        last = steps or 2
        measured = sorted({1, last, *(range(every, last + 1, every) if every else ())})
        records = pattern_quality.profile_sparsity(
            config, patterns, measured, rows, partial(_say, console, f"step {{}}/{last}"), analyzer
        )
    else:
        progress = partial(_say, console, "checkpoint step-{}")
        records = pattern_quality.profile_checkpoints(
            config, source, patterns, samples or 1, rows, progress, analyzer
        )
    if analyzer is not None:
        analyzer.finish()
    names = {p.name: display_name(p) for p in patterns}
    done = sorted({record.step for record in records})
    shown = [dataclasses.asdict(r) | {"pattern": names[r.pattern]} for r in records]
    for table in sparsity_tables(shown):
        print_table(console, table)
    about = {"patterns": list(names), "steps": done, "rows": rows, "samples": samples or 1}
    if source is not None:
        about["checkpoints"] = [str(folder) for folder in source]
    folder = _save_measurement(config, words, records, about, analyzer)
    if analyzer is not None:
        analyzer.show(console)
    console.print(f"files  {folder}\ndraw   mtrain report {shlex.quote(str(folder))}")


def _say(console: Console, what: str, step: int, loss: float | None) -> None:
    console.print(f"{what.format(step)}  loss {'n.a.' if loss is None else f'{loss:.4f}'}")


def _of_checkpoints(
    run: Path, words: list[str], pattern: str
) -> tuple[list[Path], Config, list[Pattern]]:
    """Return the checkpoints of a run in ascending order, its configuration, and the patterns."""
    from mtrain_cli.composition import compose
    from mtrain_cli.config import resolved_file
    from mtrain_cli.training import checkpoint_source

    try:
        source = checkpoint_source.find_source(run)
    except ConfigError as error:
        if (run / "config.json").is_file():
            raise ConfigError(
                f"--checkpoints {run}: is a Hugging Face folder, not a run; to measure its "
                f"weights, give train.init_from={run} --steps 1 instead"
            ) from None
        raise ConfigError(*(f"--checkpoints {line}" for line in error.problems)) from None
    saved = resolved_file.load(checkpoint_source.run_of(source) / checkpoint_source.RESOLVED)
    alone = ["topology=local", "topology.workers=1"]
    alone.append(f"topology.block_size={saved.topology.block_size}")

    def compose_with(name: str, keys: list[str], others: list[str]) -> Config:
        chosen = [] if name == saved.sparsity.pattern else [f"sparsity={name}"]
        # Results go to a folder of their own, so the run's own folder does not matter.
        of_run = [word for word in others if word.startswith(("run.", "run="))]
        others = [word for word in others if word not in of_run]
        config = compose.resume(saved, [*alone, *others, *chosen, *keys])
        return replace(config, run=compose.compose(of_run).run)

    config, patterns = _compose_patterns(words, pattern, saved.sparsity.pattern, compose_with)
    return checkpoint_source.checkpoints_of(source)[::-1], config, patterns


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

    return _compose_patterns(
        overrides, names, "dense",
        lambda name, keys, others: compose(
            [*others, f"sparsity={name}", "topology.workers=1", *keys]
        ),
    )  # fmt: skip


def _compose_patterns(
    overrides: list[str],
    names: str,
    default: str,
    compose_with: Callable[[str, list[str], list[str]], Config],
) -> tuple[Config, list[Pattern]]:
    """Return the configuration of the model's own attention, and the patterns to measure."""
    from mtrain_cli.config.pattern_settings import PATTERNS

    wanted = parse_names("--pattern", names, [name for name in PATTERNS if name != "dense"])
    trained = next(
        (w.removeprefix("sparsity=") for w in overrides if w.startswith("sparsity=")), default
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
    config = compose_with(trained, keys_for(trained, keys), rest)
    _require_causal_intervals(config)
    configs = [compose_with(name, keys_for(name, keys), rest) for name in wanted]
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
        "keys up to itself, the same in every layer; allowed: mask=causal, and mask=sliding_window "
        "without global tokens and full layers, each with or without data.document_mask"
    )
