"""`mtrain config`: what can be set, and what it means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import complete_options
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

app = typer.Typer(
    help="See what can be configured.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    epilog="Example: [cyan]mtrain config show model/qwen3b[/cyan]",
)

VALUE, ALLOWED = "value", "allowed"
_READABLE = 44  # characters that values and their meaning need beside a key
RECIPE = "recipe"  # a group whose options set keys of all the others
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="Your own groups, as in `mtrain train`.",
        show_default=False,
    ),
]


@app.command("list")
def list_groups(config_dir: ConfigDir = None) -> None:
    """List the groups with their options, and the names of all keys.

    [bold]Examples[/bold]

      [cyan]mtrain config list[/cyan]
      [cyan]mtrain config list --config-dir my-conf[/cyan]
    """
    from mtrain_cli.config import keys
    from mtrain_cli.config.groups import open_groups, summary

    groups = open_groups(config_dir)
    rows = []
    for group, options in groups.options.items():
        for option, file in options.items():
            chosen = "default" if groups.defaults.get(group) == option else ""
            rows.append((f"{group}={option}", chosen, summary(file)))
    _print_table("Groups", ("override", "", "what it is"), rows)
    top = [(f"{key.name}=...", key.help) for key in keys.all_keys().values() if "." not in key.name]
    _print_table("Top-level keys", ("override", "what it is"), top)
    of_groups: dict[str, list[str]] = {}
    for name in keys.all_keys():
        group, dot, rest = name.partition(".")
        if dot:
            of_groups.setdefault(f"{group}.", []).append(rest)
    _print_table(
        "Keys",
        ("group", "keys, such as optim.lr=1e-4"),
        [(group, ", ".join(names)) for group, names in of_groups.items()],
    )
    print("`mtrain config show GROUP/NAME` says what the keys of a group mean.")


@app.command("show")
def show_option(
    option: Annotated[
        str,
        typer.Argument(
            metavar="GROUP/NAME",
            help="An option of `mtrain config list`.",
            autocompletion=complete_options,
        ),
    ],
    config_dir: ConfigDir = None,
) -> None:
    """Show the keys of an option: value, meaning and what is allowed.

    [bold]Examples[/bold]

      [cyan]mtrain config show model/qwen3b[/cyan]
      [cyan]mtrain config show topology/local[/cyan]
    """
    from mtrain_cli.config import keys, validate
    from mtrain_cli.config.compose import composed_values
    from mtrain_cli.config.groups import open_groups, summary

    groups = open_groups(config_dir)
    group, name = _split(option, groups.options, groups.defaults)
    file = groups.options[group][name]
    values = composed_values({group: name}, config_dir)
    rows = []
    if group == RECIPE:
        before = composed_values({}, config_dir)
        changed = [
            key
            for key in keys.all_keys().values()
            if key.name in values and values[key.name] != before.get(key.name)
        ]
        rows = [
            (key.name, keys.show(values[key.name]), key.help, validate.allowed(key))
            for key in changed
        ]
    for key in keys.all_keys().values():
        if key.name.startswith(f"{group}.") and key.name in values:
            if group == "sparsity" and not _has(
                str(values.get("sparsity.pattern")), key.name, values[key.name]
            ):
                continue
            rows.append((key.name, keys.show(values[key.name]), key.help, validate.allowed(key)))
    _print_table(
        f"{group}={name}  {summary(file)}".rstrip(), ("key", VALUE, "what it is", ALLOWED), rows
    )


def _has(pattern: str, name: str, value: object) -> bool:
    """Whether a key of the group sparsity is one of the pattern's; one that has a value all the same is shown too."""
    from mtrain_cli.config.schema import PATTERN_KEYS

    return value is not None or name.removeprefix("sparsity.") in (
        "pattern",
        *PATTERN_KEYS.get(pattern, ()),
    )


def _split(
    option: str, options: dict[str, dict[str, Path]], defaults: dict[str, str]
) -> tuple[str, str]:
    """Group and name of ``GROUP/NAME``; ``GROUP=NAME`` and ``GROUP`` alone (its default) are understood too."""
    from mtrain_cli.config.suggest import did_you_mean

    group, _, name = option.replace("=", "/").strip("/").rpartition("/")
    if not group:
        group, name = name, defaults.get(name, "")
    if group not in options:
        raise ConfigError(
            f"{option}: no group is called {group}{did_you_mean(group, options)}; groups: {', '.join(options)}"
        )
    if name not in options[group]:
        raise ConfigError(
            f"{option}: no such {group}; options: {', '.join(options[group])}{did_you_mean(name, options[group])}"
        )
    return group, name


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that folds at the width of the terminal, or of COLUMNS; aligned columns, never cut, for a pipe or a file.

    Where it folds, the words that a key allows stand below its help: with a column of their own both would be too narrow to read.
    """
    from rich.text import Text

    from mtrain_cli.console import Console
    from mtrain_cli.reporting.terminal_width import limit

    console = Console()
    width = limit(console)
    if width is None:
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))] if rows else []
        print(title)
        for row in rows:
            print(
                "  "
                + "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
        return
    first = max((len(row[0]) for row in rows), default=0)
    if first + _READABLE <= width:
        console.print(_table(title, header, rows))
    else:
        console.print(Text(title, style="bold"), overflow="fold")
        for row in rows:
            console.print(*_block(header, row), sep="\n")
    console.print()


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    below = header[-1] == ALLOWED
    for index, name in enumerate(header[:-1] if below else header):
        table.add_column(
            name, style="cyan" if index == 0 else "", no_wrap=index == 0, overflow="fold"
        )
    for row in rows:
        cells = [Text(cell) for cell in row]
        if below:
            *cells, allowed = cells
            if "," in allowed.plain:
                cells[-1].append(f"\n{allowed.plain}", style="dim")
        table.add_row(*cells)
    return table


def _block(header: Sequence[str], row: Sequence[str]) -> list[RenderableType]:
    """A row as lines of its own, for terminals on which a table has no room beside its keys."""
    from rich.padding import Padding
    from rich.text import Text

    key, *rest = row
    of_rest = [(name, cell) for name, cell in zip(header[1:], rest, strict=True) if cell]
    head = Text(key, style="cyan", overflow="fold")
    if of_rest and of_rest[0][0] == VALUE:
        head.append(f"  {of_rest.pop(0)[1]}", style="default")
    return [
        head,
        *(
            Padding(Text(cell, style="dim" if name == ALLOWED else ""), (0, 0, 0, 4))
            for name, cell in of_rest
        ),
    ]
