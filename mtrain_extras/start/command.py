"""`mtrain init`: write a recipe for one of five jobs, with a script that runs it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

from mtrain_cli.commands.options import MOST_WORKERS, argument, bounded, flag, option, writing
from mtrain_cli.config import plugins
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such
from mtrain_cli.printable import one_line
from mtrain_extras.start.jobs import JOBS, WITH_MODEL

_RECIPES = Path(__file__).with_name("recipes")
_OWN = "the sources of Python's standard library"
_SMALL = """\
  name: small
  hidden_size: 512
  num_layers: 8
  num_heads: 8
  num_kv_heads: 2
  head_dim: 64
  intermediate_size: 1536"""
_YARN = """\
model:
  rope:
    scaling: yarn  # stretches the rotary positions; the factor follows from seq"""
_SEQUENCES, _TOKEN_BYTES = 16, 4  # that a recipe's data should have; of a token, about
_UNKNOWN_REACH = 4096  # tokens, of a model whose config.json does not say


def init(
    folder: Annotated[Path | None, argument("FOLDER")] = None,
    job: Annotated[str | None, option("NAME")] = None,
    data: Annotated[str | None, option("PATH")] = None,
    model: Annotated[str | None, option("FOLDER")] = None,
    gpus: Annotated[int | None, bounded(0, MOST_WORKERS)] = None,
    force: Annotated[bool, flag("--force")] = False,
) -> None:
    """Write a recipe to start from, for one of five jobs.

    text trains on your own text, chat on conversations, extend makes a Hugging Face model read
    longer sequences, lora adapts one, and profile measures a cluster. Without --job, the command
    asks on the terminal. It checks the recipe before it writes it.

    [bold]Examples[/bold]

      [cyan]mtrain init[/cyan]
          Ask for the job, the data and the number of GPUs
      [cyan]mtrain init books-run --job text --data ~/books --gpus 4[/cyan]
          Write a recipe for four GPUs, without a question
      [cyan]mtrain init --job extend --model Qwen2.5-3B --data ~/books[/cyan]
          Extend a model to four times its length

    Args:
        folder: Folder for the recipe; by default the name of the job.
        job: What to do: text, chat, extend, lora or profile.
        data: File or folder with the data; by default the sources of Python's standard library.
        model: Folder of a Hugging Face model, or its name on the Hub, for chat, extend and lora.
        gpus: Number of GPUs, or 0 for two CPU processes; by default all GPUs here, or the CPU.
        force: Replace files of an earlier recipe.
    """
    if job is None and sys.stdin.isatty() and sys.stdout.isatty():
        from mtrain_extras.start.questions import ask

        job, data, model, gpus = ask(data, model, gpus)
    if job is None:
        raise ConfigError(f"--job NAME: required; one of {', '.join(JOBS)}")
    if job not in JOBS:
        raise ConfigError(f"--job {job}: {no_such('job', job, list(JOBS))}")
    if model is None and job in WITH_MODEL:
        raise ConfigError(f"--model FOLDER: --job {job} needs a Hugging Face model")
    if model is not None and job not in WITH_MODEL:
        raise ConfigError(f"--model {model}: --job {job} takes no model; leave it out")
    if data is None and job == "chat":
        raise ConfigError("--data PATH: --job chat needs a .jsonl file of conversations")
    if data is not None and not Path(data).expanduser().exists():
        raise ConfigError(f"--data {data}: no such file or folder")
    folder = folder or Path(job)
    base = _without_weights(model) if model is not None else None
    reach = _reach(base) if base is not None else (0, False)
    files = {
        folder / "recipe" / f"{job}.yaml": _recipe(folder, job, data, model, reach, gpus),
        folder / "run.sh": _script(job, gpus),
    }
    taken = [str(file) for file in files if file.exists() or file.is_symlink()]
    if taken and not force:
        raise ConfigError(f"{taken[0]}: exists; give another FOLDER, or --force to replace it")
    _check(job, next(iter(files.values())), model, base)
    with writing(folder):
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    train = ["mtrain", "train", "--config-dir", str(folder), f"recipe={job}"]
    script = ["bash", str(folder / "run.sh")]
    for name, words in (
        ("wrote", list(map(str, files))),
        ("plan", [*train, "--dry-run"]),
        ("run", script if job == "profile" else train),
        ("watch", ["mtrain", "report", "--serve"]),
    ):
        typer.echo(one_line(f"{name:<6} {shlex.join(words)}"))


