"""Report where a run's settings differ from the Hugging Face folder of its initial weights."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config.keys import show
from mtrain_cli.config.mask_settings import CAUSAL, MaskConfig
from mtrain_cli.config.rope_settings import RopeConfig
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.model.huggingface_config import RAMP, read_config, read_mask
from mtrain_cli.model.huggingface_config import remarks as config_remarks
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tokenizer_files import TOKENIZER, encodes_bytes


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
            *_beyond_reach(config, reach),
            *_tokenizer(config, folder),
            *config_remarks(folder),
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


def _mask_difference(config: Config, theirs: MaskConfig | None) -> list[str]:
    """Return a line if the run's mask is not that of the folder's layers."""
    theirs = theirs or CAUSAL
    # A window that holds the whole sequence is no window.
    ours, folder = (
        CAUSAL if (each.plain_window or 0) >= config.seq else each for each in (config.mask, theirs)
    )
    if ours == folder:
        return []
    return [f"differs from its folder: mask {ours.describe()} ({folder.describe()} in the folder)"]


def _beyond_reach(config: Config, reach: int) -> list[str]:
    """Return a line if the sequence is longer than the model's rotary positions cover.

    reach: number of tokens that the folder's positions cover without the run's scaling.
    """
    rope = config.model.rope
    if rope.scaling == "yarn":
        reach = round(rope_factor(rope, config.seq) * rope.original_max_position)
    if config.seq <= reach:
        return []
    remedy = "Set model.rope.scaling=yarn or a larger model.rope.theta"
    if rope.scaling == "yarn":
        remedy = "Set model.rope.factor=auto"
    return [
        f"seq={format_size(config.seq)} exceeds the {format_size(reach)} tokens that the model's "
        f"rotary positions cover. {remedy}."
    ]


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
