"""An mkdocs hook that writes the reference pages while the site is built.

`reference/configuration.md` comes from the typed schema and `conf/`, `reference/commands.md` from
the help of the command line, `contributing.md` from CONTRIBUTING.md, `definitions.md` from
`profiles/`. None of them is committed, so none can be out of date. Where a page links to a source
of such a page, which works on GitHub, the site links to the page instead.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer

from mtrain_cli import docstrings, resource_dir
from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.groups import open_groups, summary
from mtrain_cli.config.pattern_settings import PATTERNS, pattern_keys
from mtrain_cli.config.schema import Config


def configuration() -> str:
    """Every group with its options, and every key with its default, meaning and allowed values."""
    lines = [
        "# Configuration reference",
        "",
        "Write settings as `key=value` and whole groups as `group=option`, in any order:",
        "`mtrain train model=qwen3b seq=512k optim.lr=1e-4`. The last value of a key wins.",
        "`mtrain config show train` prints one group in a terminal.",
        "",
        "Keys that count tokens take suffixes: `4k` is 4,096 and `1m` is 1,048,576 tokens.",
        "Every number has an upper limit; a limit of a billion or more is not shown.",
        "This page is generated from the version of mtrain that these documents describe.",
        "",
        "## Top level",
        "",
    ]
    hints = get_type_hints(Config)
    sections = [field.name for field in fields(Config) if is_dataclass(hints[field.name])]
    lines += _keys(lambda name: "." not in name)
    for section in sections:
        lines += [f"## {section}", "", _sentence(hints[section]), "", *_options(section)]
        if section == "sparsity":
            lines += _patterns()
        lines += _keys(lambda name, prefix=f"{section}.": name.startswith(prefix))
    lines += ["## recipe", "", "A recipe sets keys of several groups.", "", *_options("recipe")]
    lines += ["## cluster", "", "`mtrain simulate --cluster NAME` takes one of these.", ""]
    for file in sorted((resource_dir("conf") / "cluster").glob("*.yaml")):
        lines.append(f"- `{file.stem}`: {_plain(summary(file))}")
    return "\n".join(lines)


def _keys(chosen: Callable[[str], bool]) -> Iterator[str]:
    for name, key in keys.all_keys().items():
        if not chosen(name):
            continue
        allowed = key.allowed
        yield f"`{name}`, default {_default(name)}"
        yield f":   {_plain(key.help)}" + (f"<br>Allowed: {_plain(allowed)}" if allowed else "")
        yield ""


def _default(name: str) -> str:
    """The default of a key. If patterns differ in it, the default of each pattern that has it."""
    if not name.startswith("sparsity.") or name == "sparsity.pattern":
        return f"`{keys.show(keys.values(compose())[name])}`"
    options = [pattern for pattern in PATTERNS if name.partition(".")[2] in pattern_keys(pattern)]
    shown = {option: keys.show(_pattern_defaults(option)[name]) for option in options}
    if len(set(shown.values())) == 1:
        return f"`{shown[options[0]]}`"
    return ", ".join(f"`{value}` ({option})" for option, value in shown.items())


@functools.cache
def _pattern_defaults(pattern: str) -> dict[str, Any]:
    return keys.values(compose([f"sparsity={pattern}", "data.document_mask=false"]))


def _options(group: str) -> Iterator[str]:
    for name, file in open_groups().options[group].items():
        yield f"- `{group}={name}`: {_plain(summary(file))}"
    yield ""


def _patterns() -> Iterator[str]:
    yield from ("| `sparsity=` | its keys |", "|---|---|")
    for pattern, settings in PATTERNS.items():
        keys_of_pattern = ", ".join(f"`{name}`" for name in settings.own_keys())
        yield f"| `{pattern}` | {keys_of_pattern or 'none'} |"
    yield ""


def _sentence(cls: type) -> str:
    return _plain(" ".join(docstrings.split(cls)[0].split()))


def _plain(text: str) -> str:
    """Text that Markdown shows as it stands; code stays code."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*_<>\[\]|{}#])", r"\\\1", parts[i])
    return "`".join(parts)


def commands() -> str:
    """Every command with its help, arguments and options."""
    lines = [
        "# Command reference",
        "",
        "Every command prints this text with `--help`. The page is generated from it.",
        "",
    ]
    lines += _command(typer.main.get_command(app), "mtrain", 2)
    return "\n".join(lines)


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {name}", "", *_help(command.help or ""), "")
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    for param in shown:
        if param.param_type_name == "argument":
            yield f"`{param.metavar or param.name.upper()}`"
        else:
            yield ", ".join(f"`{option}`" for option in (*param.opts, *param.secondary_opts))
        default = param.default
        shows = default not in (None, False, (), "") and not callable(default)
        yield f":   {_plain(' '.join((param.help or '').split()))}" + (
            f"<br>Default: `{default}`." if shows else ""
        )
        yield ""
    for each in command.list_commands(None) if hasattr(command, "list_commands") else ():
        sub = command.commands[each]
        if not sub.hidden:
            yield from _command(sub, f"{name} {sub.name}", 3 if level == 2 else level + 1)


def _help(text: str) -> Iterator[str]:
    """Paragraphs as text, indented examples as a block of code, without rich's marks."""
    code: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        bare = re.sub(r"\[/?(?:bold|cyan|dim|italic)\]", "", line)
        if bare.startswith("  "):
            code.append(bare[2:])
            continue
        if code and bare.strip():
            yield from ("```text", *_trimmed(code), "```", "")
            code = []
        if not code:
            yield _plain(bare)
        else:
            code.append(bare)
    if code:
        yield from ("```text", *_trimmed(code), "```")


def _trimmed(code: list[str]) -> list[str]:
    while code and not code[-1].strip():
        code = code[:-1]
    return code


def contributing() -> str:
    """CONTRIBUTING.md of the repository, whose links start there."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def definitions() -> str:
    """The meaning of every figure of a profile, a report and a simulation."""
    return (resource_dir("profiles") / "definitions.md").read_text(encoding="utf-8")


PAGES = {
    "definitions.md": definitions,
    "reference/configuration.md": configuration,
    "reference/commands.md": commands,
    "contributing.md": contributing,
}


# {target of a link in docs/: the page of the site that replaces it}
ON_SITE = {
    "../mtrain_cli/config/schema.py": "reference/configuration.md",
    "../mtrain_cli/commands": "reference/commands.md",
    "../profiles/definitions.md": "definitions.md",
    "../CONTRIBUTING.md": "contributing.md",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to the sources of generated pages into links to these pages."""
    for source, page in ON_SITE.items():
        markdown = re.sub(rf"\]\({re.escape(source)}(?=[#)])", f"]({page}", markdown)
    return markdown


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those that mkdocs found."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
