"""Rotary position embedding, plain or stretched beyond the model's original length.

Plain: RoFormer (arXiv:2104.09864), section 3.2. Stretched: YaRN (arXiv:2309.00071), sections 3.2 to
3.4, or Llama 3.1's scaling. Heads have Hugging Face's half-split layout: dimension i turns with
dimension i + D/2.

B batch, N local tokens, H heads (query or KV), D head dim, F = D/2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain_cli.config.schema import ConfigError, RopeConfig


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every token's angles, float32 ``[B, N, 1, F]``.

    A plain dataclass on purpose: FSDP2 casts floating-point tensors among a module's arguments, but
    not those inside a dataclass.
    """

    cos_BN1F: Tensor
    sin_BN1F: Tensor


def rope_factor(rope: RopeConfig, seq: int) -> float:
    """Return how far positions are stretched when training on ``seq`` tokens.

    ``auto`` gives max(1, seq / original_max_position).

    Raises:
        ConfigError: the factor is neither ``auto`` nor a number of at least 1.
    """
    if rope.scaling == "none":
        return 1.0
    if rope.factor == "auto":
        return max(1.0, seq / rope.original_max_position)
    try:
        factor = float(rope.factor)
    except ValueError:
        factor = math.nan
    if not 1.0 <= factor < math.inf:
        raise ConfigError(
            f"model.rope.factor={rope.factor}: must be auto or a number of at least 1"
        )
    return factor


def attention_factor(rope: RopeConfig, factor: float) -> float:
    """Return the factor of cosine and sine, YaRN's temperature 0.1 ln(factor) + 1 (section 3.4).

    1 without YaRN.
    """
    return 0.1 * math.log(factor) + 1.0 if rope.scaling == "yarn" else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, factor: float) -> Tensor:
    """Return the radians per position of each pair of dimensions, float32 ``[F]`` on the CPU.

    The result is on the CPU even under ``torch.device("meta")``. It is float32, because released
    models were trained with exactly this rounding.
    """
    exponents_F = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    plain_F = 1.0 / rope.theta**exponents_F
    if rope.scaling == "none":
        return plain_F
    if rope.scaling == "yarn":
        unscaled_F = _yarn_unscaled_share(rope, head_dim)
    else:
        assert rope.scaling == "llama3", rope.scaling
        unscaled_F = _llama3_unscaled_share(rope, plain_F)
    return plain_F / factor * (1.0 - unscaled_F) + plain_F * unscaled_F


def _yarn_unscaled_share(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the unscaled share of each frequency: 1 for fast dimensions, 0 for slow ones.

    The ramp runs between the dimensions that turn beta_fast and beta_slow times over the original
    length; the stretched length would give another model. It is linear in the dimension, as in
    released implementations, not in turns as in the paper.
    """

    def dimension_that_turns(times: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_position / (times * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(dimension_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_that_turns(rope.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    return 1.0 - ((torch.arange(head_dim // 2, device="cpu").float() - low) / width).clamp(0.0, 1.0)


def _llama3_unscaled_share(rope: RopeConfig, plain_F: Tensor) -> Tensor:
    """Return the share as `_yarn_unscaled_share` does, with Llama 3.1's ramp.

    It is linear in turns over the original length, from low_freq_factor to high_freq_factor.
    """
    turns_F = rope.original_max_position * plain_F / (2 * math.pi)
    return (
        (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ).clamp(0.0, 1.0)


def rotation(
    positions_BN: Tensor, inverse_frequencies_F: Tensor, attention_factor: float
) -> Rotation:
    """Return cosine and sine for tokens at any integer positions, in any order.

    Angles are float64: at position 4M a float32 angle is off by up to a quarter of a radian, and
    q.k would not depend on distance alone. Both tensors must be on one device.
    """
    angles_BN1F = (positions_BN[..., None].double() * inverse_frequencies_F.double()).unsqueeze(-2)
    return Rotation(
        (angles_BN1F.cos() * attention_factor).float(),
        (angles_BN1F.sin() * attention_factor).float(),
    )


def rotate(x_BNHD: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of every head by its token's angle.

    Computed in float32; returned contiguous in x's dtype.
    """
    a, b = x_BNHD.chunk(2, dim=-1)
    return torch.cat(
        (
            (a * cos_BN1F - b * sin_BN1F).to(x_BNHD.dtype),
            (b * cos_BN1F + a * sin_BN1F).to(x_BNHD.dtype),
        ),
        dim=-1,
    )
