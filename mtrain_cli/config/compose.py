"""Compose YAML groups and overrides into one frozen, checked `Config`; save and load it.

Hydra composes the YAML. Every leaf is then converted to its schema type, and the whole is checked
across fields. All problems are reported together. No Hydra or OmegaConf object leaves this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain_cli import __version__
from mtrain_cli.config import derived, earlier_versions, keys, validate
from mtrain_cli.config.documents import read_yaml, reason
from mtrain_cli.config.groups import TOP, Groups, open_groups
from mtrain_cli.config.overrides import OverrideProblem, parse
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.suggest import did_you_mean

# A resumed run keeps these: its weights, data order and name depend on them.
FIXED = ("model.", "data.", "seq", "seed", "train.init_from", "run.name", "run.dir")

_SHOWN = 80  # characters of a value in a message

# Marks a value that the user must give. (OmegaConf's own mark, ???, yields to the null below it.)
_OPEN = "REQUIRED"
_DISPENSABLE = ("train.init_from",)  # required keys that the user may set to null

# Two keys for one thing: when the first is given, it replaces the default of the second.
_INSTEAD = {"sparsity.slashes": "sparsity.density"}


def compose(
    overrides: Sequence[str] = (), config_dir: Path | None = None, *, plan: bool = False
) -> Config:
    """Return the configuration for overrides such as ``["model=qwen3b", "seq=512k"]``.

    Paths become absolute, so that workers on other machines and resumed runs find them.

    Args:
        overrides: ``group=option`` and ``key=value``; the last one of a key wins.
        config_dir: the user's own groups, searched before the shipped ones.
        plan: allow null for values that a recipe leaves to the user (REQUIRED), such as the folder
            of the weights; a plan does not read them.

    Raises:
        ConfigError: every problem, one line each.
    """
    groups = open_groups(config_dir)
    parsed = parse(overrides, groups)
    files = _files(groups, parsed.groups)
    raw, unresolved = _composed(groups, parsed.groups, parsed.values)
    open_keys, raw = _required_keys(raw, parsed.groups)
    given, model = _given_model(groups, parsed.groups, parsed.values, raw)
    raw, underivable = derived.fill(raw, given, model, _defaults())
    leaves, wrong = _convert(raw, files)
    if leaves.get("optim.rewarm"):
        value = keys.show(leaves["optim.rewarm"])
        line = f"optim.rewarm={value}: is for --resume RUN; a new run warms up anyway. Leave it out"
        wrong = [*wrong, OverrideProblem(line, ("optim.rewarm",))]
    problems = [*parsed.problems, *unresolved, *underivable, *wrong, *([] if plan else open_keys)]
    return _checked(leaves, problems, files, tolerated=open_keys if plan else ())


def resume(saved: Config, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Config:
    """Return ``saved`` with ``overrides`` on top, for a run that resumes from its checkpoint.

    Raises:
        ConfigError: an override is wrong, or changes one of `FIXED`.
    """
    groups = open_groups(config_dir)
    parsed = parse(overrides, groups)
    files = _files(groups, parsed.groups)
    before = keys.values(saved)
    raw, unresolved = _composed(groups, parsed.groups, parsed.values)
    raw = derived.without_auto(_required_keys(raw, parsed.groups)[1])
    from_files = {name: raw[name] for name in raw if name not in parsed.values}
    unresolved += _recipe_conflicts(groups, parsed.groups, from_files, before)
    touched = [
        name
        for name in raw
        if name in parsed.values or any(name.startswith(f"{group}.") for group in parsed.groups)
    ]
    changed, wrong = _convert({name: raw[name] for name in touched}, files)
    problems = [*parsed.problems, *unresolved, *wrong]
    for name, value in _absolute(changed).items():
        if not name.startswith(FIXED) or value == before[name]:
            continue
        group = name.partition(".")[0]
        if group in parsed.groups and name not in parsed.values:
            # One line for all keys of an option.
            line = (
                f"{group}={parsed.groups[group]}: a resumed run keeps its {group}; "
                "start a new run to change it"
            )
            if not any(problem.line == line for problem in problems):
                problems.append(OverrideProblem(line, (f"{group}.",)))
        else:
            line = (
                f"{name}={keys.show(value)}: a resumed run keeps its {name}="
                f"{keys.show(before[name])}; start a new run to change it"
            )
            problems.append(OverrideProblem(line, (name,)))
    # The checkpoint holds the weights, so the folder of train.init_from may be gone.
    # The weights that the run started from are in its checkpoint by now.
    return _checked({**before, **changed}, problems, files, ignore=("train.init_from",))


def _recipe_conflicts(
    groups: Groups, choices: Mapping[str, str], raw: Mapping[str, Any], before: Mapping[str, Any]
) -> list[OverrideProblem]:
    """Return one line if a recipe's keys in ``raw`` differ from the run's.

    A recipe that agrees is allowed, so the command line that started a run can be repeated.
    """
    if choices.get("recipe", "none") == "none":
        return []
    without, _ = _composed(
        groups, {group: option for group, option in choices.items() if group != "recipe"}, {}
    )
    from_recipe = {
        name: value
        for name, value in raw.items()
        if value is not None and value != without.get(name)
    }
    values = _absolute(_convert(from_recipe, {})[0])
    other = [name for name in from_recipe if name in values and values[name] != before[name]]
    if not other:
        return []
    differences = ", ".join(
        f"{name}={keys.show(values[name])} (the run: {keys.show(before[name])})"
        for name in other[:3]
    )
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    line = (
        f"recipe={choices['recipe']}: a resumed run keeps its recipe, and this one sets "
        f"{differences}{more}"
    )
    return [
        OverrideProblem(f"{line}; start a new run to change it, or give single keys", tuple(other))
    ]


def _required_keys(
    raw: Mapping[str, Any], choices: Mapping[str, str]
) -> tuple[list[OverrideProblem], dict[str, Any]]:
    """Return a line for each REQUIRED leaf, and the leaves with null in those places."""
    required = []
    for name in [name for name, value in raw.items() if value == _OPEN]:
        owner = next(
            (
                f"{group}={choices[group]}"
                for group in ("recipe", name.split(".")[0])
                if choices.get(group, "none") != "none"
            ),
            TOP,
        )
        key = keys.all_keys().get(name)
        without = (
            f", or {name}=null to do without" if key is not None and name in _DISPENSABLE else ""
        )
        required.append(
            OverrideProblem(
                f"{name}={_OPEN}: {owner} leaves it to you: {key.help if key else 'a value'}; "
                f"give {name}=...{without}",
                (name,),
            )
        )
    return required, {name: None if value == _OPEN else value for name, value in raw.items()}


def _given_model(
    groups: Groups, choices: Mapping[str, str], values: Mapping[str, Any], raw: Mapping[str, Any]
) -> tuple[set[str], str]:
    """Return the leaves under ``model`` that the user or a file chose, and the option as text.

    The text is empty where no option of the group was chosen. The group's default option does not
    count as a choice.
    """
    given = {name for name in values if name.startswith("model.")}
    option, source = choices.get("model"), ""
    top_files = [file for folder in groups.folders[:-1] if (file := folder / TOP).is_file()]
    recipe = groups.options.get("recipe", {}).get(choices.get("recipe", "none"))
    for file in [*top_files, *([recipe] if recipe else [])] if option is None else []:
        chosen, leaves = _model_in(file)
        given |= leaves
        option, source = (chosen, f"{file.stem}'s ") if chosen else (option, source)
    if option is None or option == derived.AUTO:
        return given, ""
    return given | {name for name in raw if name.startswith("model.")}, f"{source}model={option}"


def _model_in(file: Path) -> tuple[str | None, set[str]]:
    """Return the ``model`` option that a recipe or top file chooses, and the leaves it sets."""
    try:
        content = read_yaml(file)
    except (OSError, ValueError):
        return None, set()  # composing has reported it
    if not isinstance(content, dict):
        return None, set()
    entries = [entry for entry in content.get("defaults") or [] if isinstance(entry, dict)]
    pairs = {
        str(group).removeprefix("override ").lstrip("/"): str(option)
        for entry in entries
        for group, option in entry.items()
    }
    option = pairs.get("model")
    return (None if option == open_groups().defaults["model"] else option), set(
        keys.flatten({"model": content.get("model") or {}})
    ) - {"model"}


def composed_values(choices: Mapping[str, str], config_dir: Path | None = None) -> dict[str, Any]:
    """Return the leaves of the chosen options by dotted name, as in the YAML, unchecked."""
    return _composed(open_groups(config_dir), choices, {})[0]


def load(path: Path) -> Config:
    """Read a resolved.yaml. Checks types, but neither the files it names nor values across fields.

    Raises:
        ConfigError: no such file, no YAML, or keys and types that this version does not have.
    """
    try:
        raw = read_yaml(path)
        flat = keys.flatten(raw) if isinstance(raw, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from error
    if flat is None:
        raise ConfigError(f"{path}: holds no configuration")
    leaves, problems = _convert(earlier_versions.completed(flat), {})
    missing = [
        name
        for name in keys.all_keys()
        if name not in leaves and not any(name in problem.keys for problem in problems)
    ]
    lines = [problem.line for problem in problems] + [f"{name}: missing" for name in missing]
    if lines:
        raise ConfigError(*(f"{path}: {line}" for line in lines))
    return keys.build(leaves)


def save(config: Config, path: Path) -> None:
    """Write ``config`` atomically for `load`: a reader sees the old file or the new one."""
    import yaml

    text = f"# Composed by mtrain {__version__}.\n" + yaml.safe_dump(
        to_dict(config), sort_keys=False, allow_unicode=True
    )
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def to_dict(config: Config) -> dict[str, Any]:
    """Return ``config`` as nested dictionaries and lists, in schema order."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _composed(
    groups: Groups, choices: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[OverrideProblem]]:
    """Return the leaves that Hydra composes from ``choices`` with ``values`` on top, and problems.

    Interpolations are resolved.
    """
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    *own, shipped = groups.folders
    words = [
        f"{'' if group in groups.defaults else '+'}{group}={option}"
        for group, option in choices.items()
    ]
    try:
        with (
            _own_hydra(own),
            initialize_config_dir(str(shipped), version_base="1.3", job_name="mtrain"),
        ):
            composed = hydra_compose(TOP.removesuffix(".yaml"), overrides=words)
            named = [group for group in choices if group != "recipe"]
            if named and choices.get("recipe", "none") != "none":
                # A group on the command line replaces all that a recipe says about that group:
                # half of each would be neither.
                without_recipe = hydra_compose(
                    TOP.removesuffix(".yaml"),
                    overrides=[word for word in words if not word.startswith("recipe=")],
                )
                for group in named:
                    OmegaConf.update(
                        composed, group, without_recipe[group], merge=False, force_add=True
                    )
        tree: Any = OmegaConf.to_container(composed, resolve=False)
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        OSError,
        ValueError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{' '.join(words) or TOP}: cannot be composed: {_one_line(error)}"
        ) from error
    leaves: dict[str, Any] = {}
    problems: dict[str, OverrideProblem] = {}

    def update(name: str) -> None:
        OmegaConf.update(composed, name, values[name], merge=False, force_add=True)

    def resolve(name: str) -> None:
        value = OmegaConf.select(composed, name)
        leaves[name] = (
            OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        )

    steps = [(update, name) for name in values] + [
        (resolve, name) for name in dict.fromkeys([*values, *keys.flatten(tree)])
    ]
    for step, name in steps:
        try:
            step(name)
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            shown = f"{name}={keys.show(values[name])}" if name in values else name
            problems[name] = OverrideProblem(
                f"{shown}: cannot be resolved: {_one_line(error)}", (name,)
            )
    for name, other in _INSTEAD.items():
        if values.get(name) and other not in values and leaves.get(other):
            leaves[other] = 0
    return leaves, list(problems.values())


