"""Format a configuration as YAML with a comment on each value that is not the default."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain_cli.config import keys, sizes
from mtrain_cli.config.schema import Config


def annotated_yaml(config: Config, defaults: Config) -> list[tuple[str, bool]]:
    """Return a (line, whether its value differs from the default) pair for each line of the YAML.

    If the value differs, the line ends in a comment with the default. Written to a file, the lines
    are input for `mtrain_cli.config.resolved_file.load`.
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
        counts_tokens, comments = keys.all_keys()[name].counts_tokens, []
        if counts_tokens and isinstance(value, int) and sizes.format_size(value) != str(value):
            comments.append(sizes.format_size(value))
        if differs := value != before[name]:
            is_size = counts_tokens and isinstance(before[name], int)
            shown = sizes.format_size if is_size else keys.show
            comments.append(f"default {shown(before[name])}")
        comment = f"  # {'; '.join(comments)}" if comments else ""
        yield f"{'  ' * len(parents)}{leaf}: {written}{comment}", differs
