"""Write a resolved.yaml, and read the resolved.yaml of this and of earlier versions of mtrain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrain_cli import __version__
from mtrain_cli.config import earlier_versions, keys
from mtrain_cli.config.documents import read_yaml, reason, replace_text
from mtrain_cli.config.overrides import convert
from mtrain_cli.config.schema import Config, ConfigError


def load(path: Path) -> Config:
    """Read a resolved.yaml. Check types and ranges, but not conflicts nor whether files exist.

    Raises:
        ConfigError: the file is missing or not YAML, or has a missing key, an unknown key or a
            wrong value.
    """
    try:
        raw = read_yaml(path)
        flat = keys.flatten(raw) if isinstance(raw, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from error
    if flat is None:
        raise ConfigError(f"{path}: holds no configuration")
    flat = earlier_versions.completed(flat)
    flat = keys.with_other_variants(_without_absent_plugins(path, flat))
    leaves, problems = convert(flat)
    reported = {*leaves, *(name for problem in problems for name in problem.keys)}
    lines = [str(problem) for problem in problems]
    lines += [f"{name}: missing" for name in keys.all_keys() if name not in reported]
    if lines:
        raise ConfigError(*(f"{path}: {line}" for line in lines))
    return keys.build(leaves)


def _without_absent_plugins(path: Path, flat: dict[str, Any]) -> dict[str, Any]:
    """Leave out null keys of absent packages' masks and patterns, and reject those in use."""
    for section, variants in keys.VARIANTS.items():
        selector = f"{section}.{variants.selector}"
        if (kind := flat.get(selector)) is not None and str(kind) not in variants.kinds:
            raise ConfigError(
                f"{path}: {selector}={kind}: no installed package has {section}={kind}; install "
                f"the package that the run used (allowed here: {', '.join(variants.kinds)})"
            )
    gone = {name for name in flat if name.partition(".")[0] in keys.VARIANTS} - {*keys.all_keys()}
    return {name: flat[name] for name in flat if name not in gone or flat[name] is not None}


def save(config: Config, path: Path) -> None:
    """Write ``config`` to ``path`` atomically: readers see the old file or the complete new one."""
    import yaml

    text = yaml.safe_dump(keys.nested(config), sort_keys=False, allow_unicode=True)
    replace_text(Path(path), f"# Composed by mtrain {__version__}.\n{text}")


def annotated_yaml(config: Config, defaults: Config) -> Iterator[tuple[str, bool]]:
    """Yield each line of the YAML, and whether its value differs from the default.

    If so, a comment has the default. Written to a file, the lines are input for `load`.
    """
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
        written = yaml.safe_dump([plain], default_flow_style=True, width=10_000, allow_unicode=True)
        differs = value != before[name]
        comment = f"  # default {keys.show(before[name])}" if differs else ""
        yield f"{'  ' * len(parents)}{leaf}: {written.strip()[1:-1]}{comment}", differs
