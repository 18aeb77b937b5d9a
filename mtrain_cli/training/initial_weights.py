"""How text is encoded for the initial weights, and the positions that they cover."""

from __future__ import annotations

import math

from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.model.huggingface_config import max_position, read_config
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tokenizer_files import TOKENIZER, encodes_bytes

# Llama 3.1 and 3.2 were trained on to 16 times their original length, whatever their factor.
_LLAMA3 = 16
_UNRELEASED = ("tiny", "tiny_moe")  # presets without released weights


def remarks(config: Config) -> list[str]:
    """Return a line on the encoding of text for the weights in ``train.init_from``, if any."""
    folder = folder_of(config.train.init_from)
    if config.data.kind not in ("text", "stdlib") or folder is None:
        return []
    file = folder / TOKENIZER
    if not (folder / "config.json").is_file():
        return []  # loading the weights reports the problem
    if config.data.tokenizer == str(file):
        return ["the folder's tokenizer.json encodes the text"]
    if config.data.tokenizer != "bytes":
        return []
    if encodes_bytes(file):
        return ["text is encoded as bytes, as by the folder's tokenizer.json"]
    has = "" if file.is_file() else ", since it has no tokenizer.json"
    return [
        f"text is encoded as bytes{has}, but the weights expect the ids of their own tokenizer. "
        "Set data.tokenizer=FILE."
    ]


def beyond_reach(config: Config) -> str:
    """Return a line if the sequence is longer than the rotary positions cover, else ""."""
    rope, model = config.model.rope, config.model.name
    trained = rope.original_max_position
    if rope.scaling == "llama3":
        trained *= _LLAMA3
    if (folder := folder_of(config.train.init_from)) is not None:
        try:
            theirs, trained = read_config(folder)
        except ConfigError:
            return ""  # loading the weights reports the problem
        if rope.theta > theirs.rope.theta:
            return ""  # a larger theta stretches the positions, by an unknown factor
    reach = max_position(rope, rope_factor(rope, config.seq), trained)
    if config.seq <= reach or (folder is None and model in _UNRELEASED):
        return ""
    factor = f"model.rope.factor={math.ceil(config.seq / rope.original_max_position)}"
    remedy = factor if rope.scaling == "yarn" else f"model.rope.scaling=yarn {factor}"
    exceeds = f"seq={format_size(config.seq)} exceeds the {format_size(reach)} tokens that the"
    if folder is not None:
        return f"{exceeds} model's rotary positions cover. Give {remedy}."
    return (
        f"{exceeds} rotary positions of model={model} cover. Random weights learn the positions "
        f"of this length; released weights need {remedy}."
    )