@contextlib.contextmanager
def _own_hydra(folders: Sequence[Path]) -> Iterator[None]:
    """Isolate Hydra from other users in this process, and search ``folders`` before mtrain's own.

    `hydra.searchpath` would search them last.
    """
    from hydra.core.global_hydra import GlobalHydra

    _register_search_path()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    _user_folders.extend(folders)
    try:
        yield
    finally:
        _user_folders.clear()
        GlobalHydra.instance().hydra = outer


_user_folders: list[Path] = []  # global, since Hydra constructs its plugins without arguments


@functools.cache
def _register_search_path() -> None:
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class UserFolders(SearchPathPlugin):
        def manipulate_search_path(self, search_path: Any) -> None:
            for folder in _user_folders:
                search_path.prepend(provider="--config-dir", path=str(folder), anchor="main")

    Plugins.instance().register(UserFolders)


def _convert(
    raw: Mapping[str, Any], files: Mapping[str, Path]
) -> tuple[dict[str, Any], list[OverrideProblem]]:
    """Convert the leaves of ``raw`` to schema types. files: each group's YAML, for messages."""
    leaves: dict[str, Any] = {}
    problems = []
    for name, value in raw.items():
        key = keys.all_keys().get(name)
        if key is None:
            file = files.get(name.split(".")[0])
            where = f"{file}: " if file else ""
            if name in keys.sections():
                problems.append(
                    OverrideProblem(
                        f"{where}{name}={keys.show(value)}: holds keys, not a value", (f"{name}.",)
                    )
                )
                continue
            problems.append(
                OverrideProblem(
                    f"{where}no key is called {name}{did_you_mean(name, keys.all_keys())}"
                )
            )
            continue
        try:
            converted = key.convert(value)
            if (range_error := validate.out_of_range(name, converted)) is not None:
                raise ValueError(range_error)
            leaves[name] = converted
        except (ValueError, OverflowError) as error:
            problems.append(
                OverrideProblem(f"{name}={_clipped(keys.show(value))}: {error}", (name,))
            )
    return leaves, problems


