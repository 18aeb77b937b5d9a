"""The command `mtrain`: its subcommands, and how errors reach the terminal.

Only this module prints a `ConfigError`, a user's mistake, or a `RunError`, such as a full disk, and
exits with code 2 or 1.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mtrain_cli import __version__
from mtrain_cli.commands import (
    checkpoint,
    config,
    data,
    doctor,
    evaluate,
    generate,
    profile,
    profile_imbalance,
    profile_sparsity,
    profile_what_if,
    report,
    simulate,
    status,
    train,
)
from mtrain_cli.commands.options import take_help_from_docstrings
from mtrain_cli.config import plugins
from mtrain_cli.config.keys import all_keys
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import nearest
from mtrain_cli.launch.failures import RunError, failure_from, write_record
from mtrain_cli.launch.job import job_rank, tell_the_others
from mtrain_cli.printable import one_line, printable

ORDER = (
    "train", "generate", "eval", "study", "status", "profile", "profile-balance", "simulate",
    "report", "init", "config", "mask", "data", "checkpoint", "doctor",
)  # fmt: skip
FAILURE = 1
USAGE_ERROR = 2
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP)
_SHOWN = 200  # characters of a path in a message
_OF_JOBS = ("train", "profile", "eval")  # commands whose ranks meet
INTERRUPTED = 130  # 128 + SIGINT, a shell's exit code for Ctrl-C

# Typer bundles its own click and does not export this class.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    """A command group that lists commands in order of use and prints each mistake on one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # File names need not be UTF-8, and terminals need not support every character.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with _errors_as_lines():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_lines(ctx):
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command that refuses an empty value, and a second value for an option that takes one.

    An empty value is allowed where the help of the option says what '' means.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parser: Any = self.make_parser(ctx)
        given, _, order = parser.parse_args(list(args))
        for places in () if ctx.resilient_parsing else plugins.places():
            args = places.local_words(args, [(param, given[param.name]) for param in order])
        for param in () if ctx.resilient_parsing else order:
            is_option, value = param.param_type_name == "option", given[param.name]
            name = max(param.opts, key=len) if is_option else param.metavar
            if is_option and not (param.is_flag or param.multiple) and order.count(param) > 1:
                raise _UsageError(f"{name} {value}: {name} is given twice; give one value", ctx)
            is_empty = "" in (value if isinstance(value, list | tuple) else [value])
            if is_empty and param.metavar and "''" not in (param.help or ""):
                give = f"{param.metavar}, or leave {name} out" if is_option else "a value"
                raise _UsageError(f"{name} '': is empty; give {give}", ctx)
        return super().parse_args(ctx, args)


