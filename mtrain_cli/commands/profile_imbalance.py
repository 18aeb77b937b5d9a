"""`mtrain profile imbalance`: who computes how much in which step of an exchange, and who waits."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_exchanges, complete_layouts, complete_overrides
from mtrain_cli.commands.options import (
    LARGEST_DEGREE,
    MOST_SAMPLES,
    MOST_STEPS,
    parse_names,
    warn_of_unused_settings,
)
from mtrain_cli.commands.profile import app
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config

DEGREES = ("worker", "step", "total", "critical")


@app.command("balance", hidden=True)
@app.command("imbalance")
def imbalance(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="As in `mtrain train`.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Layouts to compare; default: that of topology.layout.",
            autocompletion=complete_layouts,
        ),
    ] = "",
    exchange: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Exchanges to compare; default: that of topology.exchange.",
            autocompletion=complete_exchanges,
        ),
    ] = "",
    pattern: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Patterns to compare; sparsity.* keys go to those that have them. Default: that of sparsity=.",
        ),
    ] = "",
    seq: Annotated[
        str, typer.Option(metavar="N,...", help="Lengths to compare (with --attention-only).")
    ] = "",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", help="Recorded iterations of each case.", min=1, max=MOST_SAMPLES
        ),
    ] = 5,
    warmup: Annotated[
        int,
        typer.Option(
            metavar="N", help="Training steps before the first recorded one.", min=0, max=MOST_STEPS
        ),
    ] = 1,
    every: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Training steps from one recorded step to the next.",
            min=1,
            max=MOST_STEPS,
        ),
    ] = 1,
    attention_only: Annotated[
        bool,
        typer.Option(
            "--attention-only",
            help="One layer's attention on random data, without a model: for lengths that no model fits.",
        ),
    ] = False,
    peer: Annotated[
        bool,
        typer.Option(
            "--peer",
            help="With --attention-only on GPUs: also time PyTorch's own context parallelism, dense.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")
    ] = False,
    fail_above: Annotated[
        str,
        typer.Option(
            metavar="DEGREE=X,...",
            help="Exit with 1 if a degree of any case is above: worker, step, total or critical of time, or work.worker and so on of work.",
        ),
    ] = "",
) -> None:
    """Who computes how long in which step of an exchange, who waits, for whom, and why: on real training steps.

    Every recorded step is computed by all cases, forward and backward, from the same weights and tokens, each once as it is and once
    recorded; then it is trained. Imbalance degrees of workers and of steps are largest over mean time of attention: across the workers of a
    step, and across the steps of a worker; 1 is perfect. Files are left in measurements/; `mtrain report` draws them.

    [bold]Examples[/bold]

      [cyan]mtrain profile imbalance --layout zigzag,striped topology.workers=4 topology.exchange=ring sparsity=vertical_slash[/cyan]
          two layouts under one dynamic index, on four CPU processes or the GPUs there are
      [cyan]mtrain profile imbalance --exchange ring,hierarchical_ring model=qwen3b seq=128k topology.gpus_per_node=2 --warmup 20[/cyan]
          two exchanges after 20 steps of training
      [cyan]mtrain profile imbalance --attention-only --pattern dense,vertical_slash --seq 128k,512k model=qwen3b --peer[/cyan]
          one layer at two lengths, beside PyTorch's own
      [cyan]mtrain profile imbalance topology.layout=zigzag --fail-above worker=1.2 --json[/cyan]
          for scripts: exit code 1 above that
    """
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    words = list(overrides or ())
    limits = _limits(fail_above)
    _only_together(attention_only, seq=seq, peer=peer)
    cases = _cases(
        words,
        *(
            parse_names(o, t)
            for o, t in (
                ("--layout", layout),
                ("--exchange", exchange),
                ("--pattern", pattern),
                ("--seq", seq),
            )
        ),
    )
    config = with_measurement_folder(cases[0][1])
    environment = resolve_environment(config)
    warn_of_unused_settings(words)
    if limits and environment.launcher != "mtrain":
        raise ConfigError(
            f"--fail-above {fail_above}: exit codes are those of torchrun or srun here; read summary.json instead"
        )
    if peer and (
        environment.device == "cpu"
        or environment.cp != environment.workers
        or config.train.dtype == "float32"
    ):
        raise ConfigError(
            "--peer: PyTorch's context parallelism with cuDNN needs GPUs in one context group, and bfloat16; leave it out"
        )
    # Only now: they take seconds to import, and a mistake is told at once.
    from mtrain_cli.profiling import records
    from mtrain_cli.profiling.measurement import ATTENTION_ONLY, TARGETS, TRAINING, MeasurementPlan

    run = run_dir.create(config, words)
    mode = ATTENTION_ONLY if attention_only else TRAINING
    MeasurementPlan(mode, cases, steps, warmup, every, peer, quiet=as_json).save(run)
    code = launch(run, environment, resume=False, target=TARGETS[mode], config=config)
    summary = run.path / records.SUMMARY
    if as_json and summary.is_file():
        typer.echo(summary.read_text().rstrip())
    if code == 0 and limits:
        _check(records.open_records(run.path).summary, limits)
    raise typer.Exit(code)


def _only_together(attention_only: bool, *, seq: str, peer: bool) -> None:
    if not attention_only:
        if seq:
            raise ConfigError(
                f"--seq {seq}: several lengths need --attention-only; training steps have one, seq=N"
            )
        if peer:
            raise ConfigError("--peer: compares one layer's attention; give --attention-only, too")


def _limits(text: str) -> dict[tuple[str, str], float]:
    """``worker=1.2,work.step=1.1`` -> {("time", "worker"): 1.2, ("work", "step"): 1.1}."""
    from mtrain_cli.config.suggest import did_you_mean

    allowed = [f"{of}{name}" for of in ("", "work.") for name in DEGREES]
    found = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        name, _, value = word.partition("=")
        if name.removeprefix("time.") not in allowed:
            raise ConfigError(
                f"--fail-above {word}: no such degree{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
            )
        of, _, degree = name.rpartition(".")
        try:
            found[of or "time", degree] = limit = float(value)
            if not 0 < limit <= LARGEST_DEGREE:
                raise ValueError(value)
        except ValueError:
            raise ConfigError(
                f"--fail-above {word}: expected DEGREE=X with a number above 0 and at most {LARGEST_DEGREE:,}, such as worker=1.2"
            ) from None
    return found


def _check(summary: dict[str, Any], limits: dict[tuple[str, str], float]) -> None:
    from mtrain_cli.launch.failures import RunError

    problems = [
        f"{of} {degree} imbalance {case[of][degree]['mean']:.3f} of {facts['label']} is above --fail-above {degree}={limit:g}"
        for facts, case in zip(summary["cases"], summary["results"], strict=True)
        for (of, degree), limit in limits.items()
        if not case[of][degree]["mean"] <= limit
    ]
    if problems:
        raise RunError("\n".join(problems))


def with_measurement_folder(config: Config, what: str = "imbalance") -> Config:
    """Measurements lie apart from the runs that can be resumed."""
    name = (
        f"{what}-{time.strftime('%Y%m%d-%H%M%S')}" if config.run.name == "auto" else config.run.name
    )
    if config.run.dir != "auto":
        return config
    return dataclasses.replace(
        config, run=dataclasses.replace(config.run, dir=str(Path("measurements", name).absolute()))
    )


# What an option compares, and the words that would say it otherwise.
_COMPARED = {
    "topology.layout": "--layout",
    "topology.exchange": "--exchange",
    "sparsity": "--pattern",
    "sparsity.pattern": "--pattern",
}


def _cases(
    words: list[str],
    layouts: list[str],
    exchanges: list[str],
    patterns: list[str],
    lengths: list[str],
) -> list[tuple[str, Config]]:
    """Every combination with its label, checked as a whole before anything runs. What is not compared is as the words say."""
    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.schema import PATTERN_KEYS, PATTERNS
    from mtrain_cli.config.suggest import did_you_mean

    given = {"--layout": layouts, "--exchange": exchanges, "--pattern": patterns, "--seq": lengths}
    for word in words:
        option = {**_COMPARED, "seq": "--seq"}.get(word.partition("=")[0])
        if option is not None and given[option]:
            raise ConfigError(
                f"{word}: is compared by {option} {','.join(given[option])} already; give one of the two"
            )
    for name in patterns:
        if name not in PATTERNS:
            raise ConfigError(
                f"--pattern {name}: no such pattern{did_you_mean(name, PATTERNS)}; allowed: {', '.join(PATTERNS)}"
            )
    sparse = [word for word in words if word.startswith("sparsity.")] if patterns else []
    rest = [word for word in words if word not in sparse]
    for word in sparse:
        key = word.partition("=")[0].removeprefix("sparsity.")
        if not any(key in PATTERN_KEYS[name] for name in patterns):
            raise ConfigError(f"{word}: is a key of none of the patterns {', '.join(patterns)}")
    found = []
    for length, pattern, layout, exchange in itertools.product(
        lengths or [""], patterns or [""], layouts or [""], exchanges or [""]
    ):
        own = [
            word
            for word in sparse
            if word.partition("=")[0].removeprefix("sparsity.") in PATTERN_KEYS[pattern]
        ]
        asked = {
            "seq": length,
            "sparsity": pattern,
            "topology.layout": layout,
            "topology.exchange": exchange,
        }
        pairs = [f"{key}={value}" for key, value in asked.items() if value]
        config = compose([*rest, *pairs, *own])
        label = f"{config.sparsity.pattern} {config.layout} {config.topology.exchange}"
        found.append((f"{label} {length}".strip() if len(lengths) > 1 else label, config))
    return found