def _checked(
    leaves: Mapping[str, Any],
    problems: Sequence[OverrideProblem],
    files: Mapping[str, Path],
    ignore: tuple[str, ...] = (),
    tolerated: Sequence[OverrideProblem] = (),
) -> Config:
    """Return the configuration. Raise ConfigError unless all problems are ``tolerated``.

    A leaf with a problem takes its default while the others are checked across fields. Findings
    that name it are dropped, since they may only follow from the problem.
    """
    blamed = {name for problem in problems for name in problem.keys}
    missing = [
        name for name in keys.all_keys() if name not in leaves and not _concerns(name, blamed)
    ]
    tolerated_keys = {name for problem in tolerated for name in problem.keys}
    lines = [problem.line for problem in problems]
    for section in dict.fromkeys(name.split(".")[0] for name in missing):
        names = [name for name in missing if name.split(".")[0] == section]
        named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(
            f"{files.get(section, TOP)}: does not give {named}; to inherit them from another "
            "option, begin the file with `defaults: [OPTION]`"
        )
    blamed.update(missing)
    complete = {**_defaults(), **leaves} if blamed else leaves
    for line in validate.problems(keys.build(complete)):
        mentioned = re.findall(r"[a-z_]+(?:\.[a-z_]+)+|\bseq\b|\bseed\b", line)
        if not any(
            _concerns(name, blamed | tolerated_keys) for name in mentioned
        ) and not line.startswith(ignore or ("\0",)):
            lines.append(line)
    if lines:
        raise ConfigError(*lines)
    return keys.build(_absolute(leaves))


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _concerns(name: str, blamed: set[str]) -> bool:
    return any(
        name == other or (other.endswith(".") and name.startswith(other)) for other in blamed
    )


