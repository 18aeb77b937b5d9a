"""Compare the logits of the decoder and of transformers for the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mtrain_cli import install_command
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.model.huggingface import HuggingFaceFolder, load_into
from mtrain_cli.model.huggingface_config import read_mask
from mtrain_cli.model.rope import rope_factor


@dataclass(frozen=True)
class LogitAgreement:
    """Differences of the decoder's logits from those of transformers, the reference.

    mean_kl: mean over tokens of KL(reference || decoder), in nats.
    """

    tokens: int
    largest_difference: float
    largest_logit: float
    mean_kl: float


def require_transformers(what: str = "verify") -> str:
    """Return the installed version of transformers, or raise ConfigError. what: what needs it."""
    try:
        import transformers
    except ImportError as error:  # missing, or refuses the version of a package that it needs
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        reason = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ConfigError(
            f"{what} needs transformers, which {reason}. Run {install_command('hf')}"
        ) from None
    return transformers.__version__


def verify(
    folder: Path | str, tokens: int, report: Callable[[str], None] = lambda _: None
) -> LogitAgreement:
    """Compare the logits of random tokens from the decoder and from transformers, on the CPU.

    Raises ConfigError if transformers is missing, or if it or mtrain cannot read the folder.
    """
    require_transformers()
    source = HuggingFaceFolder(folder)
    model, mask = source.model, read_mask(source.path)
    tokens_BN = torch.randint(
        model.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)
    )
    with torch.device("meta"):
        decoder = Decoder(model, rope_factor(model.rope, source.max_position))
    decoder.to_empty(device="cpu")
    load_into(decoder, folder)
    with torch.inference_mode():
        work = (
            f"logits of {tokens:,} tokens through {model.num_layers} layers, in float32 on the CPU"
        )
        report(f"1 of 2: mtrain's {work}")
        attend = window_attend(tokens, mask) if mask else causal_attend
        ours_BNV = decoder.logits(tokens_BN, torch.arange(tokens)[None], attend)
        del decoder
        safe = {"use_safetensors": True, "dtype": torch.float32}  # no pickled weights
        reference = read_with_transformers(folder, "AutoModelForCausalLM", **safe).eval()
        report(f"2 of 2: transformers' {work}")
        theirs_BNV = reference(input_ids=tokens_BN, use_cache=False).logits
    return compare(ours_BNV, theirs_BNV)


def read_with_transformers(folder: Path | str, kind: str, **options: Any) -> Any:
    """Read a folder with a class of transformers such as AutoConfig, running no code from it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        safe = {"local_files_only": True, "trust_remote_code": False}
        return getattr(transformers, kind).from_pretrained(folder, **safe, **options)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{folder}: transformers {transformers.__version__} rejects this folder: {reason}. "
            "Correct its config.json, or install the release of transformers that wrote it."
        ) from error


def compare(ours_BNV: Tensor, theirs_BNV: Tensor) -> LogitAgreement:
    theirs_log, ours_log = (
        functional.log_softmax(logits.double(), dim=-1) for logits in (theirs_BNV, ours_BNV)
    )
    return LogitAgreement(
        tokens=ours_BNV.shape[0] * ours_BNV.shape[1],
        largest_difference=(ours_BNV - theirs_BNV).abs().max().item(),
        largest_logit=theirs_BNV.abs().max().item(),
        mean_kl=(theirs_log.exp() * (theirs_log - ours_log)).sum(-1).mean().item(),
    )


def window_attend(tokens: int, mask: MaskSettings) -> Attend:
    """Return an `Attend` function for a model with sliding windows."""
    at = torch.arange(tokens)
    away = at[:, None] - at
    assert mask.plain_window is not None
    seen = (away >= 0) & (away < mask.plain_window)

    def attend(q_BNHD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, layer: int) -> Tensor:
        if mask.is_full(layer):
            return causal_attend(q_BNHD, k_BNKD, v_BNKD, layer)
        q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNKD, v_BNKD))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    return attend


def causal_attend(q_BNHD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, _layer: int) -> Tensor:
    """Return the output of causal attention over one whole sequence, in natural order."""
    q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNKD, v_BNKD))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous()
