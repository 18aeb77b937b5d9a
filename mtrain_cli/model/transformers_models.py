"""Models of transformers: the attention that they call, and what would make them silently wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mtrain_cli.config.keys import first_few
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.model.loss import LossOptions, chunked_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "mtrain"
_KINDS = {"full_attention", "sliding_attention"}
PROBED = 24  # tokens
# A balance loss of routers (output_router_logits) would balance the tokens of one process.
_OFF = {"attention_dropout": 0, "attn_pdrop": 0, "output_router_logits": False}
_LATER = (
    "attention to later tokens (is_causal=False) needs mask=full, or a batch with slices that show "
    "them"
)
_BY_ROW = LossOptions(1 << 29, recompute=True, by_row=True)
_BY_LENGTH = ("dynamic", "longrope")


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    mtrain: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: q, k, v are [batch, heads, tokens, head_dim].

    mtrain: a `Probe`, or an object with the method `ContextBatch.attention`.

    Raises ConfigError for a call that the engine would compute wrongly.
    """
    layer: Any = getattr(module, "layer_idx", None)
    if isinstance(mtrain, Probe):
        heads = query.shape[1], key.shape[1], query.shape[-1]
        mtrain.calls[layer] = heads, sliding_window, s_aux is not None
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1]), None
    if mtrain is None:
        raise ConfigError(
            "the model was called without a batch: call it as model(**cp.inputs(input_ids))"
        )
    if attention_mask is not None:
        raise ConfigError("attention_mask: the batch has the masks; leave it out")
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"layer {layer}: {query.shape[2]} queries see {key.shape[2]} keys; a cache "
            "(use_cache=True) and cross-attention are not supported"
        )
    for problem in _refusals(module, options, shows_later=mtrain.shows_later_keys):
        raise ConfigError(f"layer {layer}: {problem}")
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    dim = q.shape[-1]
    if scaling is not None and scaling != dim**-0.5:
        q = q * (scaling * dim**0.5)  # the engine divides by the square root
    out: Tensor = mtrain.attention(
        q, k, v, layer, window=sliding_window, sinks=s_aux, softcap=softcap
    )
    return out, None


def _refusals(module: nn.Module, options: dict[str, Any], *, shows_later: bool) -> Iterator[str]:
    if options.get("dropout") or getattr(module, "attention_dropout", 0):
        yield "attention_dropout is not supported; set it to 0"
    causal = options.get("is_causal", getattr(module, "is_causal", True))
    if not (causal or shows_later):
        yield _LATER


