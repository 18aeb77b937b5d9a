"""Fill in the values that a configuration takes from other files.

- The model comes from the folder of ``train.init_from``, and the mask if its layers have a sliding
  window.
- The vocabulary size and the tokenizer come from that folder or from the data.

The values replace ``auto``. Values that the user set do not change.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mtrain_cli.config import keys
from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import TRANSFORMERS, ConfigError, ModelConfig

AUTO = "auto"
INIT_FROM, VOCABULARY, TOKENIZER = "train.init_from", "model.vocab_size", "data.tokenizer"


def fill(
    raw: Mapping[str, Any],
    given: Collection[str],
    model: str,
    defaults: Mapping[str, Any],
    *,
    chose_mask: bool = False,
    mask_keys: Collection[str] = (),
) -> tuple[dict[str, Any], list[Problem]]:
    """Return ``raw`` with values for the keys that other files decide, and the problems found.

    Args:
        raw: values by dotted key, not yet converted to schema types.
        given: keys under ``model`` that the user chose.
        model: the user's choice, such as ``model=qwen3b``, for messages; "" without.
        defaults: values for keys whose file is missing or invalid, which is reported.
        chose_mask: whether the user or a file chose a kind of mask.
        mask_keys: keys under ``mask`` that the user typed.
    """
    leaves = dict(raw)
    of_model = [name for name in leaves if name.startswith("model.")]
    problems: list[Problem] = []
    given = {name for name in given if not (name == VOCABULARY and leaves.get(name) == AUTO)}
    folder = folder_of(leaves.get(INIT_FROM))
    if folder is not None:
        try:
            theirs, mask = _read(leaves.get("model.family"), folder, defaults)
        except ConfigError as error:
            problems += [Problem(line, "model.") for line in error.problems]
        else:
            problems += _take_model(leaves, given, model, theirs)
            if not problems and not chose_mask and mask is not None:
                problems += _take_window(leaves, mask, mask_keys)
    elif isinstance(leaves.get(INIT_FROM), str):  # `validate` reports what is wrong with it
        _take(leaves, defaults, (name for name in of_model if name not in given))
    elif (family := leaves.get("model.family")) in (AUTO, TRANSFORMERS):
        choice = "model=auto" if family == AUTO else f"model.family={family}"
        line = f"{choice}: needs {INIT_FROM}=FOLDER; set it, or choose another model"
        problems.append(Problem(line, "model."))
    if problems:
        _take(leaves, defaults, of_model)
    if leaves.get(TOKENIZER) == AUTO:
        leaves[TOKENIZER] = _tokenizer(leaves, folder)
    if leaves.get(VOCABULARY) == AUTO and not problems:
        try:
            leaves[VOCABULARY] = _vocabulary(leaves)
        except ConfigError as error:
            blamed = (VOCABULARY, TOKENIZER, "data.path", "data.mix")
            problems += [Problem(line, *blamed) for line in error.problems]
    if leaves.get(VOCABULARY) == AUTO:
        leaves[VOCABULARY] = defaults[VOCABULARY]
    return leaves, problems


def folder_of(init_from: object) -> Path | None:
    """Return the Hugging Face folder that ``train.init_from`` names, if it has a config.json."""
    if not isinstance(init_from, str) or not init_from:
        return None
    folder = Path(init_from).expanduser()
    # Unlike Path.is_file, this is also False for a name that is too long.
    return folder if os.path.isfile(folder / "config.json") else None


def without_auto(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys that another file decides. A resumed run keeps the values of these keys."""
    derived = (VOCABULARY, TOKENIZER, *(["model."] if leaves.get("model.family") == AUTO else []))
    return {
        name: value
        for name, value in leaves.items()
        if value != AUTO or not name.startswith(derived)
    }


def _take(leaves: dict[str, Any], source: Mapping[str, Any], names: Iterable[str]) -> None:
    leaves.update({name: source[name] for name in list(names) if name in source})


def _read(
    family: object, folder: Path, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], MaskSettings | None]:
    """Return the keys under ``model`` of a folder, and the mask of its windows."""
    if family == TRANSFORMERS:
        from mtrain_cli.model.transformers_decoder import read_foreign

        theirs, mask = read_foreign(folder)
        return {name: v for name, v in defaults.items() if name.startswith("model.")} | theirs, mask
    from mtrain_cli.model.huggingface_config import read_config, read_mask

    model = dataclasses.asdict(read_config(folder)[0])
    return keys.flatten({"model": model}), read_mask(folder)


