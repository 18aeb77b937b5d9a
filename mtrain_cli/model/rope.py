"""Rotary position embedding, plain and scaled to longer sequences.

Each pair of dimensions of a head is rotated by an angle: the token's position times the pair's
frequency. Dimensions i and i + D/2 form a pair, as in Hugging Face. Frequencies are one of:
- plain: RoFormer (arXiv:2104.09864), section 3.2
- yarn: YaRN (arXiv:2309.00071), sections 3.2 to 3.4
- llama3: the scaling of Llama 3.1

Shape suffixes: B batch, N local tokens, H heads (query or KV), D head dimension, F = D/2
frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain_cli.attention.partials import has_triton
from mtrain_cli.config.schema import ConfigError, RopeConfig


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every token's angles, float32 ``[B, N, 1, F]``.

    In a dataclass they stay float32: FSDP2 casts only tensors that are arguments of a module.
    """

    cos_BN1F: Tensor
    sin_BN1F: Tensor


def rope_factor(rope: RopeConfig, seq: int) -> float:
    """Return the factor by which positions are stretched for sequences of ``seq`` tokens.

    ``auto`` is max(1, seq / original_max_position). A wrong factor raises ConfigError.
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
    """Return the factor of cosine and sine: for YaRN, 0.1 ln(factor) + 1 (section 3.4)."""
    return 0.1 * math.log(factor) + 1.0 if rope.scaling == "yarn" else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, factor: float) -> Tensor:
    """Return the radians per position of each pair, float32 as in released models, on the CPU."""
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
    """Return the share of each plain frequency that YaRN keeps, ``[F]``."""
    # 1 keeps the plain frequency, 0 divides it by the factor. Between beta_fast and beta_slow turns
    # over the original length it falls linearly with the dimension, as in released implementations;
    # in the paper, with the number of turns.

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
    """Return the share of each plain frequency that Llama 3.1's scaling keeps, ``[F]``."""
    turns_F = rope.original_max_position * plain_F / (2 * math.pi)
    return (
        (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ).clamp(0.0, 1.0)


def rotation(
    positions_BN: Tensor, inverse_frequencies_F: Tensor, attention_factor: float
) -> Rotation:
    """Return the cosine and sine of the angles of tokens at any positions, in any order.

    In float64: a float32 angle at position 4 million is wrong by up to a quarter of a radian.
    """
    angles_BN1F = (positions_BN[..., None].double() * inverse_frequencies_F.double()).unsqueeze(-2)
    return Rotation(
        (angles_BN1F.cos() * attention_factor).float(),
        (angles_BN1F.sin() * attention_factor).float(),
    )


def rotate(x_BNHD: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor) -> Tensor:
    """Rotate the dimensions (i, i + D/2) of every head by the token's angle, in float32."""
    if _fuses(x_BNHD):
        from mtrain_cli.kernels.triton import rope

        return rope.rotate(x_BNHD, cos_BN1F, sin_BN1F)
    a, b = x_BNHD.chunk(2, dim=-1)
    return torch.cat(
        (
            (a * cos_BN1F - b * sin_BN1F).to(x_BNHD.dtype),
            (b * cos_BN1F + a * sin_BN1F).to(x_BNHD.dtype),
        ),
        dim=-1,
    )


def _fuses(x_BNHD: Tensor) -> bool:
    # One new token per sequence in eager mode, where launches cost the most. Prompts keep the
    # operations of training, so that both round alike.
    return (
        x_BNHD.is_cuda
        and x_BNHD.shape[1] == 1
        and x_BNHD.dtype != torch.float64
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and has_triton()
    )