def _recipe(
    folder: Path,
    job: str,
    data: str | None,
    model: str | None,
    length: tuple[int, bool],
    gpus: int | None,
) -> str:
    """Return the text of a recipe. length: of the model, as `_reach` returns it."""
    on_gpus = gpus > 0 if gpus is not None else Path("/dev/nvidiactl").exists()
    reach, scaled = length
    words = {
        "folder": one_line(shlex.quote(str(folder))),
        "kind": _kind(data),
        "topology": _topology(gpus),
        "data": f"data:\n  path: {_quoted(data)}" if data else f"data:\n  path: null  # {_OWN}",
        "model": _quoted(model or ""),
        "seq": str(_seq(data, 65536 if on_gpus else 4096)),
        "shape": "",
        "reach": f"the model was trained on {reach:,} tokens",
        "columns": "2048" if on_gpus else "128",
    }
    if job == "text":
        words["shape"] = _SMALL if on_gpus else "  # the shape of model=tiny"
    elif job == "profile":
        words |= {"shape": "qwen3b"} if on_gpus else {"shape": "tiny", "seq": "1k"}
    elif job == "extend":
        words |= {"seq": str(4 * reach), "shape": "" if scaled else _YARN}
    else:
        words["seq"] = str(_seq(data, min(8192, reach)))
    text = Template((_RECIPES / f"{job}.yaml").read_text(encoding="utf-8")).substitute(words)
    return re.sub(r"\n\n+", "\n\n", text)


def _seq(data: str | None, most: int) -> int:
    """Return a length of which small data have several sequences: halves of ``most``."""
    if data is None:
        return most
    path = Path(data).expanduser()
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    while most > 256 and most * _SEQUENCES * _TOKEN_BYTES > size:
        most //= 2
    return most


def _topology(gpus: int | None) -> str:
    if gpus is None:
        return "topology:\n  device: auto  # all GPUs here; without one, two CPU processes"
    if gpus == 0:
        return "topology:\n  device: cpu"
    return f"topology:\n  device: cuda\n  workers: {gpus}  # GPUs"


def _kind(data: str | None) -> str:
    """Return the option of the group data that reads a file or folder."""
    if data is None:
        return "stdlib"
    path = Path(data).expanduser()
    if path.suffix in (".npy", ".bin") or (path / "meta.json").is_file():
        return "tokens"
    return "mds" if (path / "index.json").is_file() else "text"


def _quoted(path: str) -> str:
    """Return a YAML string: an absolute path, or a name that is no path here, as it is."""
    here = Path(path).expanduser()
    return json.dumps(str(here.absolute()) if here.exists() else path, ensure_ascii=False)


def _without_weights(model: str) -> str:
    """Return the folder of a model. A name's config and tokenizer are fetched from the Hub.

    Raises ConfigError if they cannot be fetched.
    """
    for places in plugins.places():
        return str(places.local("--model ", model, places.FOLDER))
    return model


def _reach(model: str) -> tuple[int, bool]:
    """Return the length that a model was trained on, and whether its positions are scaled."""
    try:
        config: Any = json.loads((Path(model).expanduser() / "config.json").read_bytes())
        config = config.get("text_config") or config
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        return int(config["max_position_embeddings"]), kind != "default"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return _UNKNOWN_REACH, True  # `_check` says what is wrong with the model


_NEXT = (
    "# For a prediction of your own run: mtrain simulate --cluster profile/cluster.yaml model=..."
)


def _script(job: str, gpus: int | None) -> str:
    place = '"$(dirname "$0")"'
    train = f"mtrain train --config-dir {place} recipe={job}"
    if job != "profile":
        return (
            f"#!/bin/sh\n# {JOBS[job].capitalize()}. Further words override keys of the recipe:\n"
            f'#   sh run.sh train.steps=1000\nexec {train} "$@"\n'
        )
    words = " topology.device=cpu" if gpus == 0 else f" topology.workers={gpus}" if gpus else ""
    return f"""#!/bin/sh
# Measure this machine. Each result is in measurements/ or runs/, and `mtrain report` shows it.
set -e
mtrain doctor                  # versions, devices, kernels
mtrain profile links{words} --cluster-out {place}/cluster.yaml
{train}
mtrain report                  # who waits for whom in the recorded steps
{_NEXT if gpus != 0 else "# mtrain simulate predicts runs on GPUs: measure those first."}
"""


def _check(job: str, recipe: str, model: str | None, base: str | None) -> None:
    """Compose the recipe as `mtrain train` does. Raises ConfigError.

    base: the folder of the model, which replaces a name, so that no weights are fetched.
    """
    from mtrain_cli.composition.compose import compose

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "recipe" / f"{job}.yaml"
        file.parent.mkdir()
        if model is not None and base is not None and base != model:
            recipe = recipe.replace(_quoted(model), _quoted(base))
        file.write_text(recipe, encoding="utf-8")
        try:
            compose([f"recipe={job}"], Path(place))
        except ConfigError as error:
            lines = (line.replace(f"{file}: ", "") for line in error.problems)
            if model is not None and base is not None:
                lines = (line.replace(base, model) for line in lines)
            raise ConfigError(*lines) from None
