"""The folders of YAML that a configuration is composed from: which groups there are, and which options each one has.

Reads file names and comments only, so that completion and error messages need no Hydra.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import read_yaml, reason
from mtrain_cli.config.schema import ConfigError

TOP = "config.yaml"
_NO_GROUPS = (
    "cluster",
)  # folders of conf/ that no run is composed from: what `mtrain simulate` runs on
_DEPTH = 3  # folders below a configuration folder that may hold options; keeps `--config-dir .` from walking a home folder


@dataclass(frozen=True)
class Groups:
    """Configuration folders in the order in which they are searched."""

    folders: tuple[Path, ...]

    @functools.cached_property
    def options(self) -> dict[str, dict[str, Path]]:
        """Option name to file, of each group; the first folder that has a file wins."""
        found: dict[str, dict[str, Path]] = {}
        for folder in reversed(self.folders):
            for depth in range(1, _DEPTH + 1):
                for file in sorted(folder.glob("*/" * depth + "*.yaml")):
                    group = file.parent.relative_to(folder)
                    if group.parts[0] not in _NO_GROUPS and not any(
                        part.startswith(".") for part in group.parts
                    ):
                        found.setdefault(group.as_posix(), {})[file.stem] = file
        return {group: dict(sorted(found[group].items())) for group in sorted(found)}

    @functools.cached_property
    def defaults(self) -> dict[str, str]:
        """The option of each group that is composed when nothing else is asked for."""
        top = next(folder / TOP for folder in self.folders if (folder / TOP).is_file())
        try:
            content = read_yaml(top) or {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{top}: cannot be read: {reason(error)}") from error
        entries = content.get("defaults", []) if isinstance(content, dict) else []
        pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
        return {
            str(group).removeprefix("override ").lstrip("/"): str(option) for group, option in pairs
        }

    def groups_of(self, option: str) -> list[str]:
        """Groups that have an option of this name."""
        return [group for group, options in self.options.items() if option in options]


def open_groups(config_dir: Path | None = None) -> Groups:
    """The user's folder, when given, before the one that ships.

    Raises:
        ConfigError: ``config_dir`` is no folder, or holds no groups.
    """
    shipped = resource_dir("conf")
    if config_dir is None:
        return Groups((shipped,))
    folder = config_dir.expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    groups = Groups((folder, shipped))
    if (
        not any(
            folder in file.parents
            for options in groups.options.values()
            for file in options.values()
        )
        and not (folder / TOP).is_file()
    ):
        raise ConfigError(
            f"--config-dir {config_dir}: holds no group; expected files such as {config_dir}/model/mine.yaml"
        )
    return groups


def summary(file: Path) -> str:
    """The first comment line of a YAML file, without its mark; empty when the file opens with something else."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        text = line.strip()
        if text.startswith("#") and not text.removeprefix("#").strip().startswith("@package"):
            return text.removeprefix("#").strip()
        if text and not text.startswith("#"):
            break
    return ""
