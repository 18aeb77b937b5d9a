"""Settings of runs in a report: the main settings of a run, and the differences between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain_cli.config import keys
from mtrain_cli.config.documents import UnreadableError, read_yaml, reason
from mtrain_cli.config.earlier_versions import renamed
from mtrain_cli.config.sizes import format_size

RESOLVED = "resolved.yaml"
# Keys that only name a run. They differ between any two runs, so a report leaves them out.
_NAMES = ("run.name", "run.dir")
_OF_MASK = "mask.*"
# Shown only if they are not 1.
_DEGREES = (
    "topology.tensor_parallel",
    "topology.pipeline_parallel",
    "topology.expert_parallel",
)
# Shown only for a sparse pattern, and only if they are not 0.
_DENSE_PARTS = ("sparsity.dense_layers", "sparsity.dense_steps")
_CARD = (
    ("model", ("model.name", "model.num_layers", "model.hidden_size")),
    ("sequence", ("seq", "train.global_batch", "train.micro_batch")),
    (
        "workers",
        (
            *("topology.workers", "topology.context_parallel", *_DEGREES),
            *("topology.layout", "topology.exchange"),
        ),
    ),
    ("mask", ("data.mask_key", "mask.kind", _OF_MASK, "data.document_mask")),
    (
        "attention",
        ("sparsity.pattern", *_DENSE_PARTS, "train.kernel", "train.dtype"),
    ),
    ("optimizer", ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.clip_norm")),
    ("steps", ("train.steps", "seed")),
    ("data", ("data.kind", "data.path")),
    ("memory", ("train.memory", "train.activation_checkpoint", "train.shard")),
)
_MOST_CHARACTERS = 10_000  # of a value that a report shows
_OF_ATTENTION = ("mask", "workers", "attention")  # headings of `_CARD`


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a resolved.yaml by dotted key.

    The file is not checked against the schema, so reports can show runs of other mtrain versions.

    Raises:
        UnreadableError: the file is no YAML, holds no settings, or a value is very long.
        OSError: the file cannot be read.
    """
    document = read_yaml(file)
    if not isinstance(document, Mapping):
        raise UnreadableError("it holds no settings")
    try:
        settings = renamed(keys.flatten(document))
        long = [
            name for name, value in settings.items() if len(keys.show(value)) > _MOST_CHARACTERS
        ]
    except (ValueError, RecursionError) as error:
        raise UnreadableError(reason(error)) from None
    if long:
        raise UnreadableError(f"{long[0]} is longer than {_MOST_CHARACTERS:,} characters")
    return settings


def with_choices(settings: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with the choices of the run, for example ``ring (auto)`` for ``auto``.

    chosen: what the run used, by dotted key.
    """
    used = {
        name: f"{value} (auto)" if settings[name] == "auto" else value
        for name, value in chosen.items()
        if name in settings
    }
    return {**settings, **used}


def attention_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return a line on the mask, and lines on how workers share and compute the attention."""
    rows = dict(card(settings))
    return [f"{heading}: {rows[heading]}" for heading in _OF_ATTENTION if heading in rows]


def card(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (heading, values) of the main settings of a run."""
    rows = []
    for heading, names in _CARD:
        parts = [
            f"{name.rpartition('.')[2]} {shown(name, settings[name])}{_of_all(name, settings)}"
            for name in _in(names, settings)
            if settings.get(name) is not None and not _says_nothing(name, settings)
        ]
        if parts:
            rows.append((heading, ", ".join(parts)))
    return rows


def _in(names: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return keys of the settings: `_OF_MASK` stands for those of the mask but its kind."""
    of_mask = [name for name in settings if name.startswith("mask.") and name != "mask.kind"]
    return [key for name in names for key in (of_mask if name == _OF_MASK else [name])]


def _says_nothing(name: str, settings: Mapping[str, Any]) -> bool:
    if name in _DENSE_PARTS:
        return settings[name] == 0 or settings.get("sparsity.pattern") in (None, "dense")
    return name in _DEGREES and bool(settings[name] == 1)


def _of_all(name: str, settings: Mapping[str, Any]) -> str:
    layers = settings.get("model.num_layers") if name == "sparsity.dense_layers" else None
    return "" if layers is None else f" of {shown('model.num_layers', layers)}"


def differing(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each run) of every setting that differs. A missing value is blank."""
    names = dict.fromkeys(name for run in runs for name in run)
    rows = []
    for name in names:
        values = [shown(name, run[name]) if name in run else "" for run in runs]
        if name not in _NAMES and len(set(values)) > 1:
            rows.append((name, values))
    return rows


def shown(name: str, value: Any) -> str:
    if name == "seq" and isinstance(value, int):
        return format_size(value)
    return keys.show(value)
