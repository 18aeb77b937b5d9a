"""`mtrain profile imbalance`: who computes how much in which step of an exchange, and who waits."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.commands.profile import app
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config


@app.command("balance", hidden=True)
@app.command("imbalance")
def imbalance(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OVERRIDES", help="As in `mtrain train`.", autocompletion=complete_overrides, show_default=False),
    ] = None,
    layout: Annotated[str, typer.Option(metavar="NAME,...", help="Layouts to compare.")] = "zigzag,striped",
    exchange: Annotated[str, typer.Option(metavar="NAME,...", help="Exchanges to compare.")] = "auto",
    pattern: Annotated[
        str, typer.Option(metavar="NAME,...", help="Patterns to compare; sparsity.* keys go to those that have them.")
    ] = "dense",
    seq: Annotated[str, typer.Option(metavar="N,...", help="Lengths to compare, in place of seq=N.", show_default=False)] = "",
    repeats: Annotated[int, typer.Option(metavar="N", help="Timed iterations of each case.", min=1)] = 5,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also time PyTorch's own context parallelism, dense, on the same shapes (GPUs).")
    ] = False,
) -> None:
    """Time one layer's attention on the workers of a run, on random queries, keys and values: forward and backward, index and exchange
    included, and per worker and step.

    worker ID and step ID are imbalance degrees, largest over mean time of attention: across the workers of a step, and across the steps of
    a worker; 1 is perfect. wait: ms for which a worker's computation stood still for a message. compute: share of attention in the time.

    [bold]Examples[/bold]

      [cyan]mtrain profile imbalance topology.workers=2 seq=4k[/cyan]
          two layouts on two CPU processes
      [cyan]mtrain profile imbalance --exchange ring,all_gather --pattern dense,vertical_slash model=qwen3b seq=128k[/cyan]
          eight cases side by side, on the GPUs there are
    """
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch
    from mtrain_cli.profiling.layer import RESULTS, TARGET, Plan

    words = list(overrides or ())
    cases = _cases(words, _names("--layout", layout), _names("--exchange", exchange), _names("--pattern", pattern), _names("--seq", seq))
    config = _in_own_folder(cases[0][1])
    environment = resolve_environment(config)
    if peer and (environment.device == "cpu" or environment.cp != environment.workers):
        raise ConfigError("--peer: PyTorch's context parallelism with cuDNN needs GPUs, all in one context group; leave it out here")
    run = run_dir.create(config, words)
    Plan(cases, repeats, peer).save(run)
    code = launch(run, environment, resume=False, target=TARGET, config=config)
    if code == 0:
        typer.echo(f"medians of {repeats} iterations, of the slowest worker; details in {run.path / RESULTS}")
    raise typer.Exit(code)


def _in_own_folder(config: Config) -> Config:
    """Measurements lie apart from the runs that can be resumed."""
    name = f"imbalance-{time.strftime('%Y%m%d-%H%M%S')}" if config.run.name == "auto" else config.run.name
    if config.run.dir != "auto":
        return config
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(Path("measurements", name).absolute())))


def _names(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if text and not names:
        raise ConfigError(f"{option} {text!r}: names nothing")
    return names


def _cases(words: list[str], layouts: list[str], exchanges: list[str], patterns: list[str], lengths: list[str]) -> list[tuple[str, Config]]:
    """Every combination with its label, checked as a whole before anything runs."""
    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.schema import PATTERNS
    from mtrain_cli.config.suggest import did_you_mean
    from mtrain_cli.config.validate import PATTERN_KEYS

    for word in words:
        key = word.partition("=")[0]
        taken = {"topology.layout": "--layout", "topology.exchange": "--exchange", "sparsity": "--pattern", "sparsity.pattern": "--pattern"}
        if lengths:
            taken["seq"] = "--seq"
        if key in taken:
            raise ConfigError(f"{word}: give what is compared as {taken[key]} NAME,...")
    for name in patterns:
        if name not in PATTERNS:
            raise ConfigError(f"--pattern {name}: no such pattern{did_you_mean(name, PATTERNS)}; allowed: {', '.join(PATTERNS)}")
    sparse = [word for word in words if word.startswith("sparsity.")]
    rest = [word for word in words if not word.startswith("sparsity.")]
    for word in sparse:
        key = word.partition("=")[0].removeprefix("sparsity.")
        if not any(key in PATTERN_KEYS[name] for name in patterns):
            raise ConfigError(f"{word}: is a key of none of the patterns {', '.join(patterns)}")
    found = []
    for length, pattern, layout, exchange in itertools.product(lengths or [""], patterns, layouts, exchanges):
        own = [word for word in sparse if word.partition("=")[0].removeprefix("sparsity.") in PATTERN_KEYS[pattern]]
        more = [f"seq={length}"] if length else []
        config = compose([*rest, *more, f"sparsity={pattern}", *own, f"topology.layout={layout}", f"topology.exchange={exchange}"])
        found.append((f"{pattern} {layout} {exchange}", config))
    return found
