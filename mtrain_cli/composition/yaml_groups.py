"""Compose YAML groups with Hydra. Other modules never see an object of Hydra or OmegaConf."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain_cli.config import keys
from mtrain_cli.config.documents import reason
from mtrain_cli.config.groups import TOP, Groups, state
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import DENSE_KEYS, ConfigError


def compose_groups(
    groups: Groups, choices: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of the chosen options by dotted key, and the problems found.

    Interpolations are resolved. Values are not checked.

    Args:
        choices: the chosen option of each group.
        values: the user's values by dotted key, which override the options.
    """
    import yaml
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    words = [
        f"{'' if group in groups.defaults else '+'}{group}={option}"
        for group, option in choices.items()
    ]
    unreadable = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError)
    try:
        composed = _compose(groups, words)
        tree: Any = OmegaConf.to_container(composed, resolve=False)
    except (*unreadable, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{' '.join(words) or TOP}: cannot be composed: {_one_line(error)}"
        ) from error
    leaves: dict[str, Any] = {}
    problems: dict[str, Problem] = {}
    refused: list[str] = []

    def update(name: str) -> None:
        OmegaConf.update(composed, name, values[name], merge=False, force_add=True)

    def resolve(name: str) -> None:
        if name in together:
            leaves[name] = together[name]
            return
        value = OmegaConf.select(composed, name)
        is_tree = OmegaConf.is_config(value)
        leaves[name] = OmegaConf.to_container(value, resolve=True) if is_tree else value

    def each(step: Callable[[str], None], names: Iterable[str]) -> None:
        for name in names:
            try:
                step(name)
            except (OmegaConfBaseException, ValueError, RecursionError) as error:
                if refused and isinstance(error, InterpolationToMissingValueError):
                    first = problems[refused[0]]  # the reason, which needs no second line
                    problems[refused[0]] = Problem(first, *first.keys, name)
                    continue
                shown = f"{name}={keys.show(values[name])}" if name in values else name
                line = f"{shown}: cannot be resolved: {_one_line(error)}"
                problems[name] = Problem(line, name)

    for name, value in keys.flatten(tree).items():
        if name not in values and _calls(str(value)):
            # The file may be a stranger's, and what it asks for a secret.
            file = _file_with(groups, choices, str(value))
            line = (
                f"{file}: {name}={value}: option files may not read the environment or call "
                f"functions; set {name}=... on the command line"
            )
            problems[name] = Problem(line, name, f"{name}.")
            refused.append(name)
            OmegaConf.update(composed, name, "???", merge=False, force_add=True)
    each(update, values)
    together = _resolved_together(composed)
    each(resolve, [name for name in {**values, **keys.flatten(tree)} if name not in problems])
    if leaves.get("model.moe", ...) is None:  # null: a dense model
        del leaves["model.moe"]
    if settings := PATTERNS.get(str(leaves.get("sparsity.pattern"))):
        for name, other in settings.instead.items():
            if values.get(f"sparsity.{name}") and f"sparsity.{other}" not in values:
                leaves[f"sparsity.{other}"] = 0
    complete = keys.with_other_variants({**DENSE_KEYS, **leaves}, values)
    return complete, list(problems.values())


def _calls(text: str) -> bool:
    """Return whether a text calls a function: ``${oc.env:HOME}`` does, ``${seq}`` does not."""
    depth = 0
    for match in re.finditer(r"\$\{|\}|:", text):
        if match[0] == ":" and depth:
            return True
        depth = max(0, depth + (match[0] == "${") - (match[0] == "}"))
    return False


def _file_with(groups: Groups, choices: Mapping[str, str], text: str) -> Path:
    """Return the chosen file with a text, or the user's folder if none has it as it is."""
    chosen = {**groups.defaults, **choices}.items()
    files = [groups.options.get(group, {}).get(option) for group, option in chosen]
    for file in filter(None, [*files, *(folder / TOP for folder in groups.folders)]):
        if file.is_file() and text in file.read_text(errors="replace"):
            return file
    return groups.folders[0]


def _resolved_together(composed: Any) -> dict[str, Any]:
    """Return all values by dotted key, which is quicker than one by one; none if one is wrong."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree: Any = OmegaConf.to_container(composed, resolve=True)
    except (OmegaConfBaseException, ValueError, RecursionError):
        return {}
    return {
        name: value
        for name, value in keys.flatten(tree).items()
        if value != "???"  # a missing value
    }


def _compose(groups: Groups, words: Sequence[str]) -> Any:
    """Return the configuration that Hydra composes from ``words`` such as ``model=qwen3b``."""
    *own, shipped = groups.folders
    if own:  # a user's folder can be large, so do not look for changes in it
        return _compose_anew(groups, words)
    return copy.deepcopy(_composed_before(groups, tuple(words), state(shipped, *groups.plugins)))


@functools.lru_cache(maxsize=1024)
def _composed_before(groups: Groups, words: tuple[str, ...], _state: object) -> Any:
    """Return what `_compose` returns. Hydra takes about 0.1 s, so equal calls share a result."""
    return _compose_anew(groups, words)


def _compose_anew(groups: Groups, words: Sequence[str]) -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    top = TOP.removesuffix(".yaml")
    *own, shipped = groups.folders
    with (
        _own_hydra(own, groups.plugins),
        initialize_config_dir(str(shipped), version_base="1.3", job_name="mtrain"),
    ):
        composed = compose(top, overrides=list(words))
        other = [word for word in words if not word.startswith("recipe=")]
        if other and len(other) < len(words) and "recipe=none" not in words:
            # A group on the command line replaces the whole group of the recipe. A mixture of both
            # would be neither the recipe's option nor the user's.
            without_recipe = compose(top, overrides=other)
            for group in (word.lstrip("+").partition("=")[0] for word in other):
                OmegaConf.update(
                    composed, group, without_recipe[group], merge=False, force_add=True
                )
    return composed


@contextlib.contextmanager
def _own_hydra(first: Sequence[Path], last: Sequence[Path]) -> Iterator[None]:
    """Set Hydra's global state for this block only, and search other folders before and after."""
    # Hydra's setting `hydra.searchpath` would search all of them after mtrain's own folder.
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    _register_search_path()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    _first_folders.extend(first)
    _last_folders.extend(last)
    OmegaConf.clear_resolver("oc.env")  # a file's list of defaults must not read the environment
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env)
        _first_folders.clear()
        _last_folders.clear()
        GlobalHydra.instance().hydra = outer


# Global, because Hydra constructs its plugins without arguments.
_first_folders: list[Path] = []
_last_folders: list[Path] = []


@functools.cache
def _register_search_path() -> None:
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class OtherFolders(SearchPathPlugin):
        def manipulate_search_path(self, search_path: Any) -> None:
            for folder in _first_folders:
                search_path.prepend(provider="--config-dir", path=str(folder), anchor="main")
            for folder in _last_folders:
                search_path.append(provider="plug-in", path=str(folder))

    Plugins.instance().register(OtherFolders)


def _one_line(error: Exception) -> str:
    """Return the first line of a library's message, with file and line if it is a YAML error."""
    if isinstance(error, RecursionError | UnicodeDecodeError):
        return reason(error)
    named = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
    line = (str(named).strip() or type(error).__name__).splitlines()[0]
    line = re.sub(r"^\w+ raised while resolving interpolation: ", "", line).strip('"')
    mark = getattr(error, "problem_mark", None)
    return line if mark is None else f"{line} ({Path(mark.name).name}, line {mark.line + 1})"
