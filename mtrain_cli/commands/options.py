"""Options that several commands share, and parsers of lists such as ``--layout zigzag,striped``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer

from mtrain_cli import docstrings
from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.config import plugins
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import EXPECTED, parse_size
from mtrain_cli.config.suggest import no_such
from mtrain_cli.printable import one_line

if TYPE_CHECKING:
    from mtrain_cli.launch.run_dir import RunDir

# Upper limits of numeric options. Larger values overflow or keep the command busy for days.
MOST_STEPS = 10**9  # the limit of train.steps
MOST_TOKENS = 2**26  # the limit of seq
MOST_WORKERS = 2**14  # the limit of topology.workers
MOST_SAMPLES = 10**6  # takes days to measure
MOST_THREADS = 4096  # more than any machine has cores
MOST_HEADS = 65_535  # the limit of model.num_heads
MOST_HEAD_DIM = 4096  # the limit of model.head_dim
MOST_IDS = 2**31 - 1  # the limit of model.vocab_size
MOST_DOCUMENTS = 2**40  # at one token each, these fill the largest disks
MOST_COMPARED = 2**16  # tokens; with 152k ids their float32 logits take 40 GiB
LARGEST_TOLERANCE = 1e3  # logit difference; a larger one would accept any logits
MOST_DIGITS = 18  # digits of a whole number in a list

T = TypeVar("T")


def option(
    metavar: str,
    *,
    least: float | None = None,
    most: float | None = None,
    complete: Callable[..., Any] | None = None,
    help: str | None = None,
) -> Any:
    """Declare an option that takes a value from ``least`` to ``most``.

    help: for an option without an entry in the docstring of its command or dataclass.
    """
    return typer.Option(metavar=metavar, help=help, min=least, max=most, autocompletion=complete)


def bounded(least: float | None = None, most: float | None = None, help: str | None = None) -> Any:
    """Declare an option that takes one number from ``least`` to ``most``."""
    return option("N", least=least, most=most, help=help)


def name_list(complete: Callable[..., Any] | None = None, help: str | None = None) -> Any:
    """Declare an option that takes a comma-separated list of names."""
    return option("NAME,...", complete=complete, help=help)


def flag(names: str, help: str | None = None) -> Any:
    """Declare a switch. names: ``--name``, or ``--name/--no-name`` if the default is on."""
    return typer.Option(names, help=help)


def argument(
    metavar: str, complete: Callable[..., Any] | None = None, help: str | None = None
) -> Any:
    """Declare a positional argument."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete, show_default=False)


Overrides = Annotated[
    list[str] | None, argument("OVERRIDES", complete_overrides, "As in `mtrain train`.")
]
ConfigDir = Annotated[
    Path | None, option("DIR", help="Folder with your own option files, as in `mtrain train`.")
]
SummaryAsJson = Annotated[bool, flag("--json", "Print the summary as JSON only.")]
Json = Annotated[bool, flag("--json", "Print one JSON object instead of a table.")]


