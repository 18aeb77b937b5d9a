"""Send an exported model to a URL, or with a model card to a repository of the Hub."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, keys, resolved_file
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.manifest import Manifest
from mtrain_cli.launch.run_dir import RunDir, run_of
from mtrain_cli.launch.temporary_folders import private_folder
from mtrain_cli.model.huggingface_config import require_new_folder
from mtrain_cli.printable import printable
from mtrain_cli.records.metrics import metrics_file, read_metrics
from mtrain_cli.training.checkpointer import newest_intact
from mtrain_cli.training.evaluation import read_evaluations
from mtrain_extras.places import files, hub
from mtrain_extras.places.files import Place, open_place, say, why
from mtrain_extras.places.kinds import is_url
from mtrain_extras.places.run_place import PlaceError, retried

CARD = "README.md"
_PROBE = "SHA256SUMS"  # shows whether the place can be written; every export has this file
_SETTINGS = (
    "seq", "mask.kind", "sparsity.pattern", "data.kind", "data.document_mask", "optim.lr",
    "optim.schedule", "optim.warmup_steps", "optim.weight_decay", "train.steps",
    "train.global_batch", "train.dtype", "topology.exchange", "topology.layout", "seed",
)  # fmt: skip


@contextlib.contextmanager
def delivery(source: Path, target: str, push: str | None, private: bool) -> Iterator[Path]:
    """Yield a folder to export to, and send it at the end, as `entry.delivery` says.

    What the user can mend is found at the beginning, since an export takes minutes.

    Raises ConfigError if the place has files, or it or the repository refuses them.
    """
    place = _empty_place(target) if is_url(target) else None
    if push is not None:
        _make_repository(push, private)
    with private_folder() as temporary:
        folder = Path(target) if place is None else temporary / "hf"
        if place is None:
            require_new_folder(folder)
        yield folder
        if push is not None:
            (folder / CARD).write_text(card(source), encoding="utf-8")
        if place is not None:
            _upload(place, folder)
        if push is not None:
            _push(push, folder)


def _empty_place(url: str) -> Place:
    subject = f"HF_FOLDER={url}"
    place = open_place(subject, url)
    try:
        taken = {}
        with contextlib.suppress(FileNotFoundError):
            taken = retried(place.entries)
        if not taken:
            retried(partial(place.write, _PROBE, b""))
    except (PlaceError, FileNotFoundError) as error:  # or no such bucket
        raise ConfigError(f"{subject}: cannot be written ({why(error)})") from error
    if taken:
        raise ConfigError(f"{subject}: has files already, such as {min(taken)}; give a new folder")
    with contextlib.suppress(Exception):  # it is written again, or was not there
        place.fs.rm_file(place.at(_PROBE))
    return place


def _upload(place: Place, folder: Path) -> None:
    """Send the files, config.json last, so that an incomplete upload is no model."""
    own = [path for path in folder.rglob("*") if path.is_file()]
    own.sort(key=lambda path: (path.name == "config.json", path))
    try:
        for file in own:
            retried(partial(place.put, file, file.relative_to(folder).as_posix()))
        sent = {name: int(facts["size"]) for name, facts in retried(place.entries).items()}
    except Exception as error:  # of any file system
        raise ConfigError(f"HF_FOLDER={place.url}: cannot be written ({why(error)})") from error
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in own}
    wrong = [name for name, size in sizes.items() if sent.get(name) != size]
    if wrong:
        raise ConfigError(f"HF_FOLDER={place.url}: {wrong[0]} did not arrive; export again")


def _make_repository(repo: str, private: bool) -> None:
    with hub.explained(f"--push {repo}", repo):
        from huggingface_hub import HfApi

        HfApi().create_repo(repo, private=private, exist_ok=True)


def _push(repo: str, folder: Path) -> None:
    with hub.explained(f"--push {repo}", repo):
        from huggingface_hub import HfApi

        message = "Model trained with mtrain"
        pushed: Any = HfApi().upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message
        )
    say(f"--push {repo}: {pushed}")


def card(source: Path) -> str:
    """Return a model card: base model, data, settings, tokens, losses, hardware and command."""
    run = RunDir(run_of(source))
    config = resolved_file.load(run.resolved)
    base = hub.commit_of(config.train.init_from or "")
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mtrain", "long-context"],
        **({"base_model": base[0]} if base else {}),
    }
    rows = [
        ("Base model", f"{base[0]} at commit {base[1]}" if base else _base(config)),
        ("Data", _origin(config)),
        *_trained(source, run),
        ("Hardware", _hardware(run)),
    ]
    values = keys.values(config)
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {_cell(run.path.name)}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows]
    lines += ["", "## Settings", "", "| key | value |", "|---|---|"]
    lines += [f"| {key} | {_cell(keys.show(values[key]))} |" for key in _SETTINGS if key in values]
    pattern = [key for key in values if key.startswith("sparsity.") and key not in _SETTINGS]
    if config.sparsity.pattern != "dense":
        lines += [f"| {key} | {_cell(keys.show(values[key]))} |" for key in pattern
                  if values[key] is not None]  # fmt: skip
    lines += ["", "## Command", "", *(f"    {printable(line)}" for line in _command(run)), ""]
    return "\n".join(lines)


def _base(config: Config) -> str:
    name = config.train.init_from
    return Path(name).name if name else f"none; random weights of the shape {config.model.name}"


def _origin(config: Config) -> str:
    data = config.data
    if data.path is None:
        return data.kind
    found = files.origin(data.path)
    return f"{found[0]}, version {found[1]}" if found else Path(data.path).name


def _trained(source: Path, run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield rows on steps, tokens and losses. A file that is missing or damaged gives none."""
    unread = OSError, ValueError, LookupError, TypeError
    manifest = newest_intact(source, Manifest.read, lambda _: None)
    yield "Steps", f"{manifest.step:,}"
    with contextlib.suppress(*unread):
        yield "Tokens trained", f"{int(manifest.trainer['tokens']):,}"
    with contextlib.suppress(*unread):
        steps = [m for m in read_metrics(metrics_file(run.path)) if m.step <= manifest.step]
        losses = [f"{m.loss:.4f} (step {m.step:,})" for m in steps if m.loss is not None]
        yield "Training loss", f"{losses[0]} to {losses[-1]}"
    with contextlib.suppress(*unread):
        last = [e for e in read_evaluations(run.path)[0] if e.step <= manifest.step][-1]
        yield "Held-out loss", f"{last.loss:.4f} (step {last.step:,})"


def _facts(run: RunDir) -> dict[str, Any]:
    try:
        facts = documents.read_json(run.environment)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _hardware(run: RunDir) -> str:
    gpus = _facts(run).get("gpus")
    if not isinstance(gpus, list) or not gpus:
        return "CPU"
    return ", ".join(f"{gpus.count(gpu)} x {gpu} on its first node" for gpu in dict.fromkeys(gpus))


def _command(run: RunDir) -> list[str]:
    words = _facts(run).get("command")
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return [shlex.join(words)]
    return ["unknown"]


def _cell(value: object) -> str:
    """Return text for a cell of a table that shows what it says."""
    text = printable(str(value)).replace("|", "\\|")
    return "".join(f"\\{c}" if c in "<>`*_[]" else c for c in text)
