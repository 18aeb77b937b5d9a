"""`mtrain config`: list the groups and keys, and show what the keys mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mtrain_cli.commands.completion import complete_options
from mtrain_cli.commands.options import ConfigDir, argument
from mtrain_cli.config import keys
from mtrain_cli.config.groups import open_groups, summary
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)

RECIPE = "recipe"  # a group whose options set keys of all other groups


@app.callback()
def config() -> None:
    """List configuration groups and keys, and show what they mean.

    [bold]Examples[/bold]

      [cyan]mtrain config list[/cyan]
          List groups and the names of all keys
      [cyan]mtrain config show model/qwen3b[/cyan]
          Show the keys of a model
    """


@app.command("list")
def list_groups(config_dir: ConfigDir = None) -> None:
    """List all groups with their options, and the names of all keys.

    [bold]Examples[/bold]

      [cyan]mtrain config list[/cyan]
          List the shipped groups
      [cyan]mtrain config list --config-dir my-conf[/cyan]
          List your own groups too
    """
    groups = open_groups(config_dir)
    rows = []
    for group, options in groups.options.items():
        for option, file in options.items():
            chosen = "default" if groups.defaults.get(group) == option else ""
            rows.append((f"{group}={option}", chosen, summary(file)))
    _print_table("Groups", ("override", "chosen", "description"), rows)
    top = [(f"{key.name}=...", key.help) for key in keys.all_keys().values() if "." not in key.name]
    _print_table("Top-level keys", ("override", "description"), top)
    names_by_group: dict[str, list[str]] = {}
    for name in keys.all_keys():
        group, dot, rest = name.partition(".")
        if dot:
            names_by_group.setdefault(f"{group}.", []).append(rest)
    _print_table(
        "Keys",
        ("group", "keys, such as optim.lr=1e-4"),
        [(group, ", ".join(names)) for group, names in names_by_group.items()],
    )
    print("`mtrain config show GROUP/NAME` shows what the keys of a group mean.")


@app.command("show")
def show_option(
    option: Annotated[str, argument("GROUP/NAME", complete_options)], config_dir: ConfigDir = None
) -> None:
    """Show the keys of an option: value, description and what is allowed.

    [bold]Examples[/bold]

      [cyan]mtrain config show model/qwen3b[/cyan]
          Show the shape of a model

    Args:
        option: An option from `mtrain config list`.
    """
    from mtrain_cli.composition.compose import composed_values

    groups = open_groups(config_dir)
    group, name = _split(option, groups.options, groups.defaults)
    file = groups.options[group][name]
    values = composed_values({group: name}, config_dir)
    before = composed_values({}, config_dir) if group == RECIPE else {}

    def belongs(key: str) -> bool:
        if group == RECIPE:
            return values[key] != before.get(key)
        # A key of another pattern or mask has no value.
        of_another = group in ("sparsity", "mask") and values[key] is None
        return key.startswith(f"{group}.") and not of_another

    rows = [
        (f"{key.name}={keys.show(values[key.name])}", key.help, key.allowed)
        for key in keys.all_keys().values()
        if key.name in values and belongs(key.name)
    ]
    title = f"{group}={name}  {summary(file)}".rstrip()
    _print_table(title, ("override", "description", "allowed"), rows)


def _split(
    option: str, options: dict[str, dict[str, Path]], defaults: dict[str, str]
) -> tuple[str, str]:
    """Split ``GROUP/NAME`` or ``GROUP=NAME``. ``GROUP`` alone gives its default option."""
    group, _, name = option.replace("=", "/").strip("/").rpartition("/")
    if not group:
        group, name = name, defaults.get(name, "")
    if option in keys.all_keys():
        owner = option.partition(".")[0]
        command = f"show {owner}" if owner in options else "list"
        raise ConfigError(f"{option}: is a key, not a group; `mtrain config {command}` shows it")
    if group not in options:
        raise ConfigError(f"{option}: {no_such('group', group, options)}")
    if name not in options[group]:
        raise ConfigError(f"{option}: {no_such(group, name, options[group])}")
    return group, name


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from mtrain_cli.console import Console
    from mtrain_cli.reporting.table import text_table
    from mtrain_cli.reporting.terminal import print_table

    print_table(Console(), text_table(header, rows, words=len(header), title=title))
