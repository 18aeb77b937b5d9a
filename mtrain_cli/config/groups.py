"""The groups and options in the YAML folders from which a configuration is composed.

Only file names, comments and defaults are read, without Hydra, whose import is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import read_yaml, reason
from mtrain_cli.config.plugins import config_folders
from mtrain_cli.config.schema import ConfigError

TOP = "config.yaml"
_NO_GROUPS = ("cluster",)  # folders of conf/ that are not Hydra groups
# Levels of folders to search. A limit, since `--config-dir .` must not search a whole home folder.
_DEPTH = 3


@dataclass(frozen=True)
class Groups:
    """Configuration folders. If several folders have the same file, the first folder wins.

    folders: the user's folder, if there is one, and mtrain's own.
    plugins: the folders of other packages, which add files but replace none.
    """

    folders: tuple[Path, ...]
    plugins: tuple[Path, ...] = ()

    @functools.cached_property
    def options(self) -> dict[str, dict[str, Path]]:
        """The file of each option, as {group: {option: file}}."""
        options: dict[str, dict[str, Path]] = {}
        for folder in reversed((*self.folders, *self.plugins)):
            for depth in range(1, _DEPTH + 1):
                for file in sorted(folder.glob("*/" * depth + "*.yaml")):
                    group = file.parent.relative_to(folder)
                    is_hidden = any(part.startswith(".") for part in group.parts)
                    if group.parts[0] not in _NO_GROUPS and not is_hidden:
                        options.setdefault(group.as_posix(), {})[file.stem] = file
        return {group: dict(sorted(options[group].items())) for group in sorted(options)}

    @functools.cached_property
    def defaults(self) -> dict[str, str]:
        """The default option of each group. Raises ConfigError if config.yaml cannot be read."""
        top = next(folder / TOP for folder in self.folders if (folder / TOP).is_file())
        try:
            content = read_yaml(top) or {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{top}: cannot be read: {reason(error)}") from error
        return default_options(content) if isinstance(content, dict) else {}

    def groups_of(self, option: str) -> list[str]:
        """Return the groups that have an option of this name."""
        return [group for group, options in self.options.items() if option in options]


def default_options(content: Mapping[str, Any]) -> dict[str, str]:
    """Return {group: option} from the ``defaults`` list of a YAML file."""
    entries = [entry for entry in content.get("defaults") or [] if isinstance(entry, dict)]
    return {
        str(group).removeprefix("override ").lstrip("/"): str(option)
        for entry in entries
        for group, option in entry.items()
    }


def open_groups(config_dir: Path | None = None) -> Groups:
    """Return the groups of mtrain's own folder and of the user's folder ``config_dir``.

    Raises:
        ConfigError: ``config_dir`` is not a folder, or holds no groups.
    """
    shipped, plugins = resource_dir("conf"), config_folders()
    if config_dir is None:
        return _unchanged(shipped, plugins, state(shipped, *plugins))
    folder = config_dir.expanduser().resolve()
    if not folder.is_dir():
        problem = "is a file; give a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"--config-dir {config_dir}: {problem}")
    groups = Groups((folder, shipped), plugins)
    files = [file for options in groups.options.values() for file in options.values()]
    if not (folder / TOP).is_file() and not any(folder in file.parents for file in files):
        raise ConfigError(
            f"--config-dir {config_dir}: holds no group; "
            f"expected files such as {config_dir}/model/mine.yaml"
        )
    return groups


def state(*folders: Path) -> tuple[tuple[str, int, int], ...]:
    """Return path, time of change and size of each YAML file below the folders."""
    files = (file for folder in folders for file in folder.rglob("*.yaml"))
    facts = sorted((str(file), file.stat()) for file in files)
    return tuple((name, status.st_mtime_ns, status.st_size) for name, status in facts)


@functools.lru_cache(maxsize=1)
def _unchanged(shipped: Path, plugins: tuple[Path, ...], _state: object) -> Groups:
    """Return the groups without a user's folder. Their files are read once until one changes."""
    return Groups((shipped,), plugins)


def summary(file: Path) -> str:
    """Return the first comment of a YAML file without its #; "" if it does not begin with one."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        text = line.strip()
        if text.startswith("#") and not text.removeprefix("#").strip().startswith("@package"):
            return text.removeprefix("#").strip()
        if text and not text.startswith("#"):
            break
    return ""