def _absolute(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Expand ~ in ``leaves`` and make relative paths absolute."""
    paths = {name: leaves.get(name) for name in keys.PATHS}
    absolute = {
        name: str(Path(value).expanduser().absolute())
        for name, value in paths.items()
        if isinstance(value, str) and value and value not in keys.PATHS[name]
    }
    if leaves.get("data.mix") and leaves.get("data.path", "") is None:
        absolute["data.path"] = str(Path.cwd())  # names of a mixture are relative to it
    return {**leaves, **absolute}


@functools.cache
def _defaults() -> dict[str, Any]:
    raw, _ = _composed(open_groups(), {}, {})
    return _convert({**raw, derived.TOKENIZER: "bytes"}, {})[0]


def _files(groups: Groups, choices: Mapping[str, str]) -> dict[str, Path]:
    chosen = {**groups.defaults, **choices}
    return {
        group: groups.options[group][option]
        for group, option in chosen.items()
        if option in groups.options.get(group, {})
    }


def _one_line(error: Exception) -> str:
    """Return the first line of a library's message, with the place of a YAML error."""
    if isinstance(error, RecursionError | UnicodeDecodeError):
        return reason(error)
    text = (
        str(getattr(error, "problem", None) or getattr(error, "strerror", None) or error).strip()
        or type(error).__name__
    )
    mark = getattr(error, "problem_mark", None)
    return text.splitlines()[0] + (
        f" ({Path(mark.name).name}, line {mark.line + 1})" if mark is not None else ""
    )