@contextlib.contextmanager
def _errors_as_lines(outer: Any = None) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        _print_problems(error.problems)
        if outer and outer.find_root().invoked_subcommand in _OF_JOBS:
            tell_the_others(error.problems)
        raise typer.Exit(USAGE_ERROR) from error
    except RunError as error:
        write_record(failure_from(error))
        lines = str(error).splitlines()
        print("\n".join(f"error: {printable(line)}" for line in lines), file=sys.stderr)
        raise typer.Exit(FAILURE) from error
    except _UsageError as error:
        # `mtrain config` without a subcommand: creating this error has printed the help already.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise typer.Exit() from error
        context = getattr(error, "ctx", None)
        command = " ".join(filter(None, ("mtrain", outer and outer.invoked_subcommand)))
        command = command if context is None else context.command_path
        _print_problems((f"{_describe(error)} See `{command} --help`.",))
        raise typer.Exit(USAGE_ERROR) from error
    except OSError as error:
        # A failure of the disk or the network, or a wrong file name: a traceback would not help.
        if error.filename is None or isinstance(error, BrokenPipeError):
            raise
        name = os.fsdecode(error.filename)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        _print_problems((f"{shown}: {error.strerror or error}",))
        raise typer.Exit(USAGE_ERROR if error.errno in _PATH_ERRORS else FAILURE) from error
    except RuntimeError as error:
        if str(error) != "Could not determine home directory.":
            raise
        _print_problems(("~: that user is unknown or has no home folder; give the whole path",))
        raise typer.Exit(USAGE_ERROR) from error
    except KeyboardInterrupt as error:
        if str(error):  # a `StopSignal`
            print(f"mtrain: {error}", file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", INTERRUPTED)) from None


def _print_problems(problems: Sequence[str]) -> None:
    """Print each problem on stderr, by one rank per machine: all ranks of a job find the same."""
    write_record(failure_from(ConfigError(*problems)))
    rank = job_rank()
    if rank and (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")) != "0":
        return
    for problem in problems:
        print(f"mtrain: {f'rank {rank}: ' if rank else ''}{one_line(problem)}", file=sys.stderr)


def _describe(error: Any) -> str:
    message = _wrong_value(error) or " ".join(error.format_message().split())
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if message.startswith("No such command") and context is not None:
        names = ", ".join(context.command.list_commands(context))
        hint = " This checkout has more: run `pip install --no-deps -e .` in it."
        return f"{message} Commands: {names}.{hint if plugins.lacks_own() else ''}"
    parameters = context.command.params if context is not None else ()
    if option and any(parameter.name == "overrides" for parameter in parameters):
        similar = message.partition("Possible options")[2]
        # A command with a trained model takes few settings.
        is_option = option in similar or (similar and any(p.name == "model" for p in parameters))
        if not is_option and (key := nearest(option[2:].replace("-", "_"), all_keys())):
            message = f"{message.rstrip('.')}; settings are written key=value: {key}=..."
    return message if message.endswith((".", "?", "!")) else f"{message}."


def _wrong_value(error: Any) -> str | None:
    """Return ``--option value: what is allowed`` if pydantic rejected the value, else None.

    Pydantic's own message does not contain the value.
    """
    list_errors = getattr(error.__cause__, "errors", None)
    param = getattr(error, "param", None)
    if list_errors is None or param is None:
        return None
    detail = list_errors()[0]
    bounds, kind = detail.get("ctx", {}), detail["type"].partition("_")[0]
    if kind == "float" or str(detail["input"]).lower() == "nan":
        reason = "expected a number"
    elif kind == "int":
        reason = "expected a whole number"
    elif "ge" in bounds:
        reason = f"must be at least {bounds['ge']:g}"
    elif "le" in bounds:
        reason = f"must be at most {bounds['le']:,}".removesuffix(".0")
    elif " is not one of " in detail["msg"]:
        reason = "expected one of " + detail["msg"].partition(" is not one of ")[2].replace("'", "")
    else:
        reason = detail["msg"].removeprefix("Value error, ")
    is_option = param.param_type_name == "option"
    name = f"{max(param.opts, key=len)} " if is_option else f"{param.metavar or param.name}="
    return name + (detail["input"] or "''") + f": {reason}"


# Subcommands inherit these names of the help option.
app = typer.Typer(
    name="mtrain",
    cls=Group,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"mtrain {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def mtrain(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train language models on very long sequences, each shared by many workers.

    [bold]Examples[/bold]

      [cyan]mtrain train[/cyan]
          Train a small model on Python's own sources, on two CPU processes
      [cyan]mtrain train model=qwen3b seq=128k train.steps=20[/cyan]
          Train Qwen2.5-3B on 131,072-token sequences, on all GPUs here
      [cyan]mtrain train model=qwen7b seq=2m topology=h100_4x8 --dry-run[/cyan]
          Plan a run on four nodes, without a GPU: memory, FLOP, kernel, exchange
    """
    del version
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


app.command("train")(train.train)
app.command("generate")(generate.generate)
app.add_typer(evaluate.app, name="eval")
app.command("status")(status.status)
# Importing these modules adds their commands to the group of commands/profile.py.
assert all(
    module.app is profile.app for module in (profile_imbalance, profile_sparsity, profile_what_if)
)
app.add_typer(profile.app, name="profile")
app.command("profile-balance")(profile_imbalance.imbalance)
app.add_typer(simulate.app, name="simulate")
app.command("report")(report.report)
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("doctor")(doctor.doctor)
take_help_from_docstrings(app)


def _take_each_value_once(group: typer.Typer) -> None:
    for command in group.registered_commands:
        command.cls = Command
    for subgroup in group.registered_groups:
        if subgroup.typer_instance is not None:
            _take_each_value_once(subgroup.typer_instance)


_take_each_value_once(app)


def _add(place: str, command: Any) -> None:
    """Add another package's command or group at ``place``, such as ``eval.mine``."""
    group, _, name = place.rpartition(".")
    owner = next((of.typer_instance for of in app.registered_groups if of.name == group), None)
    owner = owner if group else app
    if owner is None:
        raise ValueError(f"mtrain has no command group {group}")
    if name in _names(owner):
        raise ValueError("mtrain has a command of this name")
    alone = typer.Typer()
    if isinstance(command, typer.Typer):
        alone.add_typer(command, name=name)
    else:
        alone.command(name)(command)
        take_help_from_docstrings(alone)
    _take_each_value_once(alone)
    typer.main.get_group(alone)  # raises an error if Typer can make no command of it
    owner.registered_groups += alone.registered_groups
    owner.registered_commands += alone.registered_commands


def _names(owner: typer.Typer) -> list[str | None]:
    groups, commands = owner.registered_groups, owner.registered_commands
    return [*(group.name for group in groups), *(command.name for command in commands)]


plugins.load(plugins.COMMANDS, _add)
# `mtrain profile --help` has the commands of other packages among its own.
profile.app.registered_commands.sort(key=lambda command: command.name or "")
