"""What the engine calls, as the entry point ``mtrain.places``.

The engine works with local paths. These functions make local paths of names and URLs, and send
runs and models to URLs. huggingface_hub, datasets and fsspec do the work. They are imported when a
name or URL needs them, since every command imports this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config.problem import ConfigError, Problem
from mtrain_extras.places import kinds
from mtrain_extras.places.kinds import DATA, FOLDER, KEYS, MODEL, TOKENIZER, is_url

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config
    from mtrain_cli.training.callback import Callback

# By the metavar of an argument or option, else by the name of an option.
_WORDS = {
    "MODEL": MODEL, "HF_FOLDER_OR_RUN": MODEL, "SOURCE": DATA, "PATH": DATA,
    "bytes|FILE": TOKENIZER, "bytes|bpe|FILE": TOKENIZER, "--tokenizer": FOLDER,
}  # fmt: skip


def local(option: str, value: Any, kind: str, known: object = None) -> Any:
    """Return the local path of a name or URL, after fetching it; any other value as it is.

    option: begins messages, such as ``data.path=``. known: a path to keep if it came from here.

    Raises ConfigError if the place cannot be read.
    """
    if not kinds.is_place(value, kind):
        return value
    from mtrain_extras.places import names

    return names.local(option, value, kind, known)


def localize(
    values: dict[str, Any],
    known: Mapping[str, Any] | None = None,
    plan: bool = False,
    data_elsewhere: bool = False,
) -> list[Problem]:
    """Put local paths for names and URLs into the values of keys. Return the problems.

    known: values of the run that resumes. plan: do without weights. data_elsewhere: leave the data.
    """
    problems = []
    rank = (known or values).get("train.lora.rank")
    for key, kind in KEYS.items():
        kind = FOLDER if plan and kind == MODEL else kinds.with_adapters(kind, rank)
        if key not in values or (data_elsewhere and key.startswith("data.")):
            continue
        try:
            values[key] = local(f"{key}=", values[key], kind, (known or {}).get(key))
        except ConfigError as error:
            problems.append(Problem(error.problems[0], key))
    return problems


def local_words(args: list[str], given: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return the words of a command line with local paths for names and URLs.

    given: the arguments and options of the command, and their values.
    """
    args, at = list(args), _indices(args, [param for param, _ in given])
    for param, value in given:
        option = max(param.opts, key=len) if param.param_type_name == "option" else ""
        kind = _WORDS.get(param.metavar, _WORDS.get(option))
        if param.metavar == "HF_FOLDER" and any(other.name == "run" for other, _ in given):
            kind = MODEL  # of `mtrain checkpoint import`; an export writes its folder
        if kind is not None:
            path = local(f"{option} " if option else f"{param.metavar}=", value, kind)
            for index in at.get(param.name, ()) if path != value else ():
                ends = {value: path, f"{option}={value}": f"{option}={path}"}
                args[index] = ends.get(args[index], args[index])
    return args


def _indices(args: Sequence[str], params: Sequence[Any]) -> dict[str, list[int]]:
    """Return where in a command line the words of each parameter are. Equal words differ in it.

    params: of the words, the arguments in their order. Only one of them may take several words.
    """
    options = {name: param for param in params for name in param.opts if name[:1] == "-"}
    found: dict[str, list[int]] = {}
    positional: list[int] = []
    index = 0
    while index < len(args):
        word = args[index]
        if word == "--":
            positional += range(index + 1, len(args))
            break
        option = options.get(word.partition("=")[0]) if word[:1] == "-" else None
        if option is not None:
            index += word in options and not option.is_flag  # the next word is its value
            found.setdefault(option.name, []).append(index)
        elif word[:1] != "-" or word == "-":
            positional.append(index)
        index += 1
    arguments = [param for param in params if param.param_type_name == "argument"]
    more = len(positional) - len(arguments)
    for param in arguments:
        count = max(0, more + 1) if param.nargs < 0 else 1
        found[param.name], positional = positional[:count], positional[count:]
    return found


def fetch_named(resume: str, words: Sequence[str]) -> str:
    """Fetch the run that ``--resume`` names, if it is at a place, and return its name here.

    resume: a name, a folder, or the URL of the run. words: those of the command; `run.remote` of
    them holds the run if resume is no URL.

    Raises ConfigError if the place cannot be read, or the URL has no run.
    """
    remotes = [word.partition("=")[2] for word in words if word.startswith("run.remote=")]
    remote, _, name = resume.rstrip("/").rpartition("/") if is_url(resume) else ("", "", resume)
    if remote or (remotes and is_url(remotes[-1])):
        from mtrain_extras.places import fetched_run

        found = fetched_run.fetch(remote or remotes[-1], fetched_run.folder_of(name))
        if remote and not found:
            raise ConfigError(f"--resume {resume}: no run with a complete checkpoint there")
    return name


def fetch_run(config: Config) -> None:
    """Fetch the run of a configuration from its `run.remote`, if it is there and not here.

    Raises ConfigError if the place cannot be read or no checkpoint has its checksums.
    """
    from mtrain_extras.places import fetched_run

    run = config.run
    given = fetched_run.folder_of(run.name) if run.dir == "auto" else Path(run.dir).expanduser()
    fetched_run.fetch(str(run.remote), given, starts=True)


def unclaim(config: Config, folder: Path) -> None:
    """Remove what a run that is refused, with its folder here, has left at its `run.remote`."""
    from mtrain_extras.places import run_copy

    run_copy.unclaim(str(config.run.remote), folder)


def require_remote(config: Config) -> None:
    """Raise ConfigError if `run.remote` is a wrong URL or lacks its package, without asking it."""
    from mtrain_extras.places import files

    files.open_place(f"run.remote={config.run.remote}", str(config.run.remote))


def follow(trainer: Any, run_dir: Any, message: Any) -> Callback:
    """Make the callback that copies a run to ``run.remote`` while it trains."""
    from mtrain_extras.places.run_copy import RunCopy

    return RunCopy(trainer, run_dir, message)


def delivery(
    source: Path, target: str, push: str | None, private: bool
) -> contextlib.AbstractContextManager[Path]:
    """Return a context with the folder to export to, which is uploaded at the end of the context.

    source: the run or checkpoint. target: a folder or URL. push: repository of the Hub, or None.
    """
    if private and push is None:
        raise ConfigError("--private: belongs to --push ORG/NAME; give both")
    if push is None and not is_url(target):
        return contextlib.nullcontext(Path(target))
    from mtrain_extras.places import exported

    return exported.delivery(source, target, push, private)
