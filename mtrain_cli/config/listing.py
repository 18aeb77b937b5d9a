"""Format a configuration as YAML with a comment on each value that is not the default."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain_cli.config import keys, sizes
from mtrain_cli.config.schema import Config


def annotated_yaml(config: Config, defaults: Config) -> list[tuple[str, bool]]:
    """Return each line of the YAML, with whether its value differs from the default.

    A line that differs ends in a comment with the default. `mtrain_cli.config.resolved_file.load`
    can read the lines as a file.
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
        if keys.all_keys()[name].counts_tokens and sizes.format_size(value) != str(value):
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
        if keys.all_keys()[name].counts_tokens and isinstance(value, int)
        else keys.show(value)
    )