def register() -> None:
    """Register `attention` and an empty mask, since the batch has the masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ALL_ATTENTION_FUNCTIONS.get(NAME, attention) is not attention:
        raise ConfigError(
            f"register: another package has registered attn_implementation={NAME} in transformers"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            "attention_mask: has zeros; padding belongs at the end, in labels of -100 and documents"
        )


@dataclass(frozen=True)
class Probe:
    """Stands for a batch in a forward pass without attention.

    calls: (heads of queries, heads of keys, head_dim), window and whether it has sinks, by layer.
    """

    calls: dict[int, tuple[tuple[int, int, int], int | None, bool]] = field(default_factory=dict)


def problems(model: PreTrainedModel, settings: Config, *, shows_later: bool) -> list[str]:
    """Return a line for each part of a model that would be wrong on a shard of a sequence.

    shows_later: whether the masks show later tokens.
    """
    config = model.config.get_text_config()
    found = []
    if config._attn_implementation != NAME:
        found.append(
            f"attn_implementation={config._attn_implementation}: load the model with "
            f'attn_implementation="{NAME}"'
        )
    if config.is_encoder_decoder:
        found.append(f"{type(model).__name__}: encoders and cross-attention are not supported")
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS):
        numbers = [str(n) for n, of_layer in enumerate(config.layer_types) if of_layer == kind]
        found.append(
            f"layers {first_few(numbers)}: {kind} is neither full nor sliding attention; a process "
            "would see only its own tokens there"
        )
    for name, allowed in _OFF.items():
        if value := getattr(config, name, None):
            found.append(f"{name}={value}: not supported; set it to {allowed}")
    rope = getattr(config, "rope_parameters", None) or {}
    for of_layers in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if (kind := of_layers.get("rope_type")) not in _BY_LENGTH:
            continue
        most = of_layers.get("original_max_position_embeddings") or config.max_position_embeddings
        if settings.seq > most and settings.topology.workers != 1:
            found.append(
                f"rope_type={kind}: beyond {most} positions, frequencies depend on the largest "
                "position, which differs between processes"
            )
    later = [
        n for n, module in model.named_modules() if getattr(module, "is_causal", True) is False
    ]
    if later and not shows_later:
        found.append(f"{later[0]}: {_LATER}")
    number = settings.model.num_layers
    if settings.sparsity.dense_layers and number != config.num_hidden_layers:
        found.append(f"model.num_layers={number}: the model has {config.num_hidden_layers}")
    return found or list(_probe(model, config))


@torch.no_grad()
def _probe(model: PreTrainedModel, config: Any) -> Iterator[str]:
    """Run the model with attention that gives zeros, and one token that is not a number.

    No other token's output may be that, too, or something else than attention mixes tokens. This
    finds recurrent layers and convolutions of any name. Rounding tells nothing: an expert computes
    other tokens otherwise if it gets one more.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    ids = torch.arange(1, 1 + PROBED, device=model.device)[None] % config.vocab_size
    positions = torch.arange(PROBED, device=model.device)[None]
    probe, in_training = Probe(), [module for module in model.modules() if module.training]

    def spoil(_module: nn.Module, _inputs: object, out_BNC: Tensor) -> Tensor:
        at = torch.arange(out_BNC.shape[1], device=out_BNC.device) == 5
        return out_BNC.masked_fill(at[:, None], torch.nan)

    hook = model.get_input_embeddings().register_forward_hook(spoil)
    model.eval()
    try:
        out_BNV = model(input_ids=ids, position_ids=positions, use_cache=False, mtrain=probe)[0]
    except ConfigError:
        yield f"{type(model).__name__}: does not pass keyword arguments on to its attention"
        return
    finally:
        hook.remove()
        for module in in_training:
            module.training = True
    if others := int(out_BNV.isnan().any(-1)[0, torch.arange(PROBED) != 5].sum()):
        yield (
            f"{type(model).__name__}: without attention, a token changes the outputs of "
            f"{with_count(others, 'other token')}; there, a process would see only its own tokens"
        )
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for layer, (_, given, _) in probe.calls.items():
        if window and given is None and (kinds is None or kinds[layer] == "sliding_attention"):
            yield (
                f"layer {layer}: has sliding_window={window} in its mask, and does not pass it to "
                "its attention"
            )
    if len(probe.calls) < config.num_hidden_layers:
        yield (
            f"{type(model).__name__}: {len(probe.calls)} of its {config.num_hidden_layers} layers "
            "call the registered attention"
        )


def logprobs(model: nn.Module, inputs: dict[str, Any], labels_BN: Tensor) -> Tensor:
    """Return the log-probability of the label of each token, [B, N], 0 for none, with gradients.

    Raises ConfigError for a head that is more than a product, and for labels that it has not.
    """
    whole: Any = getattr(model, "module", model)  # in DDP
    name, head = type(whole).__name__, getattr(whole, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError(
            f"model: the LM head of {name} is {type(head).__name__}; it must be an nn.Linear "
            "without a bias or an adapter"
        )
    counts_BN, found = labels_BN != IGNORED, list[Tensor]()

    def score(_head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x_BNC, weight_VC, labels_N = inputs[0], head.weight, labels_BN[counts_BN]
        device, size = x_BNC.device.type, len(weight_VC)
        if len(wrong := labels_N[(labels_N < 0) | (labels_N >= size)]):
            raise ConfigError(f"labels: {wrong[0]} is outside the vocabulary of {size} tokens")
        if torch.is_autocast_enabled(device):
            weight_VC = weight_VC.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            x_NC = x_BNC[counts_BN].to(weight_VC.dtype)
            losses_N = chunked_losses(x_NC, weight_VC, labels_N, 1.0, _BY_ROW)[0]
        none_BN1 = losses_N.new_zeros(*counts_BN.shape, 1)
        found.append(none_BN1.masked_scatter(counts_BN[..., None], -losses_N))
        return (x_BNC[:, :0],)  # of which the head computes no logits

    # FSDP2 gathers the weight in a hook before `score`, and waits for the gradient of what the head
    # and the model return. It frees the weight in a hook after the head, so ours comes first.
    replace = head.register_forward_hook(lambda *_: found[0], prepend=True)
    with head.register_forward_pre_hook(score), replace:
        tokens_BN1: Tensor = model(**inputs).logits
    if bool((tokens_BN1 - found[0]).nan_to_num().any()):
        raise ConfigError(f"model: {name} scales, caps or rounds its logits, which is unsupported")
    return tokens_BN1[..., 0]