def described_parameters(declared: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a command or of a dataclass, with the help in its docstring."""
    parameters = inspect.signature(declared, eval_str=True).parameters.copy()
    for name, help in docstrings.entries(declared).items():
        if get_origin(parameters[name].annotation) is not Annotated:  # a command of another package
            continue
        kind, declaration = get_args(parameters[name].annotation)
        described = copy.copy(declaration)
        described.help = help
        parameters[name] = parameters[name].replace(annotation=Annotated[kind, described])
    return list(parameters.values())


def describe(command: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Give a command these parameters: Typer reads the signature and the annotations."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def take_help_from_docstrings(group: typer.Typer) -> None:
    """Take the help of commands and of their options from the docstrings.

    Join the lines of each paragraph to fill the terminal's width, but not indented examples.
    """
    infos: list[Any] = [*group.registered_commands, *filter(None, [group.registered_callback])]
    for info in infos:
        if info.callback is not None:
            text, _ = docstrings.split(info.callback)
            info.help = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
            describe(info.callback, described_parameters(info.callback))
    for subgroup in group.registered_groups:
        if subgroup.typer_instance is not None:
            take_help_from_docstrings(subgroup.typer_instance)


def with_options(shared: type[T], *left_out: str) -> Callable[[Callable[..., None]], Any]:
    """Give a command an option for each field of a dataclass, which is its first argument.

    A command with several such dataclasses takes that of the outermost decorator last.
    left_out: fields that get no option and keep their defaults.
    """
    offered = [field for field in described_parameters(shared) if field.name not in left_out]

    def decorate(command: Callable[..., None]) -> Any:
        own = described_parameters(command)[1:]

        @functools.wraps(command)
        def call(*others: Any, **values: Any) -> None:
            typed = shared(**{field.name: values.pop(field.name) for field in offered})
            command(typed, *others, **values)

        describe(call, [*own, *offered])
        return call

    return decorate


@contextlib.contextmanager
def writing(place: object) -> Iterator[None]:
    """Turn an OSError into a RunError or ConfigError of one line that names the file.

    place: a folder or file, or what the user typed, as in `not_written`.
    """
    from mtrain_cli.launch.failures import not_written, write_failure

    try:
        yield
    except OSError as error:
        raise write_failure(error, not_written(error, place)) from error


def parse_names(option: str, text: str, allowed: Sequence[str] | None = None) -> list[str]:
    """Split a comma-separated list of names and drop duplicates.

    option: what the user typed before the names: ``--layout``, or ``topology.layout=``.
    allowed: None if the caller checks the names; then ``text`` may be empty.
    """
    lead = option if option.endswith("=") else f"{option} "
    parsed = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not parsed and (text or allowed is not None):
        raise ConfigError(
            f"{lead}{text!r}: names nothing"
            + (f"; allowed: {', '.join(allowed)}" if allowed is not None else "")
        )
    for name in parsed:
        if allowed is not None and name not in allowed:
            why = no_such(option.strip("-=").rpartition(".")[2], name, allowed)
            raise ConfigError(f"{lead}{name}: {why}")
    return parsed


def parse_items(option: str, text: str, parse: Callable[[str], T], example: str) -> list[T]:
    """Parse a comma-separated list of numbers. Raises ConfigError if ``parse`` rejects one."""
    values = []
    for item in map(str.strip, text.split(",")):
        try:
            values.append(parse(item))
        except ValueError:
            wrong = f"{item or 'an empty item'} is not a number; give items such as {example}"
            raise ConfigError(f"{option} {text}: {wrong}") from None
    return values


def parse_whole_number(text: str) -> int:
    """Parse a whole number of at least 0 written in plain digits, without signs and spaces."""
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ValueError(text)
    return int(text)


def warn_of_unused_settings(
    words: Sequence[str],
    config: Config,
    config_dir: Path | None = None,
    *,
    exchange: str = "",
    device: str = "",
) -> None:
    """Print a warning on stderr for each typed setting that has no effect, as `unused_keys`."""
    from mtrain_cli.config.unused_settings import unused_keys

    warn(unused_keys(words, config, config_dir, exchange=exchange, device=device))


def warn(lines: Sequence[str]) -> None:
    """Print warnings on stderr, in the first process of a job."""
    from mtrain_cli.launch.job import job_rank

    for line in () if job_rank() else lines:
        print(f"mtrain: warning: {one_line(line)}", file=sys.stderr)


def _warn_of_broken(line: str) -> None:
    if "_MTRAIN_COMPLETE" not in os.environ:  # it would stand in the middle of the command line
        warn([line])


plugins.on_broken = _warn_of_broken  # before a command loads an entry point


def print_summary(run: RunDir, as_json: bool) -> None:
    """Print the summary.json of a measurement if --json asks for it and the file exists."""
    from mtrain_cli.records.record_files import SUMMARY

    if as_json and (run.path / SUMMARY).is_file():
        typer.echo((run.path / SUMMARY).read_text().rstrip())


def with_measurement_folder(config: Config, kind: str = "imbalance") -> Config:
    """Set ``run.dir`` to a folder in measurements/, unless the user set ``run.dir``."""
    run = config.run
    if run.dir != "auto":
        return config
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}" if run.name == "auto" else run.name
    folder = str(Path("measurements", name).absolute())
    return dataclasses.replace(config, run=dataclasses.replace(run, dir=folder))


def token_lengths(option: str, text: str, least: int = 2, most: int = MOST_TOKENS) -> list[int]:
    """Parse numbers of tokens such as ``4k,128k``, without duplicates."""
    lengths = []
    for item in text.split(","):
        try:
            tokens = parse_size(item)
        except ValueError:
            raise ConfigError(f"{option} {text}: {item!r} is not {EXPECTED}") from None
        if not least <= tokens <= most:
            raise ConfigError(f"{option} {text}: must be from {least} to {most:,} tokens")
        lengths.append(tokens)
    return list(dict.fromkeys(lengths))


def token_count(option: str, text: str, least: int = 2, most: int = MOST_TOKENS) -> int:
    """Parse one number of tokens."""
    if len(lengths := token_lengths(option, text, least, most)) > 1:
        raise ConfigError(f"{option} {text}: give one number of tokens")
    return lengths[0]
