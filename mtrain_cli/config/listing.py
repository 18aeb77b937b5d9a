"""A configuration as YAML with comments on what was changed."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain_cli.config import keys, sizes
from mtrain_cli.config.schema import Config


def annotated_yaml(config: Config, defaults: Config) -> list[tuple[str, bool]]:
    """Return lines of YAML, each with whether its value differs from ``defaults``.

    A line that differs ends in a comment with the default. The lines joined by newlines form a
    document that `mtrain_cli.config.compose.load` reads.
    """
    return list(_lines(config, defaults))


def _lines(config: Config, defaults: Config) -> Iterator[tuple[str, bool]]:
    import yaml

    before = keys.values(defaults)
    open_sections: list[str] = []
    for name, value in keys.values(config).items():
        *parents, leaf = name.split(".")
        while open_sections != parents[: len(open_sections)]:
            open_sections.pop()
        for parent in parents[len(open_sections) :]:
            yield "  " * len(open_sections) + f"{parent}:", False
            open_sections.append(parent)
        plain = list(value) if isinstance(value, tuple) else value
        written = yaml.safe_dump(
            [plain], default_flow_style=True, width=10_000, allow_unicode=True
        ).strip()[1:-1]
        comments = []
        if name in keys.TOKEN_COUNTS and sizes.format_size(value) != str(value):
            comments.append(sizes.format_size(value))
        if value != before[name]:
            comments.append(f"default {_short(name, before[name])}")
        yield (
            "  " * len(parents)
            + f"{leaf}: {written}"
            + (f"  # {'; '.join(comments)}" if comments else ""),
            value != before[name],
        )


def _short(name: str, value: object) -> str:
    return (
        sizes.format_size(value)
        if name in keys.TOKEN_COUNTS and isinstance(value, int)
        else keys.show(value)
    )
