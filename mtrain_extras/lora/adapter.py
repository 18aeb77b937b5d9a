"""LoRA (arXiv:2106.09685) and QLoRA (arXiv:2305.14314) on a model of transformers, with peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtrain_cli import install_command
from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import ConfigError, LoraConfig

_NAME = "default"  # peft's name of an adapter
_PREFIX = "base_model.model."  # begins the names of tensors in a PEFT folder


def add(model: nn.Module, settings: LoraConfig) -> None:
    """Put adapters into the linear layers of a model and freeze its other weights.

    With ``train.lora.quantize``, linear layers other than the LM head get a weight of no elements,
    which `quantize` replaces. Raises ConfigError if no layer has a name of ``train.lora.targets``.
    """
    if settings.quantize != "none":
        _empty_layers(model, settings)
    _inject(model, settings)


def quantize(layer: nn.Module, settings: LoraConfig, weight: Tensor, device: torch.device) -> None:
    """Give an emptied layer its weight, [out, in], in 4 bits on ``device``."""
    import bitsandbytes

    of_4_bits: Any = bitsandbytes.nn.Params4bit
    kept = of_4_bits(weight, requires_grad=False, quant_type=settings.quantize, module=layer)
    layer.weight = kept.to(device)


def _empty_layers(model: nn.Module, settings: LoraConfig) -> None:
    try:
        from mtrain_extras.lora.quantized import EmptyLinear
    except ImportError as error:
        given = f"train.lora.quantize={settings.quantize}"
        raise ConfigError(f"{given}: needs bitsandbytes: {install_command('qlora')}") from error
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, EmptyLinear(module, settings.quantize))


def merge(model: nn.Module, settings: LoraConfig, weights: Mapping[str, Tensor]) -> None:
    """Add the products of trained adapters to the weights of a whole model.

    weights: the adapters' tensors, by their names in ``model`` with adapters.
    """
    tuner = _inject(model, settings)
    _, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    tuner.merge_and_unload(safe_merge=True)


def write(folder: Path, settings: LoraConfig, weights: Mapping[str, Tensor], base: str) -> None:
    """Write the adapters as a PEFT folder. base: name or folder of the model that they adapt."""
    config = _config(settings)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = peft.TaskType.CAUSAL_LM
    named = {
        _PREFIX + name.replace(f".{_NAME}.", "."): tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config.to_dict().items()
    }
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _config(settings: LoraConfig) -> peft.LoraConfig:
    targets = settings.targets
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules="all-linear" if isinstance(targets, str) else list(targets),
    )


def _inject(model: nn.Module, settings: LoraConfig) -> peft.LoraModel:
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = model.named_modules()
    names = [n for n, layer in layers if isinstance(layer, nn.Linear) and layer is not head]
    targets = () if isinstance(settings.targets, str) else settings.targets
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            given = f"train.lora.targets={show(settings.targets)}"
            raise ConfigError(f"{given}: {target} is none of the linear layers {known}")
    return peft.LoraModel(model, _config(settings), _NAME)