def _take_model(
    leaves: dict[str, Any], given: Collection[str], model: str, theirs: dict[str, Any]
) -> list[Problem]:
    """Copy the folder's model into ``leaves``, except keys in ``given``, which must fit it."""
    scaling = "model.rope.scaling"
    if scaling in given and leaves[scaling] == "yarn" != theirs[scaling]:
        # The folder's factor belongs to the folder's scaling; YaRN needs another factor.
        theirs["model.rope.factor"] = AUTO
    _take(leaves, theirs, (name for name in theirs if name not in given))
    shape = [f"model.{field}" for field in ModelConfig.SHAPE]
    if leaves["model.family"] == TRANSFORMERS:  # other keys would have no effect
        shape = [name for name in theirs if name != "model.name"]
    other = [name for name in shape if name in given and _differs(leaves, theirs, name)]
    if not other:
        return []
    shown = [f"{name}={keys.show(leaves[name])} (not {keys.show(theirs[name])})" for name in other]
    line = (
        f"{keys.first_few(shown)}: the weights of {INIT_FROM}={leaves[INIT_FROM]} have another "
        f"shape; leave out {model or 'these keys'}"
    )
    return [Problem(line, "model.")]


def _take_window(
    leaves: dict[str, Any], mask: MaskSettings, typed: Collection[str]
) -> list[Problem]:
    """Set the mask to the window of the folder's layers, which keys in ``typed`` must equal."""
    theirs = keys.flatten({"mask": {"kind": mask.kind, **dataclasses.asdict(mask)}})
    other = {name: leaves[name] for name in typed if _differs(leaves, theirs, name)}
    leaves.update({name: value for name, value in theirs.items() if name not in typed})
    if not other:
        return []
    given = ", ".join(f"{name}={keys.show(value)}" for name, value in other.items())
    own = ", ".join(f"{name}={keys.show(value)}" for name, value in theirs.items() if value)
    line = (
        f"{given}: the layers of {INIT_FROM}={leaves[INIT_FROM]} have {own}; add "
        "mask=sliding_window to train with another window"
    )
    return [Problem(line, "mask.")]


def _differs(leaves: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> bool:
    """Return whether a key has another value than in the folder; False for a wrong type."""
    try:
        return keys.all_keys()[name].convert(leaves.get(name)) != theirs[name]
    except ValueError:
        return False


def _tokenizer(leaves: Mapping[str, Any], folder: Path | None) -> str:
    """Return the folder's tokenizer.json for text data, or "bytes"."""
    if folder is not None and _tokenizes(leaves) and (folder / "tokenizer.json").is_file():
        from mtrain_cli.model.tokenizer_files import encodes_bytes

        # An exported byte model has a file with the same ids, which needs another package. Data of
        # other kinds need the files beside it, such as a chat template.
        is_text = leaves.get("data.kind") in ("text", "stdlib")
        if not (is_text and encodes_bytes(folder / "tokenizer.json")):
            return str(folder / "tokenizer.json")
    return "bytes"


def _vocabulary(leaves: Mapping[str, Any]) -> int | str:
    """Return the vocabulary size of the data, or auto if `validate` reports what is wrong."""
    if _tokenizes(leaves):
        from mtrain_cli.data.tokenizers import open_tokenizer

        choice = str(leaves.get(TOKENIZER))
        if choice != "bytes" and not Path(choice).expanduser().is_file():
            return AUTO
        ids = [open_tokenizer(choice).vocab_size]
    else:
        ids = [_ids_of_store(leaves.get("data.kind"), corpus) for corpus in _corpora(leaves)]
    return -(-max(ids) // 8) * 8 if ids and all(ids) else AUTO


def _tokenizes(leaves: Mapping[str, Any]) -> bool:
    kind = KINDS.get(str(leaves.get("data.kind")))
    return kind is not None and kind.tokenizes


def _corpora(leaves: Mapping[str, Any]) -> list[Path]:
    """Return the paths of the data's token stores."""
    mix, path = leaves.get("data.mix"), leaves.get("data.path")
    folder = Path(path).expanduser() if isinstance(path, str) else None
    if isinstance(mix, str) and Path(mix).expanduser().is_file():
        from mtrain_cli.data.mixture import parse_mix

        mix = parse_mix(mix)
    if isinstance(mix, Mapping):
        return [folder / str(name) if folder else Path(str(name)).expanduser() for name in mix]
    return [folder] if folder else []


def _ids_of_store(kind: object, path: Path) -> int:
    """Return the vocabulary size of a token store, or 0 if the path does not exist."""
    if not path.exists():
        return 0
    if kind != "tokens" or not path.is_dir():
        raise ConfigError(
            f"{VOCABULARY}=auto: {path} does not give the vocabulary size of its tokenizer; "
            f"give a number, or {INIT_FROM}=FOLDER, or tokens from `mtrain data prepare`"
        )
    from mtrain_cli.data.store import StoreMeta

    return StoreMeta.read(path, f"data.path={path}").vocab_size
