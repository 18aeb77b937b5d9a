"""Report where a run's settings differ from the Hugging Face folder of its initial weights.

Also report a sequence beyond the positions that these weights, or the weights of a preset, cover.
"""

from __future__ import annotations

import math
from pathlib import Path

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config.keys import show
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import Config, ConfigError, RopeConfig
from mtrain_cli.config.sizes import format_size
from mtrain_cli.model.huggingface_config import RAMP, max_position, read_config, read_mask
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tokenizer_files import TOKENIZER, encodes_bytes

# Llama 3.1 and 3.2 were trained on to 16 times their original length, whatever their factor.
_LLAMA3 = 16
_UNRELEASED = ("tiny", "tiny_moe")  # presets without released weights


def remarks(config: Config) -> list[str]:
    """Return lines on how `config` differs from the folder of `train.init_from`.

    Return no lines if `train.init_from` is null or the folder cannot be read.
    """
    folder = folder_of(config.train.init_from)
    if folder is None:
        return []
    try:
        theirs, reach = read_config(folder)
        return [
            *_rotary_differences(config, theirs.rope, reach),
            *_mask_difference(config, read_mask(folder)),
            *_tokenizer(config, folder),
        ]
    except ConfigError:
        return []  # loading the weights reports the problem


def _rotary_differences(config: Config, theirs: RopeConfig, reach: int) -> list[str]:
    """Return a line with both values of all rotary settings that differ, or no line if none do."""
    ours = config.model.rope
    pairs = [
        ("theta", show(ours.theta), show(theirs.theta)),
        ("scaling", ours.scaling, theirs.scaling),
    ]
    if ours.scaling != "none":
        factor = show(rope_factor(ours, config.seq))
        if ours.scaling != theirs.scaling:
            shown = f"{ours.scaling} by {factor} from {format_size(ours.original_max_position)}"
            pairs[1] = ("scaling", shown, theirs.scaling)
        else:
            first, last = (format_size(rope.original_max_position) for rope in (ours, theirs))
            pairs += [
                ("factor", factor, show(rope_factor(theirs, reach))),
                ("original_max_position", first, last),
            ]
            pairs += [
                (name, show(getattr(ours, name)), show(getattr(theirs, name)))
                for name in RAMP[ours.scaling]
            ]
    differences = [
        f"model.rope.{name}={value} ({other} in the folder)"
        for name, value, other in pairs
        if value != other
    ]
    return ["differs from its folder: " + ", ".join(differences)] if differences else []


def _mask_difference(config: Config, theirs: MaskSettings | None) -> list[str]:
    """Return a line if the run's mask is not that of the folder's layers."""
    theirs = theirs or CAUSAL
    # A window that holds the whole sequence is no window.
    ours, folder = (
        CAUSAL if (each.plain_window or 0) >= config.seq else each for each in (config.mask, theirs)
    )
    if ours == folder:
        return []
    return [f"differs from its folder: mask {ours.describe()} ({folder.describe()} in the folder)"]


def beyond_reach(config: Config) -> str:
    """Return a line if the sequence is longer than the rotary positions cover, else "".

    The positions of a preset are those of its released weights.
    """
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


def _tokenizer(config: Config, folder: Path) -> list[str]:
    """Return a line that says how text is encoded: by the folder's tokenizer or as bytes."""
    if config.data.kind not in ("text", "stdlib"):
        return []
    if config.data.tokenizer == str(folder / TOKENIZER):
        return ["the folder's tokenizer.json encodes the text"]
    if config.data.tokenizer == "bytes":
        if encodes_bytes(folder / TOKENIZER):
            return ["text is encoded as bytes, as by the folder's tokenizer.json"]
        has = "" if (folder / TOKENIZER).is_file() else ", since it has no tokenizer.json"
        return [
            f"text is encoded as bytes{has}, but the weights expect the ids of their own "
            "tokenizer. Set data.tokenizer=FILE."
        ]
    return []
