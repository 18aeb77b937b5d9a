"""Compose YAML groups and overrides into one frozen, checked `Config`.

1. `yaml_groups` composes the YAML into values by dotted key.
2. `derived` fills in the values that other files decide.
3. `config.keys` converts every value to its schema type.
4. `config.validate` checks the values against each other.

All problems are reported together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain_cli.composition import derived
from mtrain_cli.composition.yaml_groups import compose_groups
from mtrain_cli.config import keys, plugins, validate
from mtrain_cli.config.documents import read_yaml
from mtrain_cli.config.groups import TOP, Groups, default_options, open_groups
from mtrain_cli.config.overrides import convert, parse
from mtrain_cli.config.problem import Problem, contains
from mtrain_cli.config.schema import Config, ConfigError

# Keys that a resumed run keeps: its weights, its loss, the order of its data and its name depend on
# them.
FIXED = (
    "model.", "mask.", "data.", "seq", "seed", "train.init_from", "train.lora.", "run.name",
    "run.dir",
)  # fmt: skip

# The value of a key that the user must set. OmegaConf's own ??? cannot be used: a null in the
# defaults would override it.
_OPEN = "REQUIRED"
_DISPENSABLE = ("train.init_from",)  # required keys that the user may set to null

_DEGREES = {f"topology.{name}_parallel" for name in ("context", "tensor", "pipeline")}


def compose(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    *,
    plan: bool = False,
    data_elsewhere: bool = False,
) -> Config:
    """Return the configuration for overrides such as ``["model=qwen3b", "seq=512k"]``.

    Paths become absolute, so that workers on other machines and resumed runs find the files.

    Args:
        overrides: ``group=option`` and ``key=value``. If a key appears twice, the last value wins.
        config_dir: folder of the user's own groups, searched before the shipped groups.
        plan: use null for REQUIRED values that the user has not set, such as the folder of the
            weights. A plan does not read these values.
        data_elsewhere: allow data that this machine lacks. Only for plans.

    Raises:
        ConfigError: the configuration has problems. The message has one line per problem.
    """
    groups = open_groups(config_dir)
    parsed = parse(overrides, groups)
    files = _files(groups, parsed.groups)
    raw, unresolved = compose_groups(groups, parsed.groups, parsed.values)
    open_keys, raw = _required_keys(raw, parsed.groups)
    for places in plugins.places():
        unresolved += places.localize(raw, plan=plan, data_elsewhere=data_elsewhere)
    given, model = _given_model(groups, parsed.groups, parsed.values, raw)
    raw, underivable = derived.fill(
        raw,
        given,
        model,
        _defaults(),
        chose_mask="mask" in parsed.groups
        or "mask.kind" in parsed.values
        or raw.get("mask.kind") != _defaults()["mask.kind"],
        mask_keys=[name for name in parsed.values if name.startswith("mask.")],
    )
    leaves, wrong = convert(raw, files)
    if leaves.get("optim.rewarm"):
        value = keys.show(leaves["optim.rewarm"])
        line = f"optim.rewarm={value}: needs --resume RUN; a new run always warms up. Leave it out"
        wrong.append(Problem(line, "optim.rewarm"))
    problems = [*parsed.problems, *unresolved, *underivable, *wrong]
    if plan:
        ignore = ("data.path", "data.mix", "data.tokenizer") if data_elsewhere else ()
        tolerated = [key for p in open_keys for key in p.keys]
        return _checked(leaves, problems, files, ignore, tolerated)
    return _checked(leaves, [*problems, *open_keys], files)


def resume(saved: Config, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Config:
    """Return ``saved`` changed by ``overrides``, for a run that resumes from its checkpoint.

    Raises ConfigError if an override is wrong, or changes one of `FIXED`.
    """
    groups = open_groups(config_dir)
    parsed = parse(overrides, groups)
    files = _files(groups, parsed.groups)
    before = keys.values(saved)
    raw, unresolved = compose_groups(groups, parsed.groups, parsed.values)
    raw = derived.without_auto(_required_keys(raw, parsed.groups)[1])
    for places in plugins.places():
        unresolved += places.localize(before) + places.localize(raw, known=before)
    from_files = {name: raw[name] for name in raw if name not in parsed.values}
    unresolved += _recipe_conflicts(groups, parsed.groups, from_files, before)
    chosen = tuple(f"{group}." for group in parsed.groups)
    touched = {n: raw[n] for n in raw if n in parsed.values or n.startswith(chosen)}
    changed, wrong = convert(touched, files)
    # Keys of one option give equal problems, which `dict.fromkeys` joins into one.
    conflicts = dict.fromkeys(
        _kept(name, value, before[name], parsed.groups, name in parsed.values)
        for name, value in _absolute(changed).items()
        if name.startswith(FIXED) and name != "data.verify" and value != before[name]
    )
    problems = [*parsed.problems, *unresolved, *wrong, *conflicts]
    # The checkpoint holds the weights, so the folder of train.init_from may be gone. So may the
    # file of the cluster, which only plans read.
    gone = ("train.init_from", "topology.cluster")
    return _checked({**before, **changed}, problems, files, ignore=gone)


def _kept(
    name: str, value: Any, before: Any, choices: Mapping[str, str], is_typed: bool
) -> Problem:
    """Return the problem that an override changes a key whose value a resumed run keeps."""
    group = name.partition(".")[0]
    if group in choices and not is_typed:
        line, blamed = f"{group}={choices[group]}: a resumed run keeps its {group}", f"{group}."
    else:
        line = f"{name}={keys.show(value)}: a resumed run keeps its {name}={keys.show(before)}"
        blamed = name
    return Problem(f"{line}; start a new run to change it", blamed)


def _recipe_conflicts(
    groups: Groups, choices: Mapping[str, str], raw: Mapping[str, Any], before: Mapping[str, Any]
) -> list[Problem]:
    """Return one problem if the recipe sets keys that the user did not type to other values."""
    # A recipe that agrees is allowed, so the command line that started the run can be repeated.
    recipe = choices.get("recipe", "none")
    if recipe == "none":
        return []
    others = {group: option for group, option in choices.items() if group != "recipe"}
    without, _ = compose_groups(groups, others, {})
    of_recipe = {n: v for n, v in raw.items() if v is not None and v != without.get(n)}
    values = _absolute(convert(of_recipe)[0])
    different = [name for name in of_recipe if name in values and values[name] != before[name]]
    if not different:
        return []
    shown = keys.first_few([f"{name}={keys.show(values[name])}" for name in different])
    line = f"recipe={recipe}: a resumed run keeps its recipe, but this one sets {shown}"
    return [Problem(f"{line}; start a new run with it, or set single keys", *different)]


def _required_keys(
    raw: Mapping[str, Any], choices: Mapping[str, str]
) -> tuple[list[Problem], dict[str, Any]]:
    """Return a problem per key with the value REQUIRED, and ``raw`` with null for these keys."""
    required = []
    for name in (name for name, value in raw.items() if value == _OPEN):
        owners = ("recipe", name.partition(".")[0])
        chosen = (f"{g}={choices[g]}" for g in owners if choices.get(g, "none") != "none")
        key = keys.all_keys().get(name)
        line = (
            f"{name}={_OPEN}: {next(chosen, TOP)} leaves it to you: "
            f"{key.help if key else 'a value'}; give {name}=..."
        )
        if name in _DISPENSABLE:
            line += f", or {name}=null to do without"
        required.append(Problem(line, name))
    return required, {name: None if value == _OPEN else value for name, value in raw.items()}


def _given_model(
    groups: Groups, choices: Mapping[str, str], values: Mapping[str, Any], raw: Mapping[str, Any]
) -> tuple[set[str], str]:
    """Return the keys under ``model`` that the user or a file set, and the choice as text."""
    given = {name for name in values if name.startswith("model.")}
    option, source = choices.get("model"), ""
    if option is None:
        files = [file for folder in groups.folders[:-1] if (file := folder / TOP).is_file()]
        recipe = groups.options.get("recipe", {}).get(choices.get("recipe", "none"))
        for file in [*files, *([recipe] if recipe else [])]:
            chosen, leaves = _model_in(file)
            given |= leaves
            option, source = (chosen, f"{file.stem}'s ") if chosen else (option, source)
    if option is None or option == derived.AUTO:
        return given, ""
    return given | {name for name in raw if name.startswith("model.")}, f"{source}model={option}"


def _model_in(file: Path) -> tuple[str | None, set[str]]:
    """Return the ``model`` option that a file chooses, or None, and its keys under ``model``."""
    try:
        content = read_yaml(file)
    except (OSError, ValueError):
        return None, set()  # composing has reported it
    if not isinstance(content, dict):
        return None, set()
    option = default_options(content).get("model")
    leaves = set(keys.flatten({"model": content.get("model") or {}})) - {"model"}
    return (None if option == open_groups().defaults["model"] else option), leaves


def composed_values(choices: Mapping[str, str], config_dir: Path | None = None) -> dict[str, Any]:
    """Return the values of the chosen options by dotted key, as the YAML has them, unchecked."""
    return compose_groups(open_groups(config_dir), choices, {})[0]


def _checked(
    leaves: Mapping[str, Any],
    problems: Sequence[Problem],
    files: Mapping[str, Path],
    ignore: tuple[str, ...] = (),
    tolerated: Sequence[str] = (),
) -> Config:
    """Return the configuration, if there are no problems and its values fit each other.

    Drop conflicts in which a key of ``ignore`` is wrong, and those about ``tolerated`` keys.
    """
    blamed = {name for problem in problems for name in problem.keys}
    absent = [name for name in keys.all_keys() if name not in leaves]
    missing = [name for name in absent if not any(contains(one, name) for one in blamed)]
    lines: list[str] = [*problems]
    for section in dict.fromkeys(name.partition(".")[0] for name in missing):
        names = keys.first_few([name for name in missing if name.partition(".")[0] == section])
        inherit = "begin the file with `defaults: [OPTION]` to inherit from another option"
        lines.append(f"{files.get(section, TOP)}: does not give {names}; {inherit}")
    blamed.update(missing)
    # With defaults for keys that have a problem, the conflicts between other keys are found. The
    # problem may cause a conflict that is about its key, so that one is dropped.
    complete = {**_defaults(), **leaves} if blamed else dict(leaves)
    if blamed & _DEGREES:
        complete["topology.workers"] = "auto"  # nobody knows how many share a sequence
    conflicts = [*validate.variant_keys(complete), *validate.problems(keys.build(complete))]
    lines += [
        conflict
        for conflict in conflicts
        if conflict.key not in ignore and not conflict.is_about(blamed | {*tolerated})
    ]
    if lines:
        raise ConfigError(*lines)
    return keys.build(_absolute(leaves))


def _absolute(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Expand ~ in ``leaves`` and make relative paths absolute."""
    absolute = {
        name: str(Path(value).expanduser().absolute())
        for name, words in keys.PATHS.items()
        if isinstance(value := leaves.get(name), str) and value and value not in words
    }
    if leaves.get("data.mix") and leaves.get("data.path", "") is None:
        absolute["data.path"] = str(Path.cwd())  # the folder that holds the corpora of the mixture
    return {**leaves, **absolute}


@functools.cache
def _defaults() -> dict[str, Any]:
    return convert({**composed_values({}), derived.TOKENIZER: "bytes"})[0]


def _files(groups: Groups, choices: Mapping[str, str]) -> dict[str, Path]:
    """Return the YAML file of the chosen option of each group."""
    chosen = {**groups.defaults, **choices}
    return {
        group: groups.options[group][option]
        for group, option in chosen.items()
        if option in groups.options.get(group, {})
    }
