"""The keys under ``model.rope``: rotary positions and their scaling."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.config.option import (
    ABOVE_ZERO,
    POSITIVE,
    TABLE_OF_POSITIONS,
    TOKENS_OF_SEQ,
    Range,
    at_least,
    option,
)

ROPE_SCALINGS = ("none", "yarn", "llama3")
_RATIO = ABOVE_ZERO.up_to(10**6, "float32 would round the smaller terms away")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, and its scaling beyond the length of the original training.

    theta: base of the rotary frequencies
    scaling: method that extends the model to positions beyond original_max_position
    factor: extended length divided by original_max_position; auto = seq / original_max_position, at
        least 1 (yarn only)
    original_max_position: number of tokens per sequence in the model's original training; YaRN
        scales from this length
    beta_fast: yarn: dimensions that make more turns than this within original_max_position stay
        unscaled
    beta_slow: yarn: dimensions that make fewer turns than this within original_max_position are
        interpolated
    low_freq_factor: llama3: wavelengths above original_max_position / low_freq_factor are fully
        scaled
    high_freq_factor: llama3: wavelengths below original_max_position / high_freq_factor stay
        unscaled
    """

    theta: float = option(
        Range("must be above 1", lambda value: value > 1).up_to(1e12, "angles are in float32")
    )
    scaling: str = option(ROPE_SCALINGS)
    factor: float | str = option(
        at_least(1, "must be auto or a number of at least 1").up_to(*TOKENS_OF_SEQ)
    )
    original_max_position: int = option(POSITIVE.up_to(*TABLE_OF_POSITIONS), tokens=True)
    beta_fast: float = option(_RATIO)
    beta_slow: float = option(_RATIO)
    low_freq_factor: float = option(_RATIO)
    high_freq_factor: float = option(_RATIO)
