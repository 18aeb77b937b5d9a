"""`mtrain profile imbalance`: measure which workers compute how long, and which ones wait."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_exchanges, complete_layouts, complete_overrides
from mtrain_cli.commands.options import (
    LARGEST_DEGREE,
    MOST_SAMPLES,
    MOST_STEPS,
    parse_names,
    warn_of_unused_settings,
    with_measurement_folder,
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
            help="Layouts to compare; by default topology.layout.",
            autocompletion=complete_layouts,
        ),
    ] = "",
    exchange: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Exchanges to compare; by default topology.exchange.",
            autocompletion=complete_exchanges,
        ),
    ] = "",
    pattern: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Patterns to compare, by default that of sparsity=. A sparsity.* key goes to each "
            "pattern that has it.",
        ),
    ] = "",
    seq: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="Sequence lengths to compare; only with --attention-only."
        ),
    ] = "",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of recorded steps per case.", min=1, max=MOST_SAMPLES
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
            help="Measure one layer's attention on random data, without a model: for lengths at "
            "which no model fits.",
        ),
    ] = False,
    peer: Annotated[
        bool,
        typer.Option(
            "--peer",
            help="With --attention-only on GPUs: also time PyTorch's context parallelism, dense.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON only.")
    ] = False,
    fail_above: Annotated[
        str,
        typer.Option(
            metavar="DEGREE=X,...",
            help="Exit with code 1 if an imbalance degree of any case is above X. DEGREE: worker, "
            "step, total or critical (of time), or work.worker and so on (of work).",
        ),
    ] = "",
) -> None:
    """Measure who computes how long in each step of an exchange, who waits, for whom, and why.

    Runs real training steps. All cases compute each recorded step, forward and backward, from the
    same weights and tokens, once without and once with recording; then the model is updated.
    Imbalance degrees are the largest attention time over the mean: worker-level across the workers
    of a step, step-level across the steps of a worker. 1 is perfect. The records are saved in
    measurements/, for `mtrain report`.

    [bold]Examples[/bold]

      [cyan]mtrain profile imbalance --layout zigzag,striped sparsity=vertical_slash[/cyan]
          Compare two layouts with one dynamic index
      [cyan]mtrain profile imbalance --exchange ring,all_gather model=qwen3b --warmup 9[/cyan]
          Compare two exchanges after nine steps of training
      [cyan]mtrain profile imbalance --attention-only --seq 128k,512k --peer[/cyan]
          Compare one layer at two lengths with PyTorch's context parallelism
      [cyan]mtrain profile imbalance --layout zigzag --fail-above worker=1.2 --json[/cyan]
          Print JSON for a script, with exit code 1 above that imbalance
    """
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    words = list(overrides or ())
    limits = _limits(fail_above)
    _require_attention_only(attention_only, seq=seq, peer=peer)
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
            f"--fail-above {fail_above}: torchrun and srun set the exit code here; read "
            "summary.json instead"
        )
    if peer and (
        environment.device == "cpu"
        or environment.cp != environment.workers
        or config.train.dtype == "float32"
    ):
        raise ConfigError(
            "--peer: PyTorch's context parallelism with cuDNN needs GPUs in one context group, and "
            "bfloat16; leave it out"
        )
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.profiling.measurement import ATTENTION_ONLY, TARGETS, TRAINING, MeasurementPlan
    from mtrain_cli.records import record_files

    run = run_dir.create(config, words)
    mode = ATTENTION_ONLY if attention_only else TRAINING
    MeasurementPlan(mode, cases, steps, warmup, every, peer, quiet=as_json).save(run)
    code = launch(run, environment, resume=False, target=TARGETS[mode], config=config)
    summary = run.path / record_files.SUMMARY
    if as_json and summary.is_file():
        typer.echo(summary.read_text().rstrip())
    if code == 0 and limits:
        _check(record_files.open_records(run.path).summary, limits)
    raise typer.Exit(code)


def _require_attention_only(attention_only: bool, *, seq: str, peer: bool) -> None:
    if not attention_only:
        if seq:
            raise ConfigError(
                f"--seq {seq}: several lengths need --attention-only; training steps have one, "
                "seq=N"
            )
        if peer:
            raise ConfigError("--peer: compares one layer's attention; add --attention-only")


def _limits(text: str) -> dict[tuple[str, str], float]:
    """Parse ``worker=1.2,work.step=1.1`` to {("time", "worker"): 1.2, ("work", "step"): 1.1}."""
    from mtrain_cli.config.suggest import did_you_mean

    allowed = [f"{quantity}{name}" for quantity in ("", "work.") for name in DEGREES]
    limits = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        name, _, value = word.partition("=")
        if name.removeprefix("time.") not in allowed:
            raise ConfigError(
                f"--fail-above {word}: no such degree{did_you_mean(name, allowed)}; "
                f"allowed: {', '.join(allowed)}"
            )
        quantity, _, degree = name.rpartition(".")
        try:
            limits[quantity or "time", degree] = limit = float(value)
            if not 0 < limit <= LARGEST_DEGREE:
                raise ValueError(value)
        except ValueError:
            raise ConfigError(
                f"--fail-above {word}: expected DEGREE=X with a number above 0 and at most "
                f"{LARGEST_DEGREE:,}, such as worker=1.2"
            ) from None
    return limits


def _check(summary: dict[str, Any], limits: dict[tuple[str, str], float]) -> None:
    from mtrain_cli.launch.failures import RunError

    problems = [
        f"{quantity} {degree} imbalance {case[quantity][degree]['mean']:.3f} of {facts['label']} "
        f"is above --fail-above {degree}={limit:g}"
        for facts, case in zip(summary["cases"], summary["results"], strict=True)
        for (quantity, degree), limit in limits.items()
        if not case[quantity][degree]["mean"] <= limit
    ]
    if problems:
        raise RunError("\n".join(problems))


# Keys that conflict with an option that compares them.
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
    """Compose every combination with its label. Check all of them before anything runs."""
    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.schema import PATTERN_KEYS, PATTERNS
    from mtrain_cli.config.suggest import did_you_mean

    given = {"--layout": layouts, "--exchange": exchanges, "--pattern": patterns, "--seq": lengths}
    for word in words:
        option = {**_COMPARED, "seq": "--seq"}.get(word.partition("=")[0])
        if option is not None and given[option]:
            raise ConfigError(
                f"{word}: {option} {','.join(given[option])} compares it already; give one of the "
                "two"
            )
    for name in patterns:
        if name not in PATTERNS:
            raise ConfigError(
                f"--pattern {name}: no such pattern{did_you_mean(name, PATTERNS)}; "
                f"allowed: {', '.join(PATTERNS)}"
            )
    sparse = [word for word in words if word.startswith("sparsity.")] if patterns else []
    rest = [word for word in words if word not in sparse]
    for word in sparse:
        key = word.partition("=")[0].removeprefix("sparsity.")
        if not any(key in PATTERN_KEYS[name] for name in patterns):
            raise ConfigError(f"{word}: none of the patterns {', '.join(patterns)} has this key")
    cases = []
    for length, pattern, layout, exchange in itertools.product(
        lengths or [""], patterns or [""], layouts or [""], exchanges or [""]
    ):
        own = [
            word
            for word in sparse
            if word.partition("=")[0].removeprefix("sparsity.") in PATTERN_KEYS[pattern]
        ]
        compared = {
            "seq": length,
            "sparsity": pattern,
            "topology.layout": layout,
            "topology.exchange": exchange,
        }
        pairs = [f"{key}={value}" for key, value in compared.items() if value]
        config = compose([*rest, *pairs, *own])
        label = f"{config.sparsity.pattern} {config.layout} {config.topology.exchange}"
        cases.append((f"{label} {length}".strip() if len(lengths) > 1 else label, config))
    return cases
